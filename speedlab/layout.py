"""Pure rank arithmetic: the grid `pp × dp × tp`, its peers, who owns which part of a flat, how blocks are cut into
pipeline stages. No torch, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_HALVINGS = 60


class LayoutError(ValueError):
    """A layout that cannot exist; the message holds the equation with its numbers."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The grid of ranks. `tp` is the fastest axis, so that it stays within a host; `pp` the slowest.

    rank = (pipeline index × dp + data index) × tp + tensor index
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"{axis} is {getattr(self, axis)}; every axis of a layout is at least 1")

    @classmethod
    def for_world(cls, world_size: int, *, dp: int | None = None, tp: int = 1, pp: int = 1) -> Layout:
        """The layout of `world_size` ranks; `dp` follows from the others when it is None.

        Raises LayoutError when the product is not the number of ranks.
        """
        cls(
            dp=1 if dp is None else dp, tp=tp, pp=pp
        )  # Each axis by itself first, so that what follows may divide by them.
        if world_size < 1:
            raise LayoutError(f"{world_size} engines hold no rank; start at least one")
        model_ranks = tp * pp
        if dp is None:
            if world_size % model_ranks:
                raise LayoutError(
                    f"{world_size} ranks do not divide by pp {pp} × tp {tp} = {model_ranks}; "
                    f"use a multiple of {model_ranks} engines"
                )
            dp = world_size // model_ranks
        layout = cls(dp=dp, tp=tp, pp=pp)
        if layout.world_size != world_size:
            possible = (
                f"dp {world_size // model_ranks}" if world_size % model_ranks == 0 else f"{layout.world_size} engines"
            )
            raise LayoutError(
                f"pp {pp} × dp {dp} × tp {tp} = {layout.world_size} ranks, but there are {world_size} engines; "
                f"{possible} would fit"
            )
        return layout

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline index, data index, tensor index) of a rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1}")
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """The rank at these coordinates. Raises LayoutError when they are outside the grid."""
        for axis, index, size in (("pp", pipeline, self.pp), ("dp", data, self.dp), ("tp", tensor, self.tp)):
            if not 0 <= index < size:
                raise LayoutError(f"{axis} index {index} is not in 0..{size - 1} of {self}")
        return (pipeline * self.dp + data) * self.tp + tensor

    def dp_peers(self, rank: int) -> list[int]:
        """Ranks that hold the same part of the model as `rank` and see other data, in data order."""
        pipeline, _, tensor = self.coordinates(rank)
        return [self.rank(pipeline, data, tensor) for data in range(self.dp)]

    def tp_peers(self, rank: int) -> list[int]:
        """Ranks that hold the other parts of the same layers and see the same data, in tensor order."""
        pipeline, data, _ = self.coordinates(rank)
        return [self.rank(pipeline, data, tensor) for tensor in range(self.tp)]

    def pp_peers(self, rank: int) -> list[int]:
        """Ranks that hold the other pipeline stages and see the same data, first stage first."""
        _, data, tensor = self.coordinates(rank)
        return [self.rank(pipeline, data, tensor) for pipeline in range(self.pp)]

    def __str__(self) -> str:
        return f"pp {self.pp} × dp {self.dp} × tp {self.tp}"


@dataclass(frozen=True, kw_only=True)
class Part:
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


def padded_numel(numel: int, dp: int) -> int:
    """Length of a flat of `numel` elements once it divides by `dp`."""
    return -(-numel // dp) * dp


def partition_range(padded: int, dp: int, index: int) -> tuple[int, int]:
    """[start, end) of the partition that the rank with data index `index` owns of a flat of `padded` elements."""
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
