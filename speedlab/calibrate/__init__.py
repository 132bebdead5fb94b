"""Measure this machine for the planner: kernels, steps and links."""
