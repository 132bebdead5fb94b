"""`BlockLayout`: the key blocks that each query block attends to. Patterns build a layout, `|` joins two of them."""

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
"""Default tokens per block: the size for which the CPU kernels are compiled best."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """A layout of attention in blocks of `block` tokens. Layouts are compared by identity.

    Attributes:
        mask: (Q, K) bool, on the CPU: query block q sees key block k.
        causal: No query sees a later key. Blocks above the diagonal are removed, and blocks on it are masked along it.
        block: Tokens per block.
        window: With `causal`: no query sees a key that is this many tokens or more before it.
        places: Only for a `part`: the indices (Q, K) of its query and key blocks in the whole layout. They give the
            order and the distance of tokens.

    Raises:
        ValueError: A mask of another kind, a block size that is no multiple of 16, a whole causal mask that is not
            square, places of another length, a window below 1 or without `causal`.
    """

    mask: Tensor
    causal: bool = False
    block: int = BLOCK
    window: int | None = None
    places: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    offsets: Tensor = field(init=False, repr=False)
    """(Q + 1,) int64: where the list of each query block starts in `columns`."""
    columns: Tensor = field(init=False, repr=False)
    """The visible key blocks of each query block, ascending, int64."""
    distances: Tensor = field(init=False, repr=False)
    """For each of `columns`: tokens from the first key of that block to the first query of its query block, int64."""
    limit: int = field(init=False, repr=False)
    """The window; without one, more tokens than between any query and a key that it sees."""

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
            object.__setattr__(self, name, value)  # The dataclass is frozen.

    def block_places(self) -> tuple[Tensor, Tensor]:
        """Return (Q,) and (K,) int64: the indices of the query and key blocks in the whole layout."""
        if self.places is None:
            return torch.arange(self.mask.shape[0]), torch.arange(self.mask.shape[1])
        rows, columns = (torch.tensor(each, dtype=torch.int64) for each in self.places)
        return rows, columns

    def part(self, rows: Sequence[int], columns: Sequence[int]) -> Self:
        """Return the layout of some query blocks and some key blocks of this whole layout.

        Args:
            rows: Query blocks, in the order of the part.
            columns: Key blocks, in the order of the part.
        """
        mask = self.mask[list(rows)][:, list(columns)]
        return type(self)(mask, self.causal, self.block, self.window, (tuple(rows), tuple(columns)))

    @classmethod
    def from_mask(cls, mask: Tensor, *, causal: bool = False, block: int = BLOCK, window: int | None = None) -> Self:
        """Return the layout of a mask.

        Args:
            mask: (Q, K) bool.
            causal: No query sees a later key.
            block: Tokens per block.
            window: See `BlockLayout`.

        Raises:
            ValueError: See `BlockLayout`.
        """
        return cls(mask, causal, block, window)

    @classmethod
    def local(cls, length: int, window: int, *, causal: bool = False, block: int = BLOCK) -> Self:
        """Return a layout in which each block sees the blocks that are fewer than `window` blocks away, itself
        included.

        Args:
            length: Number of tokens.
            window: Blocks.
            causal: No query sees a later key.
            block: Tokens per block.
        """
        _check_positive(window=window)
        return cls(_distances(length, block).abs() < window, causal, block)

    @classmethod
    def global_(cls, length: int, count: int = 1, *, causal: bool = False, block: int = BLOCK) -> Self:
        """Return a layout in which the first `count` blocks see all blocks and are seen by all.

        Args:
            length: Number of tokens.
            count: Blocks.
            causal: No query sees a later key.
            block: Tokens per block.
        """
        _check_positive(count=count)
        mask = torch.zeros_like(_distances(length, block), dtype=torch.bool)
        mask[:count] = True
        mask[:, :count] = True
        return cls(mask, causal, block)

    @classmethod
    def strided(cls, length: int, stride: int, *, causal: bool = False, block: int = BLOCK) -> Self:
        """Return a layout in which each block sees every `stride`-th block, counted from itself (arXiv:1904.10509).

        Args:
            length: Number of tokens.
            stride: Blocks.
            causal: No query sees a later key.
            block: Tokens per block.
        """
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
        """Return a layout with a local window, global blocks and random blocks (arXiv:2007.14062).

        Args:
            length: Number of tokens.
            seed: The same seed gives the same layout.
            window: Blocks of the local window.
            global_blocks: First blocks that see all blocks and are seen by all.
            random_blocks: Random key blocks per query block.
            causal: No query sees a later key.
            block: Tokens per block.
        """
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
        """Return the blocks of either layout.

        Raises:
            ValueError: The layouts differ in size, block, causality, window or places.
        """
        mine, others = (
            (tuple(each.mask.shape), each.causal, each.block, each.window, each.places) for each in (self, other)
        )
        if mine != others:
            raise ValueError(f"layouts of (blocks, causal, block, window, places) {mine} and {others} cannot be joined")
        return type(self)(self.mask | other.mask, self.causal, self.block, self.window, self.places)

    @property
    def density(self) -> float:
        """Number of blocks as a share of dense attention, causal or not like this layout: the share of the work that
        remains.
        """
        rows, columns = self.block_places()
        dense = int((rows[:, None] >= columns).sum()) if self.causal else self.mask.numel()
        return int(self.mask.sum()) / dense if dense else 0.0

    def __str__(self) -> str:
        """Return a grid: a line per query block, with ■ for each key block that it sees."""
        name = f"{'causal' if self.causal else 'two-way'}, blocks of {self.block}, density {self.density:.3f}"
        return "\n".join([name, *("".join("■" if seen else "·" for seen in row) for row in self.mask.tolist())])


@contextmanager
def as_usual() -> Iterator[None]:
    """Create cached layouts under normal conditions: real tensors on the CPU, usable in training, whatever the caller's
    mode.
    """
    with unset_fake_temporarily(), torch.inference_mode(False), torch.device("cpu"):
        yield


@uncompiled  # A trace would bypass the cache.
def whole_layout(queries: int, keys: int, *, causal: bool) -> BlockLayout:
    """Return a layout of all blocks. Cached: equal numbers of blocks give the same object.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        causal: No query sees a later key.
    """
    return _whole(-(-queries // BLOCK), -(-keys // BLOCK), causal)


@lru_cache(maxsize=64)
def _whole(rows: int, columns: int, causal: bool) -> BlockLayout:
    with as_usual():
        return BlockLayout(torch.ones(rows, columns, dtype=torch.bool), causal)


def _distances(length: int, block: int) -> Tensor:
    """Return (n, n): query block index minus key block index, for the n blocks of `length` tokens."""
    _check_positive(length=length, block=block)
    place = torch.arange(-(-length // block))
    return place[:, None] - place


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: {number}, expected 1 or more")
