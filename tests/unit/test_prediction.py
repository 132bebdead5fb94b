"""What the planner said of a run, from what the run tells of itself."""

from __future__ import annotations

import pytest
from telemetry_samples import make_event

from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.planner import parameter_count
from speedlab.planner.calibration import store
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.setup import Setup
from speedlab.telemetry.prediction import error_text, prediction_of

DEVICE = Device(
    kind="cpu",
    name="cpu 0",
    uuid="",
    cores=(0,),
    threads=1,
    capacity_bytes=2**32,
    free_bytes=2**32,
    fast_dtype="float32",
)
CONFIG = RunConfig(model="gpt-tiny", zero=1)


@pytest.fixture(autouse=True)
def _not_calibrated(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(store, "path", lambda folder=None: tmp_path / "none.json")


def started(**changes):
    said = {"parameters": parameter_count(CONFIG.model), "dtype": "float32", "pp": 1, "dp": 4, "tp": 1, "zero": 1}
    return make_event("started", details={**said, **changes})


def test_a_run_is_predicted_as_a_plan_of_its_configuration_is() -> None:
    found = prediction_of(CONFIG, [started()], [DEVICE] * 4)
    assert found is not None
    hardware = hardware_here([DEVICE] * 4, "float32")
    setup = Setup.of_config(CONFIG, 4, dtype="float32")
    assert [rank.total for rank in found.memory] == [hardware.memory(setup)[0].total] * 4
    assert found.speeds == ((0, hardware.time(setup).tokens_per_second),)
    assert found.note == "(not yet calibrated)"


def test_a_change_of_shape_changes_what_is_predicted_from_its_step_on() -> None:
    after = {"zero": 1, "pp": 2, "dp": 2, "tp": 1, "schedule": "1f1b", "chunks": 1, "micro_batches": 2, "cut": None}
    change = make_event("reshaped", 30, details={"before": {"zero": 1}, "after": {**after, "sequence": False}})
    found = prediction_of(CONFIG, [started(), change], [DEVICE] * 4)
    assert found is not None
    assert [step for step, _ in found.speeds] == [0, 30]
    assert found.memory[0].pipeline == 0
    assert found.memory[3].pipeline == 1


def test_what_is_not_known_is_not_predicted() -> None:
    assert prediction_of(CONFIG, [], [DEVICE] * 4) is None
    assert prediction_of(CONFIG, [started()], []) is None
    assert prediction_of(CONFIG, [started(parameters=7)], [DEVICE] * 4) is None  # Somebody's own model.
    assert prediction_of(CONFIG, [started(dtype=None)], [DEVICE] * 4) is None


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [
        (120, 100, "20 % more than measured"),
        (80, 100, "20 % less than measured"),
        (199, 100, "99 % more than measured"),
        (200, 100, "2 times what was measured"),
        (351, 100, "3.5 times what was measured"),
        (150_000, 100, "1,500 times what was measured"),
        (100.4, 100, "as measured"),
        (99.6, 100, "as measured"),
        (100, 0, ""),
        (100, float("nan"), ""),
        (float("inf"), 100, ""),
    ],
)
def test_an_error_is_told_in_words(predicted: float, measured: float, text: str) -> None:
    assert error_text(predicted, measured) == text
