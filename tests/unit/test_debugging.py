"""The debugger of ranks, in one process: what is kept, the door, a post-mortem, breakpoints of a cell."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import speedlab.cluster.debug_line as debug_line
import speedlab.cluster.debugging as debugging
from speedlab.cluster import remote
from speedlab.cluster.debug_line import Door, door_path
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.shipping import pack


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SPEEDLAB_RENDEZVOUS", str(tmp_path / "rendezvous"))
    yield tmp_path
    debugging.forget()


class Person:
    """Says the lines in their order; after them an interrupt, or whatever stands there as an exception."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def on_a_rank(folder: Path, person: Person, work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, on a thread that stands for the rank, while the person serves the door."""
    found: list[Any] = []

    def rank() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=rank, daemon=True)
    with Door(folder, "name", ask=person) as door:
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


def test_a_post_mortem_has_the_frames_of_what_was_raised_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert not door_path(folder, "name").exists()


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
    with debugging.breakpoints("name"):
        breakpoint()
        counts.append(2)
        counts.append(3)
        breakpoint()
    return counts


def test_breakpoints_stop_until_the_person_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = sys.breakpointhook
    person = Person("p counts", "n", "p counts", "!counts[0] = 5", "c", "p len(counts)", "c")
    assert on_a_rank(folder, person, stopping) == [5, 2, 3]
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if not line.startswith((">", "->"))] == ["[1]", "[1, 2]", "3"]
    assert sys.breakpointhook is hook
    assert person.lines == []


@pytest.mark.parametrize("end", ["q", KeyboardInterrupt, EOFError])
def test_who_leaves_the_debugger_ends_the_cell(folder: Path, end: Any) -> None:
    assert type(on_a_rank(folder, Person("p 1", end), stopping)).__name__ == "BdbQuit"


def test_nobody_at_the_door_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_line, "GREET_SECONDS", 0.05)
    assert stopping() == [1, 2, 3]
    with Door(folder, "name", ask=Person()):  # Open, but nobody serves it.
        assert stopping() == [1, 2, 3]
    assert capsys.readouterr().out.count("nobody on this host waits for the cell, which goes on") == 2
    failing_call_quietly()
    with pytest.raises(ClusterError, match="rank 1 does not reach the notebook"):
        debugging.post_mortem("name")
