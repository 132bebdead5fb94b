"""Compare the bytes of a rank with its share of the capacity of device, host and disk. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speedlab.display.formatting import bytes_text
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup


@dataclass(frozen=True, kw_only=True)
class PlaceBytes:
    """Bytes of a rank in one place, and its equal share of the capacity.

    If host and device share one memory, the bytes of the device are those of both.
    """

    name: str
    """device, host or disk."""
    held_bytes: int
    capacity_bytes: int | None
    """None if unknown; then nothing is refused."""

    @property
    def free_bytes(self) -> int | None:
        """Free bytes, negative if the place is too small; None if the capacity is unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.held_bytes

    @property
    def share(self) -> float:
        """Used share of the capacity; 0 if the capacity is unknown."""
        return self.held_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def fits(self) -> bool:
        """Whether the bytes fit, or the capacity is unknown."""
        return self.free_bytes is None or self.free_bytes >= 0

    def __str__(self) -> str:
        held = f"{self.name}: {bytes_text(self.held_bytes)}"
        if self.free_bytes is None or self.capacity_bytes is None:
            return f"{held}, its capacity is not known"
        left = f"{bytes_text(self.free_bytes)} free" if self.fits else f"{bytes_text(-self.free_bytes)} too much"
        return f"{held} of {bytes_text(self.capacity_bytes)} for each rank, {left}"


def places(memory: Sequence[RankMemory], setup: Setup, machines: Machines) -> list[PlaceBytes]:
    """Return the used places (device, host, disk), each with the bytes of the rank that holds most there.

    Args:
        memory: memory of each distinct position.
        setup: the training.
        machines: the capacities.
    """
    # Ranks of one host share its memory and disk equally.
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
            # On CPU cores the device entry already counts this memory.
            capacity_bytes=machines.device.memory_bytes if memory[0].one_memory else host.memory_bytes // sharing,
        ),
        PlaceBytes(
            name="disk",
            held_bytes=max(rank.disk_bytes for rank in memory),
            capacity_bytes=None if host.disk_bytes is None else host.disk_bytes // sharing,
        ),
    ]
    return [place for place in found if place.held_bytes or place.name == "device"]
