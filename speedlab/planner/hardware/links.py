"""Describe links between devices: bandwidth and latency from data sheets. No torch.

All bandwidths are for one direction. The share that collectives reach is part of `Efficiency`, not of the link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from speedlab.display.formatting import unknown

_GBIT_BYTES = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection of one device (inside a host) or of one network card (between hosts)."""

    name: str
    bandwidth_bytes_per_second: float
    """Bandwidth in one direction, of one card if there are several."""
    latency_seconds: float
    """From the send of one rank to the receive of the other, including software."""
    cards: int = 1
    """Network cards of a host that work in parallel."""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.latency_seconds < 0 or self.cards < 1:
            raise ValueError(
                f"link {self.name!r} has {self.bandwidth_bytes_per_second} bytes/s, {self.latency_seconds} s and "
                f"{self.cards} cards; a link has a bandwidth above 0, a latency of at least 0 and at least one card"
            )

    @property
    def host_bytes_per_second(self) -> float:
        """Bandwidth of all cards of a host together."""
        return self.bandwidth_bytes_per_second * self.cards


def pretended(text: str, *, bits_per_second: float, latency_seconds: float) -> Link:
    """Return the simulated link between the engines of a cluster.

    Args:
        text: the link as the user wrote it.
        bits_per_second: bandwidth in one direction.
        latency_seconds: latency of a message.
    """
    return Link(
        name=f"pretended link of {text}",
        bandwidth_bytes_per_second=bits_per_second / 8,
        latency_seconds=latency_seconds,
    )


IN_HOST = {
    # NVIDIA's data sheets of V100, A100, H100 and B200 give both directions together: 300, 600, 900 and 1800 GB/s.
    "nvlink2": (150e9, 5e-6),
    "nvlink3": (300e9, 5e-6),
    "nvlink4": (450e9, 5e-6),
    "nvlink5": (900e9, 5e-6),
    # 16 lanes of 8, 16 and 32 GT/s with 128b/130b coding.
    "pcie3": (15.75e9, 1e-5),
    "pcie4": (31.5e9, 1e-5),
    "pcie5": (63e9, 1e-5),
}
"""name -> (bytes/s, seconds)"""

NETWORKS = {"ib": 5e-6, "roce": 6e-6, "efa": 1.5e-5, "opa": 5e-6, "eth": 3e-5}
"""Kind of network -> latency in seconds. InfiniBand, RDMA over Ethernet, AWS's adapter, Omni-Path, plain Ethernet."""

_NETWORK = re.compile(r"(?P<kind>[a-z]+)-(?P<gbit>\d+(?:\.\d+)?)(?:x(?P<cards>\d+))?")


def parse_link(text: str) -> Link:
    """Parse a link: 'nvlink3', 'pcie4', 'eth-100', 'ib-200x8' (8 cards of 200 Gbit/s a host).

    Raises:
        ValueError: the name is unknown; the message lists the nearest ones.
    """
    name = text.strip().lower()
    if name in IN_HOST:
        bandwidth, latency = IN_HOST[name]
        return Link(name=name, bandwidth_bytes_per_second=bandwidth, latency_seconds=latency)
    found = _NETWORK.fullmatch(name)
    if found is None:
        raise unknown("link", text, [*IN_HOST, *(f"{kind}-<Gbit/s>x<cards>" for kind in NETWORKS)])
    kind = found["kind"]
    if kind not in NETWORKS:
        raise unknown("network", kind, NETWORKS)
    return Link(
        name=name,
        bandwidth_bytes_per_second=float(found["gbit"]) * _GBIT_BYTES,
        latency_seconds=NETWORKS[kind],
        cards=int(found["cards"] or 1),
    )
