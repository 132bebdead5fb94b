"""Select a group's transport by the link between its ranks and the device of the tensors."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.shared import SharedGroup, SpanningGroup
from speedlab.comm.transfers import BufferMeter
from speedlab.comm.transports.base import Transport
from speedlab.comm.transports.gloo import GlooPeers
from speedlab.comm.transports.nccl import Exchanging
from speedlab.comm.transports.shared_memory import InPlace


class GroupLink(Enum):
    """The link between the ranks of a group, for memory of one kind of device."""

    PROCESS = "same process"
    """One rank: nothing is sent."""
    SHARED = "shared memory"
    """One host, whose ranks read each other's memory."""
    HOSTS = "shared memory and gloo"
    """Several hosts: shared memory inside each host, gloo between hosts."""
    GLOO = "gloo"
    """Connections between CPU ranks."""
    FABRIC = "nccl"
    """Links between GPUs: NVLink, PCIe, InfiniBand."""
    OTHER = "torch"
    """An unknown backend of torch.distributed."""


def link_of(group: Any, kind: str) -> GroupLink:
    """Return the link of a process group for tensors on one kind of device.

    Args:
        group: Process group; None for a group of one rank.
        kind: "cpu" or "cuda".
    """
    if group is None:
        return GroupLink.PROCESS
    if kind == "cpu" and isinstance(group, SharedGroup | SpanningGroup):
        return GroupLink.SHARED if isinstance(group, SharedGroup) else GroupLink.HOSTS
    backend = backend_of(group, kind)
    if kind == "cpu" and isinstance(backend, dist.ProcessGroupGloo):
        return GroupLink.GLOO
    if type(backend).__name__ == "ProcessGroupNCCL":  # Compare names, because a torch without NCCL lacks the class.
        return GroupLink.FABRIC
    return GroupLink.OTHER


def backend_of(group: Any, kind: str) -> Any:
    """Return a group's backend for one kind of device, or None. A group may itself be such a backend.

    Args:
        group: Process group.
        kind: "cpu" or "cuda".
    """
    if isinstance(group, dist.ProcessGroupGloo):
        return group
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


def choose(
    link: GroupLink, wires: ProcessGroups, size: int, index: int, device: torch.device, buffers: BufferMeter
) -> Transport | None:
    """Return the transport of flat parameters on `device`; None for a group of one rank.

    Args:
        link: Link between the ranks.
        wires: Connections of the group.
        size: Number of ranks.
        index: Index of this rank.
        device: Device of the tensors.
        buffers: Counts bytes of buffers.
    """
    match link:
        case GroupLink.PROCESS:
            return None
        case GroupLink.SHARED:
            return InPlace(wires, size, index, device)
        case GroupLink.GLOO:
            return GlooPeers(wires, size, index, device, buffers)
        case GroupLink.FABRIC:
            return Exchanging(wires, size, index, device)
        case GroupLink.HOSTS | GroupLink.OTHER:
            # These collectives send each byte over the network once; exchanges between all pairs send more.
            return Transport(wires, size, index, device)
