"""The debugger of ranks, in one process: what is kept, the door, a post-mortem, breakpoints of a cell; the same for a
rank on another host, over its agent and the supervisor."""

from __future__ import annotations

import gc
import re
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import pytest
from person import Person

import speedlab.cluster.debug.connection as debug_line
import speedlab.cluster.debug.rank_debugger as debugging
from speedlab.cluster.debug.agent_relay import MOST_BYTES, DebugRelay, Given, Said
from speedlab.cluster.debug.connection import (
    ConnectRequest,
    DebuggerOutput,
    DebugServer,
    Greeting,
    relay_path,
    server_path,
)
from speedlab.cluster.debug.supervisor_relay import SupervisorDebugRelay
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.supervisor.channel import connect, listen
from speedlab.cluster.worker import remote
from speedlab.cluster.worker.serialization import pack


class Far:
    """The way of a rank on another host: what its agent and the supervisor do, the controller's calls left out."""

    def __init__(self, cluster: Path, host: Path) -> None:
        self.lobby = DebugRelay(host)
        self.relay = SupervisorDebugRelay(cluster, self.exchange)
        self.answers = True
        self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def exchange(self, host: str, given: Mapping[str, Given]) -> dict[str, Said]:
        if not self.answers:
            raise ClusterError(f"{host} does not answer")
        said = self.lobby.exchange(given)
        self.most_bytes = max([self.most_bytes, *(len(data) for data, _ in said.values())])
        return said

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.relay.hear({"host-b": self.lobby.waiting()})

    def close(self) -> None:
        """Sessions that there are end."""
        self._over.set()
        self._thread.join()
        self.lobby.end_forgotten(0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cluster's, in which a rank of this host is, too."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SPEEDLAB_RENDEZVOUS", str(tmp_path / "rendezvous"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # As in a kernel; what ranks run here changes it.
    yield tmp_path
    signal.signal(signal.SIGINT, before)
    debugging.forget()


@pytest.fixture
def far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """The rank is on another host."""
    host = folder / "host-b"
    host.mkdir()
    monkeypatch.setenv("SPEEDLAB_RENDEZVOUS", str(host / "rendezvous"))
    made = Far(folder, host)
    yield made
    made.close()


@pytest.fixture(params=["here", "far"])
def either(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The cluster's folder; the rank is on this host, or on another one."""
    if request.param == "far":
        request.getfixturevalue("far")
    return folder


def on_a_rank(folder: Path, person: Person, work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, on a thread that stands for the rank, while the person serves the door."""
    found: list[Any] = []

    def rank() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=rank, daemon=True)
    with DebugServer(folder, "name", ask=person) as door:
        thread.start()
        while thread.is_alive():
            door.serve(0.01)
        door.serve()
    return found[0]


class TooDeepError(ValueError):
    pass


def fail(depth: int) -> None:
    inner = {"depth": depth}
    if depth:
        fail(depth - 1)
    raise TooDeepError(f"<b>too deep</b> {inner}")


def failing_call() -> dict[str, Any]:
    return remote.call(pack((fail, (1,), {}), {}))


def test_a_post_mortem_has_the_frames_of_what_was_raised_last(either: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = either
    assert on_a_rank(folder, Person(), lambda: debugging.post_mortem("name")) is False
    on_a_rank(folder, Person(), failing_call_quietly)
    person = Person(
        "p depth, inner", "up", "args", "pp inner['depth'] + 41", "!inner['depth'] = 7", "p inner", "w", "q"
    )
    assert on_a_rank(folder, person, lambda: debugging.post_mortem("name")) is True
    said = capsys.readouterr().out
    assert said.startswith("rank 1: TooDeepError: <b>too deep</b> {'depth': 0}\n")
    for line in ("(0, {'depth': 0})\n", "depth = 1\n", "\n42\n", "{'depth': 7}\n"):
        assert line in said
    assert "remote.py" not in said
    assert person.prompts == ["rank 1 (Pdb) "] * 8
    assert not server_path(folder, "name").exists()


def failing_call_quietly() -> None:
    """As the engine's main thread does it, which alone may have handlers of signals."""
    try:
        fail(1)
    except ValueError as error:
        debugging.keep(error)


def test_what_is_kept_is_freed_before_the_next_work_begins(folder: Path) -> None:
    assert remote.FAILED in failing_call()
    kept = weakref.ref(debugging._kept[0])
    remote.call(pack((remote.held_runs, (), {}), {}))
    assert debugging._kept == [kept()]
    assert remote.call(pack((len, ([],), {}), {}))
    gc.collect()
    assert (kept(), debugging._kept) == (None, [])
    followed = (
        type("PeerLost", (RuntimeError,), {})("rank 0 left"),
        RuntimeError("[pair.cc] Connection closed by peer"),
    )
    for error in (KeyboardInterrupt(), *followed):
        failing_call()
        debugging.keep(error)
        assert debugging._kept == []


def stopping() -> list[int]:
    counts = [1]
    with debugging.Breakpoints("name"):
        breakpoint()
        counts.append(2)
        counts.append(3)
        breakpoint()
    return counts


def test_breakpoints_stop_until_the_person_goes_on(either: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, hook = either, sys.breakpointhook
    person = Person("p counts", "n", "p counts", "!counts[0] = 5", "c", "p len(counts)", "c")
    assert on_a_rank(folder, person, stopping) == [5, 2, 3]
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if not line.startswith((">", "->"))] == ["[1]", "[1, 2]", "3"]
    assert sys.breakpointhook is hook
    assert person.lines == []


@pytest.mark.parametrize("end", ["q", KeyboardInterrupt, EOFError])
def test_who_leaves_the_debugger_ends_the_cell(either: Path, end: Any) -> None:
    assert type(on_a_rank(either, Person("p 1", end), stopping)).__name__ == "BdbQuit"


def test_it_never_stops_where_the_interpreter_calls(folder: Path) -> None:
    """What is raised in the callback of a weak reference is lost, and with it the end of the cell."""
    things = [TooDeepError()]
    known = WeakSet(things)

    def forgetting() -> int:
        with debugging.Breakpoints("name"):
            breakpoint() or things.clear()
            return len(known)

    assert type(on_a_rank(folder, Person("q"), forgetting)).__name__ == "BdbQuit"


def test_nobody_at_the_door_stops_nothing(
    either: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = either
    monkeypatch.setattr(debug_line, "GREET_SECONDS", 0.05)
    monkeypatch.setattr(debug_line, "FAR_GREET_SECONDS", 0.5)
    assert stopping() == [1, 2, 3]
    with DebugServer(folder, "name", ask=Person()):  # Open, but nobody serves it.
        assert stopping() == [1, 2, 3]
    no_one, silent = capsys.readouterr().out.splitlines()
    assert "no prompt waits for this cell" in no_one
    assert re.search("(the kernel with the prompt has not|no prompt has) answered within 0.0?5 s", silent)
    failing_call_quietly()
    with pytest.raises(ClusterError, match="rank 1 does not reach who asked"):
        debugging.post_mortem("name")


def test_a_rank_whose_line_fails_is_told_so(
    folder: Path, far: Far, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    far.close()  # The supervisor asks no more, after which the agent lets those go about whom nobody has asked.

    def forget() -> None:
        wait_for(lambda: bool(far.lobby.waiting()), 20)
        far.lobby.end_forgotten(0.0)

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    assert stopping() == [1, 2, 3]
    thread.join()
    listen(relay_path(folder / "host-b")).close()  # The agent has ended.
    assert stopping() == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        f"breakpoint(): {what}, so this cell goes on; run it again to stop there"
        for what in (
            "the line to the prompt, over the agent of this host, has broken (the connection was closed)",
            "the agent of this host, over which a prompt is reached, has ended ([Errno 111] Connection refused)",
        )
    ]
    failing_call_quietly()
    with pytest.raises(ClusterError, match="rank 1 does not reach who asked for a post-mortem: the agent of this host"):
        debugging.post_mortem("name")


def test_half_a_message_of_one_rank_keeps_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that was suspended amid it."""
    data = msgspec.msgpack.encode(DebuggerOutput(text="at last\n"))
    framed = struct.pack("!Q", len(data)) + data
    ended: list[list[int]] = []
    thread = threading.Thread(target=lambda: ended.append(stopping()), daemon=True)
    with DebugServer(folder, "name", ask=Person("c", "c")) as door:
        half = connect(server_path(folder, "name"), Greeting)
        for end in (3, 11):  # Amid the length, and amid what follows it.
            half.connection.sendall(framed[:end])
            framed = framed[end:]
            door.serve()
        thread.start()
        deadline = time.monotonic() + 20
        while thread.is_alive():
            door.serve(0.01)
            assert time.monotonic() < deadline
        assert ended == [[1, 2, 3]]
        assert "at last" not in capsys.readouterr().out
        half.connection.sendall(framed)
        door.serve()
        assert capsys.readouterr().out == "at last\n"
        half.close()


def test_what_is_said_may_be_of_any_length(either: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than a socket, or an agent, keeps of it."""
    count = 3 * MOST_BYTES
    # What `!` prints would go to whichever of the two is at work: both are threads of this process.
    person = Person(f"!counts.append('{'a' * count}')", f"p 'b' * {count}", "!counts.append(len(counts[1]))", "c", "c")
    stopped = on_a_rank(either, person, stopping)
    assert (len(stopped[1]), stopped[2]) == (count, count)
    assert "b" * count in capsys.readouterr().out


def rank_of_its_own(number: int) -> str:
    with debugging.Breakpoints("name"):
        breakpoint()
    return f"rank {number} went on"


def test_ranks_that_stop_together_are_taken_one_after_the_other(either: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a person thinks about the first: the others are greeted meanwhile, and wait."""
    monkeypatch.setattr(debug_line, "GREET_SECONDS", 0.5)
    monkeypatch.setattr(debug_line, "FAR_GREET_SECONDS", 0.5)
    ended: list[str] = []
    asked: list[tuple[int, int]] = []
    inside: list[int] = []
    ranks = [
        threading.Thread(target=lambda number=number: ended.append(rank_of_its_own(number)), daemon=True)
        for number in range(3)
    ]

    def person(prompt: str) -> str:
        asked.append((len(inside), len(ended)))
        inside.append(1)
        if len(asked) == 1:
            for thread in ranks[1:]:
                thread.start()
            wait_for(lambda: len(door._inside) == 3, 10)
            assert not ended  # Nobody went on for want of a greeting.
        inside.pop()
        return "c"

    with DebugServer(either, "name", ask=person) as door:
        ranks[0].start()
        deadline = time.monotonic() + 20
        while any(thread.is_alive() for thread in ranks) or len(asked) < 3:
            door.serve(0.01)
            assert time.monotonic() < deadline
    assert sorted(ended) == [f"rank {number} went on" for number in range(3)]
    assert [at_once for at_once, _ in asked] == [0, 0, 0]


def wait_for(check: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("lost", ["agent", "supervisor"])
def test_a_host_that_goes_ends_the_session_on_both_sides(
    folder: Path, far: Far, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose() -> None:
        if lost == "agent":
            far.answers = False  # From now on; the rank hears it from its agent, which nobody asks any more.
        else:
            far.close()

    ended: list[BaseException] = []

    def rank() -> None:
        try:
            stopping()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=rank, daemon=True)
    with DebugServer(folder, "name", ask=Person(lose)) as door:
        thread.start()
        deadline = time.monotonic() + 20
        while "out of reach" not in (said := capsys.readouterr().out):
            door.serve(0.01)
            assert time.monotonic() < deadline
    assert "\nthe rank is out of reach, which ends its session\n" in said
    if lost == "supervisor":
        thread.join(20)
    assert thread.is_alive() is (lost == "agent")
    far.lobby.end_forgotten(0.0)
    thread.join(10)
    assert [type(error).__name__ for error in ended] == ["BdbQuit"]


def test_more_ranks_than_a_door_holds_wait_to_be_let_in(folder: Path) -> None:
    """Those who were told that nobody waits would go on, and the others wait for them in the next collective."""
    ranks = {str(number): "name" for number in range(100)}
    ended: list[str] = []
    greeted: set[str] = set()
    heard = threading.Condition()

    def exchange(host: str, given: Mapping[str, Given]) -> dict[str, Said]:
        with heard:
            ended.extend(number for number, (_, over, _) in given.items() if over)
            greeted.update(number for number, (data, _, _) in given.items() if data)
            heard.notify_all()
            return {number: (b"", len(greeted) == len(ranks) or bool(ended)) for number in given}

    with DebugServer(folder, "name") as door:
        SupervisorDebugRelay(folder, exchange).hear({"host-b": ranks})
        deadline = time.monotonic() + 20
        while len(greeted) < len(ranks) and not ended and time.monotonic() < deadline:
            door.serve(0.01)
    assert ended == []
    assert greeted == ranks.keys()


def test_a_lobby_outlives_what_it_cannot_take_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank that knocks on this host from then on would wait, and be told that its line is silent."""
    lobby = DebugRelay(folder)
    strangers = []
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "speedlab-lobby" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    for said in (b"", b"\x00" * 7 + b"\x01\xc0"):  # Nothing, as there is no thread that would hear it; no Knock.
        strangers.append(connect(relay_path(folder), DebuggerOutput))
        if said:  # An empty write, too, breaks on a line that the lobby has closed by then.
            strangers[-1].connection.sendall(said)
        assert strangers[-1].connection.recv(1) == b""
    channel = connect(relay_path(folder), DebuggerOutput)
    channel.send(ConnectRequest(door="name"))
    deadline = time.monotonic() + 20
    while list(lobby.waiting().values()) != ["name"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for each in (*strangers, channel):
        each.close()
    lobby.end_forgotten(0.0)
