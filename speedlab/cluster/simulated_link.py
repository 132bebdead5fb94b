"""The simulated link between engines of this machine (`speedlab.comm.simulated_link`): parse and describe it."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.cluster.errors import ClusterError
from speedlab.hardware import Device
from speedlab.network import LinkRate


def parse(link: str | None, *, on_hosts: bool) -> LinkRate | None:
    """Return the requested link; None for none.

    Args:
        link: Text such as "1 Gbit/s 1 ms"; None for no link.
        on_hosts: Whether engines run on several hosts.

    Raises:
        ClusterError: If the text is not valid, or engines run on several hosts.
    """
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
    """Return the link as text for engines on `devices`; "" without one.

    Args:
        devices: Devices by rank.
        link: The link; None for none.

    Raises:
        ClusterError: If the devices are GPUs, whose transfers cannot be delayed.
    """
    if link is not None and devices[0].kind != "cpu":
        raise ClusterError(f"link is {link}, which only CPU engines pretend; add device='cpu', or leave link out")
    return "" if link is None else str(link)


def words(link: str) -> str:
    """Return 'pretend a link of 1 Gbit/s 1 ms'; '' without one."""
    return f"pretend a link of {link}" if link else ""


def note(link: LinkRate | str | None) -> str:
    """', over a pretended link of 1 Gbit/s 1 ms'; '' without one. Follows the description of a cluster."""
    return f", over a pretended link of {link}" if link else ""
