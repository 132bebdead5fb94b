"""Which transport a group takes: a function of the link between its ranks, and of where the flat lives."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from speedlab.comm.process_groups import Wires
from speedlab.comm.shared import SharedGroup, SpanningGroup
from speedlab.comm.transfers import BufferMeter
from speedlab.comm.transports.base import Transport
from speedlab.comm.transports.gloo import GlooPeers
from speedlab.comm.transports.nccl import Exchanging
from speedlab.comm.transports.shared_memory import InPlace


class Link(Enum):
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


def link_of(group: Any, kind: str) -> Link:
    """The link of process group `group` for tensors on devices of `kind` ("cpu", "cuda"); None is a group of one."""
    if group is None:
        return Link.PROCESS
    if kind == "cpu" and isinstance(group, SharedGroup | SpanningGroup):
        return Link.SHARED if isinstance(group, SharedGroup) else Link.HOSTS
    backend = backend_of(group, kind)
    if kind == "cpu" and isinstance(backend, dist.ProcessGroupGloo):
        return Link.GLOO
    if type(backend).__name__ == "ProcessGroupNCCL":  # A torch without NCCL lacks the class.
        return Link.FABRIC
    return Link.OTHER


def backend_of(group: Any, kind: str) -> Any:
    """What carries a group's tensors of `kind`; None when nothing does. A group may be such a backend itself."""
    if isinstance(group, dist.ProcessGroupGloo):
        return group
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


def choose(
    link: Link, wires: Wires, size: int, index: int, device: torch.device, buffers: BufferMeter
) -> Transport | None:
    """The transport of flats on `device`; None where nothing travels."""
    match link:
        case Link.PROCESS:
            return None
        case Link.SHARED:
            return InPlace(wires, size, index, device)
        case Link.GLOO:
            return GlooPeers(wires, size, index, device, buffers)
        case Link.FABRIC:
            return Exchanging(wires, size, index, device)
        case Link.HOSTS | Link.OTHER:
            # Collectives that send over the network what must be sent, once; exchanges of all with all send more.
            return Transport(wires, size, index, device)
