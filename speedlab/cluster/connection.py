"""A connection to a running cluster: its client, its tasks, its output, and what is known of its engines."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

import speedlab.cluster.processes as processes
import speedlab.cluster.remote as remote
import speedlab.cluster.start as start
from speedlab.cluster.errors import ClusterError, name_ranks
from speedlab.cluster.home import ClusterState, EngineEntry, Home
from speedlab.cluster.output import OutputHub
from speedlab.cluster.tasks import POLL_SECONDS, Tasks
from speedlab.hardware import Device

if TYPE_CHECKING:
    from ipyparallel import Client

_UNREGISTER_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """One rank's engine, as it is now."""

    rank: int
    engine_id: int
    pid: int
    device: Device
    state: str
    """'idle', 'busy', 'frozen' (its process is suspended) or 'dead' (it ended, or stopped answering)."""
    rss_bytes: int


class Connection:
    """What one handle holds of a running cluster. It closes when it is dropped; the engines go on."""

    def __init__(self, home: Home, state: ClusterState, client: Client) -> None:
        # A plain dict, so that the output's thread can ask for ranks without keeping the handle alive.
        self._rank_by_id: dict[int, int] = {}
        self.client = client
        self.tasks = Tasks(client)
        self.output = OutputHub(start.read_connection(home), self._rank_by_id.get, len(state.devices))
        self.take_over(state, home.stamp())
        self.close = weakref.finalize(self, _close, self.client, self.output)
        self._listen()

    def take_over(self, state: ClusterState, stamp: int) -> None:
        """What runs now, as read from the cluster's folder at `stamp`."""
        self.state, self.stamp = state, stamp
        ranks = {engine.engine_id: engine.rank for engine in state.engines}
        self._rank_by_id.update(ranks)
        for engine_id in self._rank_by_id.keys() - ranks.keys():
            del self._rank_by_id[engine_id]
        self.output.size = len(ranks)

    def existing(self, ranks: Iterable[int] | None) -> list[int]:
        """`ranks`, or all; raises ClusterError when one does not exist."""
        known = [engine.rank for engine in self.state.engines]
        chosen = known if ranks is None else list(dict.fromkeys(ranks))
        unknown = [rank for rank in chosen if rank not in known]
        if unknown or not chosen:
            raise ClusterError(
                f"ranks {unknown or chosen} were asked for; cluster {self.state.name!r} has {name_ranks(known)}"
            )
        return chosen

    def living(self, ranks: Iterable[int] | None) -> list[int]:
        """`ranks`, or all; raises ClusterError when one does not exist or its engine is dead."""
        chosen = self.existing(ranks)
        dead = [rank for rank in chosen if not self.tasks.reaches(self.state.engines[rank])]
        if dead:
            raise ClusterError(
                f"the engine{'s' if len(dead) > 1 else ''} of {name_ranks(dead)} ended or stopped answering; "
                f"cluster.restart({dead[0]}) brings it back"
            )
        return chosen

    def status(self) -> list[EngineStatus]:
        busy = self.tasks.under_way(self.state)
        return [self._status_of(engine, engine.rank in busy) for engine in self.state.engines]

    def end(self, engines: Iterable[EngineEntry]) -> None:
        """End these engines and what they started; returns when the controller has noticed. ClusterError when a process
        cannot be ended."""
        engines = list(engines)
        trees = [start.tree(engine.pid, self.state.token) for engine in engines]
        # The engines alone at first: one of the children of each tells the controller that it has gone.
        left = processes.end([process for tree in trees for process in tree[:1]], patience_seconds=0.0)
        for engine in engines:
            self._await_unregistered(engine)
        left += processes.end([process for tree in trees for process in tree[1:]], patience_seconds=0.0)
        if left:
            ranks = name_ranks(engine.rank for engine in engines)
            raise ClusterError(f"process {left[0].pid} of {ranks} cannot be ended; it may wait for a device or a disk")

    def _await_unregistered(self, engine: EngineEntry) -> None:
        deadline = time.monotonic() + _UNREGISTER_SECONDS
        while self.tasks.reaches(engine):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"after {_UNREGISTER_SECONDS:g} s the controller counts the old engine of rank {engine.rank}: "
                    f"cluster.stop() ends all"
                )
            time.sleep(POLL_SECONDS)

    def _status_of(self, engine: EngineEntry, busy: bool) -> EngineStatus:
        rss_bytes, suspended = 0, False
        alive = processes.is_alive(engine.pid, self.state.token)
        if alive:
            try:
                process = psutil.Process(engine.pid)
                suspended = process.status() == psutil.STATUS_STOPPED
                rss_bytes = process.memory_info().rss
            except psutil.NoSuchProcess:
                alive = False
        if suspended:
            word = "frozen"
        elif not alive or not self.tasks.reaches(engine):
            word = "dead"
        else:
            word = "busy" if busy else "idle"
        return EngineStatus(
            rank=engine.rank,
            engine_id=engine.engine_id,
            pid=engine.pid,
            device=self.state.devices[engine.rank],
            state=word,
            rss_bytes=rss_bytes,
        )

    def _listen(self) -> None:
        """Make sure that output comes through before anything is submitted; busy engines cannot prove it."""
        busy = self.tasks.under_way(self.state)
        idle = [engine.rank for engine in self.state.engines if engine.rank not in busy and self.tasks.reaches(engine)]
        deadline = time.monotonic() + 1.0
        while idle and time.monotonic() < deadline:
            (task,) = self.tasks.send(self.state, idle[:1], remote.identify).values()
            if self.output.settle(task.msg_ids, timeout=0.1):
                return


def _close(client: Client, output: OutputHub) -> None:
    """Close the connections; the engines go on."""
    output.close()
    client.close(linger=0)
