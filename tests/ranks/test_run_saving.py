"""A run's saves in the background, which are all told and never cost the run; and its states on their way to another
layout."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ranks.pool import Pool
from ranks.runs import as_engine, new_run, trainer_of
from ranks.test_trainer import advance, events, post
from speedlab.engine.checkpoint import safetensors_files
from speedlab.engine.checkpoint import write as write_module
from speedlab.engine.engine import Engine
from speedlab.trainer import reshape
from speedlab.trainer.trainer import Loop


@pytest.fixture
def world(two: Pool) -> Iterator[Pool]:
    """Two ranks that may leave their world: the pool's own is made anew behind them."""
    yield two
    two.new_group()


def with_saves_longer_than_a_step(run: str) -> str:
    """What a step saves is written when the next one is over."""
    gates: list[threading.Event] = []
    next_save, end = Loop._save_if_due, Loop._end

    def held_up(*args: Any, **named: Any) -> Any:
        gates.append(threading.Event())
        assert gates[-1].wait(30)
        return safetensors_files.write_tensors(*args, **named)

    def open_gates() -> None:
        for gate in gates:
            gate.set()

    def save_next(loop: Loop, step: int) -> None:
        open_gates()
        next_save(loop, step)
        while len(gates) < step:  # Until the thread stands before its gate.
            threading.Event().wait(0.001)

    def last(loop: Loop, *args: Any) -> None:
        open_gates()
        end(loop, *args)

    with (
        as_engine(run),
        patch.object(write_module, "write_tensors", held_up),
        patch.object(Loop, "_save_if_due", save_next),
        patch.object(Loop, "_end", last),
    ):
        return advance(run)


def test_a_save_that_is_under_way_when_the_next_is_due_is_told_too(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=3, checkpoint={"every_steps": 1, "keep": 1})
    assert world.run(with_saves_longer_than_a_step, run) == ["finished"] * 2
    assert [event.text for event in events(run, "checkpoint")] == ["step-000001", "step-000002", "step-000003"]
    assert [path.name for path in (Path(run) / "checkpoints").iterdir()] == ["step-000003"]


def advance_as_engine(run: str) -> str:
    with as_engine(run):
        return advance(run)


def test_behind_a_step_that_is_skipped_nothing_is_due_again(world: Pool, tmp_path: Path) -> None:
    precision = {"dtype": "float16", "initial_loss_scale": 2.0**17, "loss_scale_window": 1}
    due = {"checkpoint": {"every_steps": 2, "keep": 9}, "eval": {"every_steps": 2}}
    run = new_run(tmp_path, steps=6, precision=precision, **due)
    assert world.run(advance_as_engine, run) == ["finished"] * 2
    lines = (Path(run) / "records" / "rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records]
    assert any(step % 2 == 0 and steps.count(step) > 1 for step in steps), "a step was skipped where something was due"
    assert [record["step"] for record in records if record["heldout_loss"] is not None] == [2, 4, 6]
    assert [event.text for event in events(run, "checkpoint")] == ["step-000002", "step-000004", "step-000006"]
    assert events(run, "warning") == []


def where_old_ones_cannot_be_removed(run: str) -> str:
    """A file of theirs is held open on a network disk."""

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path / ".nfs01"))

    with as_engine(run), patch.object(shutil, "rmtree", busy):
        return advance(run)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_cost_the_run(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=2, checkpoint={"every_steps": 1, "keep": 1})
    assert world.run(where_old_ones_cannot_be_removed, run) == ["finished"] * 2
    old = Path(run) / "checkpoints" / "step-000001" / ".nfs01"
    assert [event.text for event in events(run, "warning")] == [
        f"checkpoint: an older one was not removed: [Errno 16] Device or resource busy: '{old}'"
    ]


def reshaped_through(memory: Path, run: str) -> tuple[str, int, list[str]]:
    """Another layout, by way of files in `memory`; and which folders were there while they were written."""
    save, seen = Engine.save_checkpoint, []

    def look(engine: Engine, folder: Path, *args: Any, **kwargs: Any) -> Path:
        seen.extend(sorted(f"{path.name} {stat.S_IMODE(path.stat().st_mode):o}" for path in memory.iterdir()))
        return save(engine, folder, *args, **kwargs)

    with as_engine(run), patch.object(reshape, "_IN_MEMORY", memory), patch.object(Engine, "save_checkpoint", look):
        return advance(run), trainer_of(run).engine.layout.tp, seen


def test_what_a_killed_rank_left_in_memory_goes_with_the_next_change(world: Pool, tmp_path) -> None:
    """Of the folders of two others, one is in use; nobody else may look into, or have prepared, the own one."""
    memory = tmp_path / "memory"
    for name in ("speedlab-state-left", "speedlab-state-used", "others"):
        (memory / name).mkdir(parents=True, mode=0o700)
    (memory / "speedlab-state-left" / "state").write_text("many bytes")
    run = new_run(tmp_path)
    post(run, ("pause", {}), ("reshape", {"tp": 2}))
    used = os.open(memory / "speedlab-state-used", os.O_RDONLY)
    try:
        fcntl.flock(used, fcntl.LOCK_EX)
        for state, tp, seen in world.run(reshaped_through, memory, run):
            assert (state, tp) == ("paused", 2)
            [own] = set(seen) - {"others 700", "speedlab-state-used 700"}
            assert re.fullmatch(r"speedlab-state-\w+ 700", own)
    finally:
        os.close(used)
    assert sorted(path.name for path in memory.iterdir()) == ["others", "speedlab-state-used"]
