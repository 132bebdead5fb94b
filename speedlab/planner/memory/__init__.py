"""Predict the memory of each rank: model states, activations, buffers and offload."""
