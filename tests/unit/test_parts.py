"""Parts of parameters: what is taken from a whole is put back at its place."""

from __future__ import annotations

import pytest
import torch

from speedlab.layout import share_of
from speedlab.parallel.tensor.slicing import cut_along, put, take


@pytest.mark.parametrize(
    ("shape", "dim", "packed", "step"),
    [((12, 5), 0, 1, 1), ((5, 12), 1, 3, 2), ((7,), 0, 1, 1), ((30, 4), 0, 3, 5), ((2, 3, 4), 1, 1, 1)],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_make_up_the_whole(shape, dim, packed, step, size) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    again = torch.full_like(whole, -1)
    for index in range(size):
        part = cut_along(whole.shape, dim, size, index, packed=packed, step=step)
        own = take(part, whole)
        assert own.shape == part.own_shape
        put(part, own, again)
    assert again.equal(whole)


def test_packed_matrices_are_each_cut() -> None:
    """Queries, keys and values of 4 heads of 2: the second of two ranks has heads 2 and 3 of each."""
    part = cut_along(torch.Size((24, 8)), 0, 2, 1, packed=3, step=2)
    assert part.ranges == ((4, 8), (12, 16), (20, 24))
    assert part.own_shape == (12, 8)


def test_shares_differ_by_one_at_most() -> None:
    shares = [share_of(50_257, 4, k) for k in range(4)]
    assert [end - start for start, end in shares] == [12_564, 12_564, 12_564, 12_565]
    assert [start for start, _ in shares[1:]] == [end for _, end in shares[:-1]]
