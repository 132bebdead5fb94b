"""Where a parameter lies in its flat."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
