"""Predict the time of a training step: kernels, communication, pipelines and offload."""
