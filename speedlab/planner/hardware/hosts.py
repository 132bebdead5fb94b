"""What stands beside the devices of a host: its memory, and a disk on which states may lie. No torch.

Figures of described hosts are those of NVIDIA's own (DGX-1, DGX-2, DGX A100, H100, H200, B200), with eight or sixteen
GPUs: memory and disks from their data sheets, reading as they are specified, writing half as fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_GB, _TB = 10**9, 10**12

USUAL_DISK_BYTES_PER_SECOND = 1e9
"""Of a disk of which nothing is known, in either direction."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One host as the planner sees it. All its ranks share what it has."""

    memory_bytes: int = 512 * _GB
    disk_bytes: int | None = None
    """Free on the disk for states; None: nobody said, so that no plan is refused for it."""
    disk_read_bytes_per_second: float = USUAL_DISK_BYTES_PER_SECOND
    disk_write_bytes_per_second: float = USUAL_DISK_BYTES_PER_SECOND
    disk_measured: bool = False
    """Whether these rates were measured where the states would lie."""


def _dgx(memory_tb: float, disk_tb: float, read_gb: float) -> HostSpec:
    return HostSpec(
        memory_bytes=round(memory_tb * _TB),
        disk_bytes=round(disk_tb * _TB),
        disk_read_bytes_per_second=read_gb * _GB,
        disk_write_bytes_per_second=read_gb * _GB / 2,
    )


HOSTS = {
    "V100-16": _dgx(0.512, 7.6, 2),
    "V100-32": _dgx(1.5, 30.7, 25),
    "A100-40": _dgx(1, 15.3, 25),
    "A100-80": _dgx(2, 30.7, 50),
    "H100": _dgx(2, 30.7, 50),
    "H200": _dgx(2, 30.7, 50),
    "B200": _dgx(2, 30.7, 50),
}
"""Name of a device -> the host that NVIDIA builds with it."""


def existing(folder: Path) -> Path | None:
    """The folder, or the nearest one above it that there is."""
    return next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)


def free_disk_bytes(folder: Path) -> int | None:
    """Free for this user on the file system where `folder` is, or would be made; None where that cannot be told."""
    there = existing(folder)
    if there is None:
        return None
    try:
        found = os.statvfs(there)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
