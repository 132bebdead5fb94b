"""Measure this machine: `speedlab bench NAME` runs the module of that name."""

BENCHES = {
    "kernels": "the operations of cuda_ops next to torch, NumPy, DeepSpeed and the speed of memory",
    "collectives": "the shared-memory backend next to gloo",
    "disk": "states on disk next to fio with the same pattern",
}
