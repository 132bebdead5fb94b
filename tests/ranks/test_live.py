"""Cells between two steps of a run on two ranks: what they find, what they leave, and how they may fail."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Pool
from ranks.runs import as_engine, new_run, own_rank, trainer_of
from speedlab.telemetry.cell_outcomes import CellOutcome, cell_path, take_said
from speedlab.telemetry.records import Event
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry


@pytest.fixture
def world(two: Pool) -> Iterator[Pool]:
    """Two ranks that may leave their world: the pool's own is made anew behind them."""
    yield two
    two.new_group()


Words = Sequence[tuple[str, dict[str, Any]]]


class PlainCells:
    """Cells that are plain files, run in a namespace of their own; `text` is what they leave as `said`."""

    def take(self, path: Path) -> str:
        code = path.read_text()
        path.unlink()
        return code

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def run(
        self,
        code: str,
        door: str,
        names: Mapping[str, Any],
        interruptible: Callable[[], AbstractContextManager[object]],
    ) -> CellOutcome:
        namespace = {"os": os, "signal": signal, "threading": threading, "torch": torch, **names}
        try:
            with interruptible():
                exec(code, namespace)
        except BaseException as error:
            return CellOutcome([], None, {"kind": type(error).__name__, "message": str(error)})
        return CellOutcome([], str(namespace.get("said")), None)


def advance(run: str, *later: Words) -> tuple[str, list[float]]:
    """Bring it forward, and once more for each group of words that is given later. The state it is left in, and of each
    parameter one number."""
    with as_engine(run):
        state = run_registry.advance(run, cells=PlainCells())
        for words in later:
            if own_rank() == 0:
                give(run, words)
            state = run_registry.advance(run, cells=PlainCells())
        whole = trainer_of(run).engine.state_dict()
        return state, [float(value.double().square().sum()) for value in whole.values()]


def give(run: str, words: Words) -> None:
    for word, arguments in words:
        if word == "live":
            post(run, **arguments)
        else:
            RunFolder(run).post(word, **arguments)


def post(run: str, cell: str, code: str, **arguments: Any) -> None:
    path = cell_path(Path(run), cell)
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    RunFolder(run).post("live", cell=cell, **arguments)


def answers(run: str) -> list[Event]:
    return [event for event in RunFolder(run).read_events() if event.command is not None]


LOOK = """
before = model.training
loss = engine(batch[0], targets=batch[1]).loss
engine.backward(loss)
torch.rand(3)
said = len(batch), tuple(batch[0].shape), engine.global_step, bool(torch.isfinite(loss)), before
engine.eval()
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
"""


@pytest.mark.parametrize("stage", [0, 3])
def test_a_look_changes_nothing(world: Pool, tmp_path: Path, stage: int) -> None:
    changes: dict[str, Any] = {"zero": stage, "steps": 4}
    model = {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 16, "dropout": 0.1}
    (tmp_path / "plain").mkdir()
    (tmp_path / "looked").mkdir()
    plain = new_run(tmp_path / "plain", model=model, **changes)
    looked = new_run(tmp_path / "looked", model=model, **changes)
    steps: list[Words] = [[("step", {"n": 2})], [("resume", {})]]
    looks: list[Words] = [
        [("live", {"cell": name, "code": LOOK}), *words] for name, words in zip("ab", steps, strict=True)
    ]
    RunFolder(plain).post("step", n=1)
    RunFolder(looked).post("step", n=1)
    undisturbed = world.run(advance, plain, *steps)
    assert world.run(advance, looked, *looks) == undisturbed
    texts = [said.text for said in take_said(Path(looked), "b", Path.read_bytes).values()]
    assert texts == ["(2, (1, 16), 3, True, True)"] * 2
    assert list((Path(looked) / "live").iterdir()) == [cell_path(Path(looked), "a").with_suffix(".json")]


def test_only_the_ranks_that_are_named_run_it(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=2)
    post(run, "one", "said = os.environ['RANK']", ranks=[1])
    post(run, "beyond", "said = 1", ranks=[2])
    post(run, "none", "said = 1", ranks=[])
    RunFolder(run).post("resume")
    assert [state for state, _ in world.run(advance, run)] == ["finished"] * 2
    assert {rank: said.text for rank, said in take_said(Path(run), "one", Path.read_bytes).items()} == {1: "1"}
    reported = [event.text for event in answers(run) if event.kind in ("looked", "warning")]
    assert reported == [
        "a cell on 1 of 2 ranks",
        "live: there is no rank 2; the run has ranks 0 to 1",
        "live: no rank was named; the run has ranks 0 to 1",
    ]


def test_a_cell_that_fails_on_one_rank_in_a_collective_ends_on_all_and_the_run_goes_on(
    world: Pool, tmp_path: Path
) -> None:
    fails = "if os.environ['RANK'] == '1':\n    raise ValueError('mine')\n" + LOOK
    run = new_run(tmp_path, steps=4, zero=3)
    post(run, "fails", fails)
    post(run, "works", LOOK)
    RunFolder(run).post("resume")
    assert [state for state, _ in world.run(advance, run)] == ["finished"] * 2
    failures = {rank: said.failure for rank, said in take_said(Path(run), "fails", Path.read_bytes).items()}
    assert failures[1] == {"kind": "ValueError", "message": "mine"}
    assert failures[0] is not None
    assert [said.failure for said in take_said(Path(run), "works", Path.read_bytes).values()] == [None, None]
    looked = [event for event in answers(run) if event.kind == "looked"]
    assert [event.details["failed"] for event in looked] == [[0, 1], []]


HANGS = "print(1); os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(30)"


@pytest.mark.parametrize(
    ("code", "ranks", "failed"),
    [
        (HANGS, [1], [1]),  # The other one waits for it.
        (f"if os.environ['RANK'] == '1':\n    {HANGS}\nengine(batch[0])", None, [0]),  # ... in a collective.
        (f"if os.environ['RANK'] == '1':\n    {HANGS}\n1 / 0", None, [0]),  # ... and has left the world.
        (f"try:\n    {HANGS}\nexcept BaseException:\n    said = 'mine'", None, []),
    ],
    ids=["alone", "in a collective", "after the other has failed", "swallowed"],
)
def test_an_interrupt_ends_the_cell_and_pauses_the_run(
    world: Pool, tmp_path: Path, code: str, ranks: list[int] | None, failed: list[int]
) -> None:
    run = new_run(tmp_path, steps=4, zero=3)
    RunFolder(run).post("step", n=1)
    post(run, "hangs", code, ranks=ranks)
    states = world.run(interrupted_and_resumed, run, timeout=25)
    assert states == [["paused", True, "finished"]] * 2
    events = RunFolder(run).read_events()
    assert [event.details["failed"] for event in events if event.kind == "looked"] == [failed]
    assert [event.step for event in events if event.kind == "interrupted"] == [0]
    assert take_said(Path(run), "hangs", Path.read_bytes).keys() <= {0, 1}


def test_a_word_to_go_on_does_not_outlive_an_interrupted_cell(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=4)
    post(run, "hangs", HANGS)
    RunFolder(run).post("resume")
    assert [state for state, _ in world.run(advance, run, [])] == ["paused"] * 2
    reported = [event.text for event in answers(run) if event.kind == "warning"]
    assert reported == ["resume: the run was interrupted after this was asked for; ask again to go on"]


BREAKS_THE_STORE = """
import pathlib
from torch.distributed import distributed_c10d
store = distributed_c10d._get_default_store()
while not hasattr(store, "path"):
    store = store.underlying_store
if os.environ["RANK"] == "0":
    broken = pathlib.Path(store.path + "-broken")
    broken.symlink_to(store.path)
    broken.replace(store.path)
"""


def test_a_rank_that_comes_when_the_store_is_broken_pauses_as_the_others_have(world: Pool, tmp_path: Path) -> None:
    """It would meet the others anew, who do not come: whoever interrupts gives them a new store by then."""
    run = new_run(tmp_path, steps=4, zero=3)
    post(run, "late", BREAKS_THE_STORE + HANGS)
    RunFolder(run).post("step", n=1)
    assert world.run(paused_and_left, run, timeout=25) == [["paused", True]] * 2
    assert [event.kind for event in RunFolder(run).read_events()][-3:] == ["looked", "interrupted", "warning"]


def paused_and_left(run: str) -> list[Any]:
    with as_engine(run):
        return [run_registry.advance(run, cells=PlainCells()), not dist.is_initialized()]


def interrupted_and_resumed(run: str) -> list[Any]:
    """State after the cell, whether this rank has left the world by then, and the state in the end."""
    with as_engine(run):
        state = run_registry.advance(run, cells=PlainCells())
        left = not dist.is_initialized()
        if own_rank() == 0:
            RunFolder(run).post("resume")
        return [state, left, run_registry.advance(run, cells=PlainCells())]


def test_what_belongs_to_the_run_is_refused_to_a_cell(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=2)
    post(run, "trains", "engine.train_batch([batch] * engine.accumulation)")
    post(
        run,
        "steps",
        "for _ in range(2):\n    engine.backward(engine(batch[0], targets=batch[1]).loss)\n    engine.step()",
    )
    post(run, "reshapes", "engine.reshape(zero=1)")
    RunFolder(run).post("resume")
    assert [state for state, _ in world.run(advance, run)] == ["finished"] * 2
    for cell, what in (("trains", "train_batch"), ("steps", "step"), ("reshapes", "reshape")):
        for said in take_said(Path(run), cell, Path.read_bytes).values():
            assert said.failure is not None
            assert said.failure["message"].startswith(f"{what}: this cell runs between two steps of a run")


def test_engines_that_nobody_gave_cells_say_so(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=1)
    post(run, "any", "said = 1")
    RunFolder(run).post("resume")
    world.run(advance_without, run)
    assert [event.text for event in answers(run) if event.kind == "warning"] == [
        "live: these engines take no cells: no cluster has started them"
    ]


def advance_without(run: str) -> str:
    with as_engine(run):
        return run_registry.advance(run)
