"""Measure this machine: `speedlab bench NAME` runs the module of that name."""

BENCHES = {
    "kernels": "the operations of cuda_ops beside torch, NumPy, DeepSpeed and the speed of memory",
    "collectives": "the shared-memory backend beside gloo",
    "disk": "states on disk beside fio with the same pattern",
}
