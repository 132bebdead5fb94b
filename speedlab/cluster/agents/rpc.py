"""Calling functions in agents, over the controller: every answer comes within its seconds, or the host is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipyparallel

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.placement import Host

ANSWER_SECONDS = 10.0
"""How long an agent may take to answer where nobody says."""
AT_ONCE_SECONDS = 1.0
"""How long an agent may take where what is asked is done to other hosts as well, and they wait."""
SILENT_SECONDS = 2.0
"""How long an agent may take to answer when it is only asked whether it is there."""


class HostLost(ClusterError):  # noqa: N818  # what happened, not a mistake made here
    """An agent does not answer: its host is down or cut off, or the agent was ended."""


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """One host's agent. `engine_id`: ipyparallel's number; `pid`: on its host; `folder`: of its host alone."""

    host: Host
    engine_id: int
    pid: int
    rendezvous: str
    folder: str

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> AgentEntry:
        """From what `asdict` gave, without fields that a later version may have added."""
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "host": Host.from_fields(fields["host"])})


def has_ended(error: ipyparallel.error.RemoteError) -> bool:
    """Whether this says that the engine ended before it answered: ipyparallel passes it on by name alone."""
    return error.ename == "EngineError"


def send_to(client: ipyparallel.Client, engine_id: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The AsyncResult of a call in one engine. Raises IndexError where the hub has given it up, also while this sends:
    what ipyparallel notes of an engine that it has just forgotten never ends."""
    try:
        task = client[engine_id].apply_async(function, *arguments)
    except (KeyError, ipyparallel.error.NoEnginesRegistered):
        raise IndexError(engine_id) from None
    if engine_id not in client.ids:
        raise IndexError(engine_id)
    return task


class Calls:
    """Calls of one client, from any thread."""

    def __init__(self, client: ipyparallel.Client) -> None:
        self._client = client
        self._lock = threading.Lock()

    def send(self, engine_id: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The AsyncResult of a call in one engine. Raises HostLost where the hub has given it up."""
        with self._lock:  # A client's views are not made for several threads.
            try:
                return send_to(self._client, engine_id, function, *arguments)
            except IndexError:
                raise HostLost(f"agent {engine_id} is gone") from None

    def answer(self, task: Any, host: str, seconds: float) -> Any:
        """What a call returned. Raises HostLost, or ClusterError with what the function raised."""
        try:
            return task.get(timeout=seconds)
        except ipyparallel.error.TimeoutError:
            raise HostLost(f"{host} does not answer: it is down or cut off, or its agent was ended") from None
        except ipyparallel.error.RemoteError as error:
            if has_ended(error):
                raise HostLost(f"{host} is lost: its agent has ended") from None
            raise ClusterError(f"{host}: {error.ename}: {error.evalue}") from None

    def ask(
        self,
        engine_id: int,
        host: str,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float = ANSWER_SECONDS,
    ) -> Any:
        """As `answer`, of a call that is made now."""
        return self.answer(self.send(engine_id, function, *arguments), host, seconds)

    def gather(
        self, asked: Mapping[str, tuple[int, tuple[Any, ...]]], function: Callable[..., Any], seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """(answers by host, hosts that did not answer in time, or failed); `asked`: number and arguments by host, all
        called at once."""
        tasks, silent = {}, []
        for host, (engine_id, arguments) in asked.items():
            try:
                tasks[host] = self.send(engine_id, function, *arguments)
            except HostLost:
                silent.append(host)
        deadline = time.monotonic() + seconds
        answers = {}
        for host, task in tasks.items():
            try:
                answers[host] = self.answer(task, host, max(0.0, deadline - time.monotonic()))
            except ClusterError:
                silent.append(host)
        return answers, silent
