"""Which transport a group takes: a function of the link between its ranks, and of where the flat lives."""

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
    """What lies between the ranks of a group, for memory of one kind of device."""

    PROCESS = "same process"
    """One rank: nothing travels."""
    SHARED = "shared memory"
    """One host, whose ranks read each other's memory."""
    HOSTS = "shared memory and gloo"
    """Several hosts: shared memory within each, gloo between them."""
    GLOO = "gloo"
    """Connections between CPU ranks."""
    FABRIC = "nccl"
    """What joins devices: NVLink, PCIe, InfiniBand."""
    OTHER = "torch"
    """A backend of torch.distributed that is not known here."""


def link_of(group: Any, kind: str) -> GroupLink:
    """The link of process group `group` for tensors on devices of `kind` ("cpu", "cuda"); None is a group of one."""
    if group is None:
        return GroupLink.PROCESS
    if kind == "cpu" and isinstance(group, SharedGroup | SpanningGroup):
        return GroupLink.SHARED if isinstance(group, SharedGroup) else GroupLink.HOSTS
    backend = backend_of(group, kind)
    if kind == "cpu" and isinstance(backend, dist.ProcessGroupGloo):
        return GroupLink.GLOO
    if type(backend).__name__ == "ProcessGroupNCCL":  # A torch without NCCL lacks the class.
        return GroupLink.FABRIC
    return GroupLink.OTHER


def backend_of(group: Any, kind: str) -> Any:
    """What carries a group's tensors of `kind`; None when nothing does. A group may be such a backend itself."""
    if isinstance(group, dist.ProcessGroupGloo):
        return group
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


def choose(
    link: GroupLink, wires: ProcessGroups, size: int, index: int, device: torch.device, buffers: BufferMeter
) -> Transport | None:
    """The transport of flats on `device`; None where nothing travels."""
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
            # Collectives that send over the network what must be sent, once; exchanges of all with all send more.
            return Transport(wires, size, index, device)
