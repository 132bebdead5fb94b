"""The table of `python -m tests.benchmarks network`: each case beside plain, its goal, and whether it was reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from speedlab.display.formatting import Table
from tests.benchmarks.network_cases import Goal

GOAL_LINK, GIGABIT, UNSHAPED = "100 Mbit/s", "1 Gbit/s", "unshaped"
"""Goals for speeds are those at the first; one compares the other two."""

_LINK_LIMITS = 0.5
"""Share of a step from which on the link is what limits it."""

Losses = Mapping[str, Sequence[float]]
"""Held-out losses by case, one for each seed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A case over one link. Bytes are those that each host has sent in a step."""

    hosts: str
    link: str
    case: str
    alongside: str
    step_seconds: float
    step_bytes: float
    bytes_share: float
    """Of plain's bytes."""
    step_speed: float
    """Times plain's, the median over the rounds."""
    step_speed_range: tuple[float, float]
    run_bytes_share: float
    run_speed: float
    """End to end, times plain's, and its bytes: of a whole run, with the warm-up."""
    wire_seconds: float
    """Of a step, which the link takes for its bytes at full speed; 0 where it is not shaped."""
    goal: Goal

    @property
    def limited_by(self) -> str:
        if not self.wire_seconds:
            return "computing"
        share = self.wire_seconds / self.step_seconds
        return f"the link, {share:.0%}" if share >= _LINK_LIMITS else f"computing, link {share:.0%}"


class Rows(Table):
    """All that was found; `losses` where they were measured."""

    def __init__(self, found: Sequence[Found], losses: Losses) -> None:
        super().__init__(vars(each) for each in found)
        self._found, self._losses = found, losses
        self.notes = tuple(_notes(losses))

    def head(self) -> Sequence[str]:
        return (
            "hosts",
            "link",
            "case",
            "step ms",
            "MB a step",
            "bytes of plain",
            "step speed (range)",
            "end to end",
            "bytes of a run",
            "limited by",
            "loss of plain",
            "goal: reached",
        )

    def cells(self) -> list[tuple[str, ...]]:
        return [self._line(each) for each in self._found]

    def _line(self, row: Found) -> tuple[str, ...]:
        numbers = row.hosts, row.link, row.case, f"{1e3 * row.step_seconds:,.0f}", f"{row.step_bytes / 1e6:,.2f}"
        worse = _worse(row, self._losses)
        loss = "–" if worse is None else f"{worse:+.2%}"
        if not row.alongside:
            return *numbers, "1", "1", "1", "1", row.limited_by, loss, "–"
        low, high = row.step_speed_range
        speed = f"{row.step_speed:.2f} ({low:.2f}..{high:.2f})"
        reported = "; ".join(reached(row, self._losses, self._found)) or "–"
        run = f"{row.run_speed:.2f}", _share(row.run_bytes_share)
        return *numbers, _share(row.bytes_share), speed, *run, row.limited_by, loss, reported


def reached(row: Found, losses: Losses, others: Sequence[Found] = ()) -> Iterator[str]:
    """'step ≥ 8: no' and the like, for each goal that the row can speak of, beside `others`."""
    goal = row.goal
    if goal.bytes_share is not None:
        yield f"bytes ≤ {_share(goal.bytes_share)}: {_word(row.bytes_share <= goal.bytes_share)}"
    if row.link == GOAL_LINK and goal.step_speed is not None:
        yield f"step ≥ {goal.step_speed:g}: {_word(row.step_speed >= goal.step_speed)}"
    if row.link == GOAL_LINK and goal.run_speed is not None:
        yield f"run ≥ {goal.run_speed:g}: {_word(row.run_speed >= goal.run_speed)}"
    if goal.run_bytes_share is not None:
        yield f"run's bytes ≤ {_share(goal.run_bytes_share)}: {_word(row.run_bytes_share <= goal.run_bytes_share)}"
    if row.link == GIGABIT and goal.gigabit_share is not None:
        for other in others:
            if (other.hosts, other.case, other.link) == (row.hosts, row.case, UNSHAPED):
                met = other.step_seconds / row.step_seconds >= goal.gigabit_share
                yield f"of unshaped ≥ {goal.gigabit_share:g}: {_word(met)}"
    worse = _worse(row, losses)
    if worse is not None and goal.loss_within is not None:
        allowed = goal.loss_within or _noise(losses[row.alongside])
        yield f"loss ≤ +{allowed:.2%}: {_word(worse <= allowed)}"


def _worse(row: Found, losses: Losses) -> float | None:
    """By what share of plain's the mean held-out loss is higher; None where nobody measured it."""
    if row.case not in losses or row.alongside not in losses:
        return None
    return statistics.mean(losses[row.case]) / statistics.mean(losses[row.alongside]) - 1


def _noise(of_plain: Sequence[float]) -> float:
    """How far losses of other seeds lie apart, as a share of their mean."""
    return (max(of_plain) - min(of_plain)) / statistics.mean(of_plain)


def _share(share: float) -> str:
    return f"1/{1 / share:.3g}" if 0 < share < 0.5 else f"{share:.3g}"


def _word(met: bool) -> str:
    return "yes" if met else "no"


def _notes(losses: Losses) -> Iterator[str]:
    for case, found in losses.items():
        low, high = min(found), max(found)
        yield f"{case}: held-out loss {statistics.mean(found):.4f} ({low:.4f}..{high:.4f}), {len(found)} seeds"
