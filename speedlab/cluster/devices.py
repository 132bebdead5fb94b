"""Which devices a cluster's engines get."""

from __future__ import annotations

from collections.abc import Sequence

import speedlab.hardware as hardware
from speedlab.cluster.errors import ClusterError
from speedlab.config.errors import more_in
from speedlab.hardware import Device

CPU_ENGINES = 4
"""How many engines a machine without GPUs gets when nobody says."""
MOST_ENGINES = 1024
"""Of one machine."""


def thread_limits(threads: int) -> dict[str, str]:
    """What libraries read from the environment when they are imported. Ranks that share cores must sleep while they
    wait: two pools that spin halve each other's bandwidth."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "OMP_WAIT_POLICY": "passive"}


def choose_devices(engines: int | None, device: str) -> list[Device]:
    """Devices by rank: one GPU each, those with most free memory first, or equal shares of the CPU cores.

    `device`: 'cuda', 'cpu', or 'auto' for GPUs where there are any. Raises ClusterError when there are not enough.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ClusterError(f"device is {device!r}; 'auto', 'cuda' and 'cpu' are known")
    if engines is not None and engines < 1:
        raise ClusterError(f"a cluster of {engines} engines was asked for; it needs at least 1")
    if engines is not None and engines > MOST_ENGINES:
        raise ClusterError(f"{engines} engines were asked for; one machine starts at most {MOST_ENGINES}")
    gpus = [] if device == "cpu" else hardware.cuda_devices()
    if device == "cuda" and not gpus:
        raise ClusterError(
            "device='cuda' was asked for, but no GPU can be seen; device='cpu' uses the CPU cores; "
            f"{more_in('engines')}"
        )
    if not gpus:
        return hardware.cpu_devices(engines or CPU_ENGINES)
    if engines is not None and engines > len(gpus):
        raise _too_few(engines, len(gpus))
    return gpus[:engines]


def devices_for(engines: int, present: Sequence[Device]) -> list[Device]:
    """Devices by rank for another number of engines than the `present` ones are for.

    Ranks that stay keep their GPU; CPU cores are shared out anew. Raises ClusterError as `choose_devices` does.
    """
    if engines < 1 or present[0].kind == "cpu":
        return choose_devices(engines, "cpu")
    if engines <= len(present):
        return list(present[:engines])
    taken = {device.uuid for device in present}
    free = [gpu for gpu in hardware.cuda_devices() if gpu.uuid not in taken]
    if engines > len(present) + len(free):
        raise _too_few(engines, len(present) + len(free))
    return [*present, *free[: engines - len(present)]]


def _too_few(engines: int, gpus: int) -> ClusterError:
    return ClusterError(
        f"{engines} engines were asked for, but only {gpus} GPU{'s' if gpus > 1 else ''} can be seen, "
        f"and each engine has its own; ask for at most {gpus}, or for device='cpu'"
    )
