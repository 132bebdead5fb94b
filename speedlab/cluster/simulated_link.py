"""A link that engines of this machine pretend to have between them (`speedlab.comm.simulated_link`): what may be asked
for, and how it is told, always as pretended."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.cluster.errors import ClusterError
from speedlab.hardware import Device
from speedlab.network import LinkRate


def parse(link: str | None, *, on_hosts: bool) -> LinkRate | None:
    """The link that was asked for; None where none was. Raises ClusterError for what is none, and where engines are on
    hosts."""
    if link is None:
        return None
    if on_hosts:
        raise ClusterError(
            f"link is {link!r}, which engines of this machine pretend, and hosts have links of their own; leave out "
            "link, or hosts, slurm and mpi"
        )
    try:
        return LinkRate.parse(link)
    except ValueError as error:
        raise ClusterError(str(error)) from None


def between(devices: Sequence[Device], link: LinkRate | None) -> str:
    """What engines on `devices` are told of the link. Raises ClusterError for GPUs, whose streams nobody holds up."""
    if link is not None and devices[0].kind != "cpu":
        raise ClusterError(f"link is {link}, which only CPU engines pretend; add device='cpu', or leave link out")
    return "" if link is None else str(link)


def words(link: str) -> str:
    """'pretend a link of 1 Gbit/s 1 ms'; '' without one."""
    return f"pretend a link of {link}" if link else ""


def note(link: LinkRate | str | None) -> str:
    """', over a pretended link of 1 Gbit/s 1 ms'; '' without one. Behind what a cluster is made of."""
    return f", over a pretended link of {link}" if link else ""
