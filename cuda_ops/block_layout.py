"""Which blocks of keys each block of queries attends to: made by patterns, joined by `|`, printed as a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from cuda_ops.torch_compat import uncompiled

BLOCK = 64
"""Tokens of a block, where nobody says otherwise: the size for which the CPU kernels are compiled best."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """A layout of attention in blocks of `block` tokens.

    `mask` (Q, K) bool, on the CPU: block q of queries sees block k of keys. With `causal` no query sees a later key:
    blocks above the diagonal are taken out, and blocks on it are cut along it. With a `window` besides, no query sees a
    key that many tokens before itself, or more. Layouts are compared by identity.

    A `part` of a layout has `places` (Q, K) besides: where each block of queries, and of keys, was in the whole, which
    tells what is later, and how far away.

    Raises ValueError for a mask of another kind, a block size that is no multiple of 16, a causal mask that is not
    square though it is whole, places for other blocks, or a window of no tokens or without `causal`.
    """

    mask: Tensor
    causal: bool = False
    block: int = BLOCK
    window: int | None = None
    places: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    offsets: Tensor = field(init=False, repr=False)
    """(Q + 1,) int64: where each block of queries starts in `columns`."""
    columns: Tensor = field(init=False, repr=False)
    """The key blocks that it sees, ascending, int64."""
    distances: Tensor = field(init=False, repr=False)
    """For each of `columns`: tokens from its first key to the first query of the block that sees it, int64."""
    limit: int = field(init=False, repr=False)
    """The window; where there is none, more tokens than lie between any query and a key that it sees."""

    def __post_init__(self) -> None:
        if self.mask.dtype is not torch.bool or self.mask.ndim != 2 or not self.mask.is_cpu:
            raise ValueError(
                f"mask: {self.mask.dtype} of shape {tuple(self.mask.shape)} on {self.mask.device}, expected torch.bool "
                f"of shape (blocks of queries, blocks of keys) on cpu"
            )
        if self.block < 16 or self.block % 16:
            raise ValueError(f"block: {self.block}, expected a multiple of 16")
        if self.places is not None and tuple(map(len, self.places)) != tuple(self.mask.shape):
            raise ValueError(f"places: {[*map(len, self.places)]}, expected one for each of {tuple(self.mask.shape)}")
        if self.causal and self.places is None and self.mask.shape[0] != self.mask.shape[1]:
            raise ValueError(f"mask: shape is {tuple(self.mask.shape)}, expected a square, since causal is set")
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window: {self.window}, expected 1 or more, and causal set, which is {self.causal}")
        rows, columns = self.block_places()
        mask = self.mask & (rows[:, None] >= columns) if self.causal else self.mask.clone()
        offsets = torch.zeros(len(mask) + 1, dtype=torch.int64)
        torch.cumsum(mask.sum(1), 0, out=offsets[1:])
        row, column = mask.nonzero().unbind(1)
        distances = (rows[row] - columns[column]) * self.block
        made: dict[str, Tensor | int] = {
            "mask": mask,
            "offsets": offsets,
            "columns": column.contiguous(),
            "distances": distances,
        }
        farthest = int(distances.max()) if len(distances) else 0
        made["limit"] = farthest + self.block if self.window is None else self.window
        for name, value in made.items():
            object.__setattr__(self, name, value)  # Frozen from here on.

    def block_places(self) -> tuple[Tensor, Tensor]:
        """(Q,) and (K,) int64: the places of the blocks of queries and of keys in the whole."""
        if self.places is None:
            return torch.arange(self.mask.shape[0]), torch.arange(self.mask.shape[1])
        rows, columns = (torch.tensor(each, dtype=torch.int64) for each in self.places)
        return rows, columns

    def part(self, rows: Sequence[int], columns: Sequence[int]) -> Self:
        """Of this whole layout what these blocks of queries see of these blocks of keys, in the orders given."""
        mask = self.mask[list(rows)][:, list(columns)]
        return type(self)(mask, self.causal, self.block, self.window, (tuple(rows), tuple(columns)))

    @classmethod
    def from_mask(cls, mask: Tensor, *, causal: bool = False, block: int = BLOCK, window: int | None = None) -> Self:
        """The layout of `mask` (Q, K) bool."""
        return cls(mask, causal, block, window)

    @classmethod
    def local(cls, length: int, window: int, *, causal: bool = False, block: int = BLOCK) -> Self:
        """Each block of `length` tokens sees those fewer than `window` blocks away, itself included."""
        _check_positive(window=window)
        return cls(_distances(length, block).abs() < window, causal, block)

    @classmethod
    def global_(cls, length: int, count: int = 1, *, causal: bool = False, block: int = BLOCK) -> Self:
        """The first `count` blocks are seen by all, and see all."""
        _check_positive(count=count)
        mask = torch.zeros_like(_distances(length, block), dtype=torch.bool)
        mask[:count] = True
        mask[:, :count] = True
        return cls(mask, causal, block)

    @classmethod
    def strided(cls, length: int, stride: int, *, causal: bool = False, block: int = BLOCK) -> Self:
        """Each block sees every `stride`-th one, counted from itself (arXiv:1904.10509)."""
        _check_positive(stride=stride)
        return cls(_distances(length, block) % stride == 0, causal, block)

    @classmethod
    def bigbird(
        cls,
        length: int,
        *,
        seed: int,
        window: int = 2,
        global_blocks: int = 1,
        random_blocks: int = 2,
        causal: bool = False,
        block: int = BLOCK,
    ) -> Self:
        """A local window, global blocks, and for each block of queries `random_blocks` drawn from those that it may see
        (arXiv:2007.14062). The same `seed` gives the same layout."""
        joined = cls.local(length, window, causal=causal, block=block)
        if global_blocks:
            joined = joined | cls.global_(length, global_blocks, causal=causal, block=block)
        mask = joined.mask.clone()
        scores = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
        if causal:
            scores = scores.tril()
        chosen = scores.topk(min(random_blocks, mask.shape[1]), dim=1).indices
        return cls(mask.scatter_(1, chosen, True), causal, block)

    def __or__(self, other: BlockLayout) -> Self:
        """The blocks of either layout. Raises ValueError unless they have the same size, block, causality, window and
        places."""
        mine, others = (
            (tuple(each.mask.shape), each.causal, each.block, each.window, each.places) for each in (self, other)
        )
        if mine != others:
            raise ValueError(f"layouts of (blocks, causal, block, window, places) {mine} and {others} cannot be joined")
        return type(self)(self.mask | other.mask, self.causal, self.block, self.window, self.places)

    @property
    def density(self) -> float:
        """Blocks over those of dense attention, causal or not as this layout is: what share of its work is left."""
        rows, columns = self.block_places()
        dense = int((rows[:, None] >= columns).sum()) if self.causal else self.mask.numel()
        return int(self.mask.sum()) / dense if dense else 0.0

    def __str__(self) -> str:
        """A grid: a line for each block of queries, ■ for a block of keys that it sees."""
        name = f"{'causal' if self.causal else 'two-way'}, blocks of {self.block}, density {self.density:.3f}"
        return "\n".join([name, *("".join("■" if seen else "·" for seen in row) for row in self.mask.tolist())])


@contextmanager
def as_usual() -> Iterator[None]:
    """For layouts that are kept: also for those who come with real tensors, and train, whoever made them."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.device("cpu"):
        yield


@uncompiled  # It would be traced past its cache.
def whole_layout(queries: int, keys: int, *, causal: bool) -> BlockLayout:
    """All blocks of attention of so many tokens; the same object for as many blocks."""
    return _whole(-(-queries // BLOCK), -(-keys // BLOCK), causal)


@lru_cache(maxsize=64)
def _whole(rows: int, columns: int, causal: bool) -> BlockLayout:
    with as_usual():
        return BlockLayout(torch.ones(rows, columns, dtype=torch.bool), causal)


def _distances(length: int, block: int) -> Tensor:
    """(n, n): the block of queries minus the block of keys, for as many blocks as `length` tokens need."""
    _check_positive(length=length, block=block)
    place = torch.arange(-(-length // block))
    return place[:, None] - place


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: {number}, expected 1 or more")
