"""Registration of agents and engines: launch agents, wait until they register, and identify them.

ipyparallel's ids do not say which rank or host an engine is, so each new engine is asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ipyparallel
from ipyparallel.error import RemoteError

import speedlab.cluster.agents.tasks as agent_tasks
import speedlab.cluster.worker.remote as remote
from speedlab.cluster.agents.process import Order, own_versions
from speedlab.cluster.agents.rpc import AgentEntry, Calls, HostLost, has_ended
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, this_host
from speedlab.cluster.launch.backends import Launching
from speedlab.cluster.launch.placement import Host
from speedlab.hardware import Device
from speedlab.network import Endpoint

_ASK_AGAIN_SECONDS = 1.0
"""Interval at which the hub is asked which engines are registered."""
_SILENT_SECONDS = 3.0
"""After this time without an answer, an engine is asked again who it is."""


class EngineWatch:
    """The engines that are registered with the hub.

    A client receives notifications only after its subscription has reached the hub, and its first list is older than
    that. It would miss an engine that registers in between, when all start at once. So the hub is polled, too.
    """

    def __init__(self, client: ipyparallel.Client) -> None:
        self._client = client
        self._answer: Any = None
        self._asked = self._looked = time.monotonic()
        self._ever = set(client.ids)

    def ids(self) -> set[int]:
        """Return ipyparallel's ids of the registered engines. Never waits."""
        now = time.monotonic()
        # There was a pause between calls: a pending answer may be out of date.
        if now > self._looked + _ASK_AGAIN_SECONDS:
            self._answer = None
        self._looked = now
        self._ever |= set(self._client.ids)
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer.result(), None
            self._take(answer["content"]["engines"])
        if self._answer is None and now > self._asked + _ASK_AGAIN_SECONDS:
            self._asked = now
            self._answer = self._client._send(self._client._query_stream, "connection_request")
        return set(self._client.ids)

    def _take(self, engines: dict[str, str]) -> None:
        """Add missed engines. An engine that is gone must not be added again; ids are never reused."""
        unheard = {int(number): uuid for number, uuid in engines.items() if int(number) not in self._ever}
        if unheard:  # Only ipyparallel's IO thread may change its list of engines.
            self._client._io_loop.add_callback(self._client._update_engines, unheard)


class RegisteredEngine(NamedTuple):
    """An engine that has answered. `engine_id` is ipyparallel's id; `pid` is a process id on the engine's host."""

    rank: int
    pid: int
    engine_id: int


class EngineRegistration:
    """Asks new engines for their rank, and collects the answers.

    An engine that ends before it answers is dropped: it may be a leftover of an earlier supervisor that the hub still
    lists. The code that started an engine checks whether it runs. A silent engine is asked again, because the scheduler
    drops messages to an engine that it does not know yet.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._asked: dict[int, list[Any]] = {}
        """Requests by engine id, the newest last."""
        self._ask_again: dict[int, float] = {}

    def ask(self, engine_ids: Iterable[int]) -> None:
        """Ask these engines for their rank."""
        for engine_id in engine_ids:
            try:
                task = self._calls.send(engine_id, remote.identify)
            except HostLost:
                self._asked.pop(engine_id, None)
                continue
            self._asked.setdefault(engine_id, []).append(task)
            self._ask_again[engine_id] = time.monotonic() + _SILENT_SECONDS

    def answers(self) -> Iterator[RegisteredEngine]:
        """Yield the engines that have answered since the last call. Raises ipyparallel's RemoteError if an engine
        cannot answer.
        """
        for engine_id, tasks in list(self._asked.items()):
            task = next((task for task in tasks if task.done()), None)
            if task is None:
                if time.monotonic() > self._ask_again[engine_id]:
                    self.ask([engine_id])
                continue
            del self._asked[engine_id]
            try:
                who = task.get()
            except RemoteError as error:
                if has_ended(error):
                    continue
                raise
            yield RegisteredEngine(who["rank"], who["pid"], engine_id)


REGISTER_SECONDS = 60.0
"""Longest time between the start of an agent's process and its registration."""

_POLL_SECONDS = 0.02


class AgentRegistration:
    """Launches and registers the agents of one cluster."""

    def __init__(
        self,
        home: ClusterDir,
        client: ipyparallel.Client,
        launching: Launching,
        token: str,
        device: str,
        interface: str,
    ) -> None:
        """Prepare the registration; see `start_agents` for the arguments."""
        self.launching, self.device, self.interface = launching, device, interface
        self.calls = Calls(client)
        self.came: dict[str, int] = {}
        """ipyparallel's id of the newest agent, by host."""
        self._home, self._register, self._token = home, EngineWatch(client), token
        self._known = self._register.ids()
        """Engine ids that existed before, or were asked already."""

    def order(self) -> Order:
        """Return the order that an agent receives at its start."""
        connection = json.loads(self._home.connection_file("engine").read_text())
        address = connection["interface"].partition("://")[2]
        return Order(
            cluster=self._home.name,
            token=self._token,
            connection=connection,
            controller=str(Endpoint(host=this_host(), address=address, port=connection["registration"])),
            expected=own_versions(),
            device=self.device,
        )

    def first(self, progress: Callable[[str], None], cancelled: threading.Event) -> tuple[AgentEntry, ...]:
        """Launch all agents; return after every one has registered and described its host.

        Args:
            progress: Called with what the start waits for.
            cancelled: Set to cancel the start.

        Returns:
            The agents in the order of ranks.

        Raises:
            ClusterError: If an agent does not register, or its host cannot be used.
        """
        self.launching.start(self.order())
        names = self.launching.names
        came = self._await(self.launching.count, progress, cancelled)
        came.sort(key=lambda who: names.index(who["host"]) if who["host"] in names else who["number"])
        entries, wrong = [], []
        for number, who in enumerate(came):
            try:
                entries.append(self._describe(who, self.launching.engines_of(number)))
            except ClusterError as error:
                wrong.append(str(error))
        if wrong:
            raise ClusterError("\n".join(wrong))
        check_equal([entry.host for entry in entries], [self.launching.engines_of(k) for k in range(len(entries))])
        return tuple(entries)

    def again(self, host: str, engines: int) -> AgentEntry:
        """Launch the agent of one host again.

        Args:
            host: Name of the host.
            engines: Number of engines of the host.

        Raises:
            ClusterError: If the agent does not register.
        """
        self.forget_new()
        self.launching.again(host, self.order())
        deadline = time.monotonic() + REGISTER_SECONDS
        while not (came := [who for who in self.new(strays=True) if who["host"] == host]):
            self.launching.progress()
            if time.monotonic() > deadline:
                late = f"{host} did not come back within {REGISTER_SECONDS:g} s"
                raise ClusterError("\n".join(filter(None, [late, self.launching.said()])))
            time.sleep(_POLL_SECONDS)
        return self._describe(came[0], engines)

    def forget_new(self) -> None:
        """Ignore all engines that have registered until now."""
        self._known |= self._register.ids()

    def new_ids(self) -> set[int]:
        """Return the ids that have registered since the last call."""
        found = self._register.ids() - self._known
        self._known |= found
        return found

    def new(self, *, strays: bool) -> list[dict[str, Any]]:
        """Return the agents among the new engines, as `agent_tasks.who` describes them, with `engine_id`.

        Args:
            strays: Whether engines of an earlier supervisor may still be ending. Then an engine that does not answer is
                asked again later, as long as it is registered.

        Raises:
            HostLost: If an engine does not answer and `strays` is False.
        """
        found = []
        for engine_id in sorted(self.new_ids()):
            try:
                who = self.calls.ask(engine_id, f"engine {engine_id}", agent_tasks.who)
            except HostLost:
                if not strays:
                    raise
                self._known.discard(engine_id)
                continue
            if who["agent"]:
                self.came[who["host"]] = engine_id
                found.append({**who, "engine_id": engine_id})
        return found

    def _await(self, count: int, progress: Callable[[str], None], cancelled: threading.Event) -> list[dict[str, Any]]:
        came: list[dict[str, Any]] = []
        deadline = time.monotonic() + REGISTER_SECONDS
        said = ""
        while len(came) < count:
            if cancelled.is_set():
                raise ClusterError("the start of the cluster was cancelled; nothing is left of it")
            words = self.launching.progress()
            if words != said:
                progress(words)
                said = words
            if words:  # Waiting in a queue has no time limit.
                deadline = time.monotonic() + REGISTER_SECONDS
            if time.monotonic() > deadline:
                there = {who["host"] for who in came}
                absent = [name for name in self.launching.names if name not in there]
                raise ClusterError(
                    f"only {len(came)} of {count} agents came within {REGISTER_SECONDS:g} s"
                    + (f"; none of {', '.join(absent)}" if absent else "")
                )
            came += self.new(strays=False)
            time.sleep(_POLL_SECONDS)
        return came

    def _describe(self, who: dict[str, Any], engines: int | None) -> AgentEntry:
        asked = (engines, self.device, self.interface)
        found = self.calls.ask(who["engine_id"], who["host"], agent_tasks.describe, *asked)
        if found["problem"]:
            raise ClusterError(f"{who['host']}: {found['problem']}")
        devices = tuple(Device(**{**each, "cores": tuple(each["cores"])}) for each in found["devices"])
        host = Host(name=who["host"], address=found["address"], interface=found["interface"], devices=devices)
        return AgentEntry(
            host=host,
            engine_id=who["engine_id"],
            pid=who["pid"],
            rendezvous=found["rendezvous"],
            folder=found["folder"],
        )


def check_equal(hosts: Sequence[Host], asked: Sequence[int | None]) -> None:
    """Raise ClusterError if hosts have different numbers of devices and the user named none: tensor-parallel ranks
    share a host.

    Args:
        hosts: Hosts with their devices.
        asked: Number of engines per host that the user named; None for unnamed.
    """
    counts = {len(host.devices) for host in hosts}
    if len(counts) > 1 and None in asked:
        what = ", ".join(f"{host.name} has {len(host.devices)}" for host in hosts)
        fewest = min(counts)
        raise ClusterError(
            f"hosts have different numbers of devices: {what}. Say how many each gives, as "
            f"{[f'{host.name}:{fewest}' for host in hosts]}"
        )
