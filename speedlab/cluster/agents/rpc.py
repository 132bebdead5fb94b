"""Call functions in agents, over the controller. Every call returns within its time limit, or raises HostLost."""

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
"""Default time limit of a call."""
AT_ONCE_SECONDS = 1.0
"""Time limit of a call that is made to several hosts while others wait."""
SILENT_SECONDS = 2.0
"""Time limit of a call that only checks whether the agent answers."""


class HostLost(ClusterError):  # noqa: N818  # what happened, not a mistake made here
    """An agent does not answer: its host is down or cut off, or the agent was ended."""


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """The agent of one host.

    `engine_id` is ipyparallel's id; `pid` is a process id on the host; `folder` is the agent's folder on the host.
    """

    host: Host
    engine_id: int
    pid: int
    rendezvous: str
    folder: str

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> AgentEntry:
        """Return an entry from the fields of `asdict`; ignore fields of a later version."""
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "host": Host.from_fields(fields["host"])})


def has_ended(error: ipyparallel.error.RemoteError) -> bool:
    """Return whether the error says that the engine ended before it answered. ipyparallel reports it only by name."""
    return error.ename == "EngineError"


def send_to(client: ipyparallel.Client, engine_id: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in one engine; return ipyparallel's AsyncResult.

    ipyparallel never completes a task for an engine that it has just forgotten, so check the engine again after
    sending.

    Args:
        client: Client of the controller.
        engine_id: ipyparallel's id of the engine.
        function: Function to call.
        *arguments: Arguments of the function.

    Raises:
        IndexError: If the hub has dropped the engine.
    """
    try:
        task = client[engine_id].apply_async(function, *arguments)
    except (KeyError, ipyparallel.error.NoEnginesRegistered):
        raise IndexError(engine_id) from None
    if engine_id not in client.ids:
        raise IndexError(engine_id)
    return task


class Calls:
    """Thread-safe calls over one client."""

    def __init__(self, client: ipyparallel.Client) -> None:
        self._client = client
        self._lock = threading.Lock()

    def send(self, engine_id: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one engine; return ipyparallel's AsyncResult.

        Raises:
            HostLost: If the hub has dropped the engine.
        """
        with self._lock:  # ipyparallel's views are not thread-safe.
            try:
                return send_to(self._client, engine_id, function, *arguments)
            except IndexError:
                raise HostLost(f"agent {engine_id} is gone") from None

    def answer(self, task: Any, host: str, seconds: float) -> Any:
        """Wait for the result of a call.

        Args:
            task: AsyncResult of the call.
            host: Name of the host, for messages.
            seconds: Time limit.

        Raises:
            HostLost: If the agent does not answer.
            ClusterError: If the function raised; with its error.
        """
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
        """Call a function and wait for its result; see `send` and `answer`.

        Args:
            engine_id: ipyparallel's id of the engine.
            host: Name of the host, for messages.
            function: Function to call.
            *arguments: Arguments of the function.
            seconds: Time limit.
        """
        return self.answer(self.send(engine_id, function, *arguments), host, seconds)

    def gather(
        self, asked: Mapping[str, tuple[int, tuple[Any, ...]]], function: Callable[..., Any], seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Call a function on several hosts at once.

        Args:
            asked: (engine id, arguments) by host.
            function: Function to call.
            seconds: Time limit of all calls together.

        Returns:
            (results by host, hosts that failed or did not answer in time).
        """
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
