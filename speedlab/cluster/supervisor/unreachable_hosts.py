"""Hosts that cannot be reached, and the engines that are given up with them.

An engine that was given up stays given up, even if its host answers again, because its state is unknown. Only a new
engine replaces it.

`PendingInterrupts` keeps interrupts for ranks whose agent does not answer. A rank gets the interrupt after the agent
answers again, if the rank still works on the same submission.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from speedlab.cluster.errors import DIED, name_ranks, restart_of
from speedlab.cluster.files.cluster_dir import ClusterState, EngineEntry
from speedlab.cluster.supervisor.process_control import ProcessController
from speedlab.cluster.supervisor.work_queue import Submission, WorkQueue
from speedlab.telemetry.record_store import last_recorded

log = logging.getLogger("speedlab.supervisor")


class LostHosts:
    """The lost hosts of one cluster."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._given_up: set[int] = set()
        """ipyparallel's ids of engines that were given up."""

    def gave_up(self, engine: EngineEntry) -> bool:
        """Return whether the engine was given up with its host."""
        return engine.engine_id in self._given_up

    def ranks(self, state: ClusterState) -> list[int]:
        """Return the ranks whose engines run on lost hosts."""
        return [engine.rank for engine in state.engines if engine.host in self._why]

    def with_its_host(self, state: ClusterState, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return these ranks and all ranks that were given up with them.

        Args:
            state: State of the cluster.
            ranks: Ranks to restart.
        """
        engines = state.engines
        hosts = {engines[rank].host for rank in ranks if self.gave_up(engines[rank])}
        with_them = [engine.rank for engine in engines if engine.host in hosts and self.gave_up(engine)]
        return tuple(dict.fromkeys([*ranks, *with_them]))

    def way_back(self, state: ClusterState, dead: Sequence[int]) -> str:
        """Return a sentence that names the dead engines and the command that restarts them.

        Args:
            state: State of the cluster.
            dead: Dead ranks.
        """
        hosts = sorted({state.engines[rank].host for rank in dead} & self._why.keys())
        if hosts:
            return f"{self._reported(hosts)} ({name_ranks(dead)}); once it is back, {restart_of(dead[:1])}"
        engines, them = ("engine", "it") if len(dead) == 1 else ("engines", "them")
        return f"the {engines} of {name_ranks(dead)} ended or stopped answering; {restart_of(dead)} brings {them} back"

    def take(self, lost: Mapping[str, str], state: ClusterState, line: WorkQueue) -> list[tuple[list[int], str]]:
        """Update the lost hosts; fail what runs or waits on their ranks.

        Args:
            lost: Reason by host.
            state: State of the cluster.
            line: Queue of the ranks.

        Returns:
            (ranks, sentence) for each newly lost host: what happened, and what its ranks did.
        """
        said = []
        known, self._why = self._why, dict(lost)
        for host in lost:
            ranks = [engine.rank for engine in state.engines if engine.host == host]
            self._given_up.update(state.engines[rank].engine_id for rank in ranks)
            reason = f"{self._reported([host])} ({name_ranks(ranks)}{_doing(line, ranks)})"
            if host not in known:
                said.append((ranks, reason))
                log.error("%s", reason)
            line.give_up(ranks, DIED, reason)
        return said

    def _reported(self, hosts: Iterable[str]) -> str:
        """Return for example 'host-b does not answer: it is down or cut off'."""
        return "; ".join(f"{host} {self._why[host]}" for host in hosts)


def _doing(line: WorkQueue, ranks: Sequence[int]) -> str:
    """Return what these ranks work on, and the last step that they recorded."""
    folders = {Path(one.label) for rank, one in line.working().items() if rank in ranks and one.label}
    return "".join(f"; they worked on {path.name}{_last_step(path, ranks)}" for path in sorted(folders))


def _last_step(folder: Path, ranks: Iterable[int]) -> str:
    """Return for example ', and have recorded step 37'; '' without records."""
    steps = [step for rank in ranks if (step := last_recorded(folder, rank)) is not None]
    return f", and have recorded step {max(steps)}" if steps else ""


class PendingInterrupts:
    """The pending interrupts of one cluster. Methods are thread-safe."""

    def __init__(self, line: WorkQueue, hands: ProcessController) -> None:
        self._line, self._hands = line, hands
        self._lock = threading.Lock()
        self._waiting: dict[int, Submission] = {}
        """Submission to interrupt, by rank."""
        self._heard: set[int] = set()
        """Ranks of `_waiting` whose agent has answered."""

    def note(self, ranks: Mapping[int, Submission], state: ClusterState) -> str:
        """Add ranks that an interrupt could not reach.

        Args:
            ranks: Submission to interrupt, by rank.
            state: State of the cluster.

        Returns:
            A message for the user; "" if there is nothing to say.
        """
        with self._lock:
            self._waiting.update(ranks)
        hosts = dict.fromkeys(state.engines[rank].host for rank in sorted(ranks))
        if not hosts:
            return ""
        do, they = ("does", "it still works") if len(ranks) == 1 else ("do", "they still work")
        return (
            f"{', '.join(hosts)}: no agent answers there, so {name_ranks(ranks)} {do} not hear the interrupt; once one "
            f"answers, it is sent if {they} on the same\n"
        )

    def try_again(self, state: ClusterState) -> None:
        """Interrupt the ranks that can be reached now, and repeat it while they work on the same submission.

        A single signal can be lost: an engine ignores it in the middle of an import. A rank that waits for a peer in
        native code needs an abort of its connections. Asks agents, which may take a moment.

        Args:
            state: State of the cluster.
        """
        with self._lock:
            now = self._line.working()
            self._waiting = {rank: one for rank, one in self._waiting.items() if now.get(rank) is one}
            waiting = dict(self._waiting)
            self._heard = {rank for rank in self._heard if rank in waiting}
            heard = {rank: waiting[rank] for rank in self._heard}
        if not waiting:
            return
        if heard:
            self._hands.cut(at_work(state, heard))
        silent = {engine.rank for engine in self._hands.interrupt(at_work(state, waiting))}
        with self._lock:
            self._heard = waiting.keys() - silent


def at_work(state: ClusterState, working: Mapping[int, Submission]) -> dict[EngineEntry, str]:
    """Return ipyparallel's message id for the engine of each of these ranks.

    Args:
        state: State of the cluster.
        working: Submission by rank.
    """
    return {state.engines[rank]: one.messages.get(rank, "") for rank, one in working.items()}
