"""`speedlab bench collectives`: the shared-memory backend beside gloo, as plain torch.distributed calls.

All ranks begin together; times are those of the slowest rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from speedlab.bench.interleave import Times, row, take_turns
from speedlab.bench.ranks import run_on_ranks
from speedlab.bench.table import Row, report
from speedlab.config.options import read_options

_SMALL_BYTES, _SMALL_CALLS = 4 << 10, 50
"""Small ones are called many times in a row, so that the barriers around them do not count."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """All-reduce, reduce-scatter and all-gather of 4 KB (latency) and of many megabytes (bandwidth)."""

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of rank processes, one thread each."""
    megabytes: int = 64
    """Size of the large tensors, MB of the whole."""
    rounds: int = 10
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "speedlab bench collectives")
    rows: list[Row] = []
    for ranks in options.ranks:
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        for (name, nbytes), times in run_on_ranks(_measure, ranks, options.megabytes, options.rounds).items():
            rows.append(row(f"{name} {_size(nbytes)} float32, {ranks} ranks", times, peer="gloo"))
    report(rows, options.json)


def _measure(megabytes: int, rounds: int) -> dict[tuple[str, int], Times]:
    """Seconds of one call, by (collective, bytes) and backend."""
    import torch.distributed as dist

    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}

    def time_calls(call: Callable[[object], object], calls: int, backend: str) -> float:
        dist.barrier(group=groups["gloo"])
        start = time.perf_counter()
        for _ in range(calls):
            call(groups[backend])
        return (time.perf_counter() - start) / calls

    results: dict[tuple[str, int], Times] = {}
    for nbytes, calls in ((_SMALL_BYTES, _SMALL_CALLS), (megabytes * 10**6, 1)):
        for name, call in _calls(nbytes).items():
            for backend in groups:
                time_calls(call, calls, backend)  # For warming up.
            times = take_turns(list(groups), rounds, partial(time_calls, call, calls))
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


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes < 10**6 else f"{nbytes // 10**6} MB"
