"""Check which layouts a run can have: rules of tensor, pipeline and context parallelism. Pure arithmetic, no torch.

Panel and engine use the same rules. An error has the numbers of the broken rule and the nearest layouts that work.

1. Context parallelism: which sequences can be split, padding, and sharing of heads.
2. `resolve`: the layout of a configuration, or the error with what would work.
3. `ring_needs`: which blocks of keys each rank of a ring needs for block-sparse attention. Every rank has its blocks of
   the sequence (`layout.own_positions`), computes its own queries, and receives the blocks of keys and values that they
   see. The pattern determines all of this before a run, on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from speedlab.config.attention import AttentionConfig, direction_problem, length_problems, seen_blocks
from speedlab.config.errors import ConfigError
from speedlab.config.validation import in_backward_problems, meeting_problem, warmup_problem
from speedlab.layout import AXES, Layout, LayoutError, own_positions, sequence_multiple

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig
    from speedlab.config.run_config import RunConfig
    from speedlab.config.sections import ParallelConfig


def heads_shared(model: ModelConfig, layout: Layout, asked: int | None) -> int:
    """Return how many cp ranks share heads: as asked, or the largest number that heads allow.

    Args:
        model: the built-in GPT.
        layout: the ranks.
        asked: `parallel.cp_heads`.
    """
    if layout.cp == 1:
        return 1
    return asked or gcd(layout.cp, model.heads // layout.tp)


def padded_length(model: ModelConfig, layout: Layout, parallel: ParallelConfig, length: int) -> int:
    """Return the tokens of a sequence as computed: `length`, or padded if `parallel.cp_pad` is set.

    Args:
        model: the built-in GPT.
        layout: the ranks.
        parallel: whether to pad, and how heads are shared.
        length: tokens of a sequence.
    """
    if layout.cp == 1 or not parallel.cp_pad:
        return length
    multiple = sequence_multiple(layout.cp, heads_shared(model, layout, parallel.cp_heads), ring_block(model))
    if parallel.sequence:
        multiple = lcm(multiple, layout.cp * layout.tp)
    return -(-length // multiple) * multiple


def padding_words(length: int, padded: int) -> str:
    """Return the padding as text: 'sequences of 42 padded to 44, 4.55% of what is computed'.

    Args:
        length: tokens of a sequence.
        padded: tokens after padding.

    Returns:
        The text; empty without padding.
    """
    if padded == length:
        return ""
    return f"sequences of {length:,} padded to {padded:,}, {1 - length / padded:.2%} of what is computed"


def context_problem(
    model: ModelConfig,
    layout: Layout,
    parallel: ParallelConfig,
    length: int | None = None,
) -> str | None:
    """Return why the layout's cp does not work for the built-in GPT, with what would work; None if it works.

    Args:
        model: the built-in GPT.
        layout: the ranks.
        parallel: padding, and sharing of heads.
        length: tokens of a sequence, if known.
    """
    cp, asked = layout.cp, parallel.cp_heads
    if cp == 1:
        return None
    heads, shared = model.heads // layout.tp, heads_shared(model, layout, asked)
    if cp % shared:
        return f"cp_heads {shared} does not divide cp {cp}; {_divisors(cp)} do"
    if heads % shared:
        return (
            f"cp_heads {shared}: the {heads} heads of a tp rank do not divide by it; {_divisors(gcd(cp, heads))} would "
            "(the others of cp form a ring), and left out it is the largest"
        )
    block = ring_block(model)
    multiple = sequence_multiple(cp, shared, block)
    padded = length if length is None else padded_length(model, layout, parallel, length)
    if length is None or padded is None or (length % multiple == 0 and padded == length):
        return None
    if parallel.cp_pad:
        return _padding_problem(model, cp, length, padded, ring=shared != cp)
    ring = cp // shared
    chunks = f", for {2 * ring} chunks of whole blocks of {block} in a ring of {ring}" if block > 1 < ring else ""
    return f"cp {cp}: sequences of {length} tokens do not divide by {multiple}{chunks}; {ways_out(length, multiple)}"


def ways_out(length: int, multiple: int) -> str:
    """Return what to do about sequences that do not divide.

    Args:
        length: tokens of a sequence.
        multiple: number that must divide `length`.
    """
    below = length // multiple * multiple
    above = below + multiple
    fitting = " or ".join(str(each) for each in (below, above) if each)
    return f"{fitting} would, or set parallel.cp_pad to true, which pads them to {above}"


def ring_block(model: ModelConfig) -> int:
    """Return the number of tokens that a ring must not split.

    Args:
        model: the built-in GPT. Sparse attention has blocks; dense attention splits anywhere.
    """
    return 1 if model.attention.kind == "dense" else model.attention.block


def _padding_problem(model: ModelConfig, cp: int, length: int, padded: int, *, ring: bool) -> str | None:
    """Return why sequences of `length` tokens cannot be padded; None if they can. A `ring` masks the padding itself."""
    if model.dropout:
        return f"cp {cp}: sequences of {length} tokens would be padded to {padded}, and {dropout_rule(model.dropout)}"
    attention = model.attention
    if attention.mask is not None and not ring and len(attention.mask) * attention.block < padded:
        return (
            f"cp {cp}: sequences of {length} tokens would be padded to {padded}, and the {len(attention.mask)} rows of "
            f"model.attention.mask are for {len(attention.mask) * attention.block}; give a row more"
        )
    return None


def dropout_rule(dropout: float) -> str:
    """Return why sequences are not padded with dropout."""
    return (
        f"dropout {dropout:g} would drop other elements of a longer sequence; set model.dropout to 0, or use lengths "
        "that cp divides"
    )


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


_NAMED = 3
"""Number of working layouts in an error."""


def resolve(config: RunConfig, engines: int, *, built_in: bool = True) -> Layout:
    """Return the layout of a configuration.

    Args:
        config: the configuration.
        engines: number of ranks.
        built_in: whether the model is the built-in GPT. If not, only rules independent of the model apply; the engine
            checks the rest when it has the model.

    Raises:
        LayoutError: there is no such layout.
        ConfigError: the update cannot run in backward with this layout, or the attention does not fit the sequence.
    """
    parallel = config.parallel
    try:
        layout = _asked(config, engines)
    except LayoutError as error:
        asked = Layout(dp=parallel.dp or 1, **_other_axes(config))
        advice = _dp_text(config, engines, built_in) + _nearest_text(config, asked, engines, built_in)
        raise LayoutError(f"{error}{advice}{_fewer_text(config, engines, built_in)}") from None
    problem = _first_problem(config, layout, built_in)
    if problem is not None:
        raise LayoutError(f"parallel: {problem}{_nearest_text(config, layout, engines, built_in)}")
    problems = in_backward_problems(config, layout)
    if built_in:
        problems += warmup_problem(config.optimizer, config.steps)
        problems += meeting_problem(layout.islands, config.outer, config.steps)
        problems += length_problems(config.model.attention, config.data.sequence_length)
        problems += filter(None, [direction_problem(config.model.attention, "the built-in GPT")])
    if problems:
        raise ConfigError("\n".join(problems))
    return layout


def possible(config: RunConfig, engines: int, *, built_in: bool = True) -> list[Layout]:
    """Return every layout that `config` could run with, with its own islands and cp, by tp, then by pp.

    The batch equation must hold, too.

    Args:
        config: the configuration.
        engines: number of ranks.
        built_in: whether the model is the built-in GPT.
    """
    parallel = config.parallel
    all_of_them = factorisations(engines, parallel.cp, parallel.islands)
    return [layout for layout in all_of_them if _works(config, layout, built_in)]


def nearest(layouts: Iterable[Layout], asked: Layout) -> list[Layout]:
    """Return the few layouts nearest to `asked`, nearest first.

    Args:
        layouts: the candidates.
        asked: the requested layout. The distance is the sum of |log| of the ratios of all axes.
    """

    def distance(layout: Layout) -> float:
        # Logarithms: a factor of 2 is equally far in both directions, on every axis.
        return sum(abs(math.log(getattr(layout, axis) / getattr(asked, axis))) for axis in AXES)

    return sorted(layouts, key=distance)[:_NAMED]


def why_not(config: RunConfig, engines: int, *, built_in: bool = True, **changes: Any) -> str | None:
    """Return why changes of `config.parallel` do not work; None if they work.

    dp follows from the other axes unless it is changed, too.

    Args:
        config: the configuration.
        engines: number of ranks.
        built_in: whether the model is the built-in GPT.
        changes: fields of `parallel`, and `micro_batches` for the accumulation.
    """
    micro_batches = changes.pop("micro_batches", None)
    try:
        changed = config.replace(
            parallel={"dp": None, **changes}, **({"batch": {"accumulation": micro_batches}} if micro_batches else {})
        )
        layout = changed.layout(engines, built_in=built_in)
    except (ConfigError, LayoutError) as error:
        return str(error).removeprefix("parallel: ")
    return _batch_problem(changed, layout)


def _first_problem(config: RunConfig, layout: Layout, built_in: bool) -> str | None:
    model, parallel = config.model, config.parallel
    tp, pp = layout.tp, layout.pp
    if built_in:
        for name, count in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden)):
            if count % tp:
                return f"tp {tp}: {count} {name} do not divide by {tp}; {_divisors_text(count)} do"
        if model.vocab_size < tp:
            return f"tp {tp}: a vocabulary of {model.vocab_size} leaves ranks without a token"
        if (problem := context_problem(model, layout, parallel, config.data.sequence_length)) is not None:
            return problem
    length, ways = config.data.sequence_length, tp * layout.cp
    padded = parallel.cp_pad and layout.cp > 1
    if parallel.sequence and tp > 1 and length % ways and not padded:
        cut = f" and cp {layout.cp}" if layout.cp > 1 else ""
        return (
            f"tp {tp}{cut} with sequence parallelism: sequences of {length} tokens do not divide by {ways}; "
            f"{length // ways * ways} would, or set parallel.sequence to false"
        )
    return _pipeline_problem(config, pp, built_in) if pp > 1 else None


def _pipeline_problem(config: RunConfig, pp: int, built_in: bool) -> str | None:
    parallel, layers = config.parallel, config.model.layers
    chunks = parallel.stages_per_rank
    stages = pp * chunks
    equation = f"pp {pp}" + (f" × {chunks} stages a rank = {stages} pipeline stages" if chunks > 1 else "")
    if built_in and stages > layers:
        return f"{equation}, but the model has {layers} blocks; each pipeline stage needs at least one"
    if parallel.cut is not None:
        total = sum(parallel.cut)
        if len(parallel.cut) != stages:
            return f"{equation} need as many numbers in parallel.cut, which has {len(parallel.cut)}; leave cut out"
        if min(parallel.cut) < 1 or (built_in and total != layers):
            return (
                f"parallel.cut {' + '.join(map(str, parallel.cut))} = {total} blocks, but the model has {layers} and "
                f"each pipeline stage needs at least one; leave cut out for a balanced one"
            )
    micro_batches = config.batch.accumulation
    if chunks > 1 and micro_batches is not None:
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            nearest = micro_batches // pp * pp
            return (
                f"schedule {parallel.schedule} takes micro-batches in rounds of pp {pp}: {micro_batches} do not divide "
                f"by {rounds} rounds; {nearest} or {nearest + pp} would"
            )
    return None


def _batch_problem(config: RunConfig, layout: Layout) -> str | None:
    try:
        config.batch.resolve(layout.data_size)
    except ConfigError as error:
        return str(error)
    return None


def _works(config: RunConfig, layout: Layout, built_in: bool) -> bool:
    if _first_problem(config, layout, built_in) is not None or _batch_problem(config, layout) is not None:
        return False
    return not in_backward_problems(config, layout)


def _dp_text(config: RunConfig, engines: int, built_in: bool) -> str:
    """Return a hint with another dp if one works for the other requested axes."""
    if config.parallel.dp is None or why_not(config, engines, built_in=built_in) is not None:
        return ""
    parallel = config.parallel
    return f"; dp {engines // (parallel.islands * parallel.tp * parallel.pp * parallel.cp)} would fit"


def _nearest_text(config: RunConfig, asked: Layout, engines: int, built_in: bool) -> str:
    """Return a hint with the working layouts nearest to `asked`."""
    near = nearest(possible(config, engines, built_in=built_in), asked) if engines > 0 else []
    return f"; on {engines} engines {' or '.join(map(str, near))} would work" if near else ""


def _fewer_text(config: RunConfig, engines: int, built_in: bool) -> str:
    """Return a hint with the largest smaller number of engines that works. More engines may not exist."""
    for count in range(engines - 1, 0, -1):
        with contextlib.suppress(LayoutError):
            if _works(config, _asked(config, count), built_in):
                return f"; as it is asked for it works on {count} engines"
    return ""


def factorisations(engines: int, cp: int = 1, islands: int = 1) -> list[Layout]:
    """Return every layout of a number of ranks, by tp, then by pp.

    Args:
        engines: number of ranks.
        cp: context-parallel ranks.
        islands: number of islands.
    """
    if engines % (cp * islands):
        return []
    rest = engines // (cp * islands)
    sizes = [n for n in range(1, rest + 1) if rest % n == 0]
    return [
        Layout(islands=islands, tp=tp, pp=pp, cp=cp, dp=rest // (tp * pp))
        for tp in sizes
        for pp in sizes
        if rest % (tp * pp) == 0
    ]


def _asked(config: RunConfig, engines: int) -> Layout:
    """Return the layout of `config.parallel`. Raise LayoutError if it does not fit the engines."""
    return Layout.for_world(engines, dp=config.parallel.dp, **_other_axes(config))


def _other_axes(config: RunConfig) -> dict[str, int]:
    return {axis: getattr(config.parallel, axis) for axis in AXES if axis != "dp"}


def _divisors_text(count: int) -> str:
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    kept = [str(n) for n in (sizes if len(sizes) <= 6 else sizes[:6])]
    return " and ".join([", ".join(kept[:-1]), kept[-1]]) if len(kept) > 1 else kept[0]


@dataclass(frozen=True, kw_only=True)
class RingNeeds:
    """Which blocks the ranks of a ring need from each other."""

    blocks: tuple[tuple[int, ...], ...]
    """For each rank its blocks of the sequence, ascending."""
    needed: tuple[tuple[tuple[int, ...], ...], ...]
    """needed[rank][source]: blocks of rank `source` that a query of `rank` sees, ascending."""

    @property
    def turns(self) -> tuple[int, ...]:
        """Distances in the ring at which a block is sent, ascending.

        In a turn of k, rank r receives from rank r - k. Turns without any transfer are omitted.
        """
        size = len(self.blocks)
        return tuple(k for k in range(1, size) if any(self.needed[rank][(rank - k) % size] for rank in range(size)))


@lru_cache(maxsize=64)
def ring_needs(attention: AttentionConfig, length: int, ranks: int) -> RingNeeds:
    """Return which blocks the ranks of a ring need from each other.

    Beyond the rows of a custom mask there is only padding, which sees nothing.

    Args:
        attention: the block-sparse pattern.
        length: tokens of a sequence, a multiple of 2 · `ranks` · block.
        ranks: size of the ring.
    """
    count = length // attention.block
    known = count if attention.mask is None else min(count, len(attention.mask))
    # Rows beyond a custom mask are padding and see nothing.
    rows = seen_blocks(attention, known * attention.block)
    blocks = tuple(tuple(place for part in own_positions(count, ranks, 1, r) for place in part) for r in range(ranks))
    owner = {block: rank for rank, own in enumerate(blocks) for block in own}
    found: list[list[set[int]]] = [[set() for _ in blocks] for _ in blocks]
    for row, seen in enumerate(rows):
        of_rank = found[owner[row]]
        for block in seen:
            of_rank[owner[block]].add(block)
    needed = tuple(tuple(tuple(sorted(each)) for each in of_rank) for of_rank in found)
    return RingNeeds(blocks=blocks, needed=needed)
