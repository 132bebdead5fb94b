"""The supervisor's parts without processes: the line of submissions, the journal, the channel, versions of messages."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from ipyparallel.error import NoEnginesRegistered, RemoteError, TaskAborted
from telemetry_samples import eventually

from speedlab.cluster.agents import tasks
from speedlab.cluster.agents.rpc import send_to
from speedlab.cluster.errors import INTERRUPTED, ClusterError, RankError, RemoteFailure
from speedlab.cluster.files import processes
from speedlab.cluster.files.cluster_dir import EngineEntry
from speedlab.cluster.known_runs import remembered_runs
from speedlab.cluster.launch import rendezvous as host_rendezvous
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, connect, listen
from speedlab.cluster.supervisor.client import Client, OtherVersionError, SupervisorGoneError
from speedlab.cluster.supervisor.engines import Engines
from speedlab.cluster.supervisor.journal import FileJournal, RecoveredWork
from speedlab.cluster.supervisor.process_control import EngineProcess, LocalProcesses
from speedlab.cluster.supervisor.recovery import AttemptCount
from speedlab.cluster.supervisor.run_locks import RunLocks
from speedlab.cluster.supervisor.server import Server
from speedlab.cluster.supervisor.unreachable_hosts import LostHosts, PendingInterrupts
from speedlab.cluster.supervisor.work_queue import Submission, WorkQueue
from speedlab.cluster.worker import remote
from speedlab.cluster.worker.serialization import pack, unpack


class FakeEngines:
    """Keeps what it is sent until the test lets an engine answer."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.open: dict[int, Any] = {}
        self.gone: set[int] = set()
        self.together = 0

    def send(self, rank: int, work: bytes) -> Any:
        if rank in self.gone:
            raise IndexError(rank)
        assert rank not in self.open, "an engine works on one thing at a time"
        task: Any = Future()
        task.msg_ids = [f"{rank}-{len(self.sent)}"]
        self.sent.append((rank, work))
        self.open[rank] = task
        return task

    def answer(self, rank: int, value: Any = b"") -> None:
        eventually(lambda: rank in self.open)
        task = self.open.pop(rank)
        task.set_exception(value) if isinstance(value, Exception) else task.set_result(value)


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def failed() -> list[Submission]:
    """Those of which one rank has failed while others were at work."""
    return []


@pytest.fixture
def line(engines: FakeEngines, failed: list[Submission], tmp_path: Path) -> Iterator[WorkQueue]:
    made = WorkQueue(engines.send, FileJournal(tmp_path / "submissions.jsonl"), failed.append)
    yield made
    made.close()


def test_a_rank_works_on_one_submission_at_a_time_in_the_order_of_all(line: WorkQueue, engines: FakeEngines) -> None:
    first = line.add(Submission(b"first", [0, 1]))
    second = line.add(Submission(b"second", [1]))
    third = line.add(Submission(b"third", [0, 1]))
    eventually(lambda: len(engines.sent) == 2)
    assert line.busy() == {0, 1}
    assert line.working() == {0: first, 1: first}
    engines.answer(0, pack("zero", {}))
    eventually(lambda: line.working() == {0: third, 1: first})
    engines.answer(1, pack("one", {}))
    assert first.wait(5)
    assert first.results() == ["zero", "one"]
    eventually(lambda: line.working() == {0: third, 1: second})
    for rank in (1, 0, 1):
        engines.answer(rank, pack(None, {}))
    assert third.wait(5)
    assert [work for rank, work in engines.sent if rank == 1] == [b"first", b"second", b"third"]
    assert line.busy() == set()


def test_what_has_not_begun_can_be_taken_back_and_the_rest_goes_on(line: WorkQueue, engines: FakeEngines) -> None:
    training = line.add(Submission(b"training", [0, 1]))
    cell = line.add(Submission(b"cell", [0, 1]))
    other = line.add(Submission(b"other", [1]))
    eventually(lambda: len(line.working(training)) == 2)
    line.take_back(cell)
    assert cell.done
    assert {failure.kind for failure in cell.failures.values()} == {"KeyboardInterrupt"}
    assert line.working(cell) == {}
    assert line.working() == {0: training, 1: training}
    line.take_back(training)  # It has begun: that is for a signal.
    assert not training.done
    engines.answer(0)
    engines.answer(1)
    engines.answer(1)
    assert other.wait(5)
    assert [work for _, work in engines.sent].count(b"cell") == 0


def test_a_reset_goes_before_what_waits(line: WorkQueue, engines: FakeEngines) -> None:
    line.add(Submission(b"at work", [0]))
    line.add(Submission(b"waiting", [0]))
    eventually(lambda: engines.sent)
    line.add(Submission(b"reset", [0]), first=True)
    for _ in range(3):
        engines.answer(0)
    eventually(lambda: not line.busy())
    assert [work for _, work in engines.sent] == [b"at work", b"reset", b"waiting"]


def test_what_goes_first_keeps_its_own_order(line: WorkQueue, engines: FakeEngines) -> None:
    """A rank that is bound to another number of ranks, and back again at once, must not end up with the former."""
    line.add(Submission(b"at work", [0]))
    eventually(lambda: engines.sent)
    line.add(Submission(b"waiting", [0]))
    for work in (b"bind", b"bind back"):
        line.add(Submission(work, [0]), first=True)
    for _ in range(4):
        engines.answer(0)
    eventually(lambda: not line.busy())
    assert [work for _, work in engines.sent] == [b"at work", b"bind", b"bind back", b"waiting"]


class Hub:
    """A client for which the hub gives up engine 11 behind so many looks at its numbers."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def ids(self) -> list[int]:
        self.looks -= 1
        return [10, 11] if self.looks >= 0 else [10]


def engines_of(line: WorkQueue, client: object, *, size: int = 2, ended: Collection[int] = ()) -> Engines:
    """As much of them as ranks are asked by. `ended`: ranks whose processes have."""
    made = object.__new__(Engines)
    entries = [EngineEntry(rank=rank, pid=0, engine_id=10 + rank) for rank in range(size)]
    looks = [EngineProcess(alive=rank not in ended, suspended=False, rss_bytes=0) for rank in range(size)]
    made.hands = SimpleNamespace(look=lambda engines: looks)  # type: ignore[assignment]
    made.state, made.client, made.line = SimpleNamespace(name="c", engines=entries), client, line  # type: ignore[assignment]
    made._lost = LostHosts()
    made.home = SimpleNamespace(generation=7)  # type: ignore[assignment]
    return made


class HandsOnHosts:
    """Of two hosts, with a rank each. One's agent does not answer until it is back."""

    def __init__(self) -> None:
        self.silent = True
        self.signals: list[tuple[int, str]] = []
        """(rank, the message that it is to work on), of those that were reached."""
        self.cuts: list[int] = []
        """Ranks, of those that were reached."""

    def interrupt(self, at_work: dict[EngineEntry, str]) -> list[EngineEntry]:
        away = [engine for engine in at_work if engine.rank == 1 and self.silent]
        self.signals += [(engine.rank, message) for engine, message in at_work.items() if engine not in away]
        return away

    def cut(self, at_work: dict[EngineEntry, str]) -> list[EngineEntry]:
        away = [engine for engine in at_work if engine.rank == 1 and self.silent]
        self.cuts += [engine.rank for engine in at_work if engine not in away]
        return away

    def next_generation(self, *, at_once: bool = False) -> None:
        assert at_once, "an interrupt waits for no agent"


def test_an_interrupt_waits_for_no_host_and_reaches_it_later_if_it_still_works_on_the_same(
    line: WorkQueue, engines: FakeEngines
) -> None:
    hands, reported = HandsOnHosts(), []
    made = engines_of(line, SimpleNamespace(ids=[10, 11]))
    made.hands, made._interrupting = hands, threading.Lock()  # type: ignore[assignment]
    made.state.engines[1] = EngineEntry(rank=1, pid=0, engine_id=11, host="host-b")  # type: ignore[index]
    made.home.amid = lambda what: contextlib.nullcontext()  # type: ignore[method-assign]
    made.output = SimpleNamespace(on_lines=lambda *said: reported.append(said))  # type: ignore[assignment]
    made._unreached = PendingInterrupts(line, hands)  # type: ignore[arg-type]
    work = line.add(Submission(b"a cell of both", [0, 1]))
    eventually(lambda: all(work.messages.get(rank) for rank in (0, 1)))

    def first_ends() -> None:
        eventually(lambda: hands.signals)
        engines.answer(0, TaskAborted())
        engines.answer(0, pack(None, {}))  # It leaves its group.

    ending = threading.Thread(target=first_ends)
    ending.start()
    began = time.monotonic()
    assert made.interrupt(None, seconds=0.6) == [0]
    ending.join(10)
    assert time.monotonic() - began < 5
    assert set(hands.signals) == {(0, work.messages[0])}
    assert reported == [
        (
            [1],
            "stderr",
            "host-b: no agent answers there, so rank 1 does not hear the interrupt; once one answers, it is sent if it "
            "still works on the same\n",
        )
    ]
    made.interrupt_those_back()  # Nobody is back.
    hands.silent, hands.signals, hands.cuts = False, [], []
    made.interrupt_those_back()
    assert hands.signals == [(1, work.messages[1])]
    made.interrupt_those_back()
    assert (len(hands.signals), hands.cuts) == (2, [1]), "again, while it works on the same"

    # One that has gone on meanwhile is left alone. What it does first is to leave its group, in the present generation.
    made._unreached.note({1: work}, made.state)
    engines.answer(1, pack(None, {}))
    eventually(lambda: len(engines.sent) == 4)
    leaves, arguments, _ = unpack(engines.sent[-1][1])
    assert (engines.sent[-1][0], leaves, arguments) == (1, remote.reset, (7,))
    made.interrupt_those_back()
    assert len(hands.signals) == 2


def test_an_agent_signals_no_other_work_than_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word may have waited for its host to be back."""
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    monkeypatch.setenv(processes.TOKEN, "token-of-an-agent")
    monkeypatch.setenv("SPEEDLAB_RENDEZVOUS", str(rendezvous))
    monkeypatch.setattr(tasks, "_folder", tmp_path)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    monkeypatch.setattr(tasks, "_known", lambda wanted: [psutil.Process(pid) for pid, _ in wanted])
    try:
        for works, meant, signals in (("a", "a", 1), ("b", "a", 0), ("", "a", 0), ("", "", 0)):
            with host_rendezvous.at_work(works) if works else contextlib.nullcontext():
                assert tasks.signal_at_work([(os.getpid(), 0.0, meant)], signal.SIGUSR2) == [os.getpid()]
                assert host_rendezvous.is_meant() is (works == meant == "a")
            assert (works, meant, len(heard)) == (works, meant, signals)
            heard.clear()
        # One that has ended is no rank that its agent does not reach.
        monkeypatch.setattr(tasks, "_known", lambda wanted: [])
        assert tasks.signal_at_work([(7, 0.0, "a")], signal.SIGUSR2) == [7]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [file.name for file in rendezvous.iterdir()] == [f"meant-{os.getpid()}"]
    for number, kept in ((2, "2\n"), (1, "2\n"), (3, "3\n")):  # One that comes late counts nothing back.
        host_rendezvous.set_generation(rendezvous, number)
        assert (rendezvous / "generation").read_text() == kept


def test_an_engine_that_dies_while_ranks_leave_their_group_stops_nobody(line: WorkQueue, engines: FakeEngines) -> None:
    """Neither an interrupt, a restart of another one nor a takeover: it is found dead afterwards."""
    engines.gone = {1}
    leaving = threading.Thread(target=engines_of(line, Hub(looks=2)).reset, args=([0, 1],))
    leaving.start()
    engines.answer(0, pack(None, {}))
    leaving.join(10)
    assert not leaving.is_alive()
    assert [rank for rank, _ in engines.sent] == [0]


def test_where_one_engine_is_dead_none_is_asked(line: WorkQueue, engines: FakeEngines) -> None:
    """What some ranks were asked for and others not would be done when nobody counts on it."""
    asked = engines_of(line, Hub(looks=1))
    with pytest.raises(ClusterError, match=r"the engine of rank 1 ended or stopped answering; cluster.restart\(1\)"):
        asked.ask([0, 1], int, seconds=1.0)
    assert line.busy() == set()
    assert asked.ask_each(int, {}, seconds=1.0) == []  # As where all engines of a resize are new.


@pytest.mark.parametrize("when", ["before", "while its name is looked up", "with all others", "while this sends"])
def test_an_engine_that_goes_is_gone_for_who_sends(when: str) -> None:
    """What ipyparallel notes of an engine that it has just forgotten never ends."""
    sent: list[int] = []
    client = SimpleNamespace(ids=[10, 11])

    def send(function: object) -> str:
        if when == "while this sends":
            client.ids.remove(11)
        sent.append(11)
        return "a task"

    class Client:
        ids = client.ids

        def __getitem__(self, engine_id: int) -> object:
            raised = {
                "before": IndexError,
                "while its name is looked up": KeyError,
                "with all others": NoEnginesRegistered,
            }
            if engine_id == 11 and when in raised:
                raise raised[when](engine_id)
            return SimpleNamespace(apply_async=send)

    with pytest.raises(IndexError):
        send_to(Client(), 11, int)  # type: ignore[arg-type]  # of a client it is only this
    assert sent == ([11] if when == "while this sends" else [])
    if when == "before":
        assert send_to(Client(), 10, int) == "a task"  # type: ignore[arg-type]


def test_while_ranks_are_interrupted_they_are_given_only_what_goes_first(line: WorkQueue, engines: FakeEngines) -> None:
    cut_off = line.add(Submission(b"cut off", [0, 1]))
    eventually(lambda: len(engines.sent) == 2)
    with line.held([0, 1]):
        next_one = line.add(Submission(b"next", [0, 1]))  # Asked for before rank 1 has come free.
        engines.answer(0, pack(None, {}))
        eventually(lambda: line.working() == {1: cut_off})
        reset = line.add(Submission(b"reset", [0, 1]), first=True)
        engines.answer(1, pack(None, {}))
        eventually(lambda: len(engines.sent) == 4)
        assert line.working() == {0: reset, 1: reset}
        engines.answer(0, pack(None, {}))
        engines.answer(1, pack(None, {}))
        assert reset.wait(5)
        assert [work for _, work in engines.sent[2:]] == [b"reset", b"reset"]
        assert not next_one.messages
    eventually(lambda: line.working() == {0: next_one, 1: next_one})
    with line.held([1]):
        other = line.add(Submission(b"other", [0]))
        engines.answer(0, pack(None, {}))
        eventually(lambda: line.working() == {0: other, 1: next_one})


def test_a_loss_is_of_an_interrupt_only_where_that_came_first() -> None:
    lost = RemoteFailure(kind="PeerLost", message="rank 0 waited for rank 1 in a collective: rank 1 left")
    stopped = RemoteFailure(kind=INTERRUPTED, message="")
    asked, failed = Submission(b"asked", [0, 1]), Submission(b"failed", [0, 1])
    asked.stop()
    for one in (asked, failed):
        one.end(0, failure=lost)
        one.stop()  # Who waits for a rank that has failed is interrupted in any case.
        one.end(1, failure=stopped)
        assert one.error is not None
    assert asked.error.only_interrupted
    assert not failed.error.only_interrupted


def test_failures_come_by_rank_and_the_others_are_released(
    line: WorkQueue, engines: FakeEngines, failed: list[Submission]
) -> None:
    engines.gone = {2}
    work = line.add(Submission(b"work", [0, 1, 2]))
    eventually(lambda: failed == [work])
    assert work.failures[2].kind == "EngineDied"
    engines.answer(0, {remote.FAILED: {"kind": "ValueError", "message": "bad"}})
    engines.answer(1, RemoteError("EngineError", "gone", "", {}))
    assert work.wait(5)
    assert {rank: failure.kind for rank, failure in work.failures.items()} == {
        2: "EngineDied",
        0: "ValueError",
        1: "EngineDied",
    }
    with pytest.raises(RankError, match="ValueError: bad"):
        work.results()
    engines.gone = set()
    late = line.add(Submission(b"late", [0, 2]))
    eventually(lambda: len(engines.open) == 2)
    line.give_up([0, 1, 2], "EngineDied", "the controller has died")
    assert late.wait(5)
    assert {failure.message for failure in late.failures.values()} == {"the controller has died"}


def test_many_at_once_are_one_order_on_all_ranks(line: WorkQueue, engines: FakeEngines) -> None:
    """Two notebooks that submit at the same time: what one rank does first, all do first."""
    draw = random.Random(0)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for rank in draw.sample(range(3), 3):
                if rank in engines.open:
                    engines.answer(rank)
            stop.wait(0.0005)  # The line's own thread is to be served, too.

    serving = threading.Thread(target=serve)
    serving.start()
    submitted: list[Submission] = []

    def submit(name: str) -> None:
        for number in range(500):
            submitted.append(line.add(Submission(f"{name} {number}".encode(), range(3))))

    notebooks = [threading.Thread(target=submit, args=(name,)) for name in ("one", "two")]
    for notebook in notebooks:
        notebook.start()
    for notebook in notebooks:
        notebook.join(30)
    assert all(one.wait(30) for one in submitted)
    stop.set()
    serving.join()
    orders = [[work for at, work in engines.sent if at == rank] for rank in range(3)]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 1000


def test_a_journal_tells_the_next_supervisor_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "submissions.jsonl"
    journal = FileJournal(path)
    whole, cut = Submission(b"", [0, 1], label="a run"), Submission(b"", [0, 1])
    for rank in (0, 1):
        journal.sending(whole, rank)
        journal.sent(whole, rank, f"message-{rank}")
    journal.sent(cut, 1, "message-1")
    journal.sending(cut, 0)
    with open(path, "ab") as file:
        file.write(b'{"id": "a line that a kill cut sh')
    before = FileJournal(path).before()
    assert before[whole.id] == ([0, 1], "a run", 0, {0: "message-0", 1: "message-1"}, set(), b"")
    assert before[cut.id] == ([0, 1], "", 0, {0: "", 1: "message-1"}, set(), b"")
    monkeypatch.setattr("speedlab.cluster.supervisor.journal._MOST_LINES", 20)
    monkeypatch.setattr("speedlab.cluster.supervisor.journal._KEPT_LINES", 4)
    journal = FileJournal(path)
    for number in range(40):
        journal.sent(cut, 1, f"m{number}")
    assert len(path.read_text().splitlines()) <= 21
    path.unlink()
    path.mkdir()  # As a disk that cannot be written.
    journal.sent(cut, 1, "lost")


def test_what_a_later_version_writes_into_a_clusters_files_is_passed_over(tmp_path: Path) -> None:
    later = {"of_a_later_version": {"deep": 1}}
    holds, run = tmp_path / "holds.json", tmp_path / "run"
    hold = {"key": "mine", "pid": os.getpid(), "started": psutil.Process().create_time()}
    holds.write_text(json.dumps({str(run): hold | later}))
    taken = RunLocks(holds)
    taken.take_over()
    assert run in taken
    entry = {"id": "one", "rank": 0, "ranks": [0], "message": "m", "place": 7}
    (tmp_path / "submissions.jsonl").write_text(json.dumps(entry | later) + "\n")
    assert FileJournal(tmp_path / "submissions.jsonl").before()["one"].messages == {0: "m"}
    count = {"token": "t", "failed": 2, "from_step": 20, "answered": "one"}
    assert msgspec.json.decode(json.dumps(count | later), type=AttemptCount) == AttemptCount(**count)
    (tmp_path / "runs.json").write_text(json.dumps({"runs": [str(run)]} | later))
    assert remembered_runs(SimpleNamespace(directory=tmp_path, name="c", token="t")) == [run]


PENDING = object()
"""Instead of a result that has not come."""


class FakeController:
    """What is asked of ipyparallel's client by whoever takes over: engine r has the number 10 + r."""

    def __init__(self) -> None:
        self.ids = [10, 11, 12]
        self.at_work: dict[int, list[str]] = {}
        self.results: dict[str, Any] = {}

    def queue_status(self, verbose: bool) -> dict[int, dict[str, list[str]]]:
        return {10 + rank: {"queue": messages, "tasks": []} for rank, messages in self.at_work.items()}

    def get_result(self, message: str, owner: bool, block: bool) -> Any:
        task: Any = Future()
        task.wait = lambda seconds: task.done()
        if self.results[message] is not PENDING:
            task.set_result(self.results[message])
        return task


def taken_over(engines: FakeEngines, controller: FakeController, path: Path) -> tuple[WorkQueue, RecoveredWork]:
    """What the next supervisor has, with the journal of the one before."""
    journal = FileJournal(path)
    line = WorkQueue(engines.send, journal, lambda submission: None)
    entries = [SimpleNamespace(rank=rank, engine_id=10 + rank) for rank in range(3)]
    return line, RecoveredWork(line, controller, SimpleNamespace(engines=entries), journal)  # type: ignore[arg-type]


def test_who_takes_over_sends_what_was_certainly_not_sent(
    line: WorkQueue, engines: FakeEngines, tmp_path: Path
) -> None:
    """Rank 1 is at work when the supervisor ends, so what the others were given waits for it, in the same order."""
    busy = line.add(Submission(b"busy", [1]))
    eventually(lambda: len(engines.sent) == 1)
    first = line.add(Submission(b"first", [0, 1, 2]))
    second = line.add(Submission(b"second", [0, 1, 2]))
    taken = line.add(Submission(b"taken back", [1, 2]))
    eventually(lambda: len(engines.sent) == 3)
    engines.answer(0, pack("zero", {}))
    engines.answer(2, pack("two", {}))  # Rank 0 and 2 work on the second now.
    engines.answer(2, pack("two again", {}))
    eventually(lambda: len(engines.sent) == 6)  # And rank 2 on the third.
    line.take_back(taken)
    controller = FakeController()
    controller.results = {f"{rank}-{at}": pack((rank, work), {}) for at, (rank, work) in enumerate(engines.sent)}
    controller.at_work = {1: ["1-0"]}
    after = FakeEngines()
    line, adopted = taken_over(after, controller, tmp_path / "submissions.jsonl")
    found = {one.id: adopted.find(one.id) or one for one in (busy, first, second, taken)}
    assert line.working() == {1: found[busy.id]}
    assert after.sent == []
    controller.at_work = {}
    for rank_1 in (b"first", b"second"):
        eventually(lambda: after.sent and after.sent[-1] == (1, rank_1))  # noqa: B023  # asked before the next one
        after.answer(1, pack("sent now", {}))
    assert found[busy.id].wait(5)
    assert found[first.id].wait(5)
    assert found[second.id].wait(5)
    assert found[first.id].results() == [(0, b"first"), "sent now", (2, b"first")]
    assert found[second.id].results() == [(0, b"second"), "sent now", (2, b"second")]
    assert [failure.kind for failure in found[taken.id].failures.values()] == ["KeyboardInterrupt"]
    assert [work for _, work in after.sent] == [b"first", b"second"]
    adopted.close()
    line.close()
    controller.results["1-1"] = pack("kept by the controller", {})
    line, adopted = taken_over(FakeEngines(), controller, tmp_path / "submissions.jsonl")
    again = adopted.find(second.id)
    assert again is not None
    assert again.wait(5)
    assert again.values[1] == pack("kept by the controller", {})
    assert list((tmp_path / "submissions").iterdir()) == []
    adopted.close()
    line.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_an_engine_that_is_gone_was_given_ends_under_the_next_supervisor(
    line: WorkQueue, engines: FakeEngines, tmp_path: Path, when: str
) -> None:
    """The controller keeps it in the engine's queue for ever, and has no result for a while."""
    line.add(Submission(b"a run", [0, 1], label="a run"))
    eventually(lambda: len(engines.sent) == 2)
    controller, after = FakeController(), FakeEngines()
    controller.at_work, controller.results = {0: ["0-0"], 1: ["1-1"]}, {"0-0": PENDING, "1-1": PENDING}
    if when == "before":
        controller.ids.remove(11)
    line, adopted = taken_over(after, controller, tmp_path / "submissions.jsonl")
    left = adopted.newest("a run")
    assert left is not None
    if when == "after":
        assert line.working() == {0: left, 1: left}
        controller.ids.remove(11)
    eventually(lambda: left.failures)
    assert {rank: failure.kind for rank, failure in left.failures.items()} == {1: "EngineDied"}
    assert line.working() == {0: left}
    following = line.add(Submission(b"of a new engine", [1]))
    after.answer(1, pack("done", {}))
    assert following.wait(5)
    controller.at_work, controller.results["0-0"] = {1: ["1-1"]}, pack("its end", {})
    assert left.wait(5)
    adopted.close()
    line.close()


def test_what_was_taken_up_late_is_followed_to_its_end(line: WorkQueue, engines: FakeEngines, tmp_path: Path) -> None:
    """The controller may hear of a message only when its sender has ended."""
    line.add(Submission(b"a run", [0], label="a run"))
    eventually(lambda: engines.sent)
    controller = FakeController()
    line, adopted = taken_over(FakeEngines(), controller, tmp_path / "submissions.jsonl")
    controller.at_work, controller.results["0-0"] = {0: ["0-0"]}, PENDING
    left = adopted.newest("a run")
    assert left is not None
    assert line.working() == {0: left}
    controller.at_work, controller.results["0-0"] = {}, pack("its end", {})
    assert left.wait(5)
    assert left.results() == ["its end"]
    adopted.close()
    line.close()


NAMED = """
import os, time, speedlab.cluster.files.processes as processes
processes.{0}
if os.fork() == 0:  # As a DataLoader's worker.
    processes._name("pt_data_worker")
else:
    print("named", flush=True)
time.sleep(60)
"""


def test_what_takes_over_ends_only_engines_that_nobody_counts() -> None:
    """Found by the cluster's token; a program that a cell has left is no engine, nor is what an engine forked. What
    engines are forked off goes first: it could fork another one."""
    environment = {**os.environ, processes.TOKEN: "token-of-this-test"}
    command = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(60)"]
    counted, unknown = (subprocess.Popen([*command, processes.ENGINE_MODULE], env=environment) for _ in range(2))
    other = subprocess.Popen(command, env=environment)
    named = [
        subprocess.Popen(
            [sys.executable, "-c", NAMED.format(own), processes.NURSERY_MODULE],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for own in (
            "name_fork_server()",
            "name_engine(7)",
            "name_engine(7); processes._name('my-program')",
            "name_nanny()",
        )
    ]
    nursery, forked, renamed, nanny = named
    try:
        for process in named:
            assert process.stdout is not None
            assert process.stdout.readline() == b"named\n"
        eventually(lambda: len(processes.marked("token-of-this-test")) == 14)
        assert [processes.rank_of(psutil.Process(process.pid)) for process in (forked, renamed)] == [7, None]
        hands = LocalProcesses(SimpleNamespace(), SimpleNamespace(), "token-of-this-test", None)  # type: ignore[arg-type]  # not asked
        unknowns = hands.end_unknown([EngineEntry(rank=0, pid=counted.pid, engine_id=0)])
        assert sorted(unknowns) == sorted([unknown.pid, forked.pid, renamed.pid])
        assert nursery.wait(10) == -signal.SIGKILL
        left = [p for p in processes.marked("token-of-this-test") if p.status() != psutil.STATUS_ZOMBIE]
        assert len(left) == 7, "two of each, and what the nursery had forked"
        assert {counted.pid, other.pid, nanny.pid} <= {process.pid for process in left}
    finally:
        processes.end(processes.marked("token-of-this-test"), patience_seconds=0.0)
        for process in (counted, unknown, other, *named):
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


# ---- the channel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, two = socket.socketpair()
    client, server = Channel(one, m.FromSupervisor), Channel(two, m.FromClient)
    yield client, server
    client.close()
    server.close()


def test_a_channel_that_another_thread_has_closed_is_at_its_end(pair: tuple[Channel, Channel]) -> None:
    _, server = pair
    server.close()
    assert server.ready()
    with pytest.raises(ChannelClosedError):
        server.receive()


def test_messages_arrive_whole_and_strangers_end_the_channel(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    work = os.urandom(3_000_000)
    sending = threading.Thread(target=client.send, args=(m.Submit(call=3, id="a", work=work, ranks=[1]),))
    sending.start()
    assert server.receive() == m.Submit(call=3, id="a", work=work, ranks=[1])
    sending.join()
    later = msgspec.msgpack.encode({"type": "GetRankStatus", "call": 4, "added_later": True})
    client._socket.sendall(len(later).to_bytes(8, "big") + later)
    assert server.receive() == m.GetRankStatus(call=4)  # A field that a later version adds is passed over.
    client._socket.sendall((5).to_bytes(8, "big") + b"hello")
    with pytest.raises(ChannelClosedError, match=r"what came is no message"):
        server.receive()
    client._socket.sendall((2**40).to_bytes(8, "big"))
    with pytest.raises(ChannelClosedError, match="a message of 1099511627776 bytes was announced"):
        server.receive()
    client.close()
    with pytest.raises(ChannelClosedError):
        server.receive()


def test_a_socket_in_a_folder_with_a_long_name_can_be_reached(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name " * 8) / ("and another one " * 8)
    folder.mkdir(parents=True)
    path = folder / "supervisor.sock"
    path.write_text("left by one that was killed")
    listening = listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    client = connect(path, m.FromSupervisor)
    accepted, _ = listening.accept()
    client.send(m.Hello())
    assert Channel(accepted, m.FromClient).receive() == m.Hello()
    for end in (listening, accepted):
        end.close()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        connect(path, m.FromSupervisor)


class FakeSupervisor:
    """Enough of one to answer."""

    def __init__(self) -> None:
        self.problem: ClusterError | None = None
        self.starting = ""
        self.engines = SimpleNamespace(status=list, restart=self._restart)
        self.gone = threading.Event()
        self.runs = SimpleNamespace()

    def _restart(self, rank: int) -> None:
        raise ClusterError(f"rank {rank} cannot be restarted")

    def ready(self, seconds: float) -> str | None:
        if self.problem is not None:
            raise self.problem
        return "the token"

    def left(self, client: object) -> None:
        self.gone.set()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, FakeSupervisor]]:
    supervisor = FakeSupervisor()
    path = tmp_path / "supervisor.sock"
    server = Server(listen(path), supervisor)  # type: ignore[arg-type]  # as much of it as is asked for
    yield path, supervisor
    server.close()


def test_questions_are_answered_or_refused_with_the_error_that_was_raised(
    served: tuple[Path, FakeSupervisor],
) -> None:
    path, supervisor = served
    client = Client(path, lambda *printed: None)
    assert client.token == "the token"
    assert client.ask(m.GetRankStatus()) == []
    with pytest.raises(ClusterError, match=r"^rank 2 cannot be restarted$"):
        client.ask(m.Restart(rank=2))
    with pytest.raises(TypeError, match=r"Expected `int`, got `str` - at `\$.rank`"):
        client.ask(m.Restart(rank="2"))  # type: ignore[arg-type]
    supervisor.engines.status = lambda: ["of another version"]
    with pytest.raises(OtherVersionError, match="says what this version does not understand: Expected `object`"):
        client.ask(m.GetRankStatus(), seconds=5)
    supervisor.engines.status = list
    assert client.ask(m.GetRankStatus()) == []  # The connection is as it was.
    del client  # Nobody holds it: the connection ends.
    gc.collect()  # The error above is in a circle with its traceback.
    assert supervisor.gone.wait(5)
    supervisor.problem = ClusterError("no engine came up")
    with pytest.raises(ClusterError, match=r"^no engine came up$"):
        Client(path, lambda *printed: None)
    with pytest.raises(SupervisorGoneError):
        Client(path.with_name("nobody.sock"), lambda *printed: None)


def test_a_connection_that_cannot_be_written_to_is_lost_at_once(
    served: tuple[Path, FakeSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread that listens has heard of it: who asks again must not ask there."""
    client = Client(served[0], lambda *printed: None)

    def closed(message: m.ProtocolMessage) -> None:
        raise ChannelClosedError("broken pipe")

    monkeypatch.setattr(client._channel, "send", closed)
    with pytest.raises(SupervisorGoneError, match="broken pipe"):
        client.ask(m.GetRankStatus())
    assert client.lost
    client.close()


LISTENER = """
import sys, time
from pathlib import Path
from speedlab.cluster.supervisor.channel import listen
listening = listen(Path(sys.argv[1]))
print("listens", flush=True)
time.sleep(60)
"""


def test_a_supervisor_that_says_nothing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedlab.cluster.supervisor.client._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("speedlab.cluster.supervisor.client._SILENT_SECONDS", 0.2)
    path = tmp_path / "supervisor.sock"
    with subprocess.Popen([sys.executable, "-c", LISTENER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(ClusterError, match=rf"process {process.pid}, has said nothing for 0.2 s"):
            Client(path, lambda *printed: None)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: processes.is_suspended(process.pid))
        with pytest.raises(ClusterError, match=rf"is suspended; let it go on \(kill -CONT {process.pid}\), or end it"):
            Client(path, lambda *printed: None)
        process.kill()


def test_a_start_that_takes_long_gives_signs_of_life(
    served: tuple[Path, FakeSupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, supervisor = served
    monkeypatch.setattr("speedlab.cluster.supervisor.client._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("speedlab.cluster.supervisor.client._SILENT_SECONDS", 0.9)
    monkeypatch.setattr("speedlab.cluster.supervisor.server._SIGN_SECONDS", 0.05)
    supervisor.starting, asked = "waiting in the queue", itertools.count()

    def ready(seconds: float) -> str | None:
        time.sleep(seconds)  # As the one it stands for waits.
        return "the token" if next(asked) == 30 else None

    monkeypatch.setattr(supervisor, "ready", ready)
    said: list[str] = []
    assert Client(path, lambda *printed: None, said.append).token == "the token"
    assert said == ["waiting in the queue"]


@pytest.mark.parametrize("leaves", [False, True], ids=["interrupted", "gone"])
def test_a_hold_that_was_given_up_while_it_waited_is_given_back(
    served: tuple[Path, FakeSupervisor], leaves: bool
) -> None:
    """Nobody would let go of it."""
    path, supervisor = served
    asked, go_on = threading.Event(), threading.Event()
    held_over: list[object] = []
    given_back: queue.SimpleQueue[tuple[Path, str, object]] = queue.SimpleQueue()

    def hold(folder: Path, holder: object, seconds: float, connection: object) -> None:
        held_over.append(connection)
        asked.set()
        assert go_on.wait(5)

    supervisor.runs = SimpleNamespace(hold=hold, leave=lambda *what: given_back.put(what))
    client = connect(path, m.FromSupervisor)
    client.send(m.Hello())
    assert isinstance(client.receive(), m.Welcome)
    client.send(m.LockRun(call=1, folder="a run", seconds=5.0, key="its key"))
    assert asked.wait(5)
    if leaves:
        client.close()
        assert supervisor.gone.wait(5)
    else:
        client.send(m.Cancel(call=1))
        client.send(m.GetRankStatus(call=2))
        assert client.receive().call == 2  # What came before was read.
    go_on.set()
    assert given_back.get(timeout=5) == (Path("a run"), "its key", *held_over)
    client.close()


@pytest.mark.parametrize(("greeting", "reported"), [(m.Hello(version=7), "7"), (m.GetRankStatus(call=1), "None")])
def test_versions_that_differ_are_told(
    served: tuple[Path, FakeSupervisor], greeting: m.ProtocolMessage, reported: str
) -> None:
    path, _ = served
    client = connect(path, m.FromSupervisor)
    client.send(greeting)
    refused = client.receive()
    assert (
        f"speaks version 2 of its protocol, and this client {reported}: they come from different versions"
        in refused.text
    )
    with pytest.raises(ChannelClosedError):
        client.receive()
    client.close()


def test_a_refusal_names_all_that_are_dead_also_whom_the_controller_still_counts(line: WorkQueue) -> None:
    engines = engines_of(line, SimpleNamespace(ids=[10, 11, 13]), size=4, ended=(0, 2))
    with pytest.raises(ClusterError, match=r"ranks 0, 2 ended .* cluster\.restart\(0, 2\)"):
        engines.living(None)
    with pytest.raises(ClusterError, match=r"rank 2 ended"):
        engines.living([1, 2, 3])
    assert engines.living([1, 3]) == [1, 3]
