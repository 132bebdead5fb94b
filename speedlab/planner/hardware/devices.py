"""Describe devices from data sheets, and hosts of equal devices. No torch.

Figures are from NVIDIA's data sheets: dense matrix multiplication (no sparsity), decimal bandwidths. Memory is what a
process can use, slightly less than the number printed on the card.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from speedlab.display.formatting import unknown
from speedlab.planner.hardware.hosts import HOSTS, HostSpec
from speedlab.planner.hardware.links import IN_HOST, Link, parse_link
from speedlab.planner.machine_spec import MOST_IN_HOST, USUAL_IN_HOST, read_words

_GIB = 2**30

_MESHED = 4
"""Maximum number of GPUs in a host that NVLink connects without a switch (NVIDIA's boards of four)."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """The planner's description of one device."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    """FLOP/s of matrix multiplication by dtype."""
    memory_bytes_per_second: float
    in_host: str = ""
    """The usual link between devices of one host."""
    host_link: str = "pcie4"
    """The link to the host's memory."""
    sold_gb: tuple[int, ...] = ()
    """Memory sizes printed on the card, in GB."""
    network: str = ""
    """The network between hosts of these devices, as NVIDIA builds them."""
    unaligned_share: float = 1.0
    """Share of the 16-bit peak for products whose inner size is not a multiple of 8.

    Matrix units do not take them, so they run at float32's speed.
    """

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix multiplication in a dtype.

        Raises:
            ValueError: the device does not support the dtype.
        """
        if dtype not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no matrix multiplication in {dtype}; it has {', '.join(sorted(self.peak_flops))}"
            )
        return self.peak_flops[dtype]

    @property
    def family(self) -> str:
        """Name without the memory size, for instance "A100"."""
        return self.name.partition("-")[0]

    @property
    def on_host(self) -> bool:
        """Whether the device is the host itself: CPU cores with the host's memory."""
        return self.name == "cpu"


def _gpu(
    name: str,
    gib: float,
    half: float,
    single: float,
    bandwidth: float,
    link: str,
    host: str,
    sold: tuple[int, ...],
    network: str,
):
    dtypes = {"float16": half * 1e12, "float32": single * 1e12}
    if not name.startswith("V100"):
        dtypes["bfloat16"] = half * 1e12
    return DeviceSpec(
        name=name,
        memory_bytes=int(gib * _GIB),
        peak_flops=dtypes,
        memory_bytes_per_second=bandwidth * 1e12,
        in_host=link,
        host_link=host,
        sold_gb=sold,
        network=network,
        unaligned_share=single / half,
    )


DEVICES = {
    device.name: device
    for device in (
        # name, memory, TFLOP/s at 16 bits and at float32 (plain on V100, TF32 is not assumed), TB/s, links, the memory
        # as printed, and the network cards of NVIDIA's own hosts (DGX-1, DGX A100, H100, H200, B200)
        _gpu("V100-16", 15.77, 125, 15.7, 0.9, "nvlink2", "pcie3", (16,), "ib-100x4"),
        _gpu("V100-32", 31.74, 125, 15.7, 0.9, "nvlink2", "pcie3", (32,), "ib-100x4"),
        _gpu("A100-40", 39.39, 312, 19.5, 1.555, "nvlink3", "pcie4", (40,), "ib-200x8"),
        _gpu("A100-80", 79.15, 312, 19.5, 2.039, "nvlink3", "pcie4", (80,), "ib-200x8"),
        _gpu("H100", 79.10, 989.4, 67, 3.35, "nvlink4", "pcie5", (80,), "ib-400x8"),
        _gpu("H200", 139.8, 989.4, 67, 4.8, "nvlink4", "pcie5", (141,), "ib-400x8"),
        _gpu("B200", 178.3, 2250, 80, 8.0, "nvlink5", "pcie5", (180, 192), "ib-400x8"),
    )
}


def device(name: str) -> DeviceSpec:
    """Return a described device.

    Args:
        name: its name, in any case.

    Raises:
        ValueError: the name is unknown; the message lists the nearest ones.
    """
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
    """None only for a single host."""
    host: HostSpec = field(default_factory=HostSpec)
    """The memory and the disk of each host."""
    price_per_device_hour: float | None = None
    """Price in any currency."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """Assumptions for what a parsed text left open."""

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
        """Return the bandwidth of a ring inside a host, in bytes/s.

        Hosts with up to four devices have no switch: each pair has its own links, so a device reaches its full
        bandwidth only together with all others.

        Args:
            ranks: devices in the ring.
        """
        bandwidth = self.in_host.bandwidth_bytes_per_second
        if ranks < 2 or self.per_host > _MESHED or not self.in_host.name.startswith("nvlink"):
            return bandwidth
        return bandwidth * (ranks - 1) / (self.per_host - 1)

    @classmethod
    def parse(cls, text: str, *, price_per_device_hour: float | None = None) -> Machines:
        """Parse machines, for instance '64x8 A100-80 nvlink3 ib-200x8'.

        The parts are hosts x devices, the device, the link inside a host, the link between hosts.
        `machine_spec.read_words` accepts many spellings. Omitted parts are those of NVIDIA's own hosts, listed in
        `assumed`.

        Args:
            text: the description.
            price_per_device_hour: in any currency.

        Raises:
            ValueError: the text is incomplete, or a name is unknown; the message lists the nearest ones.
        """
        words = read_words(text)
        alike = [spec for spec in DEVICES.values() if spec.family == words.device.upper()]
        # Compare with the printed size: the usable memory is a little less.
        fitting = [spec for spec in alike if words.memory is None or words.memory in spec.sold_gb]
        if not fitting:
            raise unknown("device", words.written, DEVICES)
        spec = max(fitting, key=lambda spec: spec.memory_bytes)
        assumed = [f"{spec.family} is {spec.name}"] if len(fitting) > 1 else []
        hosts, per_host = words.hosts or 1, words.count
        if words.hosts is None and per_host > MOST_IN_HOST:
            hosts, rest = divmod(per_host, USUAL_IN_HOST)
            if rest:
                raise ValueError(
                    f"machines {text!r}: no host has {per_host} devices, and they make no whole hosts of "
                    f"{USUAL_IN_HOST}; write hosts x devices, for instance '{hosts + 1}x{USUAL_IN_HOST} {spec.name}'"
                )
            per_host = USUAL_IN_HOST
            assumed.append(f"{hosts} hosts of {per_host}")
        links = [parse_link(word) for word in words.links]
        inside = [link for link in links if link.name in IN_HOST]
        outside = [link for link in links if link.name not in IN_HOST]
        if len(inside) > 1 or len(outside) > 1:
            raise ValueError(
                f"machines {text!r} name {len(inside)} links inside a host and {len(outside)} networks; give at most "
                "one of each"
            )
        if hosts > 1 and not outside:
            outside = [parse_link(spec.network)]
            assumed.append(f"the network is {spec.network}")
        return cls(
            device=spec,
            hosts=hosts if words.hosts is None else words.hosts,
            per_host=per_host,
            in_host=inside[0] if inside else parse_link(spec.in_host),
            between=outside[0] if outside else None,
            host=HOSTS[spec.name],
            price_per_device_hour=price_per_device_hour,
            assumed=tuple(assumed),
        )

    def __str__(self) -> str:
        network = f", {self.between.name}" if self.between else ""
        return f"{self.hosts} × {self.per_host} {self.device.name} ({self.in_host.name}{network})"
