"""Timing several ways to do a thing in one run: round by round, in turn, so that what disturbs one disturbs all.

Ratios are taken between times of one round. What is told of them is their median, the smallest and the largest.
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
"""Seconds by contestant, one for each round."""


def turned(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`. Every second round is the one before backwards, so that of any two contestants each
    is the earlier one equally often; and every two rounds begin one further on."""
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


def take_turns(
    names: Sequence[str], rounds: int, act: Callable[[str], float], *, after: Callable[[int], object] = lambda _: None
) -> Times:
    """The seconds that `act(name)` returns, of each name once in every round; `after(number)` ends a round."""
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        for name in turned(names, number):
            times[name].append(act(name))
        after(number)
    return times


def interleave(contestants: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device) -> Times:
    """Call each contestant once in every round, after two calls that are not counted.

    On a GPU the time is that between two events.
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
    after.synchronize()  # This is the measurement.
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
    """`own` beside `peer`, and beside `floor`, the time below which nobody can get. `value`: of seconds, in `unit`."""
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
    """A row for each peer; one row when there is none."""
    peers = [name for name in times if name not in ("ours", floor)]
    return [row(case, times, peer=peer, floor=floor) for peer in peers] or [row(case, times, floor=floor)]


def _ratios(others: list[float], own: list[float]) -> list[float]:
    return [a / b for a, b in zip(others, own, strict=True)]
