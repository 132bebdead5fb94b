"""Where parameters lie in their flat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from speedlab.layout import padded_numel
from speedlab.placement import Row


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one parameter lies in its flat, in elements. `group` is the index of its optimizer parameter group."""

    name: str
    offset: int
    numel: int
    shape: torch.Size
    group: int

    @property
    def range(self) -> slice:
        """Its elements of the flat."""
        return slice(self.offset, self.offset + self.numel)


def lay_out(rows: Iterable[Row], shapes: Iterable[torch.Size], step: int) -> list[Slot]:
    """Parameters of these rows and shapes end to end, each from a multiple of `step` elements on."""
    slots: list[Slot] = []
    end = 0
    for row, shape in zip(rows, shapes, strict=True):
        offset = padded_numel(end, step)
        slots.append(Slot(name=row.name, offset=offset, numel=shape.numel(), shape=shape, group=row.group))
        end = offset + shape.numel()
    return slots
