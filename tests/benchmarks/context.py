"""`python -m tests.benchmarks context`: sequences cut over ranks, beside one rank with as many threads.

1. Steps of one length in turns: one rank with n threads, n ranks of one thread in a ring, and n that share heads.
2. The most memory of a step on a rank, over the length, is a line through two short steps; in a given memory the
   longest sequence of each side follows.

Memory is what a process takes beyond one that has imported and compiled everything and trains nothing.

torch's own context parallelism is no side: its rings are made of CUDA's attention kernels (torch 2.11 to 2.13), and
take no tensors on CPUs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from speedlab.calibrate.interleave import row, take_turns
from speedlab.calibrate.rank_processes import RankSet
from speedlab.calibrate.table import BenchRow, report
from speedlab.config.command_line import read_options
from tests.benchmarks import long_sides
from tests.benchmarks.long import Line, say
from tests.benchmarks.long_sides import Model, Side

_GIB = 2**30
_ONE = "one rank"

GOALS = {"longest": 3.7, "step": 0.9}
"""At least: of cp 4's longest sequence over one rank's, and of one rank's step over cp's."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Context parallelism beside one rank: the time of a step with as many threads, and the longest sequence."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Precisions."""
    ranks: int = 2
    """Of the timed sides, with a thread each."""
    spread: int = 4
    """Ranks over which the longest sequences are cut."""
    length: int = 16384
    """Tokens of a timed step."""
    layers: int = 2
    """Blocks of the GPT whose steps are timed."""
    deep: int = 16
    """Of the one whose memory is measured: what a ring needs for itself is that of one block."""
    hidden: int = 256
    """Its width, in heads of 64."""
    short: tuple[int, int] = (2048, 4096)
    """Lengths whose memory gives the line of each side."""
    limit_gib: float = 1.0
    """Memory of a rank for which the longest sequence is told."""
    rounds: int = 3
    """Steps of each timed side."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks context")
    found = [row for dtype in options.dtypes for row in (*_timed(options, dtype), *_longest(options, dtype))]
    report(found, options.json)
    for each in found:
        assert each.ratio is not None  # All have a peer.
        kind = "longest" if each.unit == "tokens" else "step"
        verdict = "met" if each.ratio >= GOALS[kind] else "MISSED"
        print(f"{each.case}: {each.ratio:.2f} of one rank's, goal {GOALS[kind]:g}: {verdict}")
    print("torch's own context parallelism is not beside it: its rings are of CUDA's kernels, and these ranks are CPUs")


def _sides(cp: int) -> dict[str, Side]:
    return {
        f"cp {cp}, a ring": Side(name="ring", cp=cp, cp_heads=1),
        f"cp {cp}, heads": Side(name="heads", cp=cp, cp_heads=cp),
    }


def _timed(options: Options, dtype: str) -> list[BenchRow]:
    model, one = _model(options, dtype, options.layers), Side(name=_ONE, threads=options.ranks, keeps_freed=True)
    sides = {_ONE: one} | {name: side.keeping() for name, side in _sides(options.ranks).items()}
    with ExitStack() as stack:
        sets = {name: _begun(model, side, stack) for name, side in sides.items()}
        for name, ranks in sets.items():
            say(f"{dtype}, {name}: {ranks.call(long_sides.step, options.length)[0]:.1f} s, not counted")

        def step(name: str) -> float:
            seconds, _ = sets[name].call(long_sides.step, options.length)
            say(f"{dtype}, {name}: {seconds:.1f} s")
            return seconds

        times = take_turns(list(sets), options.rounds, step)
    own = partial(row, peer=_ONE, unit="s", value=lambda seconds: seconds)
    return [
        own(f"{dtype}: a step of {options.length:,} tokens, {name}", times, own=name) for name in times if name != _ONE
    ]


def _longest(options: Options, dtype: str) -> list[BenchRow]:
    model, found = _model(options, dtype, options.deep), {}
    for name, side in ({_ONE: Side(name=_ONE)} | _sides(options.spread)).items():
        with ExitStack() as stack:
            ranks = _begun(model, side, stack)
            line = Line.through([(length, ranks.call(long_sides.step, length)[1]) for length in options.short])
        found[name] = line.longest(options.limit_gib * _GIB)
        say(f"{dtype}, {name}: {found[name]:,} tokens by {line.per_token / 1024:.2f} KiB a token")
    return [
        BenchRow(
            case=f"{dtype}: longest in {options.limit_gib:g} GiB a rank, {name}",
            ours=float(tokens),
            unit="tokens",
            peer_name=_ONE,
            peer=float(found[_ONE]),
            ratio=tokens / found[_ONE],
            n=1,
        )
        for name, tokens in found.items()
        if name != _ONE
    ]


def _model(options: Options, dtype: str, layers: int) -> Model:
    return Model(layers=layers, hidden=options.hidden, window=128, tile=1024, dtype=dtype)


def _begun(model: Model, side: Side, stack: ExitStack) -> RankSet:
    ranks = stack.enter_context(RankSet(side.cp))
    ranks.call(long_sides.warm, model, side)
    ranks.call(long_sides.begin, model, side)
    return ranks
