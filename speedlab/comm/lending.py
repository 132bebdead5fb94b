"""Buffers that reductions use in turn: one is filled while the other is reduced and read by peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from speedlab.comm.traffic import BufferMeter

_BUFFERS = 2
"""Buffers of one kind that a pass uses."""


class LentBuffers:
    """The buffers of one group."""

    def __init__(self, meter: BufferMeter) -> None:
        """`meter` counts their bytes."""
        self._meter = meter
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Those that were given back, by size and dtype, the one that was first given back first."""
        self._made: Counter[tuple[int, torch.dtype]] = Counter()
        """How many of each kind there are."""

    def borrow(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        empty: Callable[[int, torch.dtype], Tensor],
        wait_until_read: Callable[[Tensor], None],
    ) -> Tensor:
        """A buffer (numel,), of new `empty` memory, or one that was given back, where it was waited until peers have
        read it."""
        key = numel, dtype
        idle = self._idle.setdefault(key, [])
        if not idle or self._made[key] < _BUFFERS:
            buffer = empty(numel, dtype)
            self._made[key] += 1
            self._meter.add(buffer.nbytes)
            return buffer
        buffer = idle.pop(0)
        wait_until_read(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def idle(self) -> list[Tensor]:
        """Those that were given back."""
        return [buffer for buffers in self._idle.values() for buffer in buffers]

    def trim(self) -> None:
        """Free what was given back beyond what a pass uses in turn."""
        for key, idle in self._idle.items():
            self._free(key, idle[_BUFFERS:])
            del idle[_BUFFERS:]

    def drop(self) -> None:
        """Free what was given back."""
        for key, idle in self._idle.items():
            self._free(key, idle)
            idle.clear()

    def _free(self, key: tuple[int, torch.dtype], freed: list[Tensor]) -> None:
        """Count these out."""
        self._meter.add(-sum(buffer.nbytes for buffer in freed))
        self._made[key] -= len(freed)
