"""Rank arithmetic: the mesh of named axes, peers, partitions of flats, and cuts into pipeline stages.

Pure functions without torch and without processes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, product
from math import lcm, prod

_HALVINGS = 60
ALWAYS_NAMED = ("pp", "dp", "tp")
"""Axes that messages always name. Other axes are named only if their size is above 1."""


class LayoutError(ValueError):
    """A layout that cannot exist. The message contains the equation with its numbers."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the message without frames, because all frames would be ours."""
        return [f"{type(self).__name__}: {self}", "more: speedlab guide trouble layout"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of the mesh: the properties of ranks that differ along this axis only."""

    name: str
    sees_other_data: bool
    """Whether the ranks read different sequences of the global batch."""
    holds_other_parameters: bool
    """Whether the ranks compute with different parameters, or with different shards of a layer."""
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
"""All possible axes of a mesh, slow to fast. Ranks along the last axes are neighbours, so they stay inside one host. A
mesh has those axes for which Layout has a field of the same name."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh of ranks. A rank has two numbers that differ: its share of the data (`data_index`), and its index in a
    group (`index`).

    `islands` are equal groups of neighbours (arXiv:2311.08105 calls them workers). Each island trains its own
    parameters, and islands average them every few steps. So the slowest links are those between islands.

    rank = sum of index × stride over the axes. The stride of an axis is the product of the sizes of the faster axes.
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
        """Return the layout of `world_size` ranks.

        Args:
            world_size: Number of ranks.
            dp: Size of the dp axis; None: computed from the other axes.
            **others: Sizes of the other axes.

        Raises:
            LayoutError: The product of the sizes is not `world_size`. The caller, which knows the model, can suggest
                another layout.
        """
        # Checks each size first, because the code below divides by them.
        layout = cls(dp=1 if dp is None else dp, **others)
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
        """Sizes of the axes, as torch's DeviceMesh takes them. Its dimensions are named AXES."""
        return tuple(self.sizes.values())

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis.

        Args:
            axis: Name of the axis.

        Raises:
            LayoutError: The axis does not exist.
        """
        self._check_names((axis,))
        return self.sizes[axis]

    def stride(self, axis: str) -> int:
        """Return the difference between the ranks of two neighbours along an axis.

        Args:
            axis: Name of the axis.

        Raises:
            LayoutError: The axis does not exist.
        """
        self._check_names((axis,))
        return prod(self.mesh_shape[list(self.sizes).index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis, slow to fast.

        Args:
            rank: Global rank.

        Raises:
            LayoutError: The rank is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in 0..{self.world_size - 1}")
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.sizes}

    def index(self, rank: int, axis: str) -> int:
        """Return the index of a rank in its group along an axis.

        Args:
            rank: Global rank.
            axis: Name of the axis.

        Raises:
            LayoutError: The rank or the axis does not exist.
        """
        self._check_names((axis,))
        return self.coordinates(rank)[axis]

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates.

        Args:
            **coordinates: Index along each axis; 0 for axes that are left out.

        Raises:
            LayoutError: An axis is unknown, or an index is outside the mesh.
        """
        self._check_names(coordinates)
        rank = 0
        for axis, size in self.sizes.items():
            index = coordinates.get(axis, 0)
            if not 0 <= index < size:
                raise LayoutError(f"{axis} index {index} is not in 0..{size - 1} of {self}")
            rank = rank * size + index
        return rank

    def peers(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from `rank` only along these axes, in rank order.

        Args:
            rank: Global rank; included in the result.
            *axes: Names of axes.

        Raises:
            LayoutError: The rank or an axis does not exist.
        """
        self._check_names(axes)
        own = self.coordinates(rank)
        spans = [range(size) if axis in axes else (own[axis],) for axis, size in self.sizes.items()]
        return [self.rank(**dict(zip(self.sizes, indices, strict=True))) for indices in product(*spans)]

    @property
    def data_size(self) -> int:
        """Number of shares into which the global batch is split."""
        return prod(size for axis, size in self.sizes.items() if KINDS[axis].sees_other_data)

    @property
    def shares_words(self) -> str:
        """The shares of the global batch by axis: 'dp 4', or 'dp 4 × islands 2'."""
        islands = f" × islands {self.islands}" if self.islands > 1 else ""
        return f"dp {self.dp}{islands}"

    @property
    def replicas(self) -> int:
        """Number of ranks that compute with the same parameters. ZeRO partitions states over these ranks, inside each
        island.
        """
        return prod(size for axis, size in self.sizes.items() if axis in REPLICATED)

    def data_index(self, rank: int) -> int:
        """Return the share of the global batch that a rank reads. Ranks that differ only along model axes read the
        same share.

        Args:
            rank: Global rank.
        """
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
"""Axes along which ranks hold the same parameters."""


def _product(sizes: dict[str, int]) -> str:
    """Return 'pp 1 × dp 4 × tp 2'."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ALWAYS_NAMED)


@dataclass(frozen=True, kw_only=True)
class ShardRange:
    """The slice of a full parameter that a rank holds.

    `ranges` are [start, end) pairs along dimension `dim`, in the order in which they appear in the rank's tensor.
    There are several if one tensor packs several matrices (queries, keys, values).
    """

    shape: tuple[int, ...]
    """Shape of the full parameter."""
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        held = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])


def share_of(count: int, size: int, index: int) -> tuple[int, int]:
    """Return the [start, end) share of one rank. Shares differ by at most one item.

    Args:
        count: Number of items to split.
        size: Number of ranks.
        index: The rank, from 0 to `size` - 1.
    """
    return count * index // size, count * (index + 1) // size


def sequence_multiple(cp: int, heads: int, block: int = 1) -> int:
    """Return the number of which a sequence length must be a multiple, so that cp ranks can split it.

    Args:
        cp: Number of context-parallel ranks.
        heads: Number of these ranks that share heads (Ulysses).
        block: Tokens per block; chunks of a ring are full blocks.
    """
    # A ring needs two chunks of full blocks per ring rank. Without a ring, tokens are split evenly.
    return cp if heads == cp else lcm(cp, 2 * (cp // heads) * block)


def own_positions(length: int, cp: int, heads: int, index: int) -> list[range]:
    """Return the token positions of one rank, as ranges.

    Under a causal mask, late tokens attend to more tokens than early ones. So a ring of R = cp / `heads` ranks splits
    the sequence into 2 R chunks. Rank r takes the chunks r and 2 R - 1 - r, so that all ranks have equal work
    (zig-zag; arXiv:2407.21783, section 3.3.2). Ranks that share heads act as one rank of the ring, and each takes an
    equal share of its tokens.

    Args:
        length: Tokens of the sequence; a multiple of `sequence_multiple`.
        cp: Number of context-parallel ranks.
        heads: Number of these ranks that share heads.
        index: This rank's index along cp.
    """
    # Ranks that share heads are neighbours along cp.
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
    """Return the length of a flat, rounded up to a multiple of `dp`.

    Args:
        numel: Elements without padding.
        dp: Number of ranks that share the flat, or another divisor.
    """
    return -(-numel // dp) * dp


MESSAGE_BLOCKS = {8: 256, 4: 64}
"""Values per scale, by the bits of the integers that are sent.

A value below one fourteenth of the largest value of its block becomes an int4 zero. In blocks of 256, so many values
became zero in every step that the loss ended up to 5 % above that of unquantized training."""


def message_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a message of quantized values and their float32 scales.

    Args:
        numel: Number of values.
        bits: Bits per integer: 8 or 4.
    """
    # Each scale is a float32, so the scales start at a multiple of 4 bytes.
    return padded_numel(-(-numel * bits // 8), 4) + 4 * -(-numel // MESSAGE_BLOCKS[bits])


def partition_range(padded: int, dp: int, index: int) -> tuple[int, int]:
    """Return the [start, end) partition of a flat that one rank owns.

    Args:
        padded: Elements of the flat; a multiple of `dp`.
        dp: Number of ranks that share the flat.
        index: This rank's index among them.
    """
    size = padded // dp
    return index * size, (index + 1) * size


def layer_counts(costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Return how many blocks each pipeline stage takes, so that the most expensive stage costs as little as possible.
    Among equal cuts, return the most even one.

    Args:
        costs: Cost of each block, in model order.
        stages: Number of pipeline stages; each takes at least one block.
        first: Cost of the modules before the blocks.
        last: Cost of the modules after the blocks.

    Raises:
        ValueError: `stages` is below 1, or there are fewer blocks than stages.
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
    # Prefix sums round differently from the running sums of the bisection, so the limit gets a tolerance.
    most = _smallest_maximum(weights, stages) * (1 + 1e-9)
    # best[i], for the first i blocks: (sum of squared stage costs, start of the last stage).
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
    """Return the cost of the most expensive stage in the best cut.

    More stages never cost more. So a bisection over the cost limit works: fill stages one after the other and count
    them.
    """

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
