"""How much of a device's and a link's data sheet a training run reaches: few constants, one set for each device.

They are not derived but set, by the rows that `published.CALIBRATION` names; all other rows
only test them. On this machine `speedlab calibrate` measures the rates themselves, so that most shares are 1
(`Efficiency.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from speedlab.planner.hardware.devices import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks, 0 to 1, and fixed times."""

    matmul: float
    """Of the peak FLOP/s that large matrix multiplications reach; the time to read and write operands is extra."""
    attention: float
    """Of the peak FLOP/s that fused attention reaches."""
    memory: float
    """Of the memory's bandwidth that elementwise kernels and matrix operands reach."""
    in_host: float
    """Of a link's bandwidth inside a host."""
    between: float
    """Of the network's bandwidth between hosts, by collectives of many ranks."""
    messages: float
    """Of a link's bandwidth, by messages from one rank to another."""
    overlap: float
    """Of data-parallel communication that runs beside kernels, how much is for nothing; the rest slows them down."""
    kernel_seconds: float
    """Fixed time of a kernel on the device."""
    drawn_seconds: float = 0.0
    """Of a random number for dropout, on processors."""
    host_link: float = 0.8
    """Of the bandwidth of the link to the host's memory."""
    host_adam_seconds: float = 0.25e-9
    """Of the host's processors together, for one parameter's update (arXiv:2101.06840, table 4)."""
    validated: bool = True
    """Whether measured runs, published or own, have set and tested these constants."""
    calibration: Any = field(default=None, hash=False, repr=False)
    """Of a machine that was measured: its `Calibration`, whose `predict(setup)` knows more than these shares say."""

    @classmethod
    def measured(cls, *, kernel_seconds: float, drawn_seconds: float = 0.0, overlap: float = 0.0) -> Efficiency:
        """For a machine whose rates were measured, so that the device's peaks are what is reached."""
        return cls(
            matmul=1,
            attention=1,
            memory=1,
            in_host=1,
            between=1,
            messages=1,
            overlap=overlap,
            kernel_seconds=kernel_seconds,
            drawn_seconds=drawn_seconds,
            host_link=1,
        )


_V100 = Efficiency(
    matmul=0.70, attention=0.35, memory=0.8, in_host=0.9, between=0.14, messages=0.6, overlap=0.6, kernel_seconds=6e-6
)
_A100 = Efficiency(
    matmul=0.78, attention=0.60, memory=0.9, in_host=0.65, between=0.3, messages=0.9, overlap=0.4, kernel_seconds=5e-6
)
_H100 = Efficiency(
    matmul=0.62, attention=0.50, memory=0.8, in_host=0.75, between=0.7, messages=0.8, overlap=0.8, kernel_seconds=5e-6
)

EFFICIENCY = {
    "V100-16": _V100,
    "V100-32": _V100,
    "A100-40": _A100,
    "A100-80": _A100,
    "H100": _H100,
}


def efficiency_of(device: DeviceSpec) -> Efficiency:
    """A described device's constants. Devices of which no run was published here take the H100's, marked as not
    validated."""
    return EFFICIENCY.get(device.name) or replace(_H100, validated=False)
