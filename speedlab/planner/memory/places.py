"""The places in which a rank holds something, device, host and disk: how much of what there is. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speedlab.display.formatting import bytes_text
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup


@dataclass(frozen=True, kw_only=True)
class PlaceBytes:
    """Bytes of a rank in one place, and its equal share of what there is. Where the host's memory is the device's, the
    device's bytes are those of both."""

    name: str
    """device, host or disk."""
    held_bytes: int
    capacity_bytes: int | None
    """None where it is not known; nothing is refused then."""

    @property
    def free_bytes(self) -> int | None:
        """Negative where it does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.held_bytes

    @property
    def share(self) -> float:
        """Of its capacity; 0 where that is not known."""
        return self.held_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.free_bytes >= 0

    def __str__(self) -> str:
        held = f"{self.name}: {bytes_text(self.held_bytes)}"
        if self.free_bytes is None or self.capacity_bytes is None:
            return f"{held}, its capacity is not known"
        left = f"{bytes_text(self.free_bytes)} free" if self.fits else f"{bytes_text(-self.free_bytes)} too much"
        return f"{held} of {bytes_text(self.capacity_bytes)} for each rank, {left}"


def places(memory: Sequence[RankMemory], setup: Setup, machines: Machines) -> list[PlaceBytes]:
    """Device, host and disk, those of them that hold something, each with what the rank holds there that holds most."""
    sharing = min(machines.per_host, setup.layout.world_size)
    host = machines.host
    found = [
        PlaceBytes(
            name="device",
            held_bytes=max(rank.total for rank in memory),
            capacity_bytes=machines.device.memory_bytes,
        ),
        PlaceBytes(
            name="host",
            held_bytes=max(rank.host_bytes for rank in memory),
            # On CPU cores the device's line counts it.
            capacity_bytes=machines.device.memory_bytes if memory[0].one_memory else host.memory_bytes // sharing,
        ),
        PlaceBytes(
            name="disk",
            held_bytes=max(rank.disk_bytes for rank in memory),
            capacity_bytes=None if host.disk_bytes is None else host.disk_bytes // sharing,
        ),
    ]
    return [place for place in found if place.held_bytes or place.name == "device"]
