"""Learning from a run's folder, as it is left by engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration_samples import calibration

from speedlab.cluster.learn_from_run import learn_from
from speedlab.config import ConfigError, RunConfig
from speedlab.planner.calibration import store
from speedlab.planner.formulas import parameter_count
from speedlab.telemetry.records import Event, Ledger, StepRecord
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import RecordWriter

HERE = calibration()


def run_folder(folder: Path, *, parameters: int | None = None, reshaped: bool = False) -> RunFolder:
    config = RunConfig(name="measured", folder=folder, steps=10)
    run = RunFolder.create(config)
    for rank in range(2):
        writer = RecordWriter(run, rank, stream_hz=0.1)
        if rank == 0:
            details = {"parameters": parameters or parameter_count(config.model), "dtype": "float32"}
            writer.event(Event(kind="started", step=0, time=1.0, details=details))
            if reshaped:
                writer.event(Event(kind="reshaped", step=5, time=1.0, details={"before": 2, "zero": 3}))
        for step in range(10):
            writer.write(record(rank, step))
        writer.close()
    return run


def record(rank: int, step: int) -> StepRecord:
    return StepRecord(
        step=step,
        rank=rank,
        time=1.0,
        loss=1.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        loss_scale=1.0,
        zero_stage=0,
        tokens=512,
        flops=1e9,
        seconds=0.25,
        phases={"forward": 0.05, "backward": 0.15, "communication": 0.02, "optimizer": 0.03},
        ledger=Ledger(other_framework=1000, outside_framework=2000),
        traced=step == 4,
    )


def test_a_run_is_learned_from_its_folder(tmp_path: Path):
    store.save(HERE, tmp_path)
    said = learn_from(run_folder(tmp_path / "runs"), folder=tmp_path)
    assert "measured 250.0 ms" in said
    assert "1 run" in said
    found = store.load(tmp_path)
    assert found is not None
    (run,) = found.runs
    assert (run.measured_seconds, run.engines, run.steps) == (0.25, 2, 7)  # ten, without two first and a traced one
    assert found.process_remainder() == (3000, 1)
    assert found.learned("computing")[1] == 1


def test_what_nothing_can_be_learned_from_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="never measured"):
        learn_from(run_folder(tmp_path / "a"), folder=tmp_path)
    store.save(HERE, tmp_path)
    with pytest.raises(ConfigError, match="not the built-in GPT"):
        learn_from(run_folder(tmp_path / "b", parameters=7), folder=tmp_path)
    with pytest.raises(ConfigError, match="changed on the way"):
        learn_from(run_folder(tmp_path / "c", reshaped=True), folder=tmp_path)
    assert store.load(tmp_path) == HERE
