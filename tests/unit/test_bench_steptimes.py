"""The table of predicted and measured step times: the machine's own speed is told apart from the planner's error."""

from __future__ import annotations

import pytest

from speedlab.planner.hardware.devices import Machines
from speedlab.planner.time.efficiency import efficiency_of
from speedlab.planner.time.step_time import predict_time
from tests.benchmarks.planner_cases import grid
from tests.benchmarks.steptimes import Found, Measured, reference_of, render, setup_of


def found(*, step: float, reference: float, predicted_reference: float) -> Found:
    """The first case of the grid, predicted for whatever device, with measurements in units of that prediction."""
    machines = Machines.parse("1 A100-80")
    time = predict_time(setup_of(next(iter(grid()))), machines, efficiency_of(machines.device))
    unit = time.step_seconds
    return Found(
        case="a case",
        time=time,
        measured=Measured(step=step * unit, reference=reference * unit, over_reference=step / reference),
        reference_seconds=predicted_reference * unit,
    )


def test_a_machine_that_became_slower_is_no_error_of_the_planner() -> None:
    each = found(step=1.5, reference=3.0, predicted_reference=2.0)
    assert each.machine == pytest.approx(1.5)
    assert each.error == pytest.approx(0)
    assert each.plain_error == pytest.approx(1 / 1.5 - 1)


def test_an_error_of_the_planner_stays_one_on_a_machine_of_the_same_speed() -> None:
    each = found(step=0.8, reference=2.0, predicted_reference=2.0)
    assert each.machine == pytest.approx(1)
    assert each.error == each.plain_error == pytest.approx(0.25)


def test_both_errors_are_in_the_table() -> None:
    text = render([found(step=1.5, reference=3.0, predicted_reference=2.0)])
    assert "- 0.0% off (median), 0.0% (worst); the goal is 8% (median)" in text
    assert "- 33.3% (median), 33.3% (worst) with whatever the machine's speed had" in text
    assert "the reference took 1.50 to 1.50 times" in text
    assert "| a case |" in text
    assert "| 1.50 | +0.0% | -33.3% |" in text


def test_the_reference_is_no_case_of_the_grid() -> None:
    for case in grid():
        reference = reference_of(case.config)
        assert reference.precision.dtype == case.config.precision.dtype
        assert reference.model != case.config.model
