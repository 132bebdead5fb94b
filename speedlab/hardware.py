"""What this machine has: GPUs by UUID through NVML, CPU cores with their memory, and what each computes fast. No torch."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place a rank can run: a GPU, or a set of CPU cores."""

    kind: str
    """'cuda' or 'cpu'."""
    name: str
    """For people: 'NVIDIA H200' or 'cpu 0-1'."""
    uuid: str
    """What CUDA_VISIBLE_DEVICES takes for a GPU; '' for CPU cores."""
    cores: tuple[int, ...]
    """CPU cores that the rank is bound to."""
    threads: int
    """Intra-op threads of the rank."""
    capacity_bytes: int
    """Memory the rank may fill: the GPU's total, or an equal share of the machine's."""
    free_bytes: int
    """Of that, what was free when it was looked at."""
    fast_dtype: str
    """'bfloat16' where the device multiplies it faster than float32, else 'float32'."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_fast_dtype() -> str:
    """bfloat16 on CPUs with instructions for it (avx512_bf16, amx_bf16, Arm's bf16), else float32."""
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def available_cores() -> tuple[int, ...]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory this process may use: the machine's, or its control group's if that is less."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, available
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        available = min(available, total - used)
    return total, available


def cpu_devices(count: int) -> list[Device]:
    """`count` devices that share this machine's cores evenly; neighbours share a core when there are more than cores."""
    cores = available_cores()
    total, available = memory_bytes()
    share = max(1, len(cores) // count)
    devices = []
    for i in range(count):
        mine = tuple(cores[(i * share + j) % len(cores)] for j in range(share))
        label = f"{mine[0]}" if len(mine) == 1 else f"{mine[0]}-{mine[-1]}"
        devices.append(
            Device(
                kind="cpu",
                name=f"cpu {label}",
                uuid="",
                cores=mine,
                threads=share,
                capacity_bytes=total // count,
                free_bytes=available // count,
                fast_dtype=cpu_fast_dtype(),
            )
        )
    return devices


def cuda_devices() -> list[Device]:
    """The GPUs that NVML and CUDA_VISIBLE_DEVICES show, the one with most free memory first; [] where there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        devices = [_cuda_device(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [entry.strip() for entry in visible.split(",") if entry.strip()]
        devices = [d for i, d in enumerate(devices) if str(i) in wanted or any(d.uuid.startswith(w) for w in wanted)]
    cores = available_cores()
    share = max(1, len(cores) // max(1, len(devices)))
    bound = []
    for i, device in enumerate(sorted(devices, key=lambda d: -d.free_bytes)):
        mine = tuple(cores[(i * share + j) % len(cores)] for j in range(share))
        bound.append(Device(**{**device.__dict__, "cores": mine, "threads": share}))
    return bound


def _cuda_device(pynvml, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, _ = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        kind="cuda",
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        cores=(),
        threads=1,
        capacity_bytes=int(memory.total),
        free_bytes=int(memory.free),
        fast_dtype="bfloat16" if major >= 8 else "float32",
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
