"""Pure rank arithmetic: the mesh of named axes, its peers, who owns which part of a flat, how blocks are cut into
pipeline stages. No torch, no processes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, product
from math import lcm, prod

_HALVINGS = 60
ALWAYS_NAMED = ("pp", "dp", "tp")
"""Axes that everybody knows; others are named where they are used."""


class LayoutError(ValueError):
    """A layout that cannot exist; the message holds the equation with its numbers."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message says all, and the frames would be ours."""
        return [f"{type(self).__name__}: {self}", "more: speedlab guide trouble layout"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What ranks have in common, and what not, that differ along one axis only."""

    name: str
    sees_other_data: bool
    """Whether they read other sequences of the global batch."""
    holds_other_parameters: bool
    """Whether they compute with other parameters, or other parts of them."""
    meaning: str


KINDS: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(
            name="islands",
            sees_other_data=True,
            holds_other_parameters=True,
            meaning="other sequences, and parameters that meet every few steps",
        ),
        Axis(name="pp", sees_other_data=False, holds_other_parameters=True, meaning="other pipeline stages"),
        Axis(name="dp", sees_other_data=True, holds_other_parameters=False, meaning="the same model, other sequences"),
        Axis(name="cp", sees_other_data=False, holds_other_parameters=False, meaning="other positions of a sequence"),
        Axis(name="ep", sees_other_data=True, holds_other_parameters=True, meaning="other experts, other sequences"),
        Axis(name="tp", sees_other_data=False, holds_other_parameters=True, meaning="other parts of the same layers"),
    )
}
"""Every axis that a mesh may have, slow to fast: ranks along the last ones are neighbours and so stay within a host.
A mesh has those for which Layout has a field of that name."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh of ranks. Which data a rank sees (`data_index`) and its index in a group (`index`) are two things.

    `islands` are equal groups of neighbours (arXiv:2311.08105 calls them workers): each trains parameters of its own,
    which meet every few steps, so that the slowest links lie between them.

    rank = sum of index × stride over the axes; the stride of an axis is the product of the sizes of the faster ones
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    islands: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise LayoutError(f"{axis} is {size}; every axis of a layout is at least 1")

    @classmethod
    def for_world(cls, world_size: int, *, dp: int | None = None, **others: int) -> Layout:
        """The layout of `world_size` ranks; `dp` follows from the others when it is None.

        Raises LayoutError when the product is not the number of ranks. What would be one is for who knows the model.
        """
        layout = cls(dp=1 if dp is None else dp, **others)  # Each axis by itself first: what follows divides by them.
        if world_size < 1:
            raise LayoutError(f"{world_size} engines hold no rank; start at least one")
        model_ranks = layout.world_size // layout.dp
        if dp is None:
            if world_size % model_ranks:
                equation = _product({axis: size for axis, size in layout.sizes.items() if axis != "dp"})
                raise LayoutError(f"{world_size} ranks do not divide by {equation} = {model_ranks}")
            return cls(dp=world_size // model_ranks, **others)
        if layout.world_size != world_size:
            raise LayoutError(f"{layout} = {layout.world_size} ranks, but there are {world_size} engines")
        return layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.mesh_shape)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, slow to fast."""
        return {axis: getattr(self, axis) for axis in _axes_of(type(self))}

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes alone, as torch's DeviceMesh takes them; its dimensions are named AXES."""
        return tuple(self.sizes.values())

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        self._check_names((axis,))
        return self.sizes[axis]

    def stride(self, axis: str) -> int:
        """By how much the ranks of neighbours along an axis differ."""
        self._check_names((axis,))
        return prod(self.mesh_shape[list(self.sizes).index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of a rank along each axis, slow to fast."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1}")
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.sizes}

    def index(self, rank: int, axis: str) -> int:
        """Index of a rank in its group along an axis."""
        self._check_names((axis,))
        return self.coordinates(rank)[axis]

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes left out are 0. Raises LayoutError when they are outside the mesh."""
        self._check_names(coordinates)
        rank = 0
        for axis, size in self.sizes.items():
            index = coordinates.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"{axis} index {index} is not in 0..{size - 1} of {self}")
            rank = rank * size + index
        return rank

    def peers(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` only along these axes, itself among them, in rank order."""
        self._check_names(axes)
        own = self.coordinates(rank)
        spans = [range(size) if axis in axes else (own[axis],) for axis, size in self.sizes.items()]
        return [self.rank(**dict(zip(self.sizes, indices, strict=True))) for indices in product(*spans)]

    @property
    def data_size(self) -> int:
        """Of how many shares the global batch consists."""
        return prod(size for axis, size in self.sizes.items() if KINDS[axis].sees_other_data)

    @property
    def shares_words(self) -> str:
        """Those shares by axis: 'dp 4', or 'dp 4 × islands 2'."""
        islands = f" × islands {self.islands}" if self.islands > 1 else ""
        return f"dp {self.dp}{islands}"

    @property
    def replicas(self) -> int:
        """How many ranks compute with the same parameters: ZeRO partitions the states of those over them, inside each
        island."""
        return prod(size for axis, size in self.sizes.items() if axis in REPLICATED)

    def data_index(self, rank: int) -> int:
        """Which share of the global batch a rank sees: the same for all that differ along the other axes only."""
        share = 0
        for axis, index in self.coordinates(rank).items():
            if KINDS[axis].sees_other_data:
                share = share * self.size(axis) + index
        return share

    def _check_names(self, axes: Iterable[str]) -> None:
        for axis in axes:
            if axis not in self.sizes:
                raise LayoutError(f"{axis!r} is no axis of a layout; its axes are {', '.join(self.sizes)}")

    def __str__(self) -> str:
        return _product(self.sizes)


@functools.cache
def _axes_of(kind: type[Layout]) -> tuple[str, ...]:
    own = {field.name for field in fields(kind)}
    return tuple(axis for axis in KINDS if axis in own)


AXES = _axes_of(Layout)
"""The axes that a layout has today, slow to fast."""

REPLICATED: tuple[str, ...] = tuple(axis for axis in AXES if not KINDS[axis].holds_other_parameters)
"""Those along which ranks hold the same parameters."""


def _product(sizes: dict[str, int]) -> str:
    """'pp 1 × dp 4 × tp 2'."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ALWAYS_NAMED)


@dataclass(frozen=True, kw_only=True)
class ShardRange:
    """The slice of a whole parameter that a rank holds: `ranges` [start, end) along dimension `dim`, in the
    order in which they lie in that tensor. Several where one tensor packs several matrices (queries, keys, values)."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of the rank's own tensor."""
        held = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])


def share_of(count: int, size: int, index: int) -> tuple[int, int]:
    """[start, end) of the share of `count` things that rank `index` of `size` has: none differs by more than one."""
    return count * index // size, count * (index + 1) // size


def sequence_multiple(cp: int, heads: int, block: int = 1) -> int:
    """What a sequence's length has to be a multiple of, to be cut over `cp` ranks of which `heads` share heads, and so
    that the chunks of a ring are whole blocks of `block` tokens."""
    return cp if heads == cp else lcm(cp, 2 * (cp // heads) * block)


def own_positions(length: int, cp: int, heads: int, index: int) -> list[range]:
    """The positions that rank `index` along cp has of a sequence of `length` tokens, a `sequence_multiple`.

    Under a causal mask late tokens look at more than early ones. A ring of R = cp / `heads` therefore cuts the sequence
    into 2 R chunks, of which the r-th has the chunks r and 2 R - 1 - r, so that all have equally much to do (zig-zag;
    arXiv:2407.21783, section 3.3.2). Ranks that share heads are one of the ring together: each has an even share of its
    tokens.
    """
    ring, place = divmod(index, heads)
    size = cp // heads
    chunk, mirrored = length // (2 * size), 2 * size - 1 - ring
    together = [range(length)]
    if size > 1:
        together = [range(k * chunk, (k + 1) * chunk) for k in (ring, mirrored)]
    begin, end = place * (length // cp), (place + 1) * (length // cp)
    found = []
    for part in together:
        found.append(part[max(0, begin) : max(0, end)])
        begin, end = begin - len(part), end - len(part)
    return [part for part in found if part]


def padded_numel(numel: int, dp: int) -> int:
    """Length of a flat of `numel` elements once it divides by `dp`, the ranks that share it."""
    return -(-numel // dp) * dp


MESSAGE_BLOCKS = {8: 256, 4: 64}
"""By the bits of integers that travel: how many values share a scale. What is less than a fourteenth of the largest in
its block travels as int4 zero, in every step, and is not trained: in blocks of 256 that were so many that a training
ended up to 5 % above its plain one."""


def message_bytes(numel: int, bits: int) -> int:
    """Bytes of so many values as integers of `bits` bits, and of a scale in float32 for each block, which begins at a
    multiple of its size."""
    return padded_numel(-(-numel * bits // 8), 4) + 4 * -(-numel // MESSAGE_BLOCKS[bits])


def partition_range(padded: int, dp: int, index: int) -> tuple[int, int]:
    """[start, end) of the partition that rank `index` of `dp` owns of a flat of `padded` elements."""
    size = padded // dp
    return index * size, (index + 1) * size


def layer_counts(costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """How many of the blocks, in order, each pipeline stage takes, so that the most expensive stage is as cheap as can
    be; of all such cuts, the most even one.

    `first`, `last`: costs of what stands before and after the blocks. Every stage takes at least one block.
    Raises ValueError when there are fewer blocks than stages.
    """
    if stages < 1:
        raise ValueError(f"{stages} pipeline stages; there is at least 1")
    if len(costs) < stages:
        raise ValueError(
            f"{len(costs)} blocks cannot be cut into {stages} pipeline stages, which take at least one block each; "
            f"use at most {len(costs)} pipeline stages"
        )
    weights = [float(cost) for cost in costs]
    weights[0] += first
    weights[-1] += last
    sums = [0.0, *accumulate(weights)]
    most = _smallest_maximum(weights, stages) * (1 + 1e-9)
    # best[i]: (sum of the squares of the stages' costs, where the last of them begins) for the first i blocks.
    best: list[tuple[float, int] | None] = [(0.0, 0), *[None] * len(weights)]
    begins: list[list[int]] = []
    for _ in range(stages):
        following: list[tuple[float, int] | None] = [None] * len(sums)
        for end in range(1, len(sums)):
            for begin in range(end - 1, -1, -1):
                cost = sums[end] - sums[begin]
                if cost > most:
                    break
                before = best[begin]
                if before is not None:
                    choice = before[0] + cost * cost, begin
                    following[end] = min(choice, following[end] or choice)
        best = following
        begins.append([entry[1] if entry else 0 for entry in best])
    counts, end = [], len(weights)
    for begin_of in reversed(begins):
        counts.append(end - begin_of[end])
        end = begin_of[end]
    return tuple(reversed(counts))


def _smallest_maximum(weights: Sequence[float], stages: int) -> float:
    """The cost of the most expensive stage in the best cut. More stages never cost more, so stages are filled one by
    one and counted."""

    def needed(most: float) -> int:
        count, held = 1, 0.0
        for weight in weights:
            if held + weight > most:
                count, held = count + 1, 0.0
            held += weight
        return count

    low, high = max(weights), sum(weights)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= stages else (middle, high)
    return high
