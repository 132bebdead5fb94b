"""A run's trainer on two ranks: interrupts, and failures of one rank that must be the failure of all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Pool
from ranks.runs import as_engine, new_run, own_rank, trainer_of
from speedlab.cluster.worker import remote
from speedlab.cluster.worker.serialization import pack
from speedlab.config import ConfigError
from speedlab.engine.engine import Engine
from speedlab.planner import predicted_peaks
from speedlab.telemetry.current_config import changed_config
from speedlab.telemetry.records import Event, Ledger, RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import RecordWriter
from speedlab.trainer import commands as words
from speedlab.trainer import interrupts, run_registry, training_run


@pytest.fixture
def world(two: Pool) -> Iterator[Pool]:
    """Two ranks that may leave their world: the pool's own is made anew behind them."""
    yield two
    two.new_group()


def events(run: str, kind: str) -> list[Event]:
    return [event for event in RunFolder(run).read_events() if event.kind == kind]


def post(run: str, *commands: tuple[str, dict[str, Any]]) -> None:
    for word, arguments in commands:
        RunFolder(run).post(word, **arguments)


def advance(run: str) -> str:
    """The state in which an advance leaves the run, or what it raises."""
    try:
        return run_registry.advance(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def broken(
    owner: Any, name: str, error: Exception, *, rank: int = 1, first: int = 0, last: int = 1000
) -> Iterator[None]:
    """On `rank`, calls number `first` to `last` of `owner.name` raise."""
    works, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if first < len(calls) <= last + 1:
            raise error
        return works(*args, **kwargs)

    with patch.object(owner, name, fails) if own_rank() == rank else contextlib.nullcontext():
        yield


# ---- interrupts ------------------------------------------------------------------------------------------------------


def interrupted_before_a_long_save(run: str) -> tuple[str, int, bool]:
    """SIGINT in the first step; the save that is due after it may take its time."""
    save, train = Engine.save_checkpoint, Engine.train_batch
    left: list[float] = []

    def asked_in_the_step(engine: Engine, *args: Any, **kwargs: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return train(engine, *args, **kwargs)

    def long_save(engine: Engine, *args: Any, **kwargs: Any) -> Path:
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return save(engine, *args, **kwargs)

    with (
        as_engine(run),
        patch.object(Engine, "train_batch", asked_in_the_step),
        patch.object(Engine, "save_checkpoint", long_save),
        patch.object(interrupts, "PATIENCE_SECONDS", 30.0),
    ):
        state = run_registry.advance(run)
        return state, trainer_of(run).engine.global_step, left == [0.0]


def test_an_interrupt_that_was_heard_does_not_break_off_the_save_behind_the_step(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, checkpoint={"every_steps": 1})
    assert world.run(interrupted_before_a_long_save, run) == [("paused", 1, True)] * 2
    assert [event.text for event in events(run, "checkpoint")] == ["step-000001"]
    assert RunFolder(run).read_status().state is RunState.PAUSED


# ---- control words ---------------------------------------------------------------------------------------------------


def advance_once(run: str) -> tuple[str, int]:
    with as_engine(run):
        return advance(run), trainer_of(run).engine.global_step


def test_arguments_are_checked_before_anything_is_done(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("pause", {"now": True}, "pause: it takes no 'now'"),
        ("step", {"n": "3"}, "step: n is '3'; it is a whole number of at least 1"),
        ("step", {"n": True}, "step: n is True; it is a whole number of at least 1"),
        ("resume", {"step": -1}, "resume: step is -1; it is a whole number of at least 0"),
        ("resume", {"stepp": 1}, "resume: unknown key 'stepp'; the nearest known key is 'step'"),
        ("save", {"tag": "../up"}, "save: tag is '../up'; it is the name of a folder: letters, digits, '-' and '_'"),
        ("reshape", {"zero": "three"}, "reshape: zero is 'three'; it is a whole number of at least 0"),
        ("reshape", {"cut": 2}, "reshape: cut is 2; it is a list of blocks for each pipeline stage"),
    ]
    post(run, ("pause", {}), *((word, arguments) for word, arguments, _ in wrong), ("step", {"n": 2}))
    assert world.run(advance_once, run) == [("paused", 2)] * 2
    assert [event.text for event in events(run, "warning")] == [text for _, _, text in wrong]
    assert all(event.details["error"] is True for event in events(run, "warning"))


def with_words_that_fail_on_one_rank(run: str) -> tuple[str, int, int]:
    """A plan that one rank alone cannot make, and a save that fails on one rank while the other waits for it."""
    with (
        as_engine(run),
        broken(words, "changed_config", TypeError("no such thing"), rank=0),
        broken(Engine, "save_checkpoint", OSError("disk on fire")),
    ):
        state = advance(run)
        return state, trainer_of(run).engine.global_step, trainer_of(run).engine.zero_stage


def test_a_word_that_fails_on_one_rank_is_refused_by_all_and_the_run_goes_on(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, zero=1)
    post(run, ("pause", {}), ("reshape", {"zero": 2}), ("save", {}), ("step", {"n": 2}))
    assert world.run(with_words_that_fail_on_one_rank, run) == [("paused", 2, 1)] * 2
    assert [event.text for event in events(run, "warning")] == [
        "reshape: rank 0: TypeError: no such thing",
        "save: rank 1: OSError: disk on fire",
    ]


def with_a_load_that_fails_on_one_rank(run: str) -> list[Any]:
    """The other has loaded when it hears of it; what is asked for next finds the ranks at the last checkpoint."""
    with as_engine(run):
        found: list[Any] = [advance(run)]
        for word, problem in (("save", None), ("resume", ValueError("bad sector")), ("step", None)):
            trainer = trainer_of(run)
            if own_rank() == 0:
                post(run, (word, {"resume": {"step": 1}}.get(word, {})))
            trainer.training.control.barrier()
            with broken(Engine, "load_checkpoint", problem) if problem else contextlib.nullcontext():
                found.append(advance(run))
            found.append((trainer.engine.global_step, trainer.training.whole))
        return [*found, trainer_of(run).engine.global_step]


def test_a_load_that_fails_on_one_rank_fails_the_run_which_goes_on_from_its_checkpoint(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path)
    post(run, ("pause", {}), ("step", {"n": 1}))
    failed = "RanksDiverged: rank 1: ValueError: bad sector"
    assert (
        world.run(with_a_load_that_fails_on_one_rank, run)
        == [["paused", "paused", (1, True), failed, (1, False), "paused", (1, False), 2]] * 2
    )


# ---- building --------------------------------------------------------------------------------------------------------


def built_with_problems(run: str) -> list[str]:
    """One rank finds the data unfit, cannot read them, cannot make the model; then all is well."""
    with as_engine(run):
        found = []
        for problem in (ConfigError("too short"), OSError("unreadable")):
            with broken(training_run, "prepare", problem):
                found.append(advance(run))
        for problem in (ConfigError("no such layer"), MemoryError("no room")):
            with broken(training_run, "GPT", problem):
                found.append(advance(run))
        return [*found, advance(run)]


def test_a_rank_that_cannot_build_the_run_does_not_leave_the_others_waiting(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=1)
    first, second = world.run(built_with_problems, run)
    assert first == [
        "CommandRefused: rank 1: too short",
        "PeerLost: rank 1: OSError: unreadable",
        "RanksDiverged: rank 1: no such layer",
        "RanksDiverged: rank 1: MemoryError: no room",
        "paused",
    ]
    assert second == [first[0], "OSError: unreadable", *first[2:]]


def interrupted_while_it_is_built(run: str) -> list[str]:
    with as_engine(run):
        with patch.object(training_run, "GPT", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            run_registry.advance(run)
        status = RunFolder(run).read_status()
        if own_rank() == 0:
            post(run, ("step", {"n": 1}))
        return [str(status.state), status.text, advance(run)]


def test_a_run_that_is_interrupted_while_it_is_built_is_paused(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=2)
    first, second = world.run(interrupted_while_it_is_built, run)
    assert first == ["paused", "interrupted before it was built; run.resume() builds it again", "paused"]
    assert second[2] == "paused"
    assert [event.step for event in events(run, "paused")] == [1]


# ---- two runs on the same ranks --------------------------------------------------------------------------------------


def two_runs(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir()
    return [new_run(folder / name, name=name, steps=5) for name in names]


def one_after_the_other(first: str, second: str, *words: Any) -> list[Any]:
    """The first as it is left behind a step and these words, then the second, then the first again."""
    with as_engine(first):
        found: list[Any] = [advance(first), advance(second), list(run_registry.held().values())]
        if own_rank() == 0:
            post(first, *words)
        return [*found, advance(first), run_registry.held().get(first)]


def test_a_paused_run_is_saved_before_another_one_takes_its_place(world: Pool, tmp_path) -> None:
    first, second = two_runs(tmp_path, "first", "second")
    post(first, ("step", {"n": 2}))
    post(second, ("step", {"n": 1}))
    step = ("step", {"n": 1})
    assert world.run(one_after_the_other, first, second, step) == [["paused", "paused", [1], "paused", 3]] * 2
    assert [(event.step, event.text) for event in events(first, "checkpoint")] == [(2, "step-000002")]
    assert [event.text for event in events(second, "checkpoint")] == ["step-000001"]  # As it made room in its turn.


def test_a_run_that_cannot_be_saved_keeps_its_place(world: Pool, tmp_path) -> None:
    first, second = two_runs(tmp_path, "first", "second")
    post(first, ("step", {"n": 2}))
    (reported, *after), (reported_too, *_) = world.run(refused_for_want_of_room, first, second)
    assert reported == reported_too
    assert "run 'first' is paused at step 2, which no checkpoint holds, and cannot be saved to make room" in reported
    assert "rank 1: OSError: no space" in reported
    assert after == [2, "paused", 3, "paused", [1]]
    assert RunFolder(second).read_status().state is RunState.PAUSED


def refused_for_want_of_room(first: str, second: str) -> list[Any]:
    with as_engine(first):
        advance(first)
        with broken(Engine, "save_checkpoint", OSError("no space")):
            found: list[Any] = [advance(second), run_registry.held()[first]]
        if own_rank() == 0:
            post(first, ("step", {"n": 1}))
        found += [advance(first), run_registry.held()[first]]
        if own_rank() == 0:
            post(first, ("stop", {}))  # Who gives it up need not save it.
            post(second, ("step", {"n": 1}))
        advance(first)
        with broken(Engine, "save_checkpoint", OSError("no space")):
            return [*found, advance(second), list(run_registry.held().values())]


def interrupted_while_it_makes_room(first: str, second: str) -> list[Any]:
    """The signal comes while the first one is written, which comes to its end."""
    works, reported = Engine.save_checkpoint, []

    def interrupted(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        reported.append(RunFolder(second).read_status().text)
        os.kill(os.getpid(), signal.SIGINT)
        return works(engine, *args, **kwargs)

    with as_engine(first):
        state = advance(first)
        with patch.object(Engine, "save_checkpoint", interrupted), pytest.raises(KeyboardInterrupt):
            run_registry.advance(second)
        return [state, run_registry.held(), str(RunFolder(second).read_status().state), reported]


def test_an_interrupt_while_a_run_makes_room_is_for_the_other_one(world: Pool, tmp_path) -> None:
    first, second = two_runs(tmp_path, "first", "second")
    post(first, ("step", {"n": 2}))
    found, _ = world.run(interrupted_while_it_makes_room, first, second)
    reported = "run 'first', which is paused on these engines, is saved first"
    assert found == ["paused", {first: 2}, "paused", [reported]]
    assert [event.step for event in events(first, "checkpoint")] == [2]


def test_a_run_that_was_cut_off_in_an_update_makes_room(world: Pool, tmp_path) -> None:
    """There is no step that could be kept."""
    first, second = two_runs(tmp_path, "first", "second")
    post(first, ("step", {"n": 2}))
    post(second, ("step", {"n": 1}))
    assert world.run(cut_off_and_another, first, second) == [["paused", "paused", {second: 1}]] * 2
    assert events(first, "checkpoint") == []


def cut_off_and_another(first: str, second: str) -> list[Any]:
    with as_engine(first):
        state = advance(first)
        trainer_of(first).engine.updating = own_rank() == 0
        return [state, advance(second), run_registry.held()]


def test_a_run_that_nobody_kept_takes_no_place(world: Pool, tmp_path) -> None:
    lost, other = two_runs(tmp_path, "lost", "other")
    post(lost, ("step", {"n": 1}))
    post(other, ("step", {"n": 1}))
    reported, step = world.run(given_up_and_asked_again, lost, other)[0]
    assert "its engines do not hold its state" in reported
    assert step == 1
    assert events(other, "checkpoint") == []


def given_up_and_asked_again(lost: str, other: str) -> list[Any]:
    with as_engine(lost):
        advance(lost)
        run_registry.release()
        advance(other)
        return [advance(lost), run_registry.held().get(other)]


# ---- beside the step -------------------------------------------------------------------------------------------------


def with_a_record_that_cannot_be_written(run: str, rank: int) -> str:
    with as_engine(run), broken(RecordWriter, "write", OSError("no space"), rank=rank, first=1):
        return advance(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_its_record_fails_the_run_on_all(world: Pool, tmp_path, rank: int) -> None:
    run = new_run(tmp_path)
    outcomes = world.run(with_a_record_that_cannot_be_written, run, rank)
    assert outcomes[rank] == "OSError: no space"
    assert outcomes[1 - rank].startswith("PeerLost")
    assert RunFolder(run).read_status().state is RunState.FAILED


def with_an_event_that_cannot_be_written(run: str) -> str:
    """The disk is full for the first rank, which cannot say of its failure either."""
    with as_engine(run), broken(RecordWriter, "event", OSError("no space"), rank=0, first=1):
        return advance(run)


def test_a_failure_that_cannot_be_written_down_is_still_raised_on_all(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=1)
    first, second = world.run(with_an_event_that_cannot_be_written, run)
    assert first == "OSError: no space"
    assert second in ("finished", "PeerLost")  # It may have ended before.


def with_a_model_that_cannot_be_made_on_a_full_disk(run: str) -> str:
    with (
        as_engine(run),
        broken(training_run, "GPT", ZeroDivisionError("seven"), rank=0),
        broken(RunFolder, "write_status", OSError("no space"), rank=0),
    ):
        return advance(run)


def test_what_cannot_be_built_is_told_though_it_cannot_be_written_down(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=1)
    reported = "RanksDiverged: rank 0: ZeroDivisionError: seven"
    assert world.run(with_a_model_that_cannot_be_made_on_a_full_disk, run) == [reported] * 2


def with_periodic_saves_that_fail(run: str) -> str:
    with as_engine(run), broken(Engine, "save_checkpoint", OSError("disk on fire")):
        return advance(run)


def test_a_periodic_save_that_fails_on_one_rank_does_not_cost_the_run(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=2, checkpoint={"every_steps": 1})
    assert world.run(with_periodic_saves_that_fail, run) == ["finished"] * 2
    assert [event.text for event in events(run, "warning")] == ["checkpoint: rank 1: OSError: disk on fire"] * 2


# ---- changes of layout -----------------------------------------------------------------------------------------------


def with_a_layout_that_one_rank_cannot_build(run: str) -> tuple[str, int, int]:
    """The model of the first engine is made, and that of the third, which goes on as the first did."""
    with as_engine(run), broken(training_run, "GPT", MemoryError("no room"), first=1, last=1):
        return advance(run), trainer_of(run).engine.global_step, trainer_of(run).engine.layout.tp


def test_a_layout_that_one_rank_cannot_build_is_taken_back(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path)
    post(run, ("pause", {}), ("reshape", {"tp": 2}), ("step", {"n": 1}))
    assert world.run(with_a_layout_that_one_rank_cannot_build, run) == [("paused", 1, 1)] * 2
    assert [event.text for event in events(run, "warning")] == [
        "reshape: rank 1: MemoryError: no room; the run goes on under pp 1 × dp 2 × tp 1 as before"
    ]


def with_little_memory(run: str, room: float) -> tuple[str, int]:
    """Ranks that can hold the states of larger micro-batches, and `room` of what a step of them needs besides."""
    config = changed_config(RunFolder(run).config, 2, micro_batches=1)
    peaks = predicted_peaks(config, 2, capacity_bytes=[1, 1], dtype="float32", device="cpu")
    assert peaks is not None
    memory = peaks.memory[0]
    capacity = memory.model_states + round(room * (memory.total - memory.model_states))
    ledger = Engine.ledger

    def little(engine: Engine) -> Ledger:
        return replace(ledger(engine), capacity_bytes=capacity, other_framework=0, outside_framework=0)

    with as_engine(run), patch.object(Engine, "ledger", little):
        return advance(run), trainer_of(run).engine.accumulation


@pytest.mark.parametrize(("room", "micro_batches"), [(0.95, 16), (1.0, 1)])
def test_what_has_room_for_its_states_but_not_for_a_step_is_refused(
    world: Pool, tmp_path, room: float, micro_batches: int
) -> None:
    run = new_run(tmp_path, zero=1, batch={"global_size": 32, "micro_size": 1})
    post(run, ("pause", {}), ("reshape", {"micro_batches": 1}), ("step", {"n": 1}))
    assert world.run(with_little_memory, run, room) == [("paused", micro_batches)] * 2
    refused = [event.text.partition(" would hold")[0] for event in events(run, "warning")]
    assert refused == ([] if micro_batches == 1 else ["reshape: pp 1 × dp 2 × tp 1 at ZeRO stage 1"])


def cut_off_without_gradients(run: str) -> list[Any]:
    """Twice an interrupt leaves torch as inside `no_grad`, as one may that comes between its lines: before a run, and
    in it."""
    works = Engine.evaluate

    def cut_off(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        works(engine, *args, **kwargs)
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    torch.set_grad_enabled(False)
    with as_engine(run):
        with patch.object(Engine, "evaluate", cut_off), pytest.raises(KeyboardInterrupt):
            run_registry.advance(run)
        found: list[Any] = [torch.is_grad_enabled()]
        torch.set_grad_enabled(False)
        return [*found, advance(run), run_registry.held()[run], torch.is_grad_enabled()]


def test_gradients_are_on_behind_an_interrupt(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=3, eval={"every_steps": 2})
    post(run, ("resume", {}))
    assert world.run(cut_off_without_gradients, run) == [[True, "finished", 3, True]] * 2
    assert [event.text for event in events(run, "interrupted")] == ["in the midst of a step"]


def interrupted_one_before_the_other(run: str) -> list[Any]:
    """Both were asked to stop; rank 1 is forced to, and rank 0 has lost it before it is itself."""

    def stopped(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        if own_rank() == 1:
            raise KeyboardInterrupt
        return dist.barrier()

    with as_engine(run):
        with patch.object(Engine, "train_batch", stopped), pytest.raises(KeyboardInterrupt):
            run_registry.advance(run)
        return [str(RunFolder(run).read_status().state), advance(run), run_registry.held()[run]]


def test_a_rank_that_has_lost_an_interrupted_one_is_paused_like_it(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, steps=2)
    first, _ = world.run(interrupted_one_before_the_other, run)
    assert first == ["paused", "paused", 0]
    assert not events(run, "failed")


def interrupted_around_a_word(run: str, word: str, *, word_first: bool) -> list[Any]:
    """The state, and that of the step, where rank 0 is told both within the second step, in this order."""
    works = Engine.train_batch

    def reported(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if own_rank() == 0 and engine.global_step == 1:
            acts = [lambda: post(run, (word, {})), lambda: os.kill(os.getpid(), signal.SIGINT)]
            for act in acts if word_first else reversed(acts):
                act()
                time.sleep(0.05)  # What a signal and a word are told apart by.
        return works(engine, *args, **kwargs)

    with as_engine(run), patch.object(Engine, "train_batch", reported):
        return [advance(run), run_registry.held()[run]]


@pytest.mark.parametrize("word", ["resume", "step"])
def test_a_word_to_go_on_that_was_there_before_an_interrupt_does_not_undo_it(world: Pool, tmp_path, word: str) -> None:
    before, after = two_runs(tmp_path, "before", "after")
    post(before, ("resume", {}))
    assert world.run(interrupted_around_a_word, before, word, word_first=True) == [["paused", 2]] * 2
    (refused,) = events(before, "warning")
    assert refused.text == f"{word}: the run was interrupted after this was asked for; ask again to go on"
    assert refused.details["error"]
    post(after, ("resume", {}))
    rests = ["finished", 5] if word == "resume" else ["paused", 3]
    assert world.run(interrupted_around_a_word, after, word, word_first=False) == [rests] * 2


# ---- interrupts in the middle of something ---------------------------------------------------------------------------


def interrupted_in(run: str, name: str) -> list[Any]:
    """Forced on both ranks in the middle of `Engine.name`; then a step more."""
    works, calls = getattr(Engine, name), []

    def forced(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt("the step did not end in time")
        return works(engine, *args, **kwargs)

    with as_engine(run), patch.object(Engine, name, forced):
        found: list[Any] = []
        try:
            run_registry.advance(run)
        except KeyboardInterrupt:
            found.append(str(trainer_of(run).training.state))
        if own_rank() == 0:
            post(run, ("step", {"n": 1}))
        trainer = trainer_of(run)
        return [*found, advance(run), trainer_of(run) is trainer, trainer_of(run).engine.global_step]


@pytest.mark.parametrize("name", ["save_checkpoint", "evaluate"])
def test_an_interrupt_in_the_middle_of_what_follows_a_step_leaves_its_state_whole(
    world: Pool, tmp_path, name: str
) -> None:
    run = new_run(tmp_path, checkpoint={"every_steps": 1}, eval={"every_steps": 1})
    before = 0 if name == "evaluate" else 1  # The first evaluation comes before the first step.
    assert world.run(interrupted_in, run, name) == [["paused", "paused", True, before + 1]] * 2
    assert [event.step for event in events(run, "interrupted")] == [before]


def repeated_while_the_world_is_left(run: str) -> list[Any]:
    """Both ranks are forced to stop; rank 1 gets the cluster's next signal while it lets its connections go."""
    forget = training_run.leave

    def forced(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt("the step did not end in time")

    def repeated(**kwargs: Any) -> None:
        if own_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        forget(**kwargs)

    with as_engine(run):
        with patch.object(Engine, "evaluate", forced), patch.object(training_run, "leave", repeated):
            kind = remote.call(pack((run_registry.advance, [run], {}), {}))[remote.FAILED]["kind"]
        left = not dist.is_initialized()
        return [kind, str(trainer_of(run).training.state), left, advance(run)]


def test_the_clusters_next_signal_does_not_cut_off_what_follows_an_interrupt(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, eval={"every_steps": 1})
    post(run, ("step", {"n": 1}))
    assert world.run(repeated_while_the_world_is_left, run) == [["KeyboardInterrupt", "paused", True, "paused"]] * 2
    assert len(events(run, "interrupted")) == 1


def interrupted_in_an_update(run: str) -> list[Any]:
    """One rank was in the middle of an update; going back fails on the other, and then works."""
    with as_engine(run):
        found: list[Any] = [advance(run)]
        trainer = trainer_of(run)
        trainer.engine.updating = own_rank() == 0
        with broken(Engine, "load_checkpoint", OSError("bad sector")):
            found += [advance(run).partition(":")[0], trainer.training.whole]
        return [*found, advance(run), trainer_of(run).training.whole, trainer_of(run).engine.global_step]


def test_going_back_that_fails_on_one_rank_is_begun_anew(world: Pool, tmp_path) -> None:
    run = new_run(tmp_path, checkpoint={"every_steps": 1})
    post(run, ("pause", {}), ("step", {"n": 1}))
    first, second = world.run(interrupted_in_an_update, run)
    assert first == ["paused", "PeerLost", False, "paused", True, 1]
    assert second == ["paused", "OSError", False, "paused", True, 1]
