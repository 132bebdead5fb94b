"""What an earlier supervisor has sent to the ranks, for the one that took over from it.

The controller knows which of its messages the engines work on, and keeps the results of those that have ended. It tells
nobody of them by itself, so this asks.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from speedlab.cluster.home import ClusterState
from speedlab.cluster.supervisor.journal import FileJournal
from speedlab.cluster.supervisor.submissions import Line, Submission

if TYPE_CHECKING:
    from ipyparallel import Client

log = logging.getLogger("speedlab.supervisor")

_POLL_SECONDS = 0.2
_FETCH_SECONDS = 0.2
"""A result that the controller has comes with its first answer."""


class Adopted:
    """Submissions of earlier supervisors, by id."""

    def __init__(self, line: Line, client: Client, state: ClusterState, journal: FileJournal) -> None:
        self._line, self._client = line, client
        self._engine_ids = {engine.rank: engine.engine_id for engine in state.engines}
        self._sent = journal.before()
        self._found: dict[str, Submission] = {}
        self._lock = threading.Lock()
        self._following = False
        self._closed = threading.Event()
        if not self._sent:
            return
        with self._lock:
            at_work = self._at_work()
            for id, sent in sorted(self._sent.items(), key=lambda each: each[1].place):
                if sent.waiting or at_work & set(sent.messages.values()):
                    self._make(id, at_work)

    def find(self, id: str) -> Submission | None:
        """The submission of this id, also one that has ended; None when none was sent."""
        with self._lock:
            if id not in self._sent:
                return None
            return self._found.get(id) or self._make(id, self._at_work())

    def newest(self, label: str) -> Submission | None:
        """The newest of this label."""
        labelled = [id for id, sent in self._sent.items() if sent.label == label]
        return self.find(labelled[-1]) if labelled else None

    def close(self) -> None:
        self._closed.set()

    def _make(self, id: str, at_work: set[str]) -> Submission:
        """Called with the lock."""
        sent = self._sent[id]
        submission = self._found[id] = Submission(sent.work, sent.ranks, id=id, label=sent.label)
        submission.place = sent.place
        submission.messages.update(sent.messages)
        for rank in sent.ranks:
            message = sent.messages.get(rank, "")
            if rank in sent.waiting:
                self._line.put_back(submission, rank)
            elif rank in sent.withdrawn:
                self._line.withdrawn(submission, rank)
            elif not message:
                self._line.lost(submission, rank)
            elif message in at_work or not self._fetch(submission, rank):
                self._line.adopt(submission, rank)
        if not self._following and self._at_engines():
            self._following = True
            threading.Thread(target=self._follow, name="speedlab-adopted", daemon=True).start()
        return submission

    def _at_work(self) -> set[str]:
        """Messages that engines work on or have before them. The controller keeps those of an engine that has gone in
        its queue for ever, so only engines count that are there."""
        queues, there = self._client.queue_status(verbose=True), set(self._client.ids)
        entries = [queues.get(engine_id, {}) for engine_id in self._engine_ids.values() if engine_id in there]
        return {message for entry in entries for kind in ("queue", "tasks") for message in entry.get(kind, [])}

    def _at_engines(self) -> list[tuple[Submission, int]]:
        """What earlier supervisors have sent, by rank, and nobody has heard the end of."""
        return [
            (one, rank)
            for one in self._found.values()
            for rank in one.unfinished
            if self._sent[one.id].messages.get(rank)  # Not what this supervisor has sent.
        ]

    def _follow(self) -> None:
        """Until all that was at work has ended."""
        while not self._closed.wait(_POLL_SECONDS):
            with self._lock:
                open_ones = self._at_engines()
                if not open_ones:
                    self._following = False
                    return
            try:
                at_work = self._at_work()
                for submission, rank in open_ones:
                    if submission.messages[rank] not in at_work:
                        self._fetch(submission, rank)
            except Exception:
                if not self._closed.is_set():
                    log.exception("what an earlier supervisor has sent cannot be looked at now")

    def _fetch(self, submission: Submission, rank: int) -> bool:
        """Take the result of what no engine was at work on; False where one is by now."""
        message = submission.messages[rank]
        for _ in range(2):  # It may come between the two questions, but not between all four.
            try:
                task: Any = self._client.get_result(message, owner=False, block=False)
                ended = task.wait(_FETCH_SECONDS)
            except Exception:  # The controller does not know it: it never arrived, or it is too long ago.
                log.exception("what rank %d returned is lost", rank)
                self._line.lost(submission, rank)
                return True
            if ended:
                self._line.take(submission, rank, task)
                return True
            if message in self._at_work():
                return False
        self._line.died(submission, rank)
        return True
