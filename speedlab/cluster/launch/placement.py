"""Placement: which devices the engines of a cluster get, and which rank runs on which host.

Ranks are numbered host by host, and within a host by device. So neighbouring ranks share a host, as the layout needs
for its fastest axis, tp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import speedlab.hardware as hardware
from speedlab.cluster.errors import ClusterError
from speedlab.config.errors import more_in
from speedlab.hardware import Device


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine on which an agent runs."""

    name: str
    """Name for users and errors."""
    address: str
    """Address at which other hosts reach its ranks."""
    interface: str
    """Network interface with that address."""
    devices: tuple[Device, ...]
    """Devices of its ranks, by local rank."""

    def to_fields(self) -> dict[str, Any]:
        """Return the host as plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Host:
        """Return the host of `to_fields`; ignore unknown fields."""
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        devices = ({name: d[name] for name in Device.__dataclass_fields__ if name in d} for d in known["devices"])
        known["devices"] = tuple(Device(**{**device, "cores": tuple(device["cores"])}) for device in devices)
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class RankHost:
    """Where a rank runs: the index of its host, and its local rank there."""

    rank: int
    host: int
    local_rank: int


def rank_hosts(hosts: Sequence[Host]) -> list[RankHost]:
    """Return the place of each rank, by rank."""
    pairs = [(number, local) for number, host in enumerate(hosts) for local in range(len(host.devices))]
    return [RankHost(rank=rank, host=number, local_rank=local) for rank, (number, local) in enumerate(pairs)]


def hosts_for(size: int, used: Mapping[str, int], aside: Mapping[str, int], lost: Collection[str]) -> list[str]:
    """Choose the hosts for `size` engines. Hosts are added and removed as a whole.

    Lost hosts are removed first, then the last of the others. Hosts that were left out are added after all others.

    Args:
        size: Number of engines.
        used: Number of engines by host, in the order of ranks.
        aside: Number of engines by host, for hosts that were left out.
        lost: Hosts that cannot be reached.

    Returns:
        Names of hosts in the order of ranks.

    Raises:
        ClusterError: If the hosts cannot provide this number; names the possible numbers.
    """
    there = {name: count for name, count in used.items() if name not in lost} | dict(aside)
    sums, chosen = [0], []
    for name, count in there.items():
        if sums[-1] == size:
            break
        sums.append(sums[-1] + count)
        chosen.append(name)
    if sums[-1] == size and chosen:
        return chosen
    have = ", ".join(f"{name}: {count}" for name, count in there.items()) or "none"
    sums = [sum(list(there.values())[: k + 1]) for k in range(len(there))]
    gone = f" ({', '.join(lost)} does not answer)" if lost else ""
    raise ClusterError(
        f"{size} engines were asked for, and hosts come and go whole: there are {have}{gone}; "
        + (f"{' or '.join(map(str, sums))} engines can be had" if sums else "start another cluster")
    )


CPU_ENGINES = 4
"""Default number of engines on a machine without GPUs."""
MOST_ENGINES = 1024
"""Maximum number of engines of one machine."""


def thread_limits(threads: int) -> dict[str, str]:
    """Return variables that libraries read at their import.

    Ranks that share cores must sleep while they wait: two spinning pools halve each other's bandwidth.

    Args:
        threads: Number of threads per rank.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "OMP_WAIT_POLICY": "passive"}


def choose_devices(engines: int | None, device: str) -> list[Device]:
    """Return devices by rank: one GPU each, with the most free memory first, or equal shares of the CPU cores.

    Args:
        engines: Number of engines; None for one per GPU, or the default on CPU.
        device: 'cuda', 'cpu', or 'auto' for GPUs if there are any.

    Raises:
        ClusterError: If there are not enough devices.
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
    """Return devices by rank for another number of engines. Ranks that stay keep their GPU; CPU cores are divided
    again.

    Args:
        engines: New number of engines.
        present: Current devices by rank.

    Raises:
        ClusterError: If there are not enough devices.
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
