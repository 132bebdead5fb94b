"""Devices that are described rather than present, and clusters of them. No torch.

Figures are NVIDIA's data sheets: dense matrix multiplication (no sparsity), decimal bandwidths. Memory is what a
process can see of it, which is a little less than what is printed on the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from speedlab.planner.links import IN_HOST, Link, parse_link
from speedlab.planner.nearest import unknown

_GIB = 2**30

_MESHED = 4
"""GPUs of a host that NVLink joins without a switch (NVIDIA's boards of four)."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device as the planner sees it."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    """FLOP/s of matrix multiplication by dtype."""
    memory_bytes_per_second: float
    in_host: str = ""
    """The link that devices of one host usually have."""
    host_link: str = "pcie4"
    """To the host's memory."""
    unaligned_share: float = 1.0
    """Of the peak at 16 bits, by products whose inner size does not divide by 8: without matrix units, at float32's."""

    def peak(self, dtype: str) -> float:
        """FLOP/s in `dtype`. Raises ValueError for a dtype that the device does not multiply."""
        if dtype not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no matrix multiplication in {dtype}; it has {', '.join(sorted(self.peak_flops))}"
            )
        return self.peak_flops[dtype]


def _gpu(name: str, gib: float, half: float, single: float, bandwidth: float, link: str, host: str, bf16: bool = True):
    dtypes = {"float16": half * 1e12, "float32": single * 1e12}
    if bf16:
        dtypes["bfloat16"] = half * 1e12
    return DeviceSpec(
        name=name,
        memory_bytes=int(gib * _GIB),
        peak_flops=dtypes,
        memory_bytes_per_second=bandwidth * 1e12,
        in_host=link,
        host_link=host,
        unaligned_share=single / half,
    )


DEVICES = {
    device.name: device
    for device in (
        # name, memory, TFLOP/s at 16 bits and at float32 (plain on V100, TF32 is not assumed), TB/s, links
        _gpu("V100-16", 15.77, 125, 15.7, 0.9, "nvlink2", "pcie3", bf16=False),
        _gpu("V100-32", 31.74, 125, 15.7, 0.9, "nvlink2", "pcie3", bf16=False),
        _gpu("A100-40", 39.39, 312, 19.5, 1.555, "nvlink3", "pcie4"),
        _gpu("A100-80", 79.15, 312, 19.5, 2.039, "nvlink3", "pcie4"),
        _gpu("H100", 79.10, 989.4, 67, 3.35, "nvlink4", "pcie5"),
        _gpu("H200", 139.8, 989.4, 67, 4.8, "nvlink4", "pcie5"),
        _gpu("B200", 178.3, 2250, 80, 8.0, "nvlink5", "pcie5"),
    )
}


def device(name: str) -> DeviceSpec:
    """A described device by its name, in any case. Raises ValueError with the nearest known ones."""
    for known, spec in DEVICES.items():
        if known.lower() == name.strip().lower():
            return spec
    raise unknown("device", name, DEVICES)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Hosts of equal devices."""

    device: DeviceSpec
    per_host: int
    hosts: int = 1
    in_host: Link
    between: Link | None = None
    """None only where there is one host."""
    price_per_device_hour: float | None = None
    """In whatever currency the user counts."""

    def __post_init__(self) -> None:
        if self.per_host < 1 or self.hosts < 1:
            raise ValueError(f"{self.hosts} hosts of {self.per_host} devices; there is at least 1 of each")
        if self.hosts > 1 and self.between is None:
            raise ValueError(
                f"{self.hosts} hosts need a network, and none is given; add one, as 'ib-200x8' (8 cards of 200 Gbit/s "
                "in each host) or 'eth-100'"
            )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.hosts * self.per_host

    def in_host_bytes_per_second(self, ranks: int) -> float:
        """Of a ring of `ranks` devices of one host. Up to four have no switch: each pair has its own links, so that a
        device reaches all of its bandwidth only with all others."""
        bandwidth = self.in_host.bandwidth_bytes_per_second
        if ranks < 2 or self.per_host > _MESHED or not self.in_host.name.startswith("nvlink"):
            return bandwidth
        return bandwidth * (ranks - 1) / (self.per_host - 1)

    @classmethod
    def parse(cls, text: str, *, price_per_device_hour: float | None = None) -> Machines:
        """'64x8 A100-80 nvlink3 ib-200x8': hosts x devices of each, the device, links inside a host and between them.

        The link inside may be left out (the device's usual one), that between where there is one host; '8 H100' is
        one host of 8. Raises ValueError: what is missing, or the nearest known names.
        """
        words = text.split()
        count = re.fullmatch(r"(?:(\d+)x)?(\d+)", words[0]) if words else None
        if count is None or len(words) < 2:
            raise ValueError(
                f"machines {text!r} do not begin with how many and what; write for instance "
                "'64x8 A100-80 nvlink3 ib-200x8' (64 hosts of 8) or '8 H100' (one host)"
            )
        spec = device(words[1])
        links = [parse_link(word) for word in words[2:]]
        inside = [link for link in links if link.name in IN_HOST]
        outside = [link for link in links if link.name not in IN_HOST]
        if len(inside) > 1 or len(outside) > 1:
            raise ValueError(
                f"machines {text!r} name {len(inside)} links inside a host and {len(outside)} networks; give at most "
                "one of each"
            )
        return cls(
            device=spec,
            hosts=int(count[1] or 1),
            per_host=int(count[2]),
            in_host=inside[0] if inside else parse_link(spec.in_host),
            between=outside[0] if outside else None,
            price_per_device_hour=price_per_device_hour,
        )

    def __str__(self) -> str:
        network = f", {self.between.name}" if self.between else ""
        return f"{self.hosts} × {self.per_host} {self.device.name} ({self.in_host.name}{network})"
