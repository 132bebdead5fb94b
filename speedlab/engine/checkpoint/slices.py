"""Where the elements of a parameter lie, whoever wrote them and whoever reads them. Pure arithmetic, no files.

A rank holds a part of a whole parameter (`layout.Part`; None: all of it) as a tensor of its own, and of that tensor,
laid out row by row, it owns a stretch [start, end). So two ranks of two layouts hold stretches of two parts of one
parameter, and what both hold is a few rectangular blocks:

1. Seen along the cut dimension a parameter is a matrix: a row for each index of the dimensions before it. A part is
   some of its columns, in the order of the part's ranges.
2. Where ranges of both parts meet, there are columns that lie together in both tensors.
3. Of these columns, all rows that are whole in both stretches are one block; rows that a stretch cuts are blocks of
   their own, at most one at each end.
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
    """`rows` × `length` elements. Places are counted from the start of each stretch; rows lie `stride` apart."""

    rows: int
    length: int
    source: int
    source_stride: int
    target: int
    target_stride: int


@torch.no_grad()
def copy_blocks(found: Iterable[StridedSlice], values: Tensor, into: Tensor) -> None:
    """Copy blocks from `values` (the source stretch's elements, 1-D) into `into` (the target's)."""
    for block in found:
        size = (block.rows, block.length)
        read = values.as_strided(size, (block.source_stride, 1), values.storage_offset() + block.source)
        into.as_strided(size, (block.target_stride, 1), into.storage_offset() + block.target).copy_(read)


def blocks(shape: Shape, source: Stretch, target: Stretch) -> Iterator[StridedSlice]:
    """What both stretches of a parameter of `shape` hold."""
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
        # Cut along two dimensions: each run of the source is a stretch of the whole parameter.
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
    """Elements of `source` that lie together in the whole parameter: (place in the stretch, stretch of the whole)."""
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
    """(index in the source, index in the target, count) along the cut dimension where ranges meet."""
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
    """Columns that begin at `first` of a tensor whose rows are `width` elements: row r begins at first + r × width."""

    stretch: Stretch
    first: int
    width: int

    def ceil_rows(self, place: int) -> int:
        """The first row that begins at or behind `place`."""
        return -((self.first - place) // self.width)


def _rows(rows: int, length: int, source: _Side, target: _Side) -> Iterator[StridedSlice]:
    """Blocks of `length` columns in what both stretches hold of so many rows."""
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
