"""The Run handle against engines made of a thread: words and answers, submitting again, re-attaching, failing."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from telemetry_samples import eventually, make_event, make_record

import speedlab.cluster
from speedlab.cluster import run_commands
from speedlab.cluster.errors import DIED, INTERRUPTED, ClusterError, RankError, RemoteFailure
from speedlab.cluster.files.user_model import OWN_MODEL, read_own_model
from speedlab.cluster.known_runs import RunError, remember_run, remembered_runs
from speedlab.cluster.reattach import attach
from speedlab.cluster.run import Run
from speedlab.cluster.run_commands import resume_arguments
from speedlab.cluster.start_run import start_run
from speedlab.cluster.supervisor import recovery
from speedlab.cluster.supervisor.run_locks import RunLock
from speedlab.cluster.supervisor.runs import SupervisedRuns
from speedlab.cluster.worker import remote
from speedlab.config import ConfigError, RunConfig
from speedlab.layout import Layout, LayoutError
from speedlab.planner import parameter_count
from speedlab.telemetry.records import Ledger, RunState
from speedlab.telemetry.run_folder import UNSUPERVISED, RunCommand, RunFolder, RunFolderError, Status
from speedlab.telemetry.writer import RecordWriter


class FakeResults:
    """What Cluster.submit returns: the outcome of one task on all ranks."""

    def __init__(self, work: Callable[[], Any], ranks: int) -> None:
        self.id = uuid.uuid4().hex
        self.ranks = list(range(ranks))
        self.outcome: Any = None
        self.error: RankError | None = None
        self.ended = threading.Event()
        self._callbacks: list[Callable[[FakeResults], None]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def die(self) -> None:
        """As when the controller has died: nothing comes any more."""
        self.error = RankError(dict.fromkeys(self.ranks, RemoteFailure(kind=DIED, message="the controller has died")))
        self._end()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.outcome = [work()] * len(self.ranks)
        except RankError as error:
            self.error = error
        except (RuntimeError, OSError) as error:
            failure = RemoteFailure(kind=type(error).__name__, message=str(error))
            self.error = RankError(dict.fromkeys(self.ranks, failure))
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.ended.set()
        for callback in self._callbacks:
            callback(self)

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float) -> bool:
        return self.ended.wait(timeout)

    def result(self) -> Any:
        self.ended.wait(10)
        if self.error is not None:
            raise self.error
        return self.outcome

    def add_done_callback(self, callback: Callable[[FakeResults], None]) -> None:
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)


class LocalRuns:
    """What `cluster.runs` is, without a supervisor's process between."""

    def __init__(self, engines: FakeEngines) -> None:
        self.runs = SupervisedRuns(engines)
        self.begin, self.attend, self.standing = self.runs.begin, self.runs.attend, self.runs.standing

    def post(self, folder: Path, word: str, arguments: dict[str, Any]) -> int:
        return self.runs.post(folder, word, arguments, key="")

    def interrupt(self, folder: Path, seconds: float = 2.0) -> list[int]:
        return self.runs.interrupt(folder, seconds)

    @contextlib.contextmanager
    def held(self, folder: Path, seconds: float = 10.0) -> Iterator[None]:
        self.runs.hold(folder, RunLock.of("a test", os.getpid()), seconds)
        try:
            yield
        finally:
            self.runs.release(folder, "a test")

    def task(self, folder: Path) -> Any:
        return self.runs._of(folder).task


class FakeDevice:
    name = "cpu 0"
    capacity_bytes = 2**20


class FakeEngines:
    """A cluster whose ranks are one thread that trains by writing records, as the real trainer does: words between two
    steps, the event of a word before the status that counts it."""

    name = "fake"
    token = "token-of-fake"

    def __init__(self, directory: Path, size: int = 2) -> None:
        self.directory = directory
        self.size = size
        self.devices = [FakeDevice()] * size
        self.submitted = 0
        self.interrupted: list[Any] = []
        """What was to be interrupted, each time."""
        self.at_once = 0
        self.busy_with_cell = False
        self.dead: set[int] = set()
        self.on_lost_host: set[int] = set()
        self.before_restart: Callable[[], None] = lambda: None
        self.pids = tuple(range(2_000_000, 2_000_000 + size))
        self.fail_at: int | None = None
        self.fail_as: dict[int, str] = {}
        """Kinds of failures, by rank."""
        self.ignores_words = False
        self.parameters = 1000
        self.refusal: str | None = None
        self.untried = ""
        self.restarted: list[tuple[int, ...]] = []
        self.step_gate = threading.Semaphore(0)
        """A step is computed for each release; `free_running` opens it for good."""
        self.free_running = True
        self.before_end: Callable[[], None] = lambda: None
        self.before_status: Callable[[], None] = lambda: None
        self._running = 0
        self._lock = threading.Lock()
        self.runs = LocalRuns(self)

    def left_of(self, label: str) -> None:
        return None

    def at_work(self, submission: Any) -> bool:
        return False

    @property
    def lost_ranks(self) -> list[int]:
        return sorted(self.on_lost_host)

    def way_back(self, dead: list[int]) -> str:
        return f"ranks {dead} are dead; cluster.restart({dead[0]}) brings it back"

    def restart(self, *ranks: int) -> None:
        self.before_restart()
        self.restarted.append(ranks)
        self.dead -= set(ranks)

    def wire(self, folder: RunFolder) -> None:
        return None

    def resize(self, size: int) -> None:
        self.size, self.devices, self.pids = size, self.devices[:size], self.pids[:size]
        self.dead, self.on_lost_host = set(), set()

    def status(self) -> list[Any]:
        busy = self.busy_with_cell or self._running > 0
        states = ["dead" if rank in self.dead else "busy" if busy else "idle" for rank in range(self.size)]
        return [types.SimpleNamespace(rank=r, pid=self.pids[r], state=state) for r, state in enumerate(states)]

    def attach(self, name: str | None = None) -> Any:
        return self

    def interrupt(self, only: Any = None, seconds: float = 2.0) -> list[int]:
        self.interrupted.append(only)
        return list(range(self.size))

    def submit(self, function: Callable[..., Any], *args: Any, label: str = "", **kwargs: Any) -> Any:
        if function is remote.generate:
            return FakeResults(lambda: f"{args[1]} … {args[2]} tokens, {kwargs}", self.size)
        if function is remote.try_model:
            if self.refusal is not None:
                failure = RemoteFailure(kind="ConfigError", message=self.refusal)
                raise RankError({0: failure})
            found = {"parameters": self.parameters, "nbytes": 0, "dtype": "float32", "untried": self.untried}
            return types.SimpleNamespace(result=lambda: [found])
        assert function is remote.advance
        self.submitted += 1
        return FakeResults(lambda: self._exclusively(RunFolder(args[0])), self.size)

    def _exclusively(self, folder: RunFolder) -> str:
        eventually(lambda: not self.busy_with_cell)  # What is submitted waits in line.
        with self._lock:
            self._running += 1
            self.at_once = max(self.at_once, self._running)
        try:
            writers = [RecordWriter(folder, rank, stream_hz=10) for rank in range(self.size)]
            try:
                return self._advance(folder, writers)
            finally:
                self.before_end()
                for writer in writers:
                    writer.close()
        finally:
            with self._lock:
                self._running -= 1

    def _advance(self, folder: RunFolder, writers: list[RecordWriter]) -> str:
        status = folder.read_status()
        if status.state is RunState.STARTING:
            status = replace(status, state=RunState.RUNNING)
            writers[0].event(make_event("started", details={"parameters": self.parameters, "dtype": "float32"}))
        folder.write_status(status)
        budget: int | None = None
        while True:
            for command in [] if self.ignores_words else folder.pending(status.command):
                status, budget = self._answer(folder, writers[0], status, command, budget)
            if status.state is not RunState.RUNNING:
                return str(status.state)
            if not self.free_running and not self.step_gate.acquire(timeout=0.01):
                continue
            step = status.step + 1
            if step == self.fail_at:
                kinds = {rank: self.fail_as.get(rank, "ValueError") for rank in range(self.size)}
                failed = {
                    r: RemoteFailure(kind=k, message="broken", traceback="…", step=step) for r, k in kinds.items()
                }
                raise RankError(failed)
            for rank, writer in enumerate(writers):
                ledger = Ledger(parameters=100, gradients=10 * (rank + 1), master_weights=5, optimizer_moments=15)
                writer.write(make_record(step, rank, zero_stage=self._stage(folder), ledger=ledger))
            status = replace(status, step=step)
            if budget is not None:
                budget -= 1
            if step >= status.steps:
                status = replace(status, state=RunState.FINISHED)
                writers[0].event(make_event("finished", step))
            elif budget == 0:
                status = replace(status, state=RunState.PAUSED)
            folder.write_status(status)

    def _answer(
        self, folder: RunFolder, writer: RecordWriter, status: Status, command: RunCommand, budget: int | None
    ) -> tuple[Status, int | None]:
        kinds = {"pause": "paused", "resume": "resumed", "step": "resumed", "stop": "stopped", "save": "checkpoint"}
        states = {
            "pause": RunState.PAUSED,
            "stop": RunState.STOPPED,
            "resume": RunState.RUNNING,
            "step": RunState.RUNNING,
        }
        details: dict[str, Any] = dict(command.arguments)
        kind = kinds.get(command.word, "reshaped")
        if command.word == "save" and command.arguments["tag"] == "bad tag":
            kind, details = "warning", {"error": True}
        if command.word == "reshape":
            details = {"before": {}, "after": dict(command.arguments), "seconds": 0.25}
            (folder.path / "stage").write_text(str(command.arguments.get("zero", self._stage(folder))))
        writer.event(
            make_event(kind, status.step, command=command.number, details=details, text=f"about {command.word}")
        )
        self.before_status()
        status = replace(status, command=command.number, state=states.get(command.word, status.state))
        folder.write_status(status)
        if command.word in ("step", "resume"):
            budget = command.arguments.get("n")
        return status, budget

    @staticmethod
    def _stage(folder: RunFolder) -> int:
        path = folder.path / "stage"
        return int(path.read_text()) if path.exists() else 0


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster").mkdir()
    data = types.ModuleType("speedlab.data")
    data.check = lambda config: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "speedlab.data", data)
    fake = FakeEngines(tmp_path / "cluster")
    found = types.SimpleNamespace(attach=lambda name=None: fake)
    monkeypatch.setattr("speedlab.cluster.reattach.Cluster", found)
    return fake


@pytest.fixture
def make(engines):
    """Starts runs; when the test ends they are stopped, so that no thread outlives it."""
    runs: list[Run] = []

    def start(**changes: Any) -> Run:
        run = start_run(engines, RunConfig(**{"steps": 10, "telemetry": {"tensorboard": False}, **changes}))
        runs.append(run)
        return run

    yield start
    engines.free_running, engines.ignores_words, engines.busy_with_cell = True, False, False
    engines.before_end = engines.before_status = lambda: None
    for run in runs:
        if run.state in (RunState.RUNNING, RunState.STARTING):
            run.stop()
        eventually(lambda run=run: not engines.runs.standing(run.folder.path).active)
        run.feed.close()


def hold(engines: FakeEngines) -> None:
    """Compute no step without being told."""
    engines.free_running = False


def allow(engines: FakeEngines, steps: int) -> None:
    for _ in range(steps):
        engines.step_gate.release()


def test_a_run_goes_from_start_to_end(make, engines):
    run = make(name="whole", steps=20)
    assert run.wait(10) is RunState.FINISHED
    assert run.step == 20
    assert [record.step for record in run.records(0)] == [record.step for record in run.records(1)] == [*range(1, 21)]
    assert [event.kind for event in run.events] == ["started", "finished"]
    assert run.errors == []
    assert (run.name, run.folder.read_status().cluster) == ("whole", "fake")
    assert remembered_runs(engines) == [run.folder.path]
    with pytest.raises(RunError, match=r"no rank 7; ranks with records: \[0, 1\]"):
        run.records(7)


@pytest.mark.parametrize("damage", ["{", '{"runs": 5}', "[]"])
def test_a_damaged_list_of_runs_is_made_anew_of_those_that_the_cluster_holds(make, engines, damage):
    first = make(name="first", steps=2)
    assert first.wait(10) is RunState.FINISHED
    own = engines.directory / "runs.json"
    own.write_text(damage)
    assert remembered_runs(engines) == [first.folder.path]
    assert remembered_runs(types.SimpleNamespace(directory=engines.directory, name="other", token="other")) == []
    second = make(name="second", steps=2)
    assert second.wait(10) is RunState.FINISHED
    assert json.loads(own.read_text()) == {"runs": [str(second.folder.path), str(first.folder.path)]}


def test_pause_step_and_resume_in_order(make, engines):
    hold(engines)
    run = make(steps=100)
    allow(engines, 3)
    assert run.wait_until(3, timeout=10) == 3
    paused = run.pause()
    assert paused.wait(10).kind == "paused"
    assert paused.done
    assert run.wait(10) is RunState.PAUSED
    allow(engines, 10)
    run.advance(2).wait(10)
    assert run.wait(10) is RunState.PAUSED
    assert run.step == 5
    run.resume().wait(10)
    allow(engines, 1)
    run.wait_until(6, timeout=10)
    stopped = run.stop()
    engines.free_running = True
    assert stopped.wait(10).kind == "stopped"
    assert run.wait(10) is RunState.STOPPED
    commands = [event.command for event in run.events if event.command]
    assert commands == [1, 2, 3, 4]


def test_a_run_advances_by_one_step_at_least(make):
    run = make(steps=4)
    run.wait(10)
    assert run.step == 4
    for wrong in (0, 1.0, "1"):
        with pytest.raises(ValueError, match=r"advance\(.*\): .* at least 1"):
            run.advance(wrong)


def test_words_return_at_once_and_answers_can_be_awaited(make, engines):
    hold(engines)
    run = make()

    async def talk() -> list[Any]:
        words = [run.reshape(zero=3), run.save("mine"), run.pause()]
        return [await word for word in words] + [await run]

    reshaped, saved, paused, state = asyncio.run(asyncio.wait_for(talk(), 10))
    assert (reshaped.kind, reshaped.details["after"]) == ("reshaped", {"zero": 3})
    assert (saved.kind, saved.details["tag"]) == ("checkpoint", "mine")
    assert (paused.kind, state) == ("paused", RunState.PAUSED)


def test_an_answer_is_there_with_the_state_that_it_brought(make, engines):
    """The ranks write the event first, then the status; a slow disk may stand between."""
    written = threading.Event()
    engines.before_status = lambda: written.wait(10)
    run = make(name="slow-disk", steps=10**6)
    stop = run.stop()
    eventually(lambda: stop.event is not None)
    assert run.state is RunState.RUNNING
    with pytest.raises(TimeoutError):
        stop.wait(0.1)
    written.set()
    assert stop.wait(10).kind == "stopped"
    assert run.state is RunState.STOPPED


def test_words_while_paused_and_after_the_end_submit_a_task_each_time(make, engines):
    run = make(steps=3)
    run.wait(10)
    assert engines.submitted == 1
    assert run.save("last").wait(10).kind == "checkpoint"
    assert run.wait(10) is RunState.FINISHED
    assert engines.submitted == 2


def test_a_word_posted_while_the_task_ends_is_not_left_lying(make, engines):
    hold(engines)
    run = make(steps=100)
    late: list[int] = []

    def post_late() -> None:
        engines.before_end = lambda: None
        late.append(RunFolder(run.folder.path).post("save", tag="late"))

    engines.before_end = post_late
    run.pause().wait(10)
    eventually(lambda: [event for event in run.events if event.command == 2])
    assert late == [2]
    assert engines.submitted == 2
    assert run.wait(10) is RunState.PAUSED


def test_two_handles_never_have_two_tasks(make, engines):
    hold(engines)
    first = make(steps=1000)
    first.pause().wait(10)
    first.wait(10)
    second = Run(first.folder.path, engines)
    words = []
    for _ in range(10):
        words += [first.resume(), second.pause(), second.save("a"), first.pause()]
    for word in words:
        word.wait(10)
    assert engines.at_once == 1
    assert [event.command for event in second.events if event.command] == list(range(1, 42))
    second.feed.close()


def test_a_word_waits_while_the_ranks_run_a_cell(make, engines):
    hold(engines)
    run = make(steps=100)
    run.pause().wait(10)
    run.wait(10)
    engines.busy_with_cell = True
    word = run.save("after the cell")
    with pytest.raises(TimeoutError, match=r"control word 2 \(save\): nothing after 0.3 s; run 'run-1' is paused"):
        word.wait(0.3)
    assert engines.submitted == 2  # It waits in line behind the cell.
    engines.busy_with_cell = False
    assert word.wait(10).kind == "checkpoint"


def test_a_dead_engine_is_named_when_a_word_needs_it(make, engines):
    run = make(steps=3)
    run.wait(10)
    engines.dead = {1}
    with pytest.raises(ClusterError, match=r"ranks \[1\] are dead; cluster.restart\(1\)"):
        run.save()
    engines.dead = set()
    # The word is not carried out later, and the new engine's process is noted.
    engines.pids = (2_000_000, 2_000_007)
    assert run.save("mine").wait(10).details["tag"] == "mine"
    assert [event.command for event in run.events if event.command] == [2]
    assert run.folder.read_status().rank_pids == (2_000_000, 2_000_007)


def test_an_engine_that_dies_while_a_word_is_sent_leaves_none_behind(make, engines, monkeypatch):
    run = make(steps=3)
    run.wait(10)

    def died(*arguments: Any, **keywords: Any) -> None:
        raise ClusterError("the engine of rank 1 ended or stopped answering")

    with monkeypatch.context() as patch:
        patch.setattr(engines, "submit", died)
        with pytest.raises(ClusterError, match="the engine of rank 1 ended"):
            run.save()
    assert run.save("mine").wait(10).details["tag"] == "mine"
    assert [event.command for event in run.events if event.command] == [2]


def test_a_run_that_a_later_version_has_written_is_not_gone_on_with(make, engines):
    run = make(steps=3)
    run.wait(10)
    config = run.folder.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"of_a_later_version": 1}))
    with pytest.raises(RunFolderError, match=r"of_a_later_version.* This version of SpeedLab can show the run"):
        run.resume(steps=5)
    assert engines.submitted == 1
    assert (Run(run.folder.path).state, len(run.records())) == (RunState.FINISHED, 3)
    assert run.folder.pending(run.folder.read_status().command) == []


def test_a_folder_removed_under_a_run_is_reported(make, engines):
    hold(engines)
    run = make()
    allow(engines, 1)
    run.wait_until(1, timeout=10)
    run.folder.path.rename(run.folder.path.with_name("away"))
    engines.free_running = True
    with pytest.raises(RunFolderError, match=r"status\.json: is missing"):
        run.wait(10)
    run.feed._status = replace(run.feed.status, state=RunState.STOPPED)  # There is nothing left to stop.


def test_a_cluster_that_dies_under_a_run_ends_the_wait(make, engines):
    hold(engines)
    run = make()
    allow(engines, 1)
    run.wait_until(1, timeout=10)  # The rank, a thread that no death ends, writes no status any more.
    engines.runs.task(run.folder.path).die()
    with pytest.raises(RankError, match="the controller has died"):
        run.wait(10)
    assert "the controller has died" in run.folder.read_status().text  # Also for who comes later.


def test_a_word_that_nobody_carries_out_is_dropped_and_says_so(make, engines):
    run = make(steps=3)
    run.wait(10)
    engines.ignores_words = True
    with pytest.raises(
        RunError, match=r"control word 1 \(pause\) was not carried out: run 'run-1' is finished at step 3"
    ):
        run.pause().wait(10)
    assert engines.submitted == 2
    engines.ignores_words = False
    assert run.save().wait(10).command == 2


def test_a_refused_word_raises_with_the_reason(make, engines):
    run = make(steps=3)
    run.wait(10)
    word = run.save("bad tag")
    with pytest.raises(RunError, match=r"control word 1 \(save\) was refused at step 3: about save"):
        word.wait(10)


def test_a_reshape_posts_what_was_named_and_starts_from_the_present_shape(make, engines):
    hold(engines)
    run = make(batch={"global_size": 16, "micro_size": 4})
    assert run.present_config == run.config
    run.reshape(tp=2, micro_batches=4).wait(10)
    assert run.folder.pending(0)[0].arguments == {"tp": 2, "micro_batches": 4}
    assert run.present_config.layout(2) == Layout(tp=2)
    assert run.present_config.batch.resolve(1).accumulation == 4
    run.reshape(zero=3).wait(10)  # A change of the stage alone leaves the layout.
    assert run.folder.pending(1)[0].arguments == {"zero": 3}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, r"reshape\(\) changes nothing; name what is to change: engines, zero, tp, pp, cp, islands, dp"),
        ({"zero": 4}, "zero.stage: Input should be 0, 1, 2 or 3"),
        ({"stage": 3}, "unknown key 'stage'"),
        ({"pp": 3}, "2 ranks do not divide by pp 3 × tp 1 = 3"),
        ({"pp": 2, "tp": 2}, "2 ranks do not divide by pp 2 × tp 2"),
        ({"micro_batches": 3}, "batch: the equation global 16 = micro . × accumulation 3 × dp 2"),
        ({"schedule": "fifo"}, "parallel.schedule: Input should be"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_posted(make, engines, changes, complaint):
    hold(engines)
    run = make(batch=16)
    with pytest.raises(ValueError, match=complaint):
        run.reshape(**changes)
    assert run.folder.pending(0) == []


def test_rules_about_the_models_heads_are_for_the_built_in_model_alone(make, engines):
    hold(engines)
    shape = {"layers": 2, "hidden": 9, "heads": 3, "position": "learned"}
    engines.parameters = parameter_count(RunConfig(model=shape).model)
    run = make(model=shape)
    with pytest.raises(LayoutError, match="tp 2: 3 heads do not divide by 2; 1 and 3 do"):
        run.reshape(tp=2)
    run.stop()
    eventually(lambda: not engines.runs.standing(run.folder.path).active)
    own = start_run(engines, run.config.replace(name="own"), model=dict)
    own.reshape(tp=2)
    own.stop()
    allow(engines, 1)
    eventually(lambda: not engines.runs.standing(own.folder.path).active)
    own.feed.close()


def test_an_own_model_is_tried_before_its_run_has_a_name(engines, tmp_path, monkeypatch):
    """A try that fails leaves no name behind, and nothing in the cluster's folder."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    config = RunConfig(name="own", steps=1, telemetry={"tensorboard": False})
    engines.refusal = "model: no loss"
    with pytest.raises(ConfigError, match=r"^model: no loss$"):
        start_run(engines, config, model=dict)
    engines.refusal, engines.parameters = None, 10**6
    with pytest.raises(
        ConfigError, match=r"1,000,000 parameters make 9.5 MiB of model states on cpu 0, which has 1.0 MiB"
    ):
        start_run(engines, config, model=dict)
    with pytest.raises(ClusterError, match=r"model \(a lock\) cannot be sent to the engines: cannot pickle"):
        start_run(engines, config, model=threading.Lock())
    assert not (tmp_path / "runs").exists()
    assert engines.submitted == 0
    engines.parameters, engines.untried = 1000, "it looks at values"
    with pytest.warns(UserWarning, match=r"could not be tried before the run.*it looks at values"):
        run = start_run(engines, config, model=dict, tp_plan={"up": "colwise"})
    run.wait(10)
    eventually(lambda: not engines.runs.standing(run.folder.path).active)
    run.feed.close()
    assert read_own_model(run.folder.path / OWN_MODEL) == {"model": dict, "tp_plan": {"up": "colwise"}}
    assert stat.S_IMODE((run.folder.path / OWN_MODEL).stat().st_mode) == 0o600
    assert list((tmp_path / "cluster").glob("model-*")) == []


def test_a_failure_surfaces_everywhere_and_the_run_goes_on_when_asked(make, engines):
    engines.fail_at = 5
    run = make(steps=10)
    with pytest.raises(RankError, match="ValueError: broken") as raised:
        run.wait(10)
    assert [error.by_rank for error in run.errors] == [raised.value.by_rank]
    assert [error.by_rank for error in Run(run.folder.path).errors] == [raised.value.by_rank]
    assert run.state is RunState.FAILED
    assert run.step == 4
    assert "ValueError: broken" in run.folder.read_status().text
    with pytest.raises(RankError):
        run.wait_until(9, timeout=10)
    seen_later = Run(run.folder.path)
    with pytest.raises(RankError, match="ValueError: broken"):
        seen_later.wait(10)
    engines.fail_at = None
    run.resume().wait(10)
    assert run.wait(10) is RunState.FINISHED
    assert run.step == 10
    seen_later.feed.close()


def test_a_run_that_was_interrupted_amid_a_step_is_paused(make, engines):
    """Also where no rank has come so far as to say so: it waits for a peer, or has not begun."""
    engines.fail_at, engines.fail_as = 5, dict.fromkeys(range(engines.size), INTERRUPTED)
    run = make(steps=10)
    assert run.wait(10) is RunState.PAUSED
    assert run.errors == []
    assert (run.step, run.folder.read_status().text) == (4, "")
    engines.fail_as = {0: INTERRUPTED}  # As its peer has failed, and it was released.
    run.resume()
    with pytest.raises(RankError, match="ValueError: broken"):
        run.wait(10)
    engines.fail_at = None
    run.resume().wait(10)
    assert run.wait(10) is RunState.FINISHED


RECOVERS = {"recover": {"attempts": 2, "from": "newest"}, "checkpoint": {"every_steps": 1}}


def kinds_and_texts(run: Run, kind: str) -> list[str]:
    return [event.text for event in run.events if event.kind == kind]


def test_a_run_that_asked_for_it_is_brought_back(make, engines):
    """Its dead engine first, then the run, from its newest checkpoint; nobody has to be there."""
    hold(engines)
    run = make(steps=6, **RECOVERS)
    allow(engines, 3)
    run.wait_until(3, timeout=10)
    write_checkpoint(run, 3)
    engines.dead, engines.fail_at = {1}, 4

    def heal() -> None:
        engines.fail_at, engines.before_end, engines.free_running = None, lambda: None, True

    engines.before_end = heal
    allow(engines, 1)
    assert run.wait(10) is RunState.FINISHED
    assert engines.restarted == [(1,)]
    assert kinds_and_texts(run, "recovering") == ["ranks 0–1: ValueError; attempt 1 of 2 at once, from step 3"]
    assert run.folder.pending(0)[0].arguments == {"tag": "step-000003"}
    assert len(run.errors) == 1


def test_a_run_that_always_fails_is_given_up_after_longer_and_longer_pauses(make, engines, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("speedlab.cluster.supervisor.recovery.FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(recovery, "_waited", lambda stopped, seconds: pauses.append(seconds) or stopped.is_set())
    hold(engines)
    config = {**RECOVERS, "recover": {"attempts": 4}}
    run = make(steps=9, **config)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.fail_at, engines.free_running = 3, True
    with pytest.raises(RankError, match="ValueError: broken"):
        run.wait(10)
    assert pauses == [0.0, 0.05, 0.1, 0.2]
    assert (
        kinds_and_texts(run, "recovering")[-1]
        == "it failed again after 4 attempts from step 2: recover.attempts is at its end"
    )
    assert len(run.errors) == 5
    engines.fail_at = None
    run.resume().wait(10)  # A person may still.
    assert run.wait(10) is RunState.FINISHED


def test_nothing_is_brought_back_without_a_checkpoint_or_against_a_persons_word(make, engines, monkeypatch):
    hold(engines)
    run = make(steps=9, **RECOVERS)
    engines.fail_at = 1
    allow(engines, 1)
    with pytest.raises(RankError):
        run.wait(10)
    assert kinds_and_texts(run, "recovering") == ["there is no checkpoint from which recover could go on"]
    write_checkpoint(run, 1)
    monkeypatch.setattr("speedlab.cluster.supervisor.recovery.FIRST_PAUSE_SECONDS", 60.0)
    engines.fail_at = 1
    run.resume()
    allow(engines, 9)
    eventually(lambda: len(run.errors) == 3)  # By hand, at once, and now it would wait for a minute.
    eventually(lambda: run._standing().recovering)
    engines.fail_at = None
    run.stop().wait(10)
    assert run.wait(10) is RunState.STOPPED
    with pytest.raises(
        ConfigError, match=r"recover.attempts is 1 and checkpoint.every_steps is 0.*set checkpoint.every"
    ):
        make(recover=1)


def test_an_attempt_that_fails_itself_is_followed_by_the_next(make, engines, monkeypatch):
    """Engines that do not come up are no end: pauses and attempts are honoured."""
    pauses: list[float] = []
    monkeypatch.setattr(recovery, "_waited", lambda wake, seconds: pauses.append(seconds))
    hold(engines)
    run = make(steps=6, **{**RECOVERS, "recover": {"attempts": 3}})
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    tries: list[int] = []

    def not_at_first() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ClusterError("the engine of rank 1 ended before it was ready\nits log")
        engines.fail_at, engines.free_running = None, True

    engines.before_restart, engines.dead, engines.fail_at = not_at_first, {1}, 3
    allow(engines, 1)
    assert run.wait(10) is RunState.FINISHED
    assert pauses == [0.0, 1.0, 2.0]
    assert kinds_and_texts(run, "recovering")[1:] == [
        "the engine of rank 1 ended before it was ready; attempt 2 of 3 in 1 s, from step 2",
        "the engine of rank 1 ended before it was ready; attempt 3 of 3 in 2 s, from step 2",
    ]


def dies(*_: Any, **__: Any) -> None:
    """Ends the thread that comes here, as the death of its process would, with whatever is written by then."""
    raise SystemExit


DEATHS: dict[str, Callable[[pytest.MonkeyPatch, FakeEngines], object]] = {
    "when it was announced": lambda patch, engines: patch.setattr(recovery.Recovery, "_start", dies),
    "before it counts": lambda patch, engines: patch.setattr(recovery.Recovery, "_next", dies),
    "in the pause": lambda patch, engines: patch.setattr(recovery, "_waited", dies),
    "while it starts engines": lambda patch, engines: patch.setattr(engines, "before_restart", dies),
    "before the word is sent on": lambda patch, engines: patch.setattr(engines, "submit", dies),
}


NOBODY_HEARS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Threads that die.


@NOBODY_HEARS
@pytest.mark.parametrize("death", DEATHS)
def test_an_attempt_that_its_supervisor_did_not_survive_is_made_by_the_next(make, engines, monkeypatch, death):
    hold(engines)
    run = make(steps=6, **{**RECOVERS, "recover": {"attempts": 1}})
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.dead, engines.fail_at = {1}, 3
    with monkeypatch.context() as patch:
        threads = set(threading.enumerate())
        DEATHS[death](patch, engines)
        allow(engines, 1)
        eventually(lambda: len(run.errors) == 1)
        eventually(lambda: not set(threading.enumerate()) - threads)
    engines.fail_at, engines.free_running = None, True
    engines.runs = LocalRuns(engines)
    engines.runs.runs.take_over()
    assert run.wait(10) is RunState.FINISHED
    assert engines.restarted == [(1,)]
    assert [word.arguments for word in run.folder.pending(0)] == [{"tag": "step-000002"}], "it goes back once"
    texts = kinds_and_texts(run, "recovering")
    assert [text for text in texts if "ValueError" in text] == [
        "ranks 0–1: ValueError; attempt 1 of 1 at once, from step 2"
    ]
    taken_up = (
        []
        if death == "before it counts"
        else ["the supervisor ended meanwhile; the next one makes attempt 1 of 1 at once, from step 2"]
    )
    assert texts[1:] == taken_up
    kept = json.loads((run.folder.path / "recovery.json").read_text())
    assert (kept["failed"], kept["from_step"], kept["due"]) == (1, 2, None)
    (run.folder.path / "recovery.json").write_text(json.dumps({**kept, "later": "a field of another version"}))
    LocalRuns(engines).runs.take_over()
    assert kinds_and_texts(run, "recovering") == texts, "nothing is left to be taken up"


@NOBODY_HEARS
def test_attempts_and_pauses_count_on_under_the_next_supervisor(make, engines, monkeypatch):
    pauses: list[float] = []
    go_on = threading.Event()

    def wait(wake: threading.Event, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            dies()
        if len(pauses) == 3:
            assert go_on.wait(10)

    monkeypatch.setattr(recovery, "_waited", wait)
    hold(engines)
    run = make(steps=6, **{**RECOVERS, "recover": {"attempts": 3}})
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.fail_at, engines.free_running = 3, True
    eventually(lambda: len(pauses) == 2)
    engines.runs = LocalRuns(engines)
    engines.runs.runs.take_over()
    eventually(lambda: len(pauses) == 3)
    assert engines.runs.standing(run.folder.path).recovering
    go_on.set()
    with pytest.raises(RankError, match="ValueError: broken"):
        run.wait(10)
    assert pauses[:2] == [0.0, 1.0]
    assert 0.0 < pauses[2] <= 1.0, "what is left of it"
    assert pauses[3:] == [2.0]
    texts = kinds_and_texts(run, "recovering")
    assert "the next one makes attempt 2 of 3 in " in texts[2]
    assert texts[-1] == "it failed again after 3 attempts from step 2: recover.attempts is at its end"
    # A damaged file is none, and what an interrupted run went through is over.
    (run.folder.path / "recovery.json").write_text("{")
    engines.runs.runs.interrupt(run.folder.path, 1.0)
    LocalRuns(engines).runs.interrupt(run.folder.path, 1.0)


def test_an_interrupt_while_an_attempt_is_announced_ends_it(make, engines, monkeypatch):
    announced, asked, go_on, interrupted = (threading.Event() for _ in range(4))
    announce, stop = recovery.Recovery._next, recovery.Recovery.stop

    def announce_slowly(self: recovery.Recovery, cause: str) -> recovery.Attempt | None:
        attempt = announce(self, cause)
        announced.set()
        assert go_on.wait(10)
        return attempt

    def stop_and_tell(self: recovery.Recovery) -> None:
        stop(self)
        asked.set()

    monkeypatch.setattr(recovery.Recovery, "_next", announce_slowly)
    monkeypatch.setattr(recovery.Recovery, "stop", stop_and_tell)
    monkeypatch.setattr(recovery, "_waited", lambda *_: interrupted.wait(10))
    hold(engines)
    run = make(steps=6, **RECOVERS)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.dead, engines.fail_at = {1}, 3
    allow(engines, 1)
    assert announced.wait(10)
    interrupting = threading.Thread(target=engines.runs.interrupt, args=(run.folder.path,))
    interrupting.start()
    assert asked.wait(10)
    go_on.set()
    interrupting.join(10)
    assert not engines.runs.standing(run.folder.path).recovering
    interrupted.set()
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "speedlab-recovery"])
    assert engines.restarted == []
    assert run.state is RunState.FAILED


def test_what_is_held_stays_held_under_the_next_supervisor(make, engines, tmp_path):
    """As long as the process lives that holds it; one that took its number later is another."""
    run = make(steps=3)
    run.wait(10)
    path = run.folder.path
    eventually(lambda: not engines.runs.standing(path).active)
    engines.runs.runs.hold(path, RunLock.of("mine", os.getpid()), 0.0)
    engines.runs = LocalRuns(engines)
    engines.runs.runs.take_over()
    with pytest.raises(ClusterError, match="is advanced by another client"):
        engines.runs.runs.hold(path, RunLock.of("another's", os.getpid()), 0.0)
    engines.runs.runs.hold(path, RunLock.of("mine", os.getpid()), 0.0)  # Asked twice, it is one.
    word = run.resume(steps=5)
    engines.runs.runs.release(path, "another's")
    engines.runs.runs.let_go_of_abandoned()
    assert engines.submitted == 1
    assert not word.done
    engines.runs.runs.release(path, "mine")
    assert word.wait(10).kind == "resumed"
    assert run.wait(10) is RunState.FINISHED

    eventually(lambda: not engines.runs.standing(path).active)
    engines.runs.runs.hold(path, RunLock("reused", os.getpid(), 1.0), 0.0)
    engines.runs.runs.let_go_of_abandoned()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        engines.runs.runs.hold(path, RunLock.of("killed", holder.pid), 0.0)
        holder.kill()
    engines.runs = LocalRuns(engines)
    engines.runs.runs.take_over()
    engines.runs.runs.hold(path, RunLock.of("next", os.getpid()), 0.0)
    (engines.directory / "holds.json").write_text("{")
    LocalRuns(engines).runs.take_over()


def test_a_hold_that_is_asked_for_anew_outlives_the_connection_before(make, engines):
    """A kernel that was let go connects again, and asks again, before the end of its first connection is heard."""
    run = make(steps=3)
    run.wait(10)
    path, runs = run.folder.path, engines.runs.runs
    eventually(lambda: not engines.runs.standing(path).active)
    for connection in ("first", "second"):
        runs.hold(path, RunLock.of("mine", os.getpid()), 0.0, connection)
    runs.leave(path, "mine", "first")
    word = run.resume(steps=5)
    assert not engines.runs.standing(path).active, "it waits"
    runs.leave(path, "another's", "second")
    assert not word.done
    runs.leave(path, "mine", "second")
    assert word.wait(10).kind == "resumed"
    assert run.wait(10) is RunState.FINISHED


def test_who_only_looks_at_a_run_waits_for_no_host(make, engines, monkeypatch):
    """A host that does not answer holds up who spoke to its run, and who interrupts that; nobody else."""
    run = make(steps=3)
    run.wait(10)
    path = run.folder.path
    eventually(lambda: not engines.runs.standing(path).active)
    asked, answers = threading.Event(), threading.Event()

    def wire(folder: RunFolder) -> None:
        asked.set()
        assert answers.wait(10)

    monkeypatch.setattr(engines, "wire", wire)
    hold(engines)
    speaking = threading.Thread(target=run.resume, kwargs={"steps": 9})
    speaking.start()
    assert asked.wait(10)
    looking = threading.Thread(target=engines.runs.standing, args=(path,))
    looking.start()
    looking.join(10)
    assert not looking.is_alive()
    interrupting = threading.Thread(target=engines.runs.interrupt, args=(path,))
    interrupting.start()
    answers.set()
    speaking.join(10)
    interrupting.join(10)
    assert engines.interrupted == [engines.runs.task(path)]
    assert engines.interrupted != [None]


def test_a_word_that_comes_while_engines_are_brought_back_waits_for_them(make, engines):
    hold(engines)
    run = make(steps=9, **RECOVERS)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    begun, going_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert going_on.wait(10)

    engines.before_restart, engines.dead, engines.fail_at = wait, {1}, 3
    allow(engines, 1)
    assert begun.wait(10)
    engines.fail_at = None
    word = run.stop()
    assert not word.done
    going_on.set()
    assert word.wait(10).kind == "stopped"
    assert run.wait(10) is RunState.STOPPED
    assert [command.word for command in run.folder.pending(0)] == ["stop"], "nobody resumes behind a person's back"


def test_a_run_goes_on_without_a_host_where_its_layout_allows_that(make, engines):
    hold(engines)
    run = make(steps=6, batch={"micro_size": 1, "global_size": 4}, **RECOVERS)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.parameters = 0

    def heal() -> None:
        engines.fail_at, engines.before_end, engines.free_running = None, lambda: None, True

    engines.dead, engines.on_lost_host, engines.fail_at, engines.before_end = {1}, {1}, 3, heal
    allow(engines, 1)
    assert run.wait(10) is RunState.FINISHED
    assert engines.restarted == []
    assert engines.size == 1
    (reshaped,) = [event for event in run.events if event.kind == "reshaped"]
    assert reshaped.text == "2 → 1 engines, pp 1 × dp 2 × tp 1 → pp 1 × dp 1 × tp 1"
    assert (reshaped.details["before"]["micro_batches"], reshaped.details["after"]["micro_batches"]) == (2, 4)


def test_a_layout_that_needs_the_lost_host_is_not_given_up_at_once(make, engines, monkeypatch):
    monkeypatch.setattr(recovery, "_waited", lambda wake, seconds: None)
    hold(engines)
    run = make(steps=6, parallel={"tp": 2}, **RECOVERS)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    write_checkpoint(run, 2)
    engines.dead, engines.on_lost_host, engines.fail_at = {1}, {1}, 3
    allow(engines, 1)
    with pytest.raises(ClusterError, match="1 ranks do not divide by pp 1 × tp 2 = 2; on 1 engines pp 1 × dp 1 × tp 1"):
        run.wait(10)
    texts = kinds_and_texts(run, "recovering")
    assert len(texts) == 3
    assert "on 1 engines pp 1 × dp 1 × tp 1 would work; attempt 2 of 2 in 1 s, from step 2" in texts[1]
    with pytest.raises(ClusterError, match=r"run.reshape\(engines=1\) needs another layout: .* would work"):
        run.resume()


def test_a_word_for_another_run_is_refused_while_one_trains(make, engines):
    first = make(steps=3)
    first.wait(10)
    hold(engines)
    second = make(name="second", steps=9)
    allow(engines, 1)
    second.wait_until(1, timeout=10)
    with pytest.raises(ClusterError, match="run 'second' is running on 'fake', step 1 of 9; pause or stop it first"):
        first.resume(steps=9)
    assert first.folder.pending(0) == []
    engines.free_running = True
    assert second.wait(10) is RunState.FINISHED
    assert engines.at_once == 1
    assert first.resume(steps=5).wait(10).kind == "resumed"
    assert first.wait(10) is RunState.FINISHED


def test_words_waiting_when_the_run_fails_are_dropped(make, engines):
    hold(engines)
    run = make(steps=10)
    engines.fail_at, engines.ignores_words = 1, True
    word = run.save("too late")
    allow(engines, 1)
    with pytest.raises(RankError):
        word.wait(10)
    engines.fail_at, engines.ignores_words, engines.free_running = None, False, True
    run.resume().wait(10)
    run.wait(10)
    assert "checkpoint" not in [event.kind for event in run.events]


def test_an_interrupt_in_a_wait_interrupts_the_ranks(make, engines, monkeypatch):
    hold(engines)
    run = make()

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    clock = types.SimpleNamespace(sleep=interrupted, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr("speedlab.cluster.run.time", clock)
    with pytest.raises(KeyboardInterrupt):
        run.wait(10)
    assert engines.interrupted == [engines.runs.task(run.folder.path)]  # This run, and nothing else.


def test_an_interrupt_while_a_run_is_awaited_interrupts_it_and_a_timeout_does_not(make, engines):
    """A kernel that is interrupted cancels what its cell awaits; so does asyncio.wait_for, without such a wish."""
    hold(engines)
    run = make()

    async def cell() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run, 0.1)
        assert engines.interrupted == []
        awaiting = asyncio.ensure_future(asyncio.wait_for(run, 10))
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        before = signal.signal(signal.SIGINT, lambda *_: awaiting.cancel())
        try:
            await awaiting
        finally:
            signal.signal(signal.SIGINT, before)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cell())
    assert engines.interrupted == [engines.runs.task(run.folder.path)]


def test_attach_finds_the_run_that_is_training_with_its_whole_history(make, engines, tmp_path, monkeypatch):
    make(name="old", steps=3).wait(10)
    hold(engines)
    run = make(name="live", steps=100)
    allow(engines, 5)
    run.wait_until(5, timeout=10)
    # A new kernel in another directory.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = attach()
    assert (again.name, again.state) == ("live", RunState.RUNNING)
    assert [record.step for record in again.records(1)] == [1, 2, 3, 4, 5]
    assert [event.kind for event in again.events] == ["started"]
    again.pause().wait(10)
    assert again.wait(10) is RunState.PAUSED
    allow(engines, 2)
    again.advance(2).wait(10)
    assert again.wait(10) is RunState.PAUSED
    assert run.step == again.step == 7
    assert run.records(0) == again.records(0)
    assert attach("old").step == 3
    with pytest.raises(RunError, match="there is no run 'never'"):
        attach("never")
    again.feed.close()


def test_a_damaged_run_hides_no_other_and_says_what_it_lacks(make, engines, monkeypatch):
    good, bad = make(name="good", steps=3), RunFolder.create(RunConfig(name="bad")).path
    remember_run(engines, bad)
    good.wait(10)
    (bad / "status.json").write_text("{")
    assert attach().name == "good"
    for name in ("bad", "runs/bad", bad):
        with pytest.raises(RunFolderError, match=r"status\.json: is not valid JSON"):
            attach(name)
    (bad / "config.json").unlink()
    for name in ("bad", "runs/bad", bad):
        with pytest.raises(RunFolderError, match=r"runs/bad is no run folder: it has no config\.json; .*good"):
            attach(name)
    with pytest.raises(RunError, match="there is no run 'runs'"):  # A folder beside them is none, either.
        attach("runs")


def test_a_run_without_engines_is_there_to_look_at(make, engines, monkeypatch):
    run = make(name="done", steps=3)
    run.wait(10)
    engines.token = "token-of-another"  # These engines are new: they hold no run.
    seen = attach("done")
    assert seen.cluster is None
    assert seen.wait(1) is RunState.FINISHED
    assert seen.step == 3
    for speak in (seen.pause, seen.save, lambda: seen.generate("a")):
        with pytest.raises(RunError, match="has no engines here"):
            speak()
    with pytest.raises(RunError, match="cluster 'fake' has no run"):
        attach()
    seen.feed.close()


@pytest.fixture
def no_clusters(monkeypatch):
    """No cluster runs, whatever this machine's do."""
    running: list[Any] = []
    monkeypatch.setattr(run_commands, "running_clusters", lambda: running)
    return running


def write_checkpoint(run: Run, step: int) -> None:
    path = run.folder.path / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"step": step}))


def test_a_run_whose_engines_are_gone_says_how_it_goes_on(make, engines, no_clusters, monkeypatch):
    """Not that it be attached to, where nothing holds it; and what is named works."""
    run = make(name="gone", steps=3)
    run.wait(10)
    run.cluster = None  # As after cluster.stop().

    def reported(word: Callable[[], Any] = run.pause) -> str:
        with pytest.raises(RunError, match="has no engines here") as refused:
            word()
        assert "attach" not in str(refused.value)
        return str(refused.value)

    assert "its engines are gone, and no checkpoint of it was written: it can only be looked at" in reported()
    with pytest.raises(RunError, match="has nothing to export: its engines are gone, and no checkpoint"):
        run.export("out")
    write_checkpoint(run, 2)
    back = "run.resume() goes on from its checkpoint of step 2"
    assert f"speedlab.Cluster(name='fake', engines=2) starts others, then {back}" in reported()
    assert back in reported(lambda: run.generate("a"))
    no_clusters.append(types.SimpleNamespace(name="another", token="another"))
    assert reported().endswith(f"cannot pause: its engines are gone; {back}")
    write_checkpoint(run, 3)
    assert "run.resume(steps=6) goes on from its checkpoint of step 3" in reported(run.save)
    assert resume_arguments(run, None, None, 6) == {"steps": 6}

    bare = Run(run.folder)
    with pytest.raises(RunError, match=r"; speedlab\.attach\('.*gone'\)\.resume\(steps=6\) goes on"):
        bare.pause()
    no_clusters.append(types.SimpleNamespace(name="fake", token=engines.token))
    with pytest.raises(RunError, match=r"cannot pause: speedlab\.attach\('gone'\) finds those that hold it"):
        bare.pause()
    bare.feed.close()


def test_export_says_what_was_written(make, monkeypatch, capsys, tmp_path):
    run = make(name="exported", steps=3)
    run.wait(10)
    write_checkpoint(run, 2)
    lines = []

    def command(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines.append(words)
        return subprocess.CompletedProcess(
            words, 0, stdout=f"{words[-1]}: step 2, from {words[-2]}, 1.0 MiB\n", stderr=""
        )

    monkeypatch.setattr(subprocess, "run", command)
    assert run.export(tmp_path / "out") == tmp_path / "out"
    path = run.folder.path / "checkpoints/step-000002"
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: step 2, from {path}, 1.0 MiB\n"
    assert lines[0][-3:] == ["export", str(path), str(tmp_path / "out")]


def test_a_run_that_ends_unsaved_says_so_and_what_to_do(make, no_clusters):
    run = make(name="unsaved", steps=3)
    run.wait(10)
    held = "step 3 is not saved: run.save() writes it, as long as the engines hold it; checkpoint.every_steps does so"
    assert held in run._repr_html_()
    assert held in str(run.table())
    assert held in run.table()._repr_html_()
    assert "2 engines, not saved>" in repr(run)
    write_checkpoint(run, 2)
    assert "step 3 is not saved, the newest checkpoint is of step 2: run.save() writes it" in str(run.table())
    run.cluster = None
    gone = "is of step 2, and its engines are gone; in the next run save before they end, or set checkpoint.every_steps"
    assert gone in str(run.table())
    assert "run.save()" not in run._repr_html_()
    write_checkpoint(run, 3)
    assert "saved" not in (repr(run) + str(run.table()) + run._repr_html_()).replace("unsaved", "")


def test_engines_that_are_gone_end_the_wait(make, engines, no_clusters, monkeypatch):
    """Also where other processes have got their numbers since."""
    run = make(steps=3)
    run.wait(10)
    pids = (os.getpid(), os.getpid())
    run.folder.write_status(replace(run.folder.read_status(), state=RunState.RUNNING, rank_pids=pids))
    seen = Run(run.folder)
    monkeypatch.setattr("speedlab.cluster.run._ENGINE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr("speedlab.cluster.run.running_clusters", lambda: no_clusters)
    with pytest.raises(RunError, match=r"is running at step 3 of 3, but its engines are gone"):
        seen.wait(10)
    seen.feed.close()


def test_what_cannot_run_is_refused_before_anything_is_written(make, engines, tmp_path, monkeypatch):
    with pytest.raises(LayoutError, match="2 engines"):
        make(parallel={"dp": 3})
    with pytest.raises(ConfigError, match="no whole solution"):
        make(batch={"global_size": 3, "micro_size": 1})
    monkeypatch.setattr(
        sys.modules["speedlab.data"], "check", lambda config: (_ for _ in ()).throw(ConfigError("data: empty"))
    )
    with pytest.raises(ConfigError, match="data: empty"):
        make()
    monkeypatch.setattr(sys.modules["speedlab.data"], "check", lambda config: None)
    monkeypatch.setattr("speedlab.telemetry.run_folder.shutil.disk_usage", lambda path: types.SimpleNamespace(free=5))
    with pytest.raises(RunFolderError, match="no disk space"):
        make()
    assert not (tmp_path / "runs").exists()
    assert engines.submitted == 0


def test_a_name_that_exists_and_a_second_run_are_refused(make, engines):
    hold(engines)
    run = make(name="same")
    with pytest.raises(ClusterError, match=r"run 'same' is (starting|running) on 'fake'"):
        make(name="other")
    run.stop().wait(10)
    run.wait(10)
    with pytest.raises(ConfigError, match="'same-2'"):
        make(name="same")


def test_a_run_that_cannot_be_sent_leaves_no_folder(make, engines, tmp_path, monkeypatch):
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise ClusterError("the engines are gone")

    monkeypatch.setattr(engines, "submit", refuse)
    with pytest.raises(ClusterError, match="engines are gone"):
        make(name="sent")
    assert not (tmp_path / "runs" / "sent").exists()
    monkeypatch.undo()


def test_paths_of_data_are_written_down_whole(make, tmp_path):
    run = make(data={"source": ("stdlib", "texts"), "tokenizer": "tok.json"}, steps=1)
    assert run.config.data.source == ("stdlib", str(tmp_path / "texts"))
    assert run.config.data.tokenizer == str(tmp_path / "tok.json")
    run.wait(10)


def test_generate_needs_ranks_at_rest(make, engines):
    hold(engines)
    run = make()
    with pytest.raises(RunError, match=r"its ranks are busy; run.pause\(\).wait\(\) first") as refusal:
        run.generate("def ")
    assert refusal.value._render_traceback_() == [f"RunError: {refusal.value}"]  # In a notebook: no frames of ours.
    run.pause().wait(10)
    run.wait(10)
    assert run.generate("def ", 5, seed=3) == "def  … 5 tokens, {'temperature': 0.8, 'seed': 3}"


def test_the_table_sets_what_was_measured_beside_the_formula(make, engines):
    hold(engines)
    run = make(steps=6)
    allow(engines, 2)
    run.wait_until(2, timeout=10)
    run.reshape(zero=3).wait(10)
    engines.free_running = True
    run.wait(10)
    first, second = run.table()
    assert (first["stage"], first["steps"], first["change_seconds"]) == (0, 2, None)
    assert (second["stage"], second["steps"], second["change_seconds"]) == (3, 4, 0.25)
    assert (first["parameters"], first["gradients"], first["optimizer"]) == (100, 20, 20)
    assert (first["formula_parameters"], first["formula_gradients"], first["formula_optimizer"]) == (4000, 4000, 8000)
    assert (second["formula_parameters"], second["formula_gradients"], second["formula_optimizer"]) == (
        2000,
        2000,
        4000,
    )
    assert first["tokens_per_second"] == 8192


def test_it_says_where_it_stands_and_escapes_what_it_says(make, engines):
    run = make(name="plain", steps=2)
    run.wait(10)
    assert repr(run) == "<Run 'plain': finished, step 2 of 2, 2 engines, not saved>"
    eventually(lambda: not engines.runs.standing(run.folder.path).active)
    # A folder from elsewhere may be called anything.
    seen = Run(run.folder.path.rename(run.folder.path.with_name("<i>x")))
    assert (
        seen._repr_html_()
        == "<b>&lt;i&gt;x</b> · step 2/2 · loss 7.980 · 8,192 tokens/s · finished · "
        + html.escape(run_commands.unsaved_warning(seen))
    )
    run.folder.path.with_name("<i>x").rename(run.folder.path)
    seen.feed.close()


def test_the_room_exports_the_handle():
    assert speedlab.cluster.Run is Run
    assert speedlab.cluster.attach is attach


@pytest.mark.parametrize("trouble", ["dead", "unsubmitted", "unknown", "held"])
def test_a_run_that_does_not_go_on_after_a_takeover_says_so_in_its_status(make, engines, monkeypatch, trouble):
    """It has paused for want of a supervisor, and its text promises that it goes on."""
    run = make(steps=3)
    run.wait(10)
    path = run.folder.path
    eventually(lambda: not engines.runs.standing(path).active)
    status = run.folder.read_status()
    run.folder.write_status(replace(status, state=RunState.PAUSED, step=2, text=UNSUPERVISED))
    with monkeypatch.context() as patch:
        if trouble == "dead":
            engines.dead, expected = {1}, "brings it back"
        elif trouble == "held":  # What goes wrong comes with the end of the hold.
            engines.runs.runs.hold(path, RunLock.of("mine", os.getpid()), 0.0)
            expected = "brings it back"
        elif trouble == "unsubmitted":
            patch.setattr(engines, "submit", mock.Mock(side_effect=OSError("no space left")))
            expected = "no space left"
        else:
            patch.setattr(RunFolder, "require_known", mock.Mock(side_effect=RunFolderError("of a later version")))
            expected = "of a later version"
        engines.runs = LocalRuns(engines)
        engines.runs.runs.take_over()
        if trouble == "held":
            engines.dead = {1}
            engines.runs.runs.release(path, "mine")
    status = run.folder.read_status()
    assert status.state is RunState.PAUSED
    assert status.text.startswith("the supervisor ended, and under the next one the run could not go on: ")
    assert expected in status.text
    assert status.text.endswith("run.resume() goes on once that is mended")
    assert run.folder.pending(status.command) == [], "nothing is carried out much later"
    with pytest.raises((ClusterError, RunFolderError), match=expected):
        run.wait(10)
    engines.dead = set()
    assert run.resume().wait(10).kind == "resumed"
    assert run.wait(10) is RunState.FINISHED
