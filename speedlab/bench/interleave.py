"""Timing several ways to do a thing in one run: round by round, in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from speedlab.bench.table import Row

Times = dict[str, list[float]]
"""Seconds by contestant, one for each round."""


def interleave(contestants: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device) -> Times:
    """Call each contestant once in every round, after two calls that are not counted; the order turns.

    On a GPU the time is that between two events.
    """
    names = list(contestants)
    for name in names:
        for _ in range(2):
            contestants[name]()
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(_time(contestants[name], device))
    return times


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    after.synchronize()  # This is the measurement.
    return before.elapsed_time(after) / 1e3


def row(case: str, times: Times, *, peer: str = "", floor: str = "") -> Row:
    """'ours' beside `peer`, and beside `floor`, the time below which nobody can get."""
    ours = times["ours"]
    return Row(
        case=case,
        ours=statistics.median(ours) * 1e3,
        unit="ms",
        peer_name=peer,
        peer=statistics.median(times[peer]) * 1e3 if peer else None,
        ratio=_ratio(times[peer], ours) if peer else None,
        limit_share=_ratio(times[floor], ours) if floor else None,
        n=len(ours),
        spread=(max(ours) - min(ours)) / statistics.median(ours),
    )


def rows(case: str, times: Times, *, floor: str = "") -> list[Row]:
    """A row for each peer; one row when there is none."""
    peers = [name for name in times if name not in ("ours", floor)]
    return [row(case, times, peer=peer, floor=floor) for peer in peers] or [row(case, times, floor=floor)]


def _ratio(others: list[float], ours: list[float]) -> float:
    return statistics.median(other / own for other, own in zip(others, ours, strict=True))
