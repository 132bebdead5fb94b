"""Positions of parameters in their flat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch

from speedlab.layout import padded_numel
from speedlab.placement import ParamPlacement


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """The position of one parameter in its flat, in elements. `group` is the index of its optimizer parameter group."""

    name: str
    offset: int
    numel: int
    shape: torch.Size
    group: int

    @property
    def range(self) -> slice:
        """The parameter's elements of the flat, as a slice."""
        return slice(self.offset, self.offset + self.numel)


def lay_out(rows: Iterable[ParamPlacement], shapes: Iterable[torch.Size], step: int) -> list[ParamSlot]:
    """Return slots for the parameters, one after the other.

    Args:
        rows: Rows of the placement table.
        shapes: Shape of each parameter.
        step: Each parameter starts at a multiple of this many elements.
    """
    slots: list[ParamSlot] = []
    end = 0
    for row, shape in zip(rows, shapes, strict=True):
        offset = padded_numel(end, step)
        slots.append(ParamSlot(name=row.name, offset=offset, numel=shape.numel(), shape=shape, group=row.group))
        end = offset + shape.numel()
    return slots


def refuse_shape(name: str, before: torch.Size, now: torch.Size) -> NoReturn:
    """Raise RuntimeError: the parameter `name` was replaced by values of another shape."""
    raise RuntimeError(
        f"{name} has shape {tuple(now)}, and had {tuple(before)} at initialize, for which its gradients and optimizer "
        "states are made. Change shapes before initialize, as model.resize_token_embeddings(size) does, or "
        "call engine.destroy(), change them, and call initialize again"
    )
