"""Hosts of a cluster that are out of reach, and the engines that are given up with them.

Nothing is expected of such an engine any more, even if its host should be there again: what it does then, nobody knows.
Only new ones take their place.

Ranks that an interrupt has not reached, because their host's agent does not answer: they get it once one does, if
they still work on what was interrupted.
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
    """Of one cluster."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._given_up: set[int] = set()
        """ipyparallel's numbers."""

    def gave_up(self, engine: EngineEntry) -> bool:
        return engine.engine_id in self._given_up

    def ranks(self, state: ClusterState) -> list[int]:
        """Ranks whose engines are on hosts that are lost."""
        return [engine.rank for engine in state.engines if engine.host in self._why]

    def with_its_host(self, state: ClusterState, ranks: Sequence[int]) -> tuple[int, ...]:
        """These ranks, and those that were given up with them."""
        engines = state.engines
        hosts = {engines[rank].host for rank in ranks if self.gave_up(engines[rank])}
        with_them = [engine.rank for engine in engines if engine.host in hosts and self.gave_up(engine)]
        return tuple(dict.fromkeys([*ranks, *with_them]))

    def way_back(self, state: ClusterState, dead: Sequence[int]) -> str:
        """Which engines are gone, and how one brings them back."""
        hosts = sorted({state.engines[rank].host for rank in dead} & self._why.keys())
        if hosts:
            return f"{self._told(hosts)} ({name_ranks(dead)}); once it is back, {restart_of(dead[:1])}"
        engines, them = ("engine", "it") if len(dead) == 1 else ("engines", "them")
        return f"the {engines} of {name_ranks(dead)} ended or stopped answering; {restart_of(dead)} brings {them} back"

    def take(self, lost: Mapping[str, str], state: ClusterState, line: WorkQueue) -> list[tuple[list[int], str]]:
        """These hosts are lost, and why: whoever waits in `line` for their ranks is told. Returns (ranks, sentence) for
        each that was not lost before: what has happened, and what its ranks did."""
        said = []
        known, self._why = self._why, dict(lost)
        for host in lost:
            ranks = [engine.rank for engine in state.engines if engine.host == host]
            self._given_up.update(state.engines[rank].engine_id for rank in ranks)
            reason = f"{self._told([host])} ({name_ranks(ranks)}{_doing(line, ranks)})"
            if host not in known:
                said.append((ranks, reason))
                log.error("%s", reason)
            line.give_up(ranks, DIED, reason)
        return said

    def _told(self, hosts: Iterable[str]) -> str:
        """'host-b does not answer: it is down or cut off'"""
        return "; ".join(f"{host} {self._why[host]}" for host in hosts)


def _doing(line: WorkQueue, ranks: Sequence[int]) -> str:
    """What these ranks work on, and the last step that they have told of."""
    folders = {Path(one.label) for rank, one in line.working().items() if rank in ranks and one.label}
    return "".join(f"; they worked on {path.name}{_last_step(path, ranks)}" for path in sorted(folders))


def _last_step(folder: Path, ranks: Iterable[int]) -> str:
    """', and have recorded step 37', where they have recorded any."""
    steps = [step for rank in ranks if (step := last_recorded(folder, rank)) is not None]
    return f", and have recorded step {max(steps)}" if steps else ""


class PendingInterrupts:
    """Those of one cluster. Methods may be called from any thread."""

    def __init__(self, line: WorkQueue, hands: ProcessController) -> None:
        self._line, self._hands = line, hands
        self._lock = threading.Lock()
        self._waiting: dict[int, Submission] = {}
        """By rank, what is to be interrupted there."""
        self._heard: set[int] = set()
        """Of these, ranks whose agent has answered since."""

    def note(self, ranks: Mapping[int, Submission], state: ClusterState) -> str:
        """These could not be reached; returns what there is to say of that, "" where there is nothing."""
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
        """Interrupt those that can be reached by now, and again as long as they work on the same: an engine hears no
        interrupt in the middle of an import, and none that waits for a peer in native code, which is cut off from it
        then. Asks agents, and may take a moment."""
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
    """The engines of these ranks, each with ipyparallel's id of the message that it works on."""
    return {state.engines[rank]: one.messages.get(rank, "") for rank, one in working.items()}
