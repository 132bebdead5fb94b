"""`python -m tests.benchmarks step`: tokens per second of a training step, ours and the peers', interleaved in one run.

The limit is as many independent processes of plain torch, without communication. Each round runs every contestant for a
few steps between two barriers; shares and ratios are those of times measured in the same round: median (least..most).

Limit and peers run with the allocator setting that our engines ask for, and in float32 with torch's setting that gives
its products to oneDNN where our engines do; lines "as installed" are those of torch without both. "limit on kernels":
as many processes whose products and attention are those of our engine, which leaves the rest to torch. "onebit_adam 0"
is our step with compressed momenta, beside "ours 0", the same stage with plain AdamW. `--against PATH` puts the engine
of another checkout of the project into the same rounds, as "before".
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speedlab.calibrate.interleave import Times, row
from speedlab.calibrate.rank_processes import KEPT_MEMORY, RankSet
from speedlab.calibrate.table import BenchRow, missing, report
from speedlab.config.command_line import read_options
from tests.benchmarks import layouts
from tests.benchmarks.contest import AS_INSTALLED, BEFORE, COMPRESSED, KEPT, ON_KERNELS, Contestant, hold, project_at


@dataclass(frozen=True, kw_only=True)
class Options:
    """A training step of a 17M-parameter GPT at every ZeRO stage, beside the peers."""

    ranks: int = 2
    """Rank processes, one thread each."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Compute dtypes to measure."""
    rounds: int = 8
    """Interleaved rounds; medians are taken over them."""
    steps: int = 3
    """Steps of each contestant in a round."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(name="only")] = field(default=())
    """Contestants to measure, for instance 'limit' 'FSDP2 kept' 'ours 2'; all when left out. Not with --layout."""
    against: Path | None = None
    """Another checkout of the project: its engine runs beside this one, as "before". Peers are then left out unless
    --only names them."""
    layout: tuple[Literal["tp2", "pp2", "pp2-tp2", "dp2-tp2", "pp2-dp2"], ...] = ()
    """Layouts to measure instead, beside torch's DTensor, pipelining and FSDP2; the number of ranks is the layout's."""
    backend: Literal["shared", "gloo"] = "shared"
    """With --layout: the collectives of both."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks step")
    against = project_at(options.against)
    if options.layout:
        report([row for dtype in options.dtypes for row in _layout_rows(dtype, options, against)], options.json)
        return
    for peer in missing():
        print(f"not installed, left out: {peer} (make bench installs it)", file=sys.stderr)
    wanted = _wanted(options)
    rows: list[BenchRow] = []
    for dtype in options.dtypes:
        print(
            f"{dtype}: {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps",
            file=sys.stderr,
            flush=True,
        )
        rows += _rows(dtype, options.ranks, _measure(wanted, dtype, options, against))
    report(rows, options.json)


def _wanted(options: Options) -> list[str]:
    from tests.benchmarks import contestants

    known = contestants.names()
    unknown = [name for name in options.only if name not in known]
    if unknown:
        print(
            f"python -m tests.benchmarks step: no contestant {unknown[0]!r}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        sys.exit(2)
    if options.only:
        return [name for name in known if name in options.only]
    return [name for name in known if options.against is None or name == "limit" or contestants.is_ours(name)]


def _measure(wanted: list[str], dtype: str, options: Options, against: Path | None) -> Times:
    """Seconds of a step by contestant, one number for each round. What has another setting or another checkout has
    processes of its own; ours set the allocator themselves, in `initialize`."""
    from tests.benchmarks import contestants, ours

    with ExitStack() as stack:
        sets: dict[str, RankSet] = {}

        def ranks_of(kind: str) -> RankSet:
            if kind not in sets:
                settings = {
                    KEPT: {"backend": "gloo", "environment": KEPT_MEMORY},
                    AS_INSTALLED: {"backend": "gloo"},
                    ON_KERNELS: {"backend": "gloo", "environment": KEPT_MEMORY},
                    "ours": {},
                    BEFORE: {"project": against},
                }[kind]
                sets[kind] = stack.enter_context(RankSet(options.ranks, **settings))
            return sets[kind]

        entered: dict[str, Contestant] = {}
        for name in wanted:
            own = contestants.is_ours(name)
            build = ours.build if own else contestants.build
            kind = "ours" if own else contestants.settings_of(name)
            entered[name] = Contestant(ranks=ranks_of(kind), build=build, arguments=(name, dtype))
            if own and against:
                entered[BEFORE + name] = Contestant(ranks=ranks_of(BEFORE), build=build, arguments=(name, dtype))
        return hold(entered, rounds=options.rounds, steps=options.steps, label=dtype)


def _allocator(name: str) -> str:
    return AS_INSTALLED if name.endswith(AS_INSTALLED) else KEPT


def _layout_rows(dtype: str, options: Options, against: Path | None) -> list[BenchRow]:
    rows = []
    for name in options.layout:
        ranks = layouts.LAYOUTS[name].world_size
        print(f"{dtype}: {name} on {options.backend}, {ranks} ranks", file=sys.stderr, flush=True)
        seconds = layouts.measure(
            name, dtype=dtype, backend=options.backend, rounds=options.rounds, steps=options.steps, against=against
        )
        tokens = layouts.tokens_of(name)
        case = f"step {dtype} {ranks} ranks: {name} on {options.backend}"
        rows += [
            _row(case, tokens, seconds, contestant, peer)
            for contestant in seconds
            for peer in layouts.peers_of(contestant)
            if not peer or peer in seconds
        ]
    return rows


_PEERS = {
    0: ("DDP", "DDP on shared", "DeepSpeed 0"),
    1: ("ZeroRedundancyOptimizer", "DeepSpeed 1"),
    2: ("FSDP2 kept", "FSDP2 kept on shared", "DeepSpeed 2"),
    3: ("FSDP2 resharded", "FSDP2 resharded on shared", "DeepSpeed 3"),
}
"""The peers that hold the same states where we do; FSDP2 is shown beside every stage."""


def _rows(dtype: str, ranks: int, seconds: Times) -> list[BenchRow]:
    from tests.benchmarks.workload import MICRO_BATCH, SEQUENCE

    rows = []
    for name in seconds:
        kind, *stage = name.split()
        peers: list[str] = []
        if kind == "ours":
            peers = [BEFORE + name, *_PEERS[int(stage[0])], "FSDP2 kept", "FSDP2 resharded"]
        elif kind == "shipped":
            # What is shipped stands beside the limit, which is plain torch without communication.
            peers = [BEFORE + name, "limit"]
        elif kind == COMPRESSED:
            peers = [BEFORE + name, f"ours {stage[0]}"]
        found = [peer for peer in dict.fromkeys(peers) if peer in seconds] or [""]
        tokens = ranks * MICRO_BATCH * SEQUENCE
        rows += [_row(f"step {dtype} {ranks} ranks:", tokens, seconds, name, peer) for peer in found]
    return rows


def _row(case: str, tokens: int, seconds: Times, name: str, peer: str = "") -> BenchRow:
    """`tokens`: of one step over all ranks."""
    return row(
        f"{case} {name}",
        seconds,
        own=name,
        peer=peer,
        floor="limit" if "limit" in seconds else "",
        unit="tokens/s",
        value=lambda second: tokens / second,
        allocator=_allocator(name),
    )
