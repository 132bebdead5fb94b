"""Define which share of the data sheet a training reaches: a few constants for each device.

The constants are set by the rows named in `published.CALIBRATION`; all other rows only test them. On this machine
`speedlab calibrate` measures the rates, so most shares are 1 (`Efficiency.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from speedlab.planner.hardware.devices import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Reached shares of the peaks, 0 to 1, and fixed times."""

    matmul: float
    """Share of the peak FLOP/s for large matrix multiplications; reading and writing operands is added."""
    attention: float
    """Share of the peak FLOP/s for fused attention."""
    memory: float
    """Share of the memory bandwidth for elementwise kernels and matrix operands."""
    in_host: float
    """Share of a link's bandwidth inside a host."""
    between: float
    """Share of the network's bandwidth between hosts, for collectives of many ranks."""
    messages: float
    """Share of a link's bandwidth for messages between two ranks."""
    overlap: float
    """Share of overlapped data-parallel communication that costs nothing; the rest slows kernels down."""
    kernel_seconds: float
    """Fixed time of a kernel on the device."""
    drawn_seconds: float = 0.0
    """Seconds of a random number for dropout, on CPUs."""
    host_link: float = 0.8
    """Share of the bandwidth of the link to the host's memory."""
    host_adam_seconds: float = 0.25e-9
    """Seconds for one parameter's update by all CPU cores of a host together (arXiv:2101.06840, table 4)."""
    validated: bool = True
    """Whether measured runs, published or own, have set and tested these constants."""
    calibration: Any = field(default=None, hash=False, repr=False)
    """`Calibration` of a measured machine; its `predict(setup)` is more exact than these shares."""

    @classmethod
    def measured(cls, *, kernel_seconds: float, drawn_seconds: float = 0.0, overlap: float = 0.0) -> Efficiency:
        """Return the efficiency of a machine with measured rates: its peaks are what it reaches.

        Args:
            kernel_seconds: fixed time of a kernel.
            drawn_seconds: time of a random number for dropout, on CPUs.
            overlap: share of overlapped communication that costs nothing.
        """
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
    """Return the constants of a described device.

    Args:
        device: the data sheet. Without a published run, the constants are the H100's, marked as not validated.
    """
    return EFFICIENCY.get(device.name) or replace(_H100, validated=False)
