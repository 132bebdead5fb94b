"""Time several contestants in one run, interleaved by round, so that a disturbance affects all of them.

Ratios compare times of the same round. Results show their median, minimum and maximum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from speedlab.calibrate.table import BenchRow

if TYPE_CHECKING:
    import torch

Times = dict[str, list[float]]
"""Contestant -> seconds, one value for each round."""


def turned(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round.

    Odd rounds reverse the previous one, so that of any two contestants each is first equally often. Every two rounds
    start one contestant later.

    Args:
        names: the contestants.
        number: number of the round, from 0.
    """
    # Every contestant starts a round equally often.
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def take_turns(
    names: Sequence[str], rounds: int, act: Callable[[str], float], *, after: Callable[[int], object] = lambda _: None
) -> Times:
    """Call every contestant once in each round.

    Args:
        names: the contestants.
        rounds: number of rounds.
        act: called with a name; returns seconds.
        after: called with the number of each round at its end.
    """
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        for name in turned(names, number):
            times[name].append(act(name))
        after(number)
    return times


def interleave(contestants: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device) -> Times:
    """Time every contestant once in each round, after two calls that do not count.

    Args:
        contestants: name -> call.
        rounds: number of rounds.
        device: on a GPU, the time between two CUDA events is measured.
    """
    for call in contestants.values():
        for _ in range(2):
            call()
    return take_turns(list(contestants), rounds, lambda name: _time(contestants[name], device))


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    after.synchronize()  # An intended sync: the times are known only now.
    return before.elapsed_time(after) / 1e3


def row(
    case: str,
    times: Times,
    *,
    own: str = "ours",
    peer: str = "",
    floor: str = "",
    unit: str = "ms",
    value: Callable[[float], float] = lambda seconds: seconds * 1e3,
    allocator: str = "",
) -> BenchRow:
    """Return the comparison of one contestant with a peer and with a lower bound.

    Args:
        case: name of the case.
        times: measured seconds.
        own: the contestant.
        peer: the peer; empty: none.
        floor: the lower bound of the time; empty: none.
        unit: unit of the values.
        value: converts seconds to `unit`.
        allocator: allocator settings, if they matter.
    """
    values = [value(seconds) for seconds in times[own]]
    ratios = _ratios(times[peer], times[own]) if peer else None
    shares = _ratios(times[floor], times[own]) if floor else None
    return BenchRow(
        case=case,
        ours=statistics.median(values),
        unit=unit,
        allocator=allocator,
        peer_name=peer,
        peer=value(statistics.median(times[peer])) if peer else None,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_range=(min(ratios), max(ratios)) if ratios else None,
        limit_share=statistics.median(shares) if shares else None,
        limit_range=(min(shares), max(shares)) if shares else None,
        n=len(values),
        spread=(max(values) - min(values)) / statistics.median(values),
    )


def rows(case: str, times: Times, *, floor: str = "") -> list[BenchRow]:
    """Return a row for each peer, or one row if there is none.

    Args:
        case: name of the case.
        times: measured seconds.
        floor: the lower bound of the time; empty: none.
    """
    peers = [name for name in times if name not in ("ours", floor)]
    return [row(case, times, peer=peer, floor=floor) for peer in peers] or [row(case, times, floor=floor)]


def _ratios(others: list[float], own: list[float]) -> list[float]:
    return [a / b for a, b in zip(others, own, strict=True)]
