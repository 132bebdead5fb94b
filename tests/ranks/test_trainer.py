"""A run's trainer on two ranks: interrupts, and failures of one rank that must be the failure of all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ranks.pool import Pool
from ranks.runs import as_engine, new_run, trainer_of
from speedlab.engine.engine import Engine
from speedlab.engine.run import held_runs, interrupt
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import Event, RunState


@pytest.fixture
def world(two: Pool) -> Any:
    """Two ranks that may leave their world: the pool's own is made anew behind them."""
    yield two
    two.new_group()


def events(run: str, kind: str) -> list[Event]:
    return [event for event in RunFolder(run).read_events() if event.kind == kind]


# ---- interrupts ------------------------------------------------------------------------------------------------------


def interrupted_before_a_long_save(run: str) -> tuple[str, int, bool]:
    """SIGINT in the first step; the save that is due after it takes longer than a step may."""
    save = Engine.save_checkpoint
    armed: list[float] = []

    def asked_in_the_step(engine: Engine, *args: Any, **kwargs: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return train(engine, *args, **kwargs)

    def long_save(engine: Engine, *args: Any, **kwargs: Any) -> Path:
        armed.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return save(engine, *args, **kwargs)

    train = Engine.train_batch
    with (
        as_engine(run),
        patch.object(Engine, "train_batch", asked_in_the_step),
        patch.object(Engine, "save_checkpoint", long_save),
        patch.object(interrupt, "PATIENCE_SECONDS", 30.0),
    ):
        state = held_runs.advance(run)
        return state, trainer_of(run).engine.global_step, armed == [0.0]


def test_an_interrupt_that_was_heard_does_not_break_off_the_save_behind_the_step(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, checkpoint={"every_steps": 1})
    assert world.run(interrupted_before_a_long_save, run) == [("paused", 1, True)] * 2
    assert [event.text for event in events(run, "checkpoint")] == ["step-000001"]
    assert RunFolder(run).read_status().state is RunState.PAUSED
