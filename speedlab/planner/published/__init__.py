"""Compare the planner with published figures: `report()` is the table, `evaluate()` its data.

Every row of `published.json` is either predicted, or left out with the reason. Rows in `CALIBRATION` set constants; all
others only test them. Misses are shown like hits.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from speedlab.planner.published.predictions import CALIBRATION, Outcome, outcomes, reason
from speedlab.planner.published.systems import Row

__all__ = ["CALIBRATION", "GROUPS", "Evaluation", "Outcome", "evaluate", "report", "rows"]

GROUPS = {
    "model states": "bytes of parameters, gradients and optimizer states",
    "memory peaks": "the most that a device held",
    "throughput": "speed of rows that say all that the planner asks",
    "throughput, partly assumed": "speed of rows of which something had to be assumed",
    "fits": "whether it fits: 1 is yes",
    "formulas": "volumes, bubbles, FLOP of a training, updates on the host, days",
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All predictions of published figures."""

    outcomes: tuple[Outcome, ...]
    left_out: dict[str, str]
    """Row -> why it cannot be predicted."""

    def errors(self, group: str, *, tests_only: bool = False) -> list[float]:
        """Return the relative errors (absolute values) of a group.

        Args:
            group: a key of `GROUPS`.
            tests_only: whether to leave out rows that set constants.
        """
        return [
            abs(outcome.error)
            for outcome in self.outcomes
            if outcome.group == group and not (tests_only and outcome.sets)
        ]


@cache
def rows() -> tuple[Row, ...]:
    """Return the published rows."""
    return tuple(json.loads(Path(__file__).with_name("published.json").read_text()))


@cache
def evaluate() -> Evaluation:
    """Predict every row, or leave it out with a reason."""
    predicted: list[Outcome] = []
    left_out: dict[str, str] = {}
    for row in rows():
        why = reason(row)
        if why:
            left_out[row["id"]] = why
        else:
            predicted += outcomes(row)
    return Evaluation(outcomes=tuple(predicted), left_out=left_out)


def report() -> str:
    """Return all rows with their errors, each group's median and worst error, and the rows left out."""
    found = evaluate()
    lines: list[str] = []
    for group, what in GROUPS.items():
        mine = [outcome for outcome in found.outcomes if outcome.group == group]
        lines += [f"{group.capitalize()} ({what})", ""]
        lines += [_line(outcome) for outcome in mine]
        lines += ["", _summary(found, group), ""]
    lines.append("Left out")
    lines += [f"  {row}: {reason}" for row, reason in found.left_out.items()]
    lines += ["", "Rows with * set constants; the others only test them."]
    return "\n".join(lines)


def _line(outcome: Outcome) -> str:
    mark = "*" if outcome.sets else " "
    assumed = f"  assumed: {outcome.assumed}" if outcome.assumed else ""
    return (
        f"{mark} {outcome.row:<28} {outcome.published:>12,.5g} {outcome.predicted:>12,.5g} {outcome.error:>+7.1%}  "
        f"{outcome.quantity}{assumed}"
    )


def _summary(found: Evaluation, group: str) -> str:
    errors, tests = found.errors(group), found.errors(group, tests_only=True)
    line = f"  {len(errors)} figures: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    if len(tests) == len(errors) or not tests:
        return line
    within = sum(error <= 0.25 for error in tests)
    return (
        f"{line}; the {len(tests)} that set nothing: median {statistics.median(tests):.1%}, "
        f"worst {max(tests):.1%}, {within} within 25%"
    )
