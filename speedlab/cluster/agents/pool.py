"""The agents of a cluster, as its supervisor sees them: start agents, call them, start and end engines.

    spec = host_specs.parse(hosts=["gpu-1:8", "gpu-2:8"])
    launching = launching_for(home, spec)
    agents = start_agents(home, client, launching, token=token)
    engines = agents.start_engines(environment)
    agents.end()

Every call is thread-safe. It returns, or raises HostLost, within its time limit.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ipyparallel

import speedlab.cluster.agents.tasks as agent_tasks
from speedlab.cluster.agents.registration import AgentRegistration, EngineRegistration
from speedlab.cluster.agents.rpc import ANSWER_SECONDS, AT_ONCE_SECONDS, SILENT_SECONDS, AgentEntry
from speedlab.cluster.errors import ClusterError, name_ranks
from speedlab.cluster.files.cluster_dir import ClusterDir, EngineEntry
from speedlab.cluster.launch.backends import Launching, launching_for
from speedlab.cluster.launch.environment import host_environment
from speedlab.cluster.launch.host_specs import Spec
from speedlab.cluster.launch.placement import Host, rank_hosts
from speedlab.network import Endpoint, free_port

_ENGINE_SECONDS = 90.0
_POLL_SECONDS = 0.02


def start_agents(
    home: ClusterDir,
    client: ipyparallel.Client,
    launching: Launching,
    *,
    token: str,
    device: str = "auto",
    interface: str = "",
    progress: Callable[[str], None] = lambda words: None,
    cancelled: threading.Event | None = None,
) -> Agents:
    """Start an agent on every host; return after all have registered and their devices are known.

    Args:
        home: Folder of the cluster.
        client: Client of the controller.
        launching: Starts the processes of agents; its `prepare` may have been called.
        token: Unique id of the cluster.
        device: 'cuda', 'cpu' or 'auto', see `choose_devices`.
        interface: Network interface of the hosts for traffic between ranks; "" for the one that leads to the
            controller.
        progress: Called with what the start waits for, such as a position in a queue.
        cancelled: Set to cancel the start.

    Raises:
        ClusterError: With the host and what to do. No agent and no queued job is left then.
    """
    agents = Agents(home, AgentRegistration(home, client, launching, token, device, interface))
    try:
        entries = agents._muster.first(progress, cancelled or threading.Event())
        agents.known.update({entry.host.name: entry for entry in entries})
        agents.use([entry.host.name for entry in entries])
    except BaseException:
        agents.end()
        raise
    return agents


class Agents:
    """The agents of one cluster, by host. Made by `start_agents`, or by `Agents.of` for running agents."""

    def __init__(self, home: ClusterDir, muster: AgentRegistration) -> None:
        self.known: dict[str, AgentEntry] = {}
        """The newest agent of each host, including hosts that were left out."""
        self.stores: dict[str, Endpoint] = {}
        """Address at which rank 0 serves the rendezvous store, by the host of rank 0; chosen at the first use."""
        self.out_of_reach: set[str] = set()
        """Hosts that are not called because they do not answer; `silent` and `restart` still try."""
        self._home, self._muster = home, muster
        self._used: tuple[str, ...] = ()
        self._coming = threading.RLock()
        """Held while agents or engines are awaited, because each caller takes every new registration for its own."""

    @property
    def entries(self) -> tuple[AgentEntry, ...]:
        """Agents of the hosts with ranks, in the order of ranks."""
        return tuple(self.known[name] for name in self._used)

    @property
    def aside(self) -> dict[str, int]:
        """Number of engines on each host that was left out."""
        return {name: len(entry.host.devices) for name, entry in self.known.items() if name not in self._used}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts with ranks, in the order of ranks."""
        return tuple(entry.host for entry in self.entries)

    @property
    def engine_ids(self) -> frozenset[int]:
        """ipyparallel's ids of the agents. They are no ranks: exclude them from "all engines"."""
        return frozenset(entry.engine_id for entry in self.entries)

    def host_of(self, rank: int) -> Host:
        """Return the host of a rank."""
        return self.hosts[rank_hosts(self.hosts)[rank].host]

    # ---- choice of hosts ---------------------------------------------------------------------------------------------

    def use(self, hosts: Sequence[str]) -> None:
        """Place ranks on these hosts, in this order, from now on.

        Ranks get new numbers; `environments` returns what to bind each one to. Other hosts are left out: they are not
        called any more, but are ended with the rest.

        Args:
            hosts: Names of hosts.
        """
        self._used = tuple(hosts)

    def restart(self, host: str) -> None:
        """Restart the agent of a host after it was killed or cut off. The new agent finds the running engines.

        Args:
            host: Name of the host.

        Raises:
            ClusterError: If the agent does not register, or the number of devices differs.
        """
        with self._coming:
            devices = self.known[host].host.devices
            entry = self._muster.again(host, len(devices))
            if len(entry.host.devices) != len(devices):
                raise ClusterError(f"{host} is back with {len(entry.host.devices)} devices, and had {len(devices)}")
            self.known[host] = entry
            self.out_of_reach.discard(host)
            self.call(host, agent_tasks.end_other_agents)

    # ---- engines -----------------------------------------------------------------------------------------------------

    def start_engines(
        self,
        environment: Mapping[str, str],
        ranks: Iterable[int] | None = None,
        *,
        keep: Iterable[EngineEntry] = (),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[EngineEntry, ...]:
        """Start the engines of these ranks; return after all have imported torch and registered.

        Other engines on these hosts are ended first, except those in `keep`, because no state records them.

        Args:
            environment: Further environment variables of all engines (SPEEDLAB_BACKEND).
            ranks: Ranks to start; None for all.
            keep: Running engines that stay.
            cancelled: Polled during the start.

        Returns:
            The engines, in the order of ranks.

        Raises:
            ClusterError: If an engine ends early (with the host and the end of its log), or the start was cancelled.
                None of these engines is left then.
        """
        wanted = sorted(range(len(rank_hosts(self.hosts))) if ranks is None else set(ranks))
        with self._coming:
            environments = self.environments(environment)
            self.set_generation(self._home.generation)
            # Engines of an earlier start may still register: ignore them.
            self._muster.forget_new()
            self._await_imports([self.host_of(rank).name for rank in wanted], cancelled)
            started: dict[int, dict[str, Any]] = {}
            try:
                for number, entry in enumerate(self.entries):
                    mine = {rank: environments[rank] for rank in wanted if rank_hosts(self.hosts)[rank].host == number}
                    if mine:
                        # Packages may have been installed since the last import.
                        self._await_imports([entry.host.name], cancelled)
                        kept = [(engine.pid, engine.started) for engine in keep if engine.host == entry.host.name]
                        started |= self.call(entry.host.name, agent_tasks.start_engines, mine, kept)
                return self._await_engines(started, cancelled)
            except BaseException:
                begun = [
                    EngineEntry(
                        rank=rank, engine_id=-1, pid=who["pid"], host=self.host_of(rank).name, started=who["started"]
                    )
                    for rank, who in started.items()
                ]
                self.end_engines(begun, patience_seconds=0.0)
                raise

    def _await_imports(self, hosts: Sequence[str], cancelled: Callable[[], bool]) -> None:
        """Wait until agents can start engines at once. The supervisor waits, because a waiting agent answers no
        call.
        """
        left = list(dict.fromkeys(hosts))
        deadline = time.monotonic() + _ENGINE_SECONDS
        while left := [host for host in left if not self.call(host, agent_tasks.ready)]:
            if cancelled():
                raise ClusterError("it was interrupted")
            if time.monotonic() > deadline:
                log = self.log(left[0], "nursery", 1500).strip()
                raise ClusterError(f"{', '.join(left)} did not import torch within {_ENGINE_SECONDS:g} s\n{log}")
            time.sleep(_POLL_SECONDS)

    def environments(self, environment: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the environment variables of each rank's engine, including `environment`.

        Args:
            environment: Variables that all engines get.
        """
        first = self.entries[0].host
        if first.name not in self.stores:
            port = self.call(first.name, free_port)
            self.stores[first.name] = Endpoint(host=first.name, address=first.address, port=port)
        store = self.stores[first.name]
        return [
            {
                **host_environment(place.rank, self.hosts, self.entries[place.host].rendezvous, store),
                **environment,
            }
            for place in rank_hosts(self.hosts)
        ]

    def _await_engines(
        self, started: Mapping[int, Mapping[str, Any]], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        roll = EngineRegistration(self._muster.calls)
        found: dict[int, EngineEntry] = {}
        deadline = time.monotonic() + _ENGINE_SECONDS
        looked = time.monotonic()
        while len(found) < len(started):
            if cancelled():
                raise ClusterError("it was interrupted")
            roll.ask(self._muster.new_ids())
            for who in roll.answers():
                mine = started.get(who.rank)
                if mine is not None and mine["pid"] == who.pid:
                    found[who.rank] = EngineEntry(
                        rank=who.rank,
                        pid=who.pid,
                        engine_id=who.engine_id,
                        host=self.host_of(who.rank).name,
                        started=mine["started"],
                    )
            absent = [rank for rank in started if rank not in found]
            if absent and time.monotonic() > looked + 1.0:
                looked = time.monotonic()
                self._raise_ended(absent, started)
            if absent and time.monotonic() > deadline:
                raise ClusterError(f"{name_ranks(absent)} not ready after {_ENGINE_SECONDS:g} s\n{self._logs(absent)}")
            time.sleep(_POLL_SECONDS)
        return tuple(found[rank] for rank in sorted(found))

    def _raise_ended(self, ranks: Sequence[int], started: Mapping[int, Mapping[str, Any]]) -> None:
        known = {(each["host"], each["pid"]): each for each in self.engines()}
        found = {rank: known.get((self.host_of(rank).name, started[rank]["pid"])) for rank in ranks}
        ended = [rank for rank, each in found.items() if each is None or not each["running"]]
        if ended:
            where = ", ".join(dict.fromkeys(self.host_of(rank).name for rank in ended))
            statuses = {each["exit"] for rank in ended if (each := found[rank]) is not None}
            how = f", {_ending(statuses.pop())}" if len(statuses) == 1 and None not in statuses else ""
            raise ClusterError(f"{name_ranks(ended)} on {where} ended before being ready{how}\n{self._logs(ended)}")

    def _logs(self, ranks: Sequence[int]) -> str:
        tails = {rank: self.log(self.host_of(rank).name, f"engine-{rank}", 1500).strip() for rank in ranks[:3]}
        return "\n".join(f"rank {rank}: {tail}" for rank, tail in tails.items())

    def engines(self) -> list[dict[str, Any]]:
        """Return the engines of the hosts that answer: the fields of `agent_tasks.engines`, and the host."""
        answers, _ = self.ask_all(agent_tasks.engines)
        return [{**engine, "host": host} for host, found in answers.items() for engine in found]

    def signal(self, engines: Iterable[EngineEntry], number: int) -> list[EngineEntry]:
        """Send a signal to these engines; return those that were reached.

        Args:
            engines: Engines.
            number: Number of the signal.
        """
        return self._to_engines(engines, agent_tasks.send_signal, number)

    def signal_at_work(self, at_work: Mapping[EngineEntry, str], number: int) -> list[EngineEntry]:
        """Send a signal to engines that still work on a message. Takes a moment at most, because other hosts wait.

        Args:
            at_work: ipyparallel's message id by engine.
            number: Number of the signal.

        Returns:
            The engines whose agents answer.
        """
        wanted = {engine: (engine.pid, engine.started, message) for engine, message in at_work.items()}
        return self._to_engines(wanted, agent_tasks.signal_at_work, number, seconds=AT_ONCE_SECONDS, given=wanted)

    def end_engines(self, engines: Iterable[EngineEntry], *, patience_seconds: float) -> list[EngineEntry]:
        """End engines and their child processes. On a silent host they end alone, half a minute after the controller is
        out of reach.

        Args:
            engines: Engines.
            patience_seconds: Time between SIGTERM and SIGKILL.

        Returns:
            The engines that were not ended.
        """
        seconds = ANSWER_SECONDS + patience_seconds
        return self._to_engines(engines, agent_tasks.end_engines, patience_seconds, seconds=seconds)

    def set_generation(self, number: int, seconds: float = ANSWER_SECONDS) -> list[str]:
        """Let ranks that join from now on use this generation of the store.

        Args:
            number: Generation.
            seconds: Longest time to wait.

        Returns:
            The hosts that do not answer.
        """
        return self.ask_all(agent_tasks.set_generation, number, seconds=seconds)[1]

    def log(self, host: str, name: str, most_bytes: int = 20_000) -> str:
        """Return the end of a log on a host.

        Args:
            host: Name of the host.
            name: 'agent', or 'engine-3' for the engine that was started as rank 3.
            most_bytes: Maximum length in bytes.
        """
        return self.call(host, agent_tasks.log_tail, name, most_bytes)

    # ---- hosts -------------------------------------------------------------------------------------------------------

    def silent(self, seconds: float = SILENT_SECONDS, hosts: Iterable[str] | None = None) -> list[str]:
        """Return the hosts whose agents do not answer.

        Args:
            seconds: Longest time to wait.
            hosts: Hosts to call; None for the hosts with ranks.
        """
        return self.ask_all(agent_tasks.who, seconds=seconds, hosts=self._used if hosts is None else hosts)[1]

    def look_round(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Return what waits to be debugged, and which hosts are silent. The supervisor calls this once a second.

        Returns:
            (by host: name of the DebugServer by caller id; hosts whose agents do not answer).
        """
        answers, silent = self.ask_all(agent_tasks.who, seconds=SILENT_SECONDS, hosts=self._used)
        return {host: who.get("waiting", {}) for host, who in answers.items()}, silent

    def why_over(self) -> str | None:
        """Return why the hosts were taken away, such as a job's time limit; None if they were not."""
        return self._muster.launching.why_over()

    def end(self) -> list[str]:
        """End all engines and agents, and return the hosts to their provider.

        Returns:
            Hosts that cannot be reached. There, engines and agent end alone, within a minute after the controller.
        """
        came = {host: (engine_id, ()) for host, engine_id in self._muster.came.items()}
        answers, _ = self._muster.calls.gather(came, agent_tasks.end, ANSWER_SECONDS)
        ended = [host for host, left in answers.items() if not left]
        return self._muster.launching.stop(self._muster.order(), ended)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def call(self, host: str, function: Callable[..., Any], *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """Call a function of `agents/tasks.py` on one host.

        Args:
            host: Name of the host.
            function: Function to call.
            *arguments: Arguments of the function.
            seconds: Time limit.

        Raises:
            HostLost: If the agent does not answer.
            ClusterError: If the function raised; with its error.
        """
        return self._muster.calls.ask(self.known[host].engine_id, host, function, *arguments, seconds=seconds)

    def ask_all(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float = ANSWER_SECONDS,
        hosts: Iterable[str] | None = None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Call a function on several hosts at once, with the same arguments.

        Args:
            function: Function to call.
            *arguments: Arguments of the function.
            seconds: Time limit of all calls together.
            hosts: Hosts to call; None for the reachable hosts with ranks.

        Returns:
            (results by host, hosts that did not answer).
        """
        chosen = [name for name in self._used if name not in self.out_of_reach] if hosts is None else hosts
        return self._gather(dict.fromkeys(chosen, arguments), function, seconds)

    def ask_each(
        self, arguments: Mapping[str, tuple[Any, ...]], function: Callable[..., Any], *, seconds: float
    ) -> dict[str, Any]:
        """Call a function on several hosts at once, with arguments by host.

        Args:
            arguments: Arguments by host.
            function: Function to call.
            seconds: Time limit of all calls together.

        Returns:
            Results by host, for the hosts that answered.
        """
        return self._gather(arguments, function, seconds)[0]

    def _gather(
        self, arguments: Mapping[str, tuple[Any, ...]], function: Callable[..., Any], seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        asked = {name: (self.known[name].engine_id, given) for name, given in arguments.items()}
        return self._muster.calls.gather(asked, function, seconds)

    def _to_engines(
        self,
        engines: Iterable[EngineEntry],
        function: Callable[..., Any],
        *more: Any,
        seconds: float = ANSWER_SECONDS,
        given: Mapping[EngineEntry, tuple[Any, ...]] | None = None,
    ) -> list[EngineEntry]:
        """Call a function for engines on their hosts; return the engines whose process ids came back.

        `given`: argument for each engine; None for its process id and start time.
        """
        engines = list(engines)
        reported = given or {engine: (engine.pid, engine.started) for engine in engines}
        asked = {}
        for entry in self.known.values():
            mine = [reported[engine] for engine in engines if engine.host == entry.host.name]
            if mine and entry.host.name not in self.out_of_reach:
                asked[entry.host.name] = (entry.engine_id, (mine, *more))
        answers, _ = self._muster.calls.gather(asked, function, seconds)
        return [engine for engine in engines if engine.pid in answers.get(engine.host, ())]

    # ---- for the next supervisor -------------------------------------------------------------------------------------

    def to_fields(self) -> dict[str, Any]:
        """Return, as plain data for JSON, what another process needs to use these agents."""
        return {
            "agents": [asdict(entry) for entry in self.known.values()],
            "used": self._used,
            "launching": self._muster.launching.to_fields(),
            "stores": [str(store) for store in self.stores.values()],
            "device": self._muster.device,
            "interface": self._muster.interface,
        }

    @classmethod
    def of(
        cls, home: ClusterDir, client: ipyparallel.Client, spec: Spec, token: str, fields: Mapping[str, Any]
    ) -> Agents:
        """Return the agents that another process has started.

        Args:
            home: Folder of the cluster.
            client: Client of the controller.
            spec: Hosts of the cluster.
            token: Unique id of the cluster.
            fields: Result of `to_fields`.
        """
        launching = launching_for(home, spec)
        for name in launching.to_fields().keys() - {"kind"}:
            setattr(launching, name, fields["launching"][name])
        agents = cls(home, AgentRegistration(home, client, launching, token, fields["device"], fields["interface"]))
        entries = [AgentEntry.from_fields(entry) for entry in fields["agents"]]
        agents.known = {entry.host.name: entry for entry in entries}
        agents._muster.came.update({entry.host.name: entry.engine_id for entry in entries})
        agents.use(fields["used"])
        agents.stores = {store.host: store for store in map(Endpoint.parse, fields["stores"])}
        return agents


def _ending(status: int) -> str:
    """Return how a process ended, as text; `status` as in subprocess."""
    if status >= 0:
        return f"with status {status}"
    killer = ", as the system does where memory has run out" if -status == signal.SIGKILL else ""
    return f"killed by signal {-status}, {signal.strsignal(-status) or 'which has no name'}{killer}"
