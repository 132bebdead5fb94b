"""Seconds in which a rank's parameters come together and its gradients are summed once, as they are sent: whole, or as
integers with their kernels, over all data-parallel ranks, or inside hosts and between them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from speedlab.placement import INT4, INT8, ITEM_BYTES
from speedlab.planner.collectives import Rings
from speedlab.planner.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Sending:
    """The ways of one set-up's flats."""

    setup: Setup
    groups: Rings
    memory_bytes: float
    """Of a device in a second, which kernels that encode and decode read and write."""
    elements: float
    """That a rank holds or gathers."""
    units: int
    """In which they travel one after the other."""
    mapped: bool
    """Whether ranks use each other's parameters where they lie, so that these need not travel."""

    @property
    def _element(self) -> float:
        return ITEM_BYTES[self.setup.dtype]

    def parameters(self, *, again: bool = False) -> float:
        """Of all units; `again`: gathered before since the last update."""
        if self.mapped:
            return self.units * self.groups.dp.gather(0)
        each = self.elements / self.units
        if again and self.setup.secondary_partition:
            return self.units * self.groups.secondary.gather(each * self._element)
        if not self.setup.quantized_weights:
            return self.units * self.groups.dp.gather(each * self._element)
        decoded = self.elements * (ITEM_BYTES[INT8] + self._element) / self.memory_bytes
        return self.units * self.groups.dp.gather(each * ITEM_BYTES[INT8]) + decoded * (self.groups.dp.ranks > 1)

    def gradients(self, element: float) -> float:
        """Of all units, of so many bytes an element, into 1/dp on each rank."""
        each, groups = self.elements / self.units, self.groups
        if not self.setup.quantized_gradients:
            return self.units * groups.dp.reduce_scatter(each * element)
        inside, between = groups.inside, groups.between
        first = inside.gather(each * ITEM_BYTES[INT4])
        second = between.gather(each / inside.ranks * ITEM_BYTES[INT4])
        passes = (inside.ranks > 1) + (between.ranks > 1) / inside.ranks  # Encoded and summed, all, then a share.
        coded = passes * self.elements * (element + 2 * ITEM_BYTES[INT4]) / self.memory_bytes
        return self.units * (first + second) + coded
