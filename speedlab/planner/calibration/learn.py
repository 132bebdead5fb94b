"""Learn from a measured run on this machine. No torch.

The run is compared with the prediction without learned factors, for each class of parts that step records distinguish.
The calibration keeps the run with its prediction, measurement and error, even if the error is large. Factors are
recomputed from all runs (`Calibration.learned`), so a run that is learned twice counts once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from speedlab.planner.calibration import CLASSES, Calibration, MeasuredRun
from speedlab.planner.setup import Setup

FEWEST_STEPS = 5
"""Minimum number of measured steps, without the first ones, which allocate what later steps reuse."""

_FIRST_STEPS = 2

MOST_RUNS = 200
"""Maximum number of stored runs; the oldest are dropped."""


class Measured(Protocol):
    """The fields of a step record that learning reads."""

    @property
    def seconds(self) -> float: ...
    @property
    def phases(self) -> dict[str, float]: ...
    @property
    def traced(self) -> bool: ...
    @property
    def ledger(self) -> Any: ...


def learn(calibration: Calibration, name: str, setup: Setup, records: Mapping[int, Sequence[Measured]]) -> Calibration:
    """Return `calibration` with one more run.

    Traced steps do not count, because following every tensor takes time.

    Args:
        calibration: the calibration before.
        name: name of the run; a run of the same name is replaced.
        setup: what the run trained.
        records: step records of every rank, in order.

    Raises:
        ValueError: too few steps are left, or the set-up cannot be predicted.
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
    """Return class -> measured over predicted time.

    The formulas describe the slowest rank, which computes longest; its wait is the cost of communication. Classes below
    a hundredth of a step are omitted.
    """
    medians = {
        rank: {
            phase: statistics.median(record.phases.get(phase, 0.0) for record in found)
            for phase in ("forward", "backward", "communication", "offload", "optimizer")
        }
        for rank, found in ranks.items()
    }
    slowest = max(medians.values(), key=lambda phases: phases["forward"] + phases["backward"])
    measured = {
        # The same phases include the engine's own time around kernels.
        "computing": slowest["forward"] + slowest["backward"] - parts["engine"],
        "communication": slowest["communication"],
        "updating": slowest["optimizer"] + slowest["offload"],
    }
    predicted = {name: sum(parts[part] for part in members) for name, members in CLASSES.items()}
    # Below this, a ratio is noise.
    least = sum(parts.values()) / 100
    return {
        name: measured[name] / predicted[name] for name in CLASSES if predicted[name] > least and measured[name] > 0
    }


def _remainder(ranks: Mapping[int, Sequence[Measured]]) -> int:
    """Return the bytes of a rank's process outside the formulas: the median over steps, the maximum over ranks."""
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
