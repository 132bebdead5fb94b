"""Slices of parameters: which blocks two ranks of two layouts have in common. Pure arithmetic, no files.

A rank holds a shard of a whole parameter (`ShardRange`; None: all of it) as a tensor of its own. Of this tensor, in row
order, it owns a stretch [start, end). Two ranks of two layouts hold stretches of two shards of one parameter. The
common elements are a few rectangular blocks:

1. Along the sharded dimension a parameter is a matrix: one row for each index of the earlier dimensions. A shard is
   some of its columns, in the order of the shard's ranges.
2. If ranges of both shards overlap, the common columns are contiguous in both tensors.
3. All rows that are complete in both stretches are one block of these columns. Rows that a stretch splits are separate
   blocks, at most one at each end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedlab.layout import ShardRange

Shape = Sequence[int]


@dataclass(frozen=True)
class Stretch:
    """Elements [start, end) of the tensor that holds `part` of a parameter; `part` None: the whole parameter."""

    part: ShardRange | None
    start: int
    end: int


@dataclass(frozen=True)
class StridedSlice:
    """A block of `rows` × `length` elements.

    Offsets count from the start of each stretch. A stride is the distance of two
    rows in elements.
    """

    rows: int
    length: int
    source: int
    source_stride: int
    target: int
    target_stride: int


@torch.no_grad()
def copy_blocks(found: Iterable[StridedSlice], values: Tensor, into: Tensor) -> None:
    """Copy blocks between two stretches.

    Args:
        found: The blocks.
        values: (n,) elements of the source stretch.
        into: (m,) elements of the target stretch.
    """
    for block in found:
        size = (block.rows, block.length)
        read = values.as_strided(size, (block.source_stride, 1), values.storage_offset() + block.source)
        into.as_strided(size, (block.target_stride, 1), into.storage_offset() + block.target).copy_(read)


def blocks(shape: Shape, source: Stretch, target: Stretch) -> Iterator[StridedSlice]:
    """Yield the blocks that two stretches of a parameter have in common.

    Args:
        shape: Shape of the whole parameter.
        source: The stretch to read.
        target: The stretch to fill.
    """
    if not math.prod(shape):
        return
    if source.part == target.part:
        low, high = max(source.start, target.start), min(source.end, target.end)
        if low < high:
            length = high - low
            yield StridedSlice(1, length, low - source.start, length, low - target.start, length)
        return
    dims = {part.dim for part in (source.part, target.part) if part is not None}
    if len(dims) == 2:
        # Sharded along two dimensions: each run of the source is a stretch of the whole parameter.
        for own, run in _runs(shape, source):
            yield from (replace(block, source=block.source + own) for block in blocks(shape, run, target))
        return
    dim = dims.pop()
    rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])  # 1
    ranges = [part.ranges if part is not None else ((0, shape[dim]),) for part in (source.part, target.part)]
    widths = [sum(end - start for start, end in own) * inner for own in ranges]
    for own, other, count in _columns(*ranges):  # 2
        sides = _Side(source, own * inner, widths[0]), _Side(target, other * inner, widths[1])
        yield from _rows(rows, count * inner, *sides)  # 3


def _runs(shape: Shape, source: Stretch) -> Iterator[tuple[int, Stretch]]:
    """Yield (offset in the stretch, stretch of the whole) for elements of `source` that are contiguous in the whole."""
    assert source.part is not None
    dim = source.part.dim
    inner = math.prod(shape[dim + 1 :])
    own = 0
    for row in range(math.prod(shape[:dim])):
        for low, high in source.part.ranges:
            length = (high - low) * inner
            begin, end = max(0, source.start - own), min(length, source.end - own)
            if begin < end:
                whole = (row * shape[dim] + low) * inner
                yield own + begin - source.start, Stretch(None, whole + begin, whole + end)
            own += length


def _columns(source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (index in the source, index in the target, count) of overlapping ranges along the sharded dimension."""
    own = 0
    for low, high in source:
        other = 0
        for first, last in target:
            start, end = max(low, first), min(high, last)
            if start < end:
                yield own + start - low, other + start - first, end - start
            other += last - first
        own += high - low


@dataclass(frozen=True)
class _Side:
    """Columns of a tensor in a stretch: row r begins at first + r × width."""

    stretch: Stretch
    first: int
    width: int

    def ceil_rows(self, place: int) -> int:
        """Return the first row that begins at or after an element.

        Args:
            place: The element.
        """
        return -((self.first - place) // self.width)


def _rows(rows: int, length: int, source: _Side, target: _Side) -> Iterator[StridedSlice]:
    """Yield blocks of `length` columns that both stretches contain, in `rows` rows."""
    sides = (source, target)
    low = max(0, *(side.ceil_rows(side.stretch.start - length + 1) for side in sides))
    high = min(rows, *(side.ceil_rows(side.stretch.end) for side in sides))
    whole_low = max(low, *(side.ceil_rows(side.stretch.start) for side in sides))
    whole_high = min(high, *(side.ceil_rows(side.stretch.end - length + 1) for side in sides))
    if whole_low < whole_high:
        yield _block(whole_low, whole_high - whole_low, 0, length, source, target)
    else:
        whole_low = whole_high = high
    for row in (*range(low, whole_low), *range(whole_high, high)):
        begins = [side.first + row * side.width for side in sides]
        begin = max(0, *(side.stretch.start - place for side, place in zip(sides, begins, strict=True)))
        end = min(length, *(side.stretch.end - place for side, place in zip(sides, begins, strict=True)))
        if begin < end:
            yield _block(row, 1, begin, end - begin, source, target)


def _block(row: int, rows: int, skip: int, length: int, source: _Side, target: _Side) -> StridedSlice:
    places = [side.first + row * side.width + skip - side.stretch.start for side in (source, target)]
    return StridedSlice(rows, length, places[0], source.width, places[1], target.width)
