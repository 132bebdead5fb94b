"""`python -m tests.benchmarks long`: how long a sequence can be, sparse beside dense attention, on one rank.

1. The most memory of a step is a line over the length: two short steps of each side give it, and the longest sequence
   that stays a little below the limit follows. All sides have the chunked loss and an allocator that keeps nothing.
2. The lengths of dense attention without checkpointing, and of sparse attention with all that is there for long inputs,
   are then trained, in processes whose memory group has that limit; what is killed is tried a little shorter. Those of
   the sides between are not: at such lengths a dense step takes many minutes.
3. At dense attention's longest length both sides take steps in turns under the limit. There the sparse one has memory
   left, and its allocator keeps what it frees.
4. The exponent of a sparse step's time over some lengths, without a limit.

Memory is what a process takes beyond one that has imported and compiled everything and trains nothing: model states and
activations. On CPUs dense attention is torch's flash attention, whose memory grows with the length, not its square.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from speedlab.calibrate.interleave import row, take_turns
from speedlab.calibrate.rank_processes import RankSet
from speedlab.calibrate.table import BenchRow, report
from speedlab.config.command_line import read_options
from tests.benchmarks import long_sides
from tests.benchmarks.long_sides import Model, Side
from tests.benchmarks.memory_limit import MemoryLimit, NoLimitError, memory_limit

_GIB = 2**30
_WHOLE = 64
"""Lengths are multiples of this, a block of sparse attention."""

DENSE = Side(name="dense")
CHECKPOINTED = Side(name="dense, checkpointing", checkpointing=True)
TILED = Side(name="dense, checkpointing, tiles", checkpointing=True, tiles=True)
LONG = Side(name="sparse, checkpointing, tiles", sparse=True, checkpointing=True, tiles=True)
SIDES = (DENSE, CHECKPOINTED, TILED, LONG)

_QUICK = replace(LONG, keeps_freed=True)
"""Where memory is not what is missing."""

_TRIES, _SHORTER = 4, 0.96
"""How often a length is tried under the limit, and how much shorter after each kill."""

_USABLE = 0.96
"""Of the limit, for what the line knows; the system's own (page tables) counts in the group, too."""

GOALS = {f"longest / {DENSE.name}": 10.0, f"longest / {CHECKPOINTED.name}": 3.0, f"step / {DENSE.name}": 6.0}
"""At least, by row and peer."""

MOST_GROWTH = 1.1
"""The exponent, at most."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The longest trainable sequence under a limit on memory, and the time of a step: sparse beside dense attention."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Precisions."""
    limits_gib: tuple[float, ...] = (1.0, 0.6)
    """Memory of model states and activations in each of them: for dense attention about equally many tokens."""
    layers: int = 16
    """Blocks of the GPT."""
    hidden: int = 64
    """Its width, in heads of 64."""
    window: int = 128
    """Tokens that a query of sparse attention sees: a sliding window."""
    tile: int = 1024
    """Tokens of a tile of feed-forward layers."""
    short: tuple[int, int] = (4096, 8192)
    """Lengths whose memory gives the line of each side."""
    growth: tuple[int, ...] = (4096, 16384, 65536)
    """Lengths whose time gives the exponent."""
    rounds: int = 1
    """Steps of each side at dense attention's longest length."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes of a step over its length."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, samples: Sequence[tuple[int, int]]) -> Line:
        """Of (tokens, bytes), the first and the last. Raises ValueError where longer sequences take no more."""
        (short, few), (long, many) = samples[0], samples[-1]
        if many <= few or long <= short:
            raise ValueError(f"{long} tokens took {many} bytes, {short} tokens {few}; measure lengths further apart")
        per_token = (many - few) / (long - short)
        return cls(fixed=few - per_token * short, per_token=per_token)

    def longest(self, limit_bytes: float) -> int:
        """Tokens that stay within `limit_bytes`, a multiple of 64; 0 where none do."""
        return max(0, int((limit_bytes - self.fixed) / self.per_token) // _WHOLE * _WHOLE)


@dataclass(kw_only=True)
class Found:
    """What was measured in one precision."""

    dtype: str
    lines: dict[str, Line] = field(default_factory=dict)
    """By side."""
    longest: dict[str, int] = field(default_factory=dict)
    """Tokens by side: trained where a peak is known, else by the line."""
    peaks: dict[str, int | None] = field(default_factory=dict)
    """The most bytes that the limited group held; None where there was no group."""
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds at dense attention's longest length, by side, a round each."""
    growth: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, seconds) of the sparse side."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks long")
    if len(options.limits_gib) != len(options.dtypes):
        sys.exit(
            f"bench long: {len(options.dtypes)} --dtypes, {len(options.limits_gib)} --limits-gib; give each its own"
        )
    limits = dict(zip(options.dtypes, options.limits_gib, strict=True))
    found = [_measure(options, dtype, limit) for dtype, limit in limits.items()]
    report([row for each in found for row in rows(each, limits[each.dtype])], options.json)
    print("\n".join(line for each in found for line in reported(each)))


# ---- what is told ----------------------------------------------------------------------------------------------------


def rows(found: Found, limit_gib: float) -> list[BenchRow]:
    """A row for each comparison; of lengths more is better, of times and of the exponent less."""
    own = found.longest[LONG.name]
    made = [
        BenchRow(
            case=f"{found.dtype}: longest in {limit_gib:g} GiB",
            ours=float(own),
            unit="tokens",
            peer_name=side.name,
            peer=float(found.longest[side.name]),
            ratio=own / found.longest[side.name],
            n=1,
        )
        for side in SIDES
        if side is not LONG
    ]
    times = {"ours": found.steps[LONG.name], DENSE.name: found.steps[DENSE.name]}
    name = f"{found.dtype}: a step of {found.longest[DENSE.name]:,} tokens"
    made.append(row(name, times, peer=DENSE.name, unit="s", value=lambda seconds: seconds))
    (short, _), (long, _) = found.growth[0], found.growth[-1]
    name = f"{found.dtype}: growth of a step's time, {short:,} to {long:,} tokens"
    made.append(BenchRow(case=name, ours=exponent(found.growth), unit="exponent", n=1))
    return made


def reported(found: Found) -> list[str]:
    """What the table does not say: which lengths were trained, and which goals are met."""
    lines = [
        f"{found.dtype}, {name}: {found.longest[name]:,} tokens "
        + ("by the line alone" if name not in found.peaks else f"trained, {_held(found.peaks[name])}")
        + f"; {found.lines[name].per_token / 1024:.2f} KiB a token"
        for name in found.longest
    ]
    own = found.longest[LONG.name]
    steps = zip(found.steps[DENSE.name], found.steps[LONG.name], strict=True)
    ratios = {
        f"longest / {DENSE.name}": own / found.longest[DENSE.name],
        f"longest / {CHECKPOINTED.name}": own / found.longest[CHECKPOINTED.name],
        f"step / {DENSE.name}": statistics.median(dense / sparse for dense, sparse in steps),
    }
    for name, goal in GOALS.items():
        lines.append(f"{found.dtype}, {name}: {ratios[name]:.2f}, goal {goal:g}: {_verdict(ratios[name] >= goal)}")
    grown = exponent(found.growth)
    lines.append(f"{found.dtype}, growth: {grown:.2f}, goal {MOST_GROWTH}: {_verdict(grown <= MOST_GROWTH)}")
    return lines


def exponent(growth: Sequence[tuple[int, float]]) -> float:
    """p of a time in proportion to length^p, of (tokens, seconds): the least squares of the logarithms."""
    points = [(math.log(length), math.log(seconds)) for length, seconds in growth]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _held(peak: int | None) -> str:
    return "without a limit" if peak is None else f"with {peak / _GIB:.3f} GiB at most"


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(options: Options, dtype: str, limit_gib: float) -> Found:
    model = Model(layers=options.layers, hidden=options.hidden, window=options.window, tile=options.tile, dtype=dtype)
    found = Found(dtype=dtype)
    limit = int(limit_gib * _GIB)
    for side in SIDES:
        samples = [(length, nbytes) for length, _, nbytes in _steps(model, side, options.short)]
        found.lines[side.name] = Line.through(samples)
        found.longest[side.name] = found.lines[side.name].longest(_USABLE * limit)
        say(f"{dtype}, {side.name}: about {found.longest[side.name]:,} tokens")
    with ExitStack() as stack:
        dense = _train_longest(model, DENSE, limit, found, stack)
        group = _limited(limit, LONG, stack)
        sparse = _begun(model, _QUICK, group, stack)
        length, ranks = found.longest[DENSE.name], {DENSE.name: dense, LONG.name: sparse}
        sparse.call(long_sides.step, length)  # Dense attention has trained at this length, too.
        found.steps = take_turns(list(ranks), options.rounds, lambda name: ranks[name].call(long_sides.step, length)[0])
        say(f"{dtype}, {length:,} tokens: {found.steps}")
    with ExitStack() as stack:
        _train_longest(model, LONG, limit, found, stack)
    growing = _steps(model, _QUICK, options.growth)
    found.growth = [(length, seconds) for length, seconds, _ in growing]
    say(f"{dtype}, sparse steps: {', '.join(f'{length:,} tokens {each:.2f} s' for length, each in found.growth)}")
    return found


def _steps(model: Model, side: Side, lengths: Iterable[int]) -> list[tuple[int, float, int]]:
    """(tokens, seconds, bytes) of a step of each length, in a process without a limit."""
    with ExitStack() as stack:
        rank = _begun(model, side, None, stack)
        return [(length, *rank.call(long_sides.step, length)) for length in lengths]


def _train_longest(model: Model, side: Side, limit: int, found: Found, stack: ExitStack) -> RankSet:
    """A step of the longest length under the limit, of a process that lives on in `stack`; `found` has the length."""
    for _ in range(_TRIES):
        with ExitStack() as trial:
            group = _limited(limit, side, trial)
            rank = _begun(model, side, group, trial)
            length = found.longest[side.name]
            try:
                seconds, _ = rank.call(long_sides.step, length)
            except RuntimeError:  # The system has ended the process.
                found.longest[side.name] = int(length * _SHORTER) // _WHOLE * _WHOLE
                say(f"{model.dtype}, {side.name}: {length:,} tokens are too long")
                continue
            found.peaks[side.name] = None if group is None else group.peak_bytes
            say(f"{model.dtype}, {side.name}: trained {length:,} tokens in {seconds:.1f} s")
            stack.push(trial.pop_all())
            return rank
    sys.exit(
        f"bench long: {side.name} does not train {found.longest[side.name]:,} tokens in {limit / _GIB:g} GiB either, "
        "where two short steps promised more; take longer --short lengths"
    )


def _begun(model: Model, side: Side, group: MemoryLimit | None, stack: ExitStack) -> RankSet:
    """A process that trains, with what it takes from now on in `group`."""
    rank = stack.enter_context(RankSet(1))
    pid = rank.call(long_sides.warm, model, side)
    if group is not None:
        group.take_in([pid])
    rank.call(long_sides.begin, model, side)
    return rank


def _limited(limit: int, side: Side, stack: ExitStack) -> MemoryLimit | None:
    """A new group with the limit; None where there can be none."""
    try:
        group = stack.enter_context(memory_limit(f"speedlab-{'sparse' if side.sparse else 'dense'}"))
    except NoLimitError as error:
        say(f"without a limit: {error}")
        return None
    group.set(limit)
    return group


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
