"""Compare the shared-memory backend with gloo: `speedlab bench collectives`.

Calls are plain torch.distributed calls. All ranks begin together; times are those of the slowest rank.

The rows "comparing the call" measure the cost of the check that all ranks make the same call
(`comm/shared/call_descriptions.py`). The benchmark alternates barriers with and without this check, because a barrier
moves no data. The row is the difference in microseconds: processor time for one rank, which other processes do not
disturb; wall-clock time for more ranks, which other processes do disturb.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.calibrate.interleave import Times, row, take_turns
from speedlab.calibrate.rank_processes import run_on_ranks
from speedlab.calibrate.table import BenchRow, report
from speedlab.config.command_line import read_options

if TYPE_CHECKING:
    from speedlab.comm.shared.sync_page import SyncPage

_SMALL_BYTES, _SMALL_CALLS = 4 << 10, 50
"""Small messages are sent many times between two barriers, so that the barriers do not count."""


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions:
    """All-reduce, reduce-scatter and all-gather of 4 KB (latency) and many megabytes (bandwidth); cost of comparing
    calls.
    """

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of rank processes, one thread each."""
    megabytes: int = 64
    """Size of the large tensors, MB of the whole."""
    rounds: int = 10
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    """Run `speedlab bench collectives` and print the table.

    Args:
        argv: command-line arguments; None means those of the process.
    """
    options = read_options(CollectivesOptions, argv, "speedlab bench collectives")
    rows: list[BenchRow] = []
    for ranks in options.ranks:
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        for (name, nbytes), times in run_on_ranks(_measure, ranks, options.megabytes, options.rounds).items():
            rows.append(row(f"{name} {_size(nbytes)} float32, {ranks} ranks", times, peer="gloo"))
    for ranks in (1, *options.ranks):
        case = f"comparing the call, {f'{ranks} ranks' if ranks > 1 else 'processor time'}"
        differences = run_on_ranks(_measure_comparing, ranks, options.rounds)
        rows.append(row(case, {"ours": differences}, unit="µs", value=lambda seconds: seconds * 1e6))
    report(rows, options.json)


def _measure(megabytes: int, rounds: int) -> dict[tuple[str, int], Times]:
    """Return the seconds of one call, by (collective, bytes) and backend."""
    import torch.distributed as dist

    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}

    def time_calls(call: Callable[[Any], object], calls: int, backend: str) -> float:
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


_COMPARED_CALLS = 300
"""Calls of each kind in a round: about half a millisecond."""


def _measure_comparing(rounds: int) -> list[float]:
    """Return for each round the extra seconds of a call because the ranks compare it."""
    import torch
    import torch.distributed as dist

    from speedlab.comm.shared import SharedGroup
    from speedlab.comm.shared.call_descriptions import Op, call_of

    group: Any = dist.group.WORLD
    assert isinstance(group, SharedGroup), "ranks of one host"
    tensor = torch.ones(4)

    def describe() -> None:
        call_of(Op.ALL_REDUCE, [tensor], reduction=dist.ReduceOp.SUM)

    def compared() -> None:
        describe()
        dist.barrier()

    # Processor time of a single rank excludes disturbances by other processes.
    clock = time.perf_counter if group.size() > 1 else time.thread_time

    def time_calls(name: str) -> float:
        with contextlib.nullcontext() if name == "compared" else uncompared(group.meeting):
            call = compared if name == "compared" else dist.barrier
            dist.barrier()
            start = clock()
            for _ in range(_COMPARED_CALLS):
                call()
            return (clock() - start) / _COMPARED_CALLS

    names = ["compared", "not compared"]
    for name in names:
        time_calls(name)  # For warming up.
    times = take_turns(names, 5 * rounds, time_calls)
    slowest = [_slowest(times[name]) for name in names]
    return [with_it - without for with_it, without in zip(*slowest, strict=True)]


@contextlib.contextmanager
def uncompared(meeting: SyncPage) -> Iterator[None]:
    """Disable the comparison of calls for this rank inside the block. All ranks must enter and leave together.

    Args:
        meeting: the sync page of this rank's group; its methods are replaced on the instance and restored afterwards.
    """
    from speedlab.comm.shared.sync_page import Number

    def meet(number: int) -> None:
        meeting.raise_own(Number.WRITTEN, number + 1)
        meeting.wait_all(Number.WRITTEN, number + 1)

    own: Any = meeting
    own.meet, own.begin_call = meet, lambda call: None
    try:
        yield
    finally:
        del own.meet, own.begin_call


def _slowest(seconds: list[float]) -> list[float]:
    """Return for each round the longest time of any rank."""
    import torch
    import torch.distributed as dist

    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()


def _calls(nbytes: int) -> dict[str, Callable[[Any], object]]:
    import torch
    import torch.distributed as dist

    from speedlab.comm.transports.base import gather_whole, scatter_sum

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
