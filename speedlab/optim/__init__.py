"""Optimizers: sharded, fused, compressed and delayed updates, DiLoCo, and learning-rate schedules."""
