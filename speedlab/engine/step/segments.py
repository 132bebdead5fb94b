"""Segments: the stretches of a flat that one optimizer group updates alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.parallel.zero import Flat


@dataclass(frozen=True)
class Segment:
    """Elements [start, end) of a flat, of its slots [first, last); `master` is a view of the flat's master."""

    start: int
    end: int
    group: int
    first: int
    last: int
    master: Tensor


def cut(flat: Flat, begins: Collection[int] = (), *, apart: bool = False) -> list[Segment]:
    """The flat's state range, cut where its optimizer group changes, and before the slots `begins`. `apart`: before
    each slot; then no segment has the padding behind its parameter, which a mean over elements would count."""
    low, high = flat.state_range
    firsts: list[int] = []
    for index, slot in enumerate(flat.slots):
        if not index or apart or index in begins or slot.group != flat.slots[index - 1].group:
            firsts.append(index)
    segments = []
    for first, last in zip(firsts, [*firsts[1:], len(flat.slots)], strict=True):
        begin = flat.slots[first].offset
        end = flat.slots[last].offset if last < len(flat.slots) else flat.padded
        if apart:
            end = begin + flat.slots[first].numel
        start, stop = max(begin, low), min(end, high)
        if start < stop:
            master = flat.master[start - low : stop - low]
            segments.append(Segment(start, stop, flat.slots[first].group, first, last, master))
    return segments


def owned_ranges(flat: Flat, within: tuple[int, int], others: Collection[str]) -> list[tuple[int, int]]:
    """Elements [start, end) of the flat `within` a range without the parameters in `others`; neighbours are one."""
    ranges, (start, stop) = [], within
    for slot in flat.slots:
        if slot.name in others:
            ranges.append((start, slot.offset))
            start = max(start, slot.offset + slot.numel)
    ranges.append((start, stop))
    return [(low, min(high, stop)) for low, high in ranges if low < min(high, stop)]


def elementwise(value: Any, segment: Segment) -> bool:
    """Whether an optimizer's state of this segment has a value for each of its elements."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.shape == segment.master.shape


def has_kernels(master: Tensor) -> bool:
    """Whether cuda_ops updates such masters: those in float32."""
    return master.dtype is torch.float32
