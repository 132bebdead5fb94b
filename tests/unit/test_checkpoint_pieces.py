"""Any layout writes, any layout reads: the arithmetic of parts and stretches, without ranks or files."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedlab.engine.checkpoint.slices import Stretch, blocks, copy_blocks
from speedlab.layout import ShardRange


def part_of(whole: Tensor, part: ShardRange | None) -> Tensor:
    """What a rank that holds `part` has in its own tensor, by plain indexing."""
    if part is None:
        return whole.reshape(-1)
    pieces = [whole.narrow(part.dim, start, end - start) for start, end in part.ranges]
    return torch.cat(pieces, part.dim).reshape(-1)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Stretch]:
    """Who holds what of a parameter: parts that cover it, of several ranges each, and their stretches by dp index."""
    parts: list[ShardRange | None] = [None]
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, shape[dim] - 1)), max_size=5)))
        edges = [0, *(cut for cut in cuts if cut < shape[dim]), shape[dim]]
        ranks = draw(st.integers(1, 4))
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for pair in draw(st.permutations(list(itertools.pairwise(edges)))):
            ranges[draw(st.integers(0, ranks - 1))].append(pair)
        parts = [ShardRange(shape=shape, dim=dim, ranges=tuple(own)) for own in ranges if own]
    stretches = []
    for part in parts:
        numel = math.prod(part.own_shape if part else shape)
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        stretches += [Stretch(part, start, end) for start, end in itertools.pairwise(cuts)]
    return stretches


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_one_layout_wrote_another_reads(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    written, wanted = data.draw(layouts(shape)), data.draw(layouts(shape))
    for target in wanted:
        into = torch.full((target.end - target.start,), -1.0, dtype=torch.float64)
        copied = 0
        for source in written:
            values = part_of(whole, source.part)[source.start : source.end]
            found = list(blocks(shape, source, target))
            copy_blocks(found, values, into)
            copied += sum(block.rows * block.length for block in found)
        assert into.equal(part_of(whole, target.part)[target.start : target.end])
        assert copied == into.numel(), "each element is read once"


def test_a_matrix_cut_by_columns_is_read_in_few_blocks() -> None:
    """A row of its own for every run would make a large checkpoint slow to read."""
    shape = (1000, 64)
    half = Stretch(ShardRange(shape=shape, dim=1, ranges=((0, 32),)), 0, 32_000)
    assert len(list(blocks(shape, Stretch(None, 0, 64_000), half))) == 1
    assert len(list(blocks(shape, Stretch(None, 100, 63_000), half))) <= 3


def test_a_scalar_is_a_parameter_too() -> None:
    into = torch.zeros(1)
    copy_blocks(blocks((), Stretch(None, 0, 1), Stretch(None, 0, 1)), torch.ones(1), into)
    assert into.item() == 1
