"""Control engine processes on several hosts, through the agents (`cluster/agents/pool.py`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.agents.tasks as agent_tasks
import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.host_specs as host_specs
import speedlab.cluster.launch.start as start
from speedlab.cluster.agents.pool import Agents, start_agents
from speedlab.cluster.agents.rpc import AT_ONCE_SECONDS
from speedlab.cluster.debug.agent_relay import Given, Said
from speedlab.cluster.debug.supervisor_relay import SupervisorDebugRelay
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import (
    ClusterDir,
    ClusterState,
    EngineEntry,
    this_host,
    timeout_environment,
    write_private,
)
from speedlab.cluster.launch.backends import launching_for
from speedlab.cluster.launch.placement import Host, hosts_for, rank_hosts
from speedlab.cluster.launch.rendezvous import controller_address
from speedlab.cluster.supervisor.process_control import AtWork, EngineProcess, ResizePlan
from speedlab.cluster.supervisor.record_relay import RecordRelay, relay_for
from speedlab.cluster.worker.abort_connections import CUT_SIGNAL
from speedlab.cluster.worker.utilization import Load
from speedlab.network import Endpoint, reserved_ports, try_to_reach
from speedlab.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from ipyparallel import Client


log = logging.getLogger("speedlab.supervisor")

_PROBED_PORT = 1
"""Nothing listens on this port: a reachable host refuses the connection at once."""
_PROBE_SECONDS = 0.5
_MOST_PROBED = 32
_LOOK_SECONDS = 2.0
_EXCHANGE_SECONDS = 4.0
"""If an agent does not answer for this long, the debugging sessions of ranks on its host end."""
_FOLDER_SECONDS = 5.0
"""The first request about a run folder is slow: the agent imports modules for it."""
_SILENT_ROUNDS = 3
"""After this many looks at which the host answers but its agent does not, the agent is restarted."""


class RemoteProcesses:
    """Engine processes that agents have started; a later supervisor finds them again."""

    def __init__(
        self,
        home: ClusterDir,
        agents: Agents,
        token: str,
        backend: str,
        timeout_seconds: float,
        spec: Mapping[str, Any],
    ) -> None:
        """Control the engines of `agents`.

        Args:
            home: Folder of the cluster.
            agents: Agents of all hosts.
            token: Unique id of the cluster.
            backend: Backend of the process group.
            timeout_seconds: Timeout of collectives; 0 for the default.
            spec: Hosts, in the form of `host_specs.fields_of`.
        """
        self._home, self._agents, self._spec = home, agents, spec
        self._environment = {
            processes.TOKEN: token,
            "SPEEDLAB_BACKEND": backend,
            **timeout_environment(timeout_seconds),
        }
        self._lost: dict[str, str] = {}
        self._silent: dict[str, int] = {}
        """Number of looks in a row at which the host answered but its agent did not."""
        self._agentless: dict[str, str] = {}
        """Hosts whose agent could not be restarted, and the reason."""
        self._were_lost: set[str] = set()
        """Hosts that were lost after their agent was started."""
        self._reported_back: set[str] = set()
        """Hosts that were left out after they were lost, and answer now."""
        self._seen: set[tuple[Path, tuple[str, ...]]] = set()
        """(run folder, hosts) that all these hosts share."""
        self._relay = SupervisorDebugRelay(home.path, self._exchange)
        self._bringing = threading.Lock()
        """Held while an agent is restarted."""

    def require(self, ranks: Iterable[int]) -> None:
        """Restart agents of these ranks that do not answer; raise ClusterError if that fails.

        Args:
            ranks: Ranks that are to be started.
        """
        at = rank_hosts(self._agents.hosts)
        self._require_agents(dict.fromkeys(self._agents.hosts[at[rank].host].name for rank in sorted(ranks)))

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        """Start engines; see `ProcessController.start`."""
        ranks = set(ranks)
        self.require(ranks)
        keep = [engine for engine in state.engines if engine.rank not in ranks]
        return self._agents.start_engines(self._environment, ranks, keep=keep, cancelled=cancelled)

    def _require_agents(self, hosts: Iterable[str]) -> None:
        """Restart the agents of hosts that do not answer or were lost; raise ClusterError if that fails.

        After a network failure, the connections of an agent recover at different times, and the controller may give up
        the agent in between. So a host that was lost gets a new agent, too.
        """
        hosts = list(hosts)
        with self._bringing:
            silent = self._agents.silent(hosts=hosts)
            for host in hosts:
                if host in silent or host in self._were_lost:
                    try:
                        self._agents.restart(host)
                    except ClusterError:
                        if host in silent:
                            raise
                        # The agent answers, so keep it although a restart failed.
                    self._were_lost.discard(host)
                    self.write()
                    # The generation may have changed in the meantime.
                    self._agents.set_generation(self._home.generation)

    def _bring_ended(self, silent: Collection[str]) -> None:
        """Restart the agents that have ended on hosts that answer. Raises ClusterError."""
        if there := self._there(silent):
            self._require_agents(there)

    def look(self, engines: Sequence[EngineEntry]) -> list[EngineProcess]:
        """Look at the processes of engines; see `ProcessController.look`."""
        hosts = dict.fromkeys(engine.host for engine in engines if engine.host not in self._lost)
        answers, silent = self._agents.ask_all(agent_tasks.look, seconds=_LOOK_SECONDS, hosts=hosts)
        found = {(host, each["pid"]): each for host, those in answers.items() for each in those}
        return [self._process(engine, found.get((engine.host, engine.pid)), silent) for engine in engines]

    def _process(self, engine: EngineEntry, seen: Mapping[str, Any] | None, silent: Collection[str]) -> EngineProcess:
        if seen is not None:
            return EngineProcess(True, seen["frozen"], seen["rss_bytes"], Load(*seen["load"]))
        # An agent that ended leaves its engines running. The controller notices whether they live.
        return EngineProcess(engine.host in silent and engine.host not in self._lost, False, 0)

    def interrupt(self, at_work: AtWork) -> list[EngineEntry]:
        """Send SIGINT; see `ProcessController.interrupt`."""
        return self._signal(at_work, signal.SIGINT)

    def cut(self, at_work: AtWork) -> list[EngineEntry]:
        """Abort connections to peers; see `ProcessController.cut`."""
        return self._signal(at_work, CUT_SIGNAL)

    def _signal(self, at_work: AtWork, number: int) -> list[EngineEntry]:
        reached = self._agents.signal_at_work(at_work, number)
        return [engine for engine in at_work if engine not in reached]

    def end(self, engines: Sequence[EngineEntry], gone: Callable[[EngineEntry], object]) -> list[EngineEntry]:
        """Kill engines on reachable hosts. Engines on a lost host end alone, half a minute after the host was cut off.

        Args:
            engines: Engines to kill.
            gone: Called with each engine whose process was killed.

        Returns:
            The engines that are still alive.
        """
        within = [engine for engine in engines if engine.host not in self._lost]
        # A host may have become reachable just now.
        self._require_agents(dict.fromkeys(engine.host for engine in within))
        # Kill only the engines first: a child of each engine reports its end to the controller.
        reached = self._agents.signal(within, signal.SIGKILL)
        for engine in reached:
            gone(engine)
        looks = self.look(within)
        return [engine for engine, look in zip(within, looks, strict=True) if look.alive]

    def next_generation(self, *, at_once: bool = False) -> None:
        """Start a new generation of the store; see `ProcessController.next_generation`."""
        self._home.next_generation()
        if at_once:
            self._agents.set_generation(self._home.generation, AT_ONCE_SECONDS)
            return
        for host in self._agents.set_generation(self._home.generation):
            try:
                # Otherwise ranks of this host would wait for the others in the old generation.
                self._bring_ended([host])
            except ClusterError:  # The watch thread counts such a host as lost.
                log.exception("ranks of %s do not know that all meet again", host)

    def plan(self, state: ClusterState, size: int) -> ResizePlan:
        """Plan another number of engines on whole hosts; see `ProcessController.plan`."""
        used = {host.name: len(host.devices) for host in self._agents.hosts}
        names = hosts_for(size, used, self._agents.aside, self._lost)
        now = {(engine.host, number): engine for host in used for number, engine in enumerate(_on(state, host))}
        hosts = [self._agents.known[name].host for name in names]
        stays = {}
        engines = []
        for place in rank_hosts(hosts):
            engine = now.get((hosts[place.host].name, place.local_rank))
            if engine is not None:
                stays[engine.rank] = place.rank
                engines.append(replace(engine, rank=place.rank))
        devices = tuple(device for host in hosts for device in host.devices)
        return ResizePlan(replace(state, devices=devices, engines=tuple(engines), hosts=tuple(names)), stays)

    def turn_to(self, state: ClusterState) -> None:
        """Use the hosts of `state` from now on."""
        self._agents.use(state.hosts)
        self.write()

    def environments(self, state: ClusterState) -> list[dict[str, str]]:
        """Return the environment of each rank."""
        return self._agents.environments(self._environment)

    def write(self) -> None:
        """Record the agents for the next supervisor, in `hosts.json`."""
        fields = {"spec": self._spec, **self._agents.to_fields()}
        write_private(self._home.path / "hosts.json", json.dumps(fields))

    # ---- run folders -------------------------------------------------------------------------------------------------

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """Return the relay for a run whose folder not all hosts see; None if all do.

        Hosts that have seen the folder once are not asked again, because submissions wait meanwhile. An agent that has
        just ended is restarted first.

        Args:
            folder: Folder of the run.

        Raises:
            ClusterError: If the run needs more than records, or a host does not answer.
        """
        place = (folder.path, self.host_names)
        if place in self._seen:
            return None
        self._bring_ended(self._agents.silent(hosts=self.host_names))
        found = relay_for(folder, self)
        if found is None:
            self._seen.add(place)
        return found

    @property
    def host_names(self) -> tuple[str, ...]:
        """Reachable hosts, in the order of ranks."""
        return tuple(host.name for host in self._agents.hosts if host.name not in self._lost)

    def ask_hosts(self, function: Callable[..., Any], by_host: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call `function` in the agents of hosts.

        Args:
            function: Function of an agent.
            by_host: Arguments by host.

        Returns:
            Result by host, for the hosts that answered.
        """
        return self._agents.ask_each(by_host, function, seconds=_FOLDER_SECONDS)

    # ---- lost hosts --------------------------------------------------------------------------------------------------

    def lost(self) -> dict[str, str]:
        """Return the lost hosts and why. A host whose agent alone has ended is lost only if the agent cannot be
        restarted.
        """
        waiting, silent = self._agents.look_round()
        self._relay.hear(waiting)
        there = self._there(silent)
        self._agentless = {host: why for host, why in self._agentless.items() if host in there}
        self._silent = {host: self._silent.get(host, 0) + 1 for host in there}
        late = [
            host for host, rounds in self._silent.items() if rounds >= _SILENT_ROUNDS and host not in self._agentless
        ]
        if late and not self._bringing.locked():
            threading.Thread(target=self._bring, args=(late,), name="speedlab-agents", daemon=True).start()
        lost = [host for host in silent if host not in there or host in self._agentless]
        self._lost = {host: self._agentless.get(host, "does not answer: it is down or cut off") for host in lost}
        self._agents.out_of_reach = set(lost)
        self._were_lost.update(lost)
        return self._lost

    def _exchange(self, host: str, given: Mapping[str, Given]) -> dict[str, Said]:
        if host in self._agents.out_of_reach:
            raise ClusterError(f"{host} is lost")
        return self._agents.call(host, agent_tasks.exchange, given, seconds=_EXCHANGE_SECONDS)

    def back(self) -> list[str]:
        """Return hosts that were left out when they were lost and answer again; each host once."""
        away = {name for name in self._agents.aside if name in self._were_lost}
        there, before = self._there(away), self._reported_back
        self._reported_back = there
        return sorted(there - before)

    def _there(self, names: Collection[str]) -> set[str]:
        """Return the hosts that answer, whether or not an agent runs on them."""
        hosts = [self._agents.known[name].host for name in names]
        with ThreadPoolExecutor(max(1, min(_MOST_PROBED, len(hosts)))) as pool:
            return {host.name for host, found in zip(hosts, pool.map(_is_there, hosts), strict=True) if found}

    def _bring(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            try:
                self._require_agents([host])
            except ClusterError as error:
                self._agentless[host] = f"has lost its agent, and no other could be started: {error}"
            else:
                log.info("the agent of %s was started again", host)

    def why_over(self) -> str | None:
        """Return why all hosts were taken away; None while they were not."""
        return self._agents.why_over()

    def stop(self) -> None:
        """End all agents and what they started."""
        self._agents.end()


def _on(state: ClusterState, host: str) -> list[EngineEntry]:
    """Return the engines of a host, by local rank."""
    return [engine for engine in state.engines if engine.host == host]


def _is_there(host: Host) -> bool:
    """Return whether a host answers, whether or not an agent runs on it."""
    port = Endpoint(host=host.name, address=host.address, port=_PROBED_PORT)
    problem = try_to_reach(port, this_host(), _PROBE_SECONDS)
    return problem is None or isinstance(problem, ConnectionRefusedError)


def start_on_hosts(
    home: ClusterDir,
    token: str,
    asked: Mapping[str, Any],
    progress: Callable[[str], None],
    cancelled: threading.Event,
) -> tuple[ClusterState, Client, RemoteProcesses]:
    """Start a controller that the hosts can reach, an agent per host, and the engines.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        asked: Request with spec (of `host_specs.fields_of`), device, backend, interface and timeout_seconds.
        progress: Called with what the start waits for.
        cancelled: Set to cancel the start.

    Returns:
        The state of the cluster, the client of its controller, and the control of its processes; all ranks are ready.

    Raises:
        ClusterError: If the start fails or was cancelled. Nothing is left on any host.
    """
    spec = host_specs.of_fields(asked["spec"])
    environment = {processes.TOKEN: token}
    address = controller_address(spec, asked["interface"])
    launching = launching_for(home, spec)
    with reserved_ports() as ports:
        try:
            launching.prepare()  # Connecting to hosts overlaps with the start of the controller.
            controller_pid = asyncio.run(start.launch_controller(home, environment, address, ports))
            client, agents = start.connect_to(home, controller_pid, token), None
        except BaseException:
            launching.abandon()
            raise
        try:
            agents = start_agents(
                home,
                client,
                launching,
                token=token,
                device=asked["device"],
                interface=asked["interface"],
                progress=progress,
                cancelled=cancelled,
            )
            progress("starting engines")
            hands = RemoteProcesses(home, agents, token, asked["backend"], asked["timeout_seconds"], asked["spec"])
            engines = agents.start_engines(hands._environment, cancelled=cancelled.is_set)
            state = ClusterState(
                name=home.name,
                token=token,
                controller_pid=controller_pid,
                started=time.time(),
                devices=tuple(device for host in agents.hosts for device in host.devices),
                engines=engines,
                backend=asked["backend"],
                timeout_seconds=asked["timeout_seconds"],
                hosts=tuple(host.name for host in agents.hosts),
            )
            hands.write()
            home.write(state)
        except BaseException:
            if agents is not None:
                agents.end()
            client.close(linger=0)
            processes.end(
                [found for found in processes.marked(token) if found.pid != os.getpid()], patience_seconds=0.0
            )
            raise
    return state, client, hands


def found_on_hosts(home: ClusterDir, state: ClusterState, client: Client) -> RemoteProcesses:
    """Find the agents that an earlier supervisor started.

    Args:
        home: Folder of the cluster.
        state: State of the cluster.
        client: Client of the controller.

    Raises:
        ClusterError: If `hosts.json` is damaged.
    """
    file = home.path / "hosts.json"
    try:
        fields = json.loads(file.read_text())
        agents = Agents.of(home, client, host_specs.of_fields(fields["spec"]), state.token, fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"{file} is damaged ({type(error).__name__}: {error}), and says which agents there are on "
            f"{', '.join(state.hosts)}; end the controller (kill {state.controller_pid}): what runs there ends then"
        ) from None
    agents.use(state.hosts)  # The file may record a resize that was not completed.
    # Contact the agents first: they learn that there is a supervisor again, before a run that paused without one
    # continues.
    agents.silent()
    return RemoteProcesses(home, agents, state.token, state.backend, state.timeout_seconds, fields["spec"])
