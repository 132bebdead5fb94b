"""Ranks that an interrupt has not reached, because their host's agent does not answer: they get it once one does, if
they still work on what was interrupted."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from speedlab.cluster.errors import name_ranks
from speedlab.cluster.home import ClusterState, EngineEntry
from speedlab.cluster.supervisor.hands import Hands
from speedlab.cluster.supervisor.submissions import Line, Submission


class Unreached:
    """Those of one cluster. Methods may be called from any thread."""

    def __init__(self, line: Line, hands: Hands) -> None:
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
