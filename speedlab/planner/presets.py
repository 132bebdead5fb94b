"""List known models and clusters by the names of their announcements."""

from __future__ import annotations

from speedlab.config.presets import MODELS
from speedlab.display.formatting import unknown
from speedlab.planner.hardware.devices import DEVICES, Machines
from speedlab.planner.setup import ModelShape

_DGX2 = "16 V100-32 nvlink2"  # 8 EDR cards of 100 Gbit/s each.

CLUSTERS = {
    "dgx-2": f"1x{_DGX2}",
    "4-dgx-2": f"4x{_DGX2} ib-100x8",
    "25-dgx-2": f"25x{_DGX2} ib-100x8",  # 400 V100: ZeRO-2's announcement
    "32-dgx-2": f"32x{_DGX2} ib-100x8",  # 512 V100: ZeRO-Infinity
    "50-dgx-2": f"50x{_DGX2} ib-100x8",  # 800 V100: 3D parallelism
    "512-a100": "64x8 A100-80 nvlink3 ib-200x8",
    "1024-a100": "128x8 A100-80 nvlink3 ib-200x8",
    "4000-a100": "500x8 A100-40 nvlink3 ib-200x8",
}
"""Clusters of the announcements, in the syntax of `Machines.parse`."""


def model(name: str) -> ModelShape:
    """Return the shape of a known model.

    Raises:
        ValueError: the name is unknown; the message lists the nearest ones.
    """
    if name.lower() not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name.lower()].shape


def cluster(text: str, *, price_per_device_hour: float | None = None) -> Machines:
    """Return a known cluster, or machines in the syntax of `Machines.parse`.

    Args:
        text: name of a cluster, or a description of machines.
        price_per_device_hour: in any currency.

    Raises:
        ValueError: the text is neither.
    """
    name = text.strip().lower()
    counted = name[:1].isdigit() or any(device.family.lower() in name for device in DEVICES.values())
    if name not in CLUSTERS and not counted:
        raise unknown("cluster", text, [*CLUSTERS, *(f"8 {device}" for device in DEVICES)])
    return Machines.parse(CLUSTERS.get(name, text), price_per_device_hour=price_per_device_hour)
