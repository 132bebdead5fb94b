"""`speedlab bench collectives`: the shared-memory backend beside gloo, as plain torch.distributed calls.

All ranks begin together; times are those of the slowest rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from speedlab.bench.ranks import run_on_ranks
from speedlab.bench.table import Row, report

_SMALL_BYTES, _SMALL_CALLS = 4 << 10, 50
"""Small ones are called many times in a row, so that the barriers around them do not count."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """All-reduce, reduce-scatter and all-gather of 4 KB (latency) and of many megabytes (bandwidth)."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of rank processes, one thread each."""
    megabytes: int = 64
    """Size of the large tensors, MB of the whole."""
    rounds: int = 9
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=argv, prog="speedlab bench collectives")
    rows: list[Row] = []
    for ranks in options.ranks:
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        for (name, nbytes), times in run_on_ranks(_measure, ranks, options.megabytes, options.rounds).items():
            rows.append(_row(f"{name} {_size(nbytes)} float32, {ranks} ranks", times))
    report(rows, options.json)


def _measure(megabytes: int, rounds: int) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Seconds of one call, by (collective, bytes) and backend."""
    import torch.distributed as dist

    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    results: dict[tuple[str, int], dict[str, list[float]]] = {}
    for nbytes, calls in ((_SMALL_BYTES, _SMALL_CALLS), (megabytes * 10**6, 1)):
        for name, call in _calls(nbytes).items():
            times: dict[str, list[float]] = {backend: [] for backend in groups}
            for number in range(-1, rounds):
                for backend in list(groups)[:: 1 if number % 2 else -1]:
                    dist.barrier(group=groups["gloo"])
                    start = time.perf_counter()
                    for _ in range(calls):
                        call(groups[backend])
                    if number >= 0:  # The round before is for warming up.
                        times[backend].append((time.perf_counter() - start) / calls)
            results[name, nbytes] = {backend: _slowest(own) for backend, own in times.items()}
    return results


def _slowest(seconds: list[float]) -> list[float]:
    """The longest time of any rank, for each round."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()


def _calls(nbytes: int) -> dict[str, Callable[[object], object]]:
    import torch
    import torch.distributed as dist

    from speedlab.comm.transports.torch_own import gather_whole, scatter_sum

    size = dist.get_world_size()
    whole = torch.ones(nbytes // 4 // size * size)
    part = torch.ones(whole.numel() // size)
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda group: scatter_sum(part, whole, group=group),
        "all_gather": lambda group: gather_whole(whole, part, group=group),
    }


def _row(case: str, times: dict[str, list[float]]) -> Row:
    ours, gloo = times["ours"], times["gloo"]
    return Row(
        case=case,
        ours=statistics.median(ours) * 1e3,
        unit="ms",
        peer_name="gloo",
        peer=statistics.median(gloo) * 1e3,
        ratio=statistics.median(b / a for a, b in zip(ours, gloo, strict=True)),
        n=len(ours),
        spread=(max(ours) - min(ours)) / statistics.median(ours),
    )


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes < 10**6 else f"{nbytes // 10**6} MB"
