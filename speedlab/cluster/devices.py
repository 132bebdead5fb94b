"""Which devices a cluster's engines get."""

from __future__ import annotations

from speedlab import hardware
from speedlab.cluster.errors import ClusterError
from speedlab.hardware import Device

CPU_ENGINES = 4
"""How many engines a machine without GPUs gets when nobody says."""


def choose_devices(engines: int | None, device: str) -> list[Device]:
    """Devices by rank: one GPU each, those with most free memory first, or equal shares of the CPU cores.

    `device`: 'cuda', 'cpu', or 'auto' for GPUs where there are any. Raises ClusterError when there are not enough.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ClusterError(f"device is {device!r}; 'auto', 'cuda' and 'cpu' are known")
    if engines is not None and engines < 1:
        raise ClusterError(f"a cluster of {engines} engines was asked for; it needs at least 1")
    gpus = [] if device == "cpu" else hardware.cuda_devices()
    if device == "cuda" and not gpus:
        raise ClusterError("device='cuda' was asked for, but no GPU can be seen; device='cpu' uses the CPU cores")
    if not gpus:
        return hardware.cpu_devices(engines or CPU_ENGINES)
    if engines is not None and engines > len(gpus):
        raise ClusterError(
            f"{engines} engines were asked for, but only {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} can be seen, "
            f"and each engine has its own; ask for at most {len(gpus)}, or for device='cpu'"
        )
    return gpus[:engines]
