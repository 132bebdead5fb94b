"""`speedlab bench step`: tokens per second of a training step, ours and the peers', interleaved in one run.

The limit is as many independent processes of plain torch, without communication. Each round runs every contestant for a
few steps between two barriers; shares and ratios are medians over rounds of times measured in the same round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speedlab.bench import layouts
from speedlab.bench.interleave import Times
from speedlab.bench.ranks import RankSet
from speedlab.bench.table import Row, missing, report

_MICRO_BATCH, _SEQUENCE = 4, 128


@dataclass(frozen=True, kw_only=True)
class Options:
    """A training step of a 17M-parameter GPT at every ZeRO stage, beside the peers."""

    ranks: int = 2
    """Rank processes, one thread each."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Compute dtypes to measure."""
    rounds: int = 7
    """Interleaved rounds; medians are taken over them."""
    steps: int = 3
    """Steps of each contestant in a round."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(name="only")] = field(default=())
    """Contestants to measure, for instance 'limit' 'FSDP2 kept' 'ours 2'; all when left out."""
    layout: tuple[Literal["tp2", "pp2", "pp2-tp2", "dp2-tp2", "pp2-dp2"], ...] = ()
    """Layouts to measure instead, beside torch's DTensor, pipelining and FSDP2; the number of ranks is the layout's."""
    backend: Literal["shared", "gloo"] = "shared"
    """With --layout: the collectives of both."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=argv, prog="speedlab bench step")
    if options.layout:
        report([row for dtype in options.dtypes for row in _layout_rows(dtype, options)], options.json)
        return
    for peer in missing():
        print(f"not installed, left out: {peer} (make bench installs it)", file=sys.stderr)
    rows: list[Row] = []
    for dtype in options.dtypes:
        print(
            f"{dtype}: {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps",
            file=sys.stderr,
            flush=True,
        )
        rows += _rows(dtype, options, _measure(options, dtype))
    report(rows, options.json)


def _measure(options: Options, dtype: str) -> Times:
    """Seconds of a step by contestant, one number for each round.

    Ours run in processes of their own: `initialize` sets the allocator, which must not help the others.
    """
    from speedlab.bench import contestants

    wanted = [name for name in contestants.names() if not options.only or name in options.only]
    ours = {name for name in wanted if contestants.is_ours(name)}
    with RankSet(options.ranks, "gloo") as plain, RankSet(options.ranks) as own:
        place = {name: own if name in ours else plain for name in wanted}
        for name in wanted:
            place[name].call(_prepare, name, dtype)
        seconds: Times = {name: [] for name in wanted}
        for number in range(options.rounds):
            for name in wanted[number % len(wanted) :] + wanted[: number % len(wanted)]:
                seconds[name].append(place[name].call(_time, name, options.steps))
            print(f"  round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return seconds


_prepared: dict[str, Callable[[], None]] = {}
"""In a rank process: the contestants that stand ready, each as its step on this rank's batch."""


def _prepare(name: str, dtype: str) -> None:
    """Build a contestant on this rank and make two steps, which are not measured."""
    import torch
    import torch.distributed as dist

    from speedlab.bench import contestants

    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (_MICRO_BATCH, _SEQUENCE)
    tokens, targets = (torch.randint(0, contestants.MODEL.vocab_size, shape, generator=generator) for _ in range(2))
    step = contestants.make(name, getattr(torch, dtype))
    _prepared[name] = lambda: step(tokens, targets)
    for _ in range(2):
        _prepared[name]()


def _time(name: str, steps: int) -> float:
    """Seconds of a step, over `steps` of them between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        _prepared[name]()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def _layout_rows(dtype: str, options: Options) -> list[Row]:
    rows = []
    for name in options.layout:
        ranks = layouts.LAYOUTS[name].world_size
        print(f"{dtype}: {name} on {options.backend}, {ranks} ranks", file=sys.stderr, flush=True)
        seconds = layouts.measure(
            name, dtype=dtype, backend=options.backend, rounds=options.rounds, steps=options.steps
        )
        tokens = layouts.tokens_of(name)
        case = f"step {dtype} {ranks} ranks: {name} on {options.backend}"
        rows.append(_row(case, tokens, seconds, "torch", "limit"))
        rows += [_row(case, tokens, seconds, own, "torch") for own in ("ours", "shipped")]
    return rows


_PEERS = {
    0: ("DDP", "DDP on shared", "DeepSpeed 0"),
    1: ("ZeroRedundancyOptimizer", "DeepSpeed 1"),
    2: ("FSDP2 kept", "FSDP2 kept on shared", "DeepSpeed 2"),
    3: ("FSDP2 resharded", "FSDP2 resharded on shared", "DeepSpeed 3"),
}
"""The peers that hold the same states where we do; FSDP2 is shown beside every stage."""


def _rows(dtype: str, options: Options, seconds: dict[str, list[float]]) -> list[Row]:
    tokens = options.ranks * _MICRO_BATCH * _SEQUENCE
    limit = seconds.get("limit")
    rows = []

    def row(name: str, peer: str = "") -> Row:
        return _row(f"step {dtype} {options.ranks} ranks:", tokens, seconds, name, peer)

    for name in seconds:
        if not name.startswith("ours"):
            # What is shipped stands beside the limit, which is plain torch without communication.
            rows.append(row(name, "limit" if name.startswith("shipped") and limit else ""))
            continue
        stage = int(name.split()[1])
        peers = dict.fromkeys((*_PEERS[stage], "FSDP2 kept", "FSDP2 resharded"))
        rows += [row(name, peer) for peer in peers if peer in seconds] or [row(name)]
    return rows


def _row(case: str, tokens: int, seconds: Times, name: str, peer: str = "") -> Row:
    """`tokens`: of one step over all ranks."""
    own, against, limit = seconds[name], seconds.get(peer), seconds.get("limit")
    speeds = [tokens / value for value in own]
    return Row(
        case=f"{case} {name}",
        ours=statistics.median(speeds),
        unit="tokens/s",
        peer_name=peer,
        peer=tokens / statistics.median(against) if against else None,
        ratio=statistics.median(b / a for a, b in zip(own, against, strict=True)) if against else None,
        limit_share=statistics.median(b / a for a, b in zip(own, limit, strict=True)) if limit else None,
        n=len(own),
        spread=(max(speeds) - min(speeds)) / statistics.median(speeds),
    )
