"""What a supervisor can do to engines' processes: where they run makes the difference, and nothing else knows it.

`LocalProcesses` are processes of this host. `RemoteProcesses` (`hands_on_hosts.py`) asks the agents of several.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import psutil

import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.start as start
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState, EngineEntry
from speedlab.cluster.launch.environment import device_fields, rank_environment
from speedlab.cluster.launch.placement import devices_for
from speedlab.cluster.worker.abort_connections import CUT_SIGNAL
from speedlab.cluster.worker.utilization import Load, Loads

if TYPE_CHECKING:
    from ipyparallel import Client

    from speedlab.cluster.supervisor.record_relay import RecordRelay
    from speedlab.cluster.worker.fork_server_client import ForkServer
    from speedlab.telemetry.run_folder import RunFolder


class EngineProcess(NamedTuple):
    """An engine's process, as it is now."""

    alive: bool
    suspended: bool
    rss_bytes: int
    load: Load = Load()


class ResizePlan(NamedTuple):
    """Another number of engines."""

    state: ClusterState
    """As it will be; its engines are those that stay, under the ranks that they will have."""
    stays: dict[int, int]
    """New rank of each engine that stays, by its rank now."""


AtWork = Mapping[EngineEntry, str]
"""Engines, each with ipyparallel's id of the message that it works on."""


class ProcessController(Protocol):
    """Engines' processes of one cluster. Methods may be called from any thread."""

    def require(self, ranks: Iterable[int]) -> None:
        """Raise ClusterError where engines of these ranks could not be started now."""
        ...

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        """New engines for these ranks of `state`, ready. Raises ClusterError, also once it is cancelled."""
        ...

    def look(self, engines: Sequence[EngineEntry]) -> list[EngineProcess]:
        """Each engine's process."""
        ...

    def interrupt(self, at_work: AtWork) -> list[EngineEntry]:
        """SIGINT to each that works on this; returns those that cannot be reached now."""
        ...

    def cut(self, at_work: AtWork) -> list[EngineEntry]:
        """Let those come back that wait for a peer in native code; returns as `interrupt` does."""
        ...

    def end(self, engines: Sequence[EngineEntry], gone: Callable[[EngineEntry], object]) -> list[EngineEntry]:
        """Kill each and what it started; returns those that cannot be ended. `gone(engine)` is called when its own
        process has ended, before what it started is."""
        ...

    def next_generation(self, *, at_once: bool = False) -> None:
        """Ranks that join from now on meet in a new store. `at_once`: no agent is started anew for that; whoever asks
        tells the ranks (`remote.reset`)."""
        ...

    def plan(self, state: ClusterState, size: int) -> ResizePlan:
        """What `size` engines instead of those of `state` would be; nothing is changed. Raises ClusterError where there
        cannot be so many."""
        ...

    def turn_to(self, state: ClusterState) -> None:
        """From now on engines are started for, and bound to, the ranks of `state`."""
        ...

    def environments(self, state: ClusterState) -> list[dict[str, str]]:
        """What binds an engine to its rank, by rank."""
        ...

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """What a run needs whose folder not all hosts see; None where they do. Raises ClusterError where that is not
        enough."""
        ...

    def lost(self) -> dict[str, str]:
        """Hosts whose engines are out of reach, and why; looks anew, and may take seconds."""
        ...

    def back(self) -> list[str]:
        """Hosts that were left out when they were lost, and answer again; each is told once."""
        ...

    def why_over(self) -> str | None:
        """Why all engines are gone for good, as whoever lent their hosts has it; None while they are not."""
        ...

    def stop(self) -> None:
        """End everything that is not on this host."""
        ...


class LocalProcesses:
    """Engines on this host."""

    def __init__(self, home: ClusterDir, client: Client, token: str, nursery: ForkServer) -> None:
        self._home, self._client, self._token, self._nursery = home, client, token, nursery
        self._loads = Loads()

    def require(self, ranks: Iterable[int]) -> None:
        """Nothing that could be missing is known before."""

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        return start.start_engines(self._home, state, self._client, ranks, self._nursery, cancelled)

    def look(self, engines: Sequence[EngineEntry]) -> list[EngineProcess]:
        return [self._look(engine) for engine in engines]

    def interrupt(self, at_work: AtWork) -> list[EngineEntry]:
        return self._signal(at_work, signal.SIGINT)

    def cut(self, at_work: AtWork) -> list[EngineEntry]:
        self._home.break_stores()
        return self._signal(at_work, CUT_SIGNAL)

    def end(self, engines: Sequence[EngineEntry], gone: Callable[[EngineEntry], object]) -> list[EngineEntry]:
        trees = {engine: start.tree(engine.pid, self._token) for engine in engines}
        # The engines alone at first: one of the children of each tells the controller that it has gone.
        left = processes.end([process for tree in trees.values() for process in tree[:1]], patience_seconds=0.0)
        for engine in engines:
            gone(engine)
        left += processes.end([process for tree in trees.values() for process in tree[1:]], patience_seconds=0.0)
        pids = {process.pid for process in left}
        return [engine for engine, tree in trees.items() if pids & {process.pid for process in tree}]

    def end_unknown(self, engines: Sequence[EngineEntry]) -> list[int]:
        """End engines that are none of these: an earlier supervisor died while it started or ended them. Returns their
        process ids."""
        processes.end(processes.fork_servers(self._token), patience_seconds=0.0)  # At first: it could fork another one.
        known = {engine.pid for engine in engines}
        unknown = [process.pid for process in processes.engines(self._token) if process.pid not in known]
        trees = [process for pid in unknown for process in start.tree(pid, self._token)]
        processes.end(trees, patience_seconds=0.0)
        return unknown

    def next_generation(self, *, at_once: bool = False) -> None:
        self._home.next_generation()

    def plan(self, state: ClusterState, size: int) -> ResizePlan:
        engines = state.engines[:size]
        after = replace(state, devices=tuple(devices_for(size, state.devices)), engines=engines)
        return ResizePlan(after, {engine.rank: engine.rank for engine in engines})

    def turn_to(self, state: ClusterState) -> None:
        """Ranks are counted on, from 0."""

    def environments(self, state: ClusterState) -> list[dict[str, str]]:
        devices = device_fields(state.devices)
        return [rank_environment(rank, devices, str(self._home.rendezvous)) for rank in range(len(devices))]

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        return None

    def lost(self) -> dict[str, str]:
        return {}

    def back(self) -> list[str]:
        return []

    def why_over(self) -> str | None:
        return None

    def stop(self) -> None:
        """Who stops the cluster ends its processes by their token."""

    def _signal(self, engines: Iterable[EngineEntry], number: signal.Signals) -> list[EngineEntry]:
        for engine in engines:
            if processes.is_alive(engine.pid, self._token):
                with contextlib.suppress(ProcessLookupError):  # It ended in between.
                    os.kill(engine.pid, number)
        return []

    def _look(self, engine: EngineEntry) -> EngineProcess:
        if processes.is_alive(engine.pid, self._token):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(engine.pid)
                suspended = process.status() == psutil.STATUS_STOPPED
                return EngineProcess(True, suspended, process.memory_info().rss, self._loads.of(process))
        return EngineProcess(False, False, 0)
