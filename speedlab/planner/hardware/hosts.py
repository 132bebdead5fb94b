"""Describe the memory and the disk of a host. No torch.

The figures are those of NVIDIA's own hosts (DGX-1, DGX-2, DGX A100, H100, H200, B200) with eight or sixteen GPUs:
memory and disks from the data sheets, the specified read speed, and half of it for writes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_GB, _TB = 10**9, 10**12

USUAL_DISK_BYTES_PER_SECOND = 1e9
"""Assumed speed of an unknown disk, in both directions."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """The planner's description of one host. All ranks of the host share its resources."""

    memory_bytes: int = 512 * _GB
    disk_bytes: int | None = None
    """Free bytes on the disk for states; None: unknown, so that no plan is refused for it."""
    disk_read_bytes_per_second: float = USUAL_DISK_BYTES_PER_SECOND
    disk_write_bytes_per_second: float = USUAL_DISK_BYTES_PER_SECOND
    disk_measured: bool = False
    """Whether the speeds were measured in the folder of the states."""


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
"""Device name -> NVIDIA's host with this device."""


def existing(folder: Path) -> Path | None:
    """Return the nearest existing folder.

    Args:
        folder: a folder, which need not exist.

    Returns:
        The folder or its nearest existing parent; None if there is none.
    """
    return next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)


def free_disk_bytes(folder: Path) -> int | None:
    """Return the free bytes for this user on the file system of `folder`; None if unknown.

    Args:
        folder: a folder, which need not exist yet.
    """
    there = existing(folder)
    if there is None:
        return None
    try:
        found = os.statvfs(there)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
