"""Control the processes of engines: start, look, signal, end.

`LocalProcesses` are processes of this host. `RemoteProcesses` (`host_process_control.py`) are processes of several
hosts, reached through agents. No other module distinguishes the two.
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
    """The current state of an engine's process."""

    alive: bool
    suspended: bool
    rss_bytes: int
    load: Load = Load()


class ResizePlan(NamedTuple):
    """The cluster after a resize."""

    state: ClusterState
    """State after the resize, with the engines that stay under their new ranks. New engines are missing."""
    stays: dict[int, int]
    """New rank of each engine that stays, by its current rank."""


AtWork = Mapping[EngineEntry, str]
"""ipyparallel's id of the message that each engine works on."""


class ProcessController(Protocol):
    """Control of the engine processes of one cluster. Methods are thread-safe."""

    def require(self, ranks: Iterable[int]) -> None:
        """Check that engines could be started now.

        Args:
            ranks: Ranks of the engines.

        Raises:
            ClusterError: If they could not.
        """
        ...

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        """Start engines and wait until they are ready.

        Args:
            state: Devices and hosts by rank.
            ranks: Ranks to start.
            cancelled: Polled during the start.

        Raises:
            ClusterError: If an engine does not start, or the start was cancelled.
        """
        ...

    def look(self, engines: Sequence[EngineEntry]) -> list[EngineProcess]:
        """Return the state of engine processes.

        Args:
            engines: Engines.

        Returns:
            One state per engine, in the same order.
        """
        ...

    def interrupt(self, at_work: AtWork) -> list[EngineEntry]:
        """Send SIGINT to engines, if they still work on their message.

        Args:
            at_work: Message by engine.

        Returns:
            The engines that cannot be reached now.
        """
        ...

    def cut(self, at_work: AtWork) -> list[EngineEntry]:
        """Abort the connections of engines that wait for a peer in native code.

        Args:
            at_work: Message by engine.

        Returns:
            The engines that cannot be reached now.
        """
        ...

    def end(self, engines: Sequence[EngineEntry], gone: Callable[[EngineEntry], object]) -> list[EngineEntry]:
        """Kill engines and their child processes.

        Args:
            engines: Engines to kill.
            gone: Called with each engine after its own process has ended and before its child processes end.

        Returns:
            The engines that cannot be ended.
        """
        ...

    def next_generation(self, *, at_once: bool = False) -> None:
        """Let ranks that join from now on use a new store.

        Args:
            at_once: Do not restart agents for this; the caller informs the ranks itself (`remote.reset`).
        """
        ...

    def plan(self, state: ClusterState, size: int) -> ResizePlan:
        """Return the cluster that a resize would make; change nothing.

        Args:
            state: Current state.
            size: Number of engines.

        Raises:
            ClusterError: If the cluster cannot have so many engines.
        """
        ...

    def turn_to(self, state: ClusterState) -> None:
        """Start engines for the ranks of another state from now on.

        Args:
            state: State of the cluster after a resize.
        """
        ...

    def environments(self, state: ClusterState) -> list[dict[str, str]]:
        """Return the environment variables that bind an engine to its rank, by rank."""
        ...

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """Return the relay for a run whose folder not all hosts see; None if all do.

        Args:
            folder: Folder of the run.

        Raises:
            ClusterError: If the run needs more than records, such as checkpoints.
        """
        ...

    def lost(self) -> dict[str, str]:
        """Return hosts whose engines cannot be reached, and the reasons. Probes the hosts, which may take seconds."""
        ...

    def back(self) -> list[str]:
        """Return hosts that were left out when they were lost and answer again; each host once."""
        ...

    def why_over(self) -> str | None:
        """Return why all engines are gone for good, in the words of the host provider; None while they are not."""
        ...

    def stop(self) -> None:
        """End everything that is not on this host."""
        ...


class LocalProcesses:
    """Engine processes on this host."""

    def __init__(self, home: ClusterDir, client: Client, token: str, nursery: ForkServer) -> None:
        """Control engines of this host.

        Args:
            home: Folder of the cluster.
            client: Client of the controller.
            token: Unique id of the cluster.
            nursery: Fork server for CPU engines.
        """
        self._home, self._client, self._token, self._nursery = home, client, token, nursery
        self._loads = Loads()

    def require(self, ranks: Iterable[int]) -> None:
        """Do nothing: no requirement can be checked before the start."""

    def start(
        self, state: ClusterState, ranks: Iterable[int], cancelled: Callable[[], bool]
    ) -> tuple[EngineEntry, ...]:
        """Start engines; see `ProcessController.start`."""
        return start.start_engines(self._home, state, self._client, ranks, self._nursery, cancelled)

    def look(self, engines: Sequence[EngineEntry]) -> list[EngineProcess]:
        """Look at the processes of engines; see `ProcessController.look`."""
        return [self._look(engine) for engine in engines]

    def interrupt(self, at_work: AtWork) -> list[EngineEntry]:
        """Send SIGINT; see `ProcessController.interrupt`."""
        return self._signal(at_work, signal.SIGINT)

    def cut(self, at_work: AtWork) -> list[EngineEntry]:
        """Break the rendezvous stores and abort connections; see `ProcessController.cut`."""
        self._home.break_stores()
        return self._signal(at_work, CUT_SIGNAL)

    def end(self, engines: Sequence[EngineEntry], gone: Callable[[EngineEntry], object]) -> list[EngineEntry]:
        """Kill engines and their children; see `ProcessController.end`."""
        trees = {engine: start.tree(engine.pid, self._token) for engine in engines}
        # Kill only the engines first: a child of each engine reports its end to the controller.
        left = processes.end([process for tree in trees.values() for process in tree[:1]], patience_seconds=0.0)
        for engine in engines:
            gone(engine)
        left += processes.end([process for tree in trees.values() for process in tree[1:]], patience_seconds=0.0)
        pids = {process.pid for process in left}
        return [engine for engine, tree in trees.items() if pids & {process.pid for process in tree}]

    def end_unknown(self, engines: Sequence[EngineEntry]) -> list[int]:
        """End engines that no state records: an earlier supervisor died while it started or ended them.

        Args:
            engines: Engines that are recorded.

        Returns:
            Process ids of the engines that were ended.
        """
        # End the fork server first: it could fork another engine.
        processes.end(processes.fork_servers(self._token), patience_seconds=0.0)
        known = {engine.pid for engine in engines}
        unknown = [process.pid for process in processes.engines(self._token) if process.pid not in known]
        trees = [process for pid in unknown for process in start.tree(pid, self._token)]
        processes.end(trees, patience_seconds=0.0)
        return unknown

    def next_generation(self, *, at_once: bool = False) -> None:
        """Start a new generation of the store; see `ProcessController.next_generation`."""
        self._home.next_generation()

    def plan(self, state: ClusterState, size: int) -> ResizePlan:
        """Plan another number of engines; ranks keep their engines; see `ProcessController.plan`."""
        engines = state.engines[:size]
        after = replace(state, devices=tuple(devices_for(size, state.devices)), engines=engines)
        return ResizePlan(after, {engine.rank: engine.rank for engine in engines})

    def turn_to(self, state: ClusterState) -> None:
        """Do nothing: local ranks keep their numbers in every size."""

    def environments(self, state: ClusterState) -> list[dict[str, str]]:
        """Return the environment of each rank."""
        devices = device_fields(state.devices)
        return [rank_environment(rank, devices, str(self._home.rendezvous)) for rank in range(len(devices))]

    def wire(self, folder: RunFolder) -> RecordRelay | None:
        """Return None: processes of this host see the folder."""
        return None

    def lost(self) -> dict[str, str]:
        """Return no host."""
        return {}

    def back(self) -> list[str]:
        """Return no host."""
        return []

    def why_over(self) -> str | None:
        """Return None: this host is never taken away."""
        return None

    def stop(self) -> None:
        """Do nothing: the code that stops the cluster ends its processes by their token."""

    def _signal(self, engines: Iterable[EngineEntry], number: signal.Signals) -> list[EngineEntry]:
        for engine in engines:
            if processes.is_alive(engine.pid, self._token):
                with contextlib.suppress(ProcessLookupError):  # The process ended in between.
                    os.kill(engine.pid, number)
        return []

    def _look(self, engine: EngineEntry) -> EngineProcess:
        if processes.is_alive(engine.pid, self._token):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(engine.pid)
                suspended = process.status() == psutil.STATUS_STOPPED
                return EngineProcess(True, suspended, process.memory_info().rss, self._loads.of(process))
        return EngineProcess(False, False, 0)
