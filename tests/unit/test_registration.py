"""Engines that register say who they are, whatever an earlier supervisor has left."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ipyparallel.error import RemoteError

from speedlab.cluster.agents.registration import AgentRegistration, EngineRegistration, EngineWatch
from speedlab.cluster.agents.rpc import Calls, HostLost
from speedlab.cluster.files.cluster_dir import ClusterDir

ENDED = RemoteError("EngineError", "Engine 3 died while running task 'abc'", "", {})


class Task(Future[Any]):
    """Of ipyparallel's AsyncResult what is used here."""

    def get(self, timeout: float | None = None) -> Any:
        return self.result(timeout)


class Engine:
    """Keeps what it is asked until the test answers."""

    def __init__(self) -> None:
        self.task = Task()
        self.asked = 0

    def apply_async(self, function: Any, *arguments: Any) -> Any:
        self.asked += 1
        return self.task


@pytest.fixture
def engines() -> dict[int, Engine]:
    """By the hub's number: 3 was left by a supervisor that died, 4 is new."""
    return {3: Engine(), 4: Engine()}


@pytest.fixture
def home(tmp_path: Path) -> ClusterDir:
    return ClusterDir("on-hosts", tmp_path)


def calls(engines: dict[int, Engine]) -> Calls:
    class Client:
        ids = tuple(engines)

        def __getitem__(self, engine_id: int) -> Engine:
            if engine_id not in engines:
                raise IndexError(engine_id)
            return engines[engine_id]

    return Calls(Client())  # pyright: ignore[reportArgumentType]  # of a client it is only this


def test_an_engine_that_ends_while_it_is_asked_is_not_waited_for(engines: dict[int, Engine]) -> None:
    roll = EngineRegistration(calls(engines))
    roll.ask([2, 3, 4])  # 2 was unregistered since its number was read.
    assert list(roll.answers()) == []
    engines[3].task.set_exception(ENDED)
    assert list(roll.answers()) == []
    engines[4].task.set_result({"rank": 0, "pid": 17})
    assert list(roll.answers()) == [(0, 17, 4)]
    assert list(roll.answers()) == []


def test_an_engine_whose_question_was_lost_is_asked_again(
    engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    roll = EngineRegistration(calls(engines))
    roll.ask([4])
    engines[4].task = Task()  # Nobody ever answers the first one.
    now += 2.9
    assert (list(roll.answers()), engines[4].asked) == ([], 1)
    now += 0.2
    assert (list(roll.answers()), engines[4].asked) == ([], 2)
    engines[4].task.set_result({"rank": 0, "pid": 17})
    assert list(roll.answers()) == [(0, 17, 4)]
    now += 10.0
    assert (list(roll.answers()), engines[4].asked) == ([], 2)


def test_an_engine_that_registers_while_a_client_connects_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's list was written before, and its word about the engine went out before the client listened."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    class Client:
        _query_stream, _io_loop = object(), SimpleNamespace(add_callback=lambda function, *given: function(*given))

        def __init__(self) -> None:
            self.ids, self.asked = [3], list[Task]()

        def _send(self, stream: Any, word: str) -> Task:
            assert (stream, word) == (self._query_stream, "connection_request")
            self.asked.append(Task())
            return self.asked[-1]

        def _update_engines(self, engines: dict[int, str]) -> None:
            self.ids += engines

    client = Client()
    register = EngineWatch(client)  # type: ignore[arg-type]  # of a client it is only this
    assert (register.ids(), client.asked) == ({3}, [])
    now += 1.1
    assert (register.ids(), len(client.asked)) == ({3}, 1)
    for _ in range(5):
        now += 0.9
        assert (register.ids(), len(client.asked)) == ({3}, 1)  # One question at a time.
    client.ids = [5]  # The client has heard of 5, and that 3 has gone, since the hub wrote its answer.
    client.asked[0].set_result({"content": {"engines": {"3": "uuid of 3", "4": "uuid of 4"}}})
    assert register.ids() == {4, 5}
    # An answer that nobody waited for is old: 6 may have come and gone since.
    now += 0.9
    assert (register.ids(), len(client.asked)) == ({4, 5}, 2)
    client.asked[1].set_result({"content": {"engines": {"4": "uuid of 4", "5": "uuid of 5", "6": "uuid of 6"}}})
    now += 60.0
    assert (register.ids(), len(client.asked)) == ({4, 5}, 3)


def test_an_engine_that_cannot_answer_is_told(engines: dict[int, Engine]) -> None:
    roll = EngineRegistration(calls(engines))
    roll.ask([4])
    engines[4].task.set_exception(RemoteError("ImportError", "no module named speedlab", "", {}))
    with pytest.raises(RemoteError, match="no module named speedlab"):
        list(roll.answers())


def test_an_agent_is_waited_for_whatever_else_registers(home: ClusterDir) -> None:
    """As an engine that a supervisor before was starting, and that ends now."""
    there = [3]
    answers: dict[int, list[Any]] = {
        3: [HostLost("engine 3 is lost")],
        4: [HostLost("engine 4 does not answer"), {"agent": True, "host": "gpu-2"}],
    }

    def ask(engine_id: int, *arguments: Any) -> Any:
        answer = answers[engine_id].pop(0)
        if isinstance(answer, HostLost):
            raise answer
        return answer

    client: Any = SimpleNamespace(ids=[])
    muster = AgentRegistration(home, client, SimpleNamespace(), "token", "cpu", "")  # type: ignore[arg-type]  # it launches nothing
    muster.calls = SimpleNamespace(ask=ask)  # type: ignore[assignment]
    client.ids = there
    assert muster.new(strays=True) == []
    client.ids = [4]  # The hub has given up the other one.
    assert muster.new(strays=True) == []
    assert muster.new(strays=True) == [{"agent": True, "host": "gpu-2", "engine_id": 4}]
    assert muster.came == {"gpu-2": 4}
    assert muster.new(strays=True) == []
    client.ids = [4, 5]  # At the first start there is nobody else: an agent that ends is told at once.
    answers[5] = [HostLost("engine 5 is lost")]
    with pytest.raises(HostLost, match="engine 5 is lost"):
        muster.new(strays=False)


def test_an_agent_that_ends_before_it_answers_is_a_lost_host(engines: dict[int, Engine]) -> None:
    engines[3].task.set_exception(ENDED)
    with pytest.raises(HostLost, match="gpu-2 is lost: its agent has ended"):
        calls(engines).ask(3, "gpu-2", int)
