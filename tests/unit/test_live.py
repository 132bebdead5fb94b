"""Cells between two steps, in a run's folder: sealed, bounded, checked."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.signed_files import write_signed
from speedlab.cluster.run_cell_handle import LiveCell
from speedlab.cluster.worker import cells
from speedlab.cluster.worker.cells import LiveCells
from speedlab.config import ConfigError
from speedlab.engine import Engine
from speedlab.engine.train_step import StepState
from speedlab.telemetry.cell_outcomes import MOST_BYTES, CellOutcome, cell_path, take_said, write_said
from speedlab.telemetry.run_folder import RunFolderError
from speedlab.trainer.commands import WORDS
from speedlab.trainer.interrupts import Interruption
from speedlab.trainer.live_cells import _left_as_it_was, _look


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "live").mkdir()
    return tmp_path


def test_a_cell_that_somebody_else_wrote_is_not_run(folder: Path) -> None:
    path = cell_path(folder, "one")
    write_signed(path, b"1 + 1")
    assert path.stat().st_mode & 0o777 == 0o600
    sealed = path.read_bytes()
    assert LiveCells().take(path) == "1 + 1"
    assert not path.exists()
    path.write_bytes(sealed + b"; import os")
    with pytest.raises(ClusterError, match=r"not written by you .* Run the cell again"):
        LiveCells().take(path)


def test_a_long_result_or_error_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Any = nullcontext()
    heard.messages = []
    monkeypatch.setattr(cells, "_Heard", lambda shell: heard)
    monkeypatch.setattr(cells, "get_ipython", lambda: SimpleNamespace(user_ns={}))
    long = "x" * (MOST_BYTES + 1000)

    def fail(*arguments: object) -> None:
        raise ValueError(long)

    for work in (lambda *arguments: long, fail):
        monkeypatch.setattr(cells, "run_cell", work)
        said = LiveCells().run("", "one", {}, nullcontext)
        reported = said.text if said.failure is None else said.failure["message"]
        assert reported == f"{long[:MOST_BYTES]}\n… 1,000 characters are left out"


@pytest.mark.parametrize(("door", "times"), [("one", 1), ("", 0)])
def test_collectives_have_their_limit_where_nobody_can_be_asked(
    door: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: Any = nullcontext()
    heard.messages = []
    monkeypatch.setattr(cells, "_Heard", lambda shell: heard)
    monkeypatch.setattr(cells, "get_ipython", lambda: SimpleNamespace(user_ns={}))
    monkeypatch.setattr(cells, "run_cell", lambda *arguments: None)
    lifted: list[int] = []
    LiveCells(lambda: lifted.append(1) or nullcontext()).run("", door, {}, nullcontext)
    assert len(lifted) == times


def test_what_ranks_said_is_taken_once(folder: Path) -> None:
    said = CellOutcome([["stream", {"name": "stdout", "text": "hello"}]], None, None)
    write_said(folder, "one", [None, said], Path.write_bytes)
    assert take_said(folder, "one", Path.read_bytes) == {1: said}
    with pytest.raises(RunFolderError, match="cannot be read"):
        take_said(folder, "one", Path.read_bytes)


def asked_of(folder: Path, cell: str) -> LiveCell:
    run: Any = SimpleNamespace(folder=SimpleNamespace(path=folder))
    return LiveCell(SimpleNamespace(), run, cell, SimpleNamespace())  # type: ignore[arg-type]  # they are asked nothing


def test_an_answer_that_no_engine_of_this_user_wrote_is_not_shown(folder: Path) -> None:
    """It holds what a notebook displays, HTML and scripts among it."""
    path = cell_path(folder, "one").with_suffix(".json")
    write_said(folder, "one", [CellOutcome([], "3", None)], LiveCells().write)
    assert path.stat().st_mode & 0o777 == 0o600
    sealed = path.read_bytes()
    assert asked_of(folder, "one").said() == {0: CellOutcome([], "3", None)}
    for forged in (json.dumps([CellOutcome([], "4", None)]).encode(), sealed.replace(b"3", b"4"), b""):
        path.write_bytes(forged)
        with pytest.raises(ClusterError, match=r"one\.json was not written by you .* Run the cell again"):
            asked_of(folder, "one").said()


@pytest.mark.parametrize(
    ("failure", "reported"),
    [
        ({"kind": "ValueError", "message": "mine", "of_a_later_version": 3}, {0: "ValueError: mine"}),
        ({"kind": "ValueError"}, "a failure has no message"),
        ({"kind": 3, "message": "mine"}, "kind of a failure is 3"),
        ({"kind": "ValueError", "message": "mine", "step": "7"}, "step of a failure is '7'"),
    ],
)
def test_a_failure_of_another_version_is_read_and_a_damaged_one_named(
    folder: Path, failure: Any, reported: Any
) -> None:
    write_said(folder, "one", [CellOutcome([], None, failure)], LiveCells().write)
    cell = asked_of(folder, "one")
    if isinstance(reported, dict):
        assert {rank: str(found) for rank, found in cell.failures.items()} == reported
        return
    with pytest.raises(RunFolderError, match=f"what ranks said in cell one cannot be read: {reported}"):
        _ = cell.failures


def test_answers_that_nobody_takes_do_not_fill_the_folder(folder: Path) -> None:
    for number in range(18):
        write_said(folder, f"cell{number}", [None], Path.write_bytes)
        os.utime(cell_path(folder, f"cell{number}").with_suffix(".json"), (number, number))
    assert {path.stem for path in (folder / "live").iterdir()} == {f"cell{number}" for number in range(2, 18)}


@pytest.mark.parametrize(
    "found", [3, [3], [[[], None]], [[[["stream", 1]], None, None]], [[[], 3, None]], [[[], None, 3]]]
)
def test_an_answer_that_is_damaged_is_named(folder: Path, found: Any) -> None:
    cell_path(folder, "one").with_suffix(".json").write_text(json.dumps(found))
    with pytest.raises(RunFolderError, match=r"one\.json: what ranks said in the cell cannot be read"):
        take_said(folder, "one", Path.read_bytes)


def test_an_answer_that_is_taken_while_another_is_written_harms_neither(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_said(folder, "one", [None], Path.write_bytes)
    found = Path.glob

    def taken_meanwhile(path: Path, pattern: str) -> list[Path]:
        answers = list(found(path, pattern))
        take_said(folder, "one", Path.read_bytes)
        return answers

    monkeypatch.setattr(Path, "glob", taken_meanwhile)
    write_said(folder, "two", [None], Path.write_bytes)
    assert [path.name for path in (folder / "live").iterdir()] == ["two.json"]


def test_cells_never_lie_outside_the_folder(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    (folder / "live").rename(elsewhere)
    (folder / "live").symlink_to(elsewhere)
    for number in range(20):
        (elsewhere / f"{number}.json").touch()
    for work in (lambda: cell_path(folder, "one"), lambda: write_said(folder, "one", [None], Path.write_bytes)):
        with pytest.raises(RunFolderError, match="live leads out of the run's folder"):
            work()
    assert len(list(elsewhere.iterdir())) == 20


def test_the_code_of_a_cell_that_is_refused_does_not_stay(folder: Path) -> None:
    path = cell_path(folder, "one")
    write_signed(path, b"1 + 1")
    training: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=2), cells=LiveCells(), folder=SimpleNamespace(path=folder)
    )
    with pytest.raises(ConfigError, match="there is no rank 7"):
        WORDS["live"].plan(training, cell="one", ranks=[7])
    assert not path.exists()


def test_a_look_puts_back_all_generators_that_a_checkpoint_keeps() -> None:
    engine = SimpleNamespace(only_looked_at=nullcontext, abandon_step=lambda: None, train=lambda: None)
    training: Any = SimpleNamespace(engine=engine, world=SimpleNamespace(device=torch.device("cpu")))

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    with _left_as_it_was(training):
        first = drawn()
    assert drawn() == first


def test_an_interrupt_ends_a_cell_that_waits_for_its_batch() -> None:
    def hangs(rows: object, step: int) -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(10)
        yield

    engine = SimpleNamespace(
        only_looked_at=nullcontext, abandon_step=lambda: None, train=lambda: None, global_step=0, module=None
    )
    training: Any = SimpleNamespace(
        engine=engine,
        world=SimpleNamespace(device=torch.device("cpu")),
        cells=SimpleNamespace(run=lambda *arguments: CellOutcome([], "it ran", None)),
        interruption=Interruption(),
        batches=hangs,
        train_rows=None,
    )
    with training.interruption, training.interruption.held():
        said = _look(training, "1 + 1", "one")
        assert training.interruption.asked
    assert said.failure is not None
    assert said.failure["kind"] == "KeyboardInterrupt"


def test_a_look_loads_no_checkpoint() -> None:
    step = object.__new__(StepState)
    step.only_looked_at = True
    engine: Any = SimpleNamespace(_step=step, global_step=3)
    with pytest.raises(RuntimeError, match=r"load_checkpoint: this cell .* run\.resume\(\) do the rest"):
        Engine.load_checkpoint(engine, "checkpoints")


def test_who_awaits_a_cell_is_asked_nothing() -> None:
    """Else `breakpoint()` in it would hold up the run until it finds that nobody serves the door."""
    order: list[str] = []
    pending: Any = SimpleNamespace(__await__=lambda: iter(order.append("awaited") or ()))
    door: Any = SimpleNamespace(close=lambda: order.append("closed"))
    cell = LiveCell(pending, SimpleNamespace(), "one", door)  # type: ignore[arg-type]  # it is asked nothing
    cell._said = {0: CellOutcome([], "3", None)}
    with pytest.raises(StopIteration) as end:
        next(cell.__await__())
    assert (end.value.value, order) == ({0: "3"}, ["closed", "awaited"])
