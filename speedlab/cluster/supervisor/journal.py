"""What a supervisor has sent to the ranks, in a file of the cluster's folder: how the next one knows what they work on.

A line for each rank of a submission before it is sent and one after; that it has ended is not written down, because the
controller keeps the results. Only the newest lines are kept. While one rank was sent a submission and another one waits
for it, the work is kept, too: the next supervisor gives it to those that wait.

What an earlier supervisor has sent to the ranks, for the one that took over from it.

The controller knows which of its messages the engines work on, and keeps the results of those that have ended. It tells
nobody of them by itself, so this asks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speedlab.cluster.files.cluster_dir import ClusterState
from speedlab.cluster.supervisor.work_queue import Submission, WorkQueue

if TYPE_CHECKING:
    from ipyparallel import Client


_MOST_LINES = 4000
_KEPT_LINES = 1000


class JournalEntry(NamedTuple):
    """A submission, as it was written down."""

    ranks: list[int]
    label: str
    place: int
    """In the line of all submissions."""
    messages: dict[int, str]
    """ipyparallel's message by rank, '' where nobody knows whether it was sent."""
    withdrawn: set[int]
    """Ranks that are not to be given it any more."""
    work: bytes
    """What the other ranks are still to be given; b'' where that is not known."""

    @property
    def waiting(self) -> list[int]:
        """Ranks that it was certainly not sent to, and is to be."""
        return [rank for rank in self.ranks if self.work and rank not in self.withdrawn and rank not in self.messages]


class FileJournal:
    """The journal of one cluster. A full disk does not make it raise: ranks work on, and only a takeover knows less."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._lines = self._read()
        self._waiting = {id: set(sent.waiting) for id, sent in self.before().items() if sent.waiting}
        """Ranks that wait for what another one was sent, by submission."""

    def sending(self, submission: Submission, rank: int) -> None:
        with self._lock:
            if len(submission.messages) == 1 and submission.unfinished != [rank]:
                self._keep(submission)
            self._write(_entry(submission, rank))
            self._count_out(submission, rank)

    def sent(self, submission: Submission, rank: int, message: str) -> None:
        self._write(_entry(submission, rank) | {"message": message})

    def withdrawn(self, submission: Submission, rank: int) -> None:
        with self._lock:
            if rank in self._waiting.get(submission.id, ()):
                self._write(_entry(submission, rank) | {"withdrawn": True})
                self._count_out(submission, rank)

    def before(self) -> dict[str, JournalEntry]:
        """What earlier supervisors have sent, by id, oldest first."""
        found: dict[str, JournalEntry] = {}
        for line in self._lines:
            if (sent := found.get(line["id"])) is None:
                work = self._kept(line["id"])
                sent = found[line["id"]] = JournalEntry(
                    line["ranks"], line.get("label", ""), line.get("place", 0), {}, set(), work
                )
            if line.get("withdrawn"):
                sent.withdrawn.add(line["rank"])
            else:
                sent.messages[line["rank"]] = line.get("message", sent.messages.get(line["rank"], ""))
        return found

    def _keep(self, submission: Submission) -> None:
        with contextlib.suppress(OSError):
            self._file(submission.id).parent.mkdir(mode=0o700, exist_ok=True)
            self._file(submission.id).write_bytes(submission.work)
        self._waiting[submission.id] = set(submission.unfinished)

    def _kept(self, id: str) -> bytes:
        with contextlib.suppress(OSError):
            return self._file(id).read_bytes()
        return b""

    def _count_out(self, submission: Submission, rank: int) -> None:
        """This rank does not wait for it any more."""
        waiting = self._waiting.get(submission.id, set())
        waiting.discard(rank)
        if not waiting and self._waiting.pop(submission.id, None) is not None:
            with contextlib.suppress(OSError):
                self._file(submission.id).unlink(missing_ok=True)

    def _file(self, id: str) -> Path:
        return self._path.with_suffix("") / id

    def _read(self) -> list[dict[str, Any]]:
        lines = []
        with contextlib.suppress(OSError):
            for line in self._path.read_text(errors="replace").splitlines()[-_KEPT_LINES:]:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and {"id", "rank", "ranks"} <= entry.keys():
                        lines.append(entry)
        return lines

    def _write(self, entry: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._lines.append(entry)
            if len(self._lines) > _MOST_LINES:
                del self._lines[:-_KEPT_LINES]
                text = "".join(f"{json.dumps(line)}\n" for line in self._lines)
                draft = self._path.with_suffix(".draft")
                draft.write_text(text)
                draft.replace(self._path)
                return
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "a") as file:
                file.write(f"{json.dumps(entry)}\n")


def _entry(submission: Submission, rank: int) -> dict[str, Any]:
    entry = {"id": submission.id, "rank": rank, "ranks": submission.ranks, "place": submission.place}
    return entry | {"label": submission.label} if submission.label else entry


log = logging.getLogger("speedlab.supervisor")

_POLL_SECONDS = 0.2
_FETCH_SECONDS = 0.2
"""A result that the controller has comes with its first answer."""


class RecoveredWork:
    """Submissions of earlier supervisors, by id."""

    def __init__(self, line: WorkQueue, client: Client, state: ClusterState, journal: FileJournal) -> None:
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
