"""Tensor parallelism: each rank holds a part of every large matrix, and the ranks share what they compute."""
