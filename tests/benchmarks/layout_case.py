"""What all contestants of `bench step --layout` have in common, as plain values: a process that runs another checkout
knows layouts by other names, perhaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.workload import MICRO_BATCH, MODEL, SEQUENCE

Batches = list[tuple[Tensor, Tensor]]
"""Micro-batches: tokens and targets, (B, T) each."""

OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}

STEPS_CHECKED = 2
_TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """A layout, and how it is trained in `dtype`."""

    sizes: dict[str, int]
    """Sizes of the mesh by axis, slow to fast."""
    data_index: tuple[int, ...]
    """By rank, which of the global batch's shares it takes."""
    cut: tuple[int, ...]
    """Blocks of each pipeline stage."""
    accumulation: int
    dtype: str
    expected: tuple[float, ...]
    """Losses of the first steps in one process."""

    def checked(self, who: str, step: Callable[[Batches], float | None]) -> Callable[[], object]:
        """`step` on this rank's batches. Raises RuntimeError unless its first steps have the losses of one process."""
        batches = make_batches(self.data_index[dist.get_rank()], self.accumulation)
        found = []
        for _ in self.expected:
            loss = step(batches)
            known = torch.tensor([loss or 0.0, float(loss is not None)], dtype=torch.float64)
            dist.all_reduce(known)
            found.append(float(known[0] / known[1]))
        if any(abs(a - b) > _TOLERANCE[self.dtype] for a, b in zip(found, self.expected, strict=True)):
            raise RuntimeError(f"{who} under {self.sizes}: losses {found}, but one process has {list(self.expected)}")
        return lambda: step(batches)


def make_batches(index: int, count: int, size: int = MICRO_BATCH) -> Batches:
    """`count` micro-batches of `size` sequences: share `index` of the global batch."""
    generator = torch.Generator().manual_seed(index)
    shape = (2, size, SEQUENCE)
    drawn = (torch.randint(0, MODEL.vocab_size, shape, generator=generator) for _ in range(count))
    return [(tokens, targets) for tokens, targets in drawn]
