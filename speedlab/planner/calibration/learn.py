"""What a measured run teaches about this machine. No torch.

A run is compared with what the formulas and the calibration say without anything learned, class by class of the parts
of a step, as step records tell them apart. It stays in the calibration with its prediction, its measurement and its
error, whatever they are; factors are made of all runs anew (`Calibration.learned`), so a run that is learned from again
counts once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from speedlab.planner.calibration import CLASSES, Calibration, MeasuredRun
from speedlab.planner.setup import Setup

FEWEST_STEPS = 5
"""Steps that a run must have measured, its first ones not counted: they make what later ones use again."""

_FIRST_STEPS = 2

MOST_RUNS = 200
"""Runs that are kept; of more, the newest."""


class Measured(Protocol):
    """What is read of a step record."""

    @property
    def seconds(self) -> float: ...
    @property
    def phases(self) -> dict[str, float]: ...
    @property
    def traced(self) -> bool: ...
    @property
    def ledger(self) -> Any: ...


def learn(calibration: Calibration, name: str, setup: Setup, records: Mapping[int, Sequence[Measured]]) -> Calibration:
    """`calibration` with the run `name`, which trained `setup`, among its runs.

    `records`: step records of every rank, in order. Traced steps do not count: following every tensor takes time.
    Raises ValueError when too few steps are left, or the setup cannot be predicted.
    """
    ranks = {rank: _steady(found) for rank, found in records.items()}
    fewest = min((len(found) for found in ranks.values()), default=0)
    if len(ranks) != setup.layout.world_size or fewest < FEWEST_STEPS:
        raise ValueError(
            f"{name}: {len(ranks)} of {setup.layout.world_size} ranks have {fewest} steps or more that count; learning "
            f"needs {FEWEST_STEPS} on each, after the first {_FIRST_STEPS} and without traced ones"
        )
    before = calibration.predict(setup, learned=False)
    measured = statistics.median(record.seconds for found in ranks.values() for record in found)
    run = MeasuredRun(
        name=name,
        setup=_text(setup),
        engines=setup.layout.world_size,
        steps=fewest,
        predicted_seconds=calibration.predict(setup).step_seconds,
        measured_seconds=measured,
        ratios=_ratios(before.parts, ranks),
        process_bytes=_remainder(ranks),
    )
    others = [other for other in calibration.runs if other.name != name]
    return replace(calibration, runs=(*others, run)[-MOST_RUNS:])


def _steady(records: Sequence[Measured]) -> list[Measured]:
    return [record for record in records[_FIRST_STEPS:] if not record.traced and record.seconds > 0]


def _ratios(parts: Mapping[str, float], ranks: Mapping[int, Sequence[Measured]]) -> dict[str, float]:
    """Class -> measured over predicted. The formulas speak of the slowest rank: the one that computes longest; what it
    waits for is what communication costs. Classes that take less than a hundredth of a step say nothing."""
    medians = {
        rank: {
            phase: statistics.median(record.phases.get(phase, 0.0) for record in found)
            for phase in ("forward", "backward", "communication", "offload", "optimizer")
        }
        for rank, found in ranks.items()
    }
    slowest = max(medians.values(), key=lambda phases: phases["forward"] + phases["backward"])
    measured = {
        # The engine's own time around kernels passes in the same phases.
        "computing": slowest["forward"] + slowest["backward"] - parts["engine"],
        "communication": slowest["communication"],
        "updating": slowest["optimizer"] + slowest["offload"],
    }
    predicted = {name: sum(parts[part] for part in members) for name, members in CLASSES.items()}
    least = sum(parts.values()) / 100
    return {
        name: measured[name] / predicted[name] for name in CLASSES if predicted[name] > least and measured[name] > 0
    }


def _remainder(ranks: Mapping[int, Sequence[Measured]]) -> int:
    """Bytes that a rank's process held beside what the formulas count: the most over ranks, in the usual step."""
    return max(
        round(statistics.median(record.ledger.other_framework + record.ledger.outside_framework for record in found))
        for found in ranks.values()
    )


def _text(setup: Setup) -> str:
    shape = setup.shape
    return (
        f"{shape.name} {shape.layers} × {shape.hidden}, {setup.layout}, zero {setup.zero_stage}, {setup.dtype}, "
        f"{setup.micro_size} × {setup.accumulation}"
    )
