"""Journal of what was sent to the ranks: the next supervisor reads what they work on.

1. One line per rank is written before a submission is sent, and one after. The end is not recorded, because the
   controller keeps the results. Only the newest lines are kept.
2. While one rank was sent a submission and another rank waits for it, the packed work is stored, too. The next
   supervisor sends it to the ranks that wait.
3. `RecoveredWork` reads the journal after a takeover. The controller does not announce what engines work on, nor the
   results of earlier messages, so this class polls it.
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
    """A submission as the journal recorded it."""

    ranks: list[int]
    label: str
    place: int
    """Position in the queue of all submissions."""
    messages: dict[int, str]
    """ipyparallel's message id by rank; '' if it is unknown whether it was sent."""
    withdrawn: set[int]
    """Ranks that must not receive it any more."""
    work: bytes
    """Packed work for the ranks that wait; b'' if it is unknown."""

    @property
    def waiting(self) -> list[int]:
        """Ranks that certainly did not receive it and must still receive it."""
        return [rank for rank in self.ranks if self.work and rank not in self.withdrawn and rank not in self.messages]


class FileJournal:
    """The journal of one cluster. A full disk raises nothing: ranks continue, and only a takeover knows less."""

    def __init__(self, path: Path) -> None:
        """Read the journal at `path`."""
        self._path = path
        self._lock = threading.RLock()
        self._lines = self._read()
        self._waiting = {id: set(sent.waiting) for id, sent in self.before().items() if sent.waiting}
        """Ranks that wait for a submission that another rank was sent, by submission id."""

    def sending(self, submission: Submission, rank: int) -> None:
        """Record that the submission is about to be sent to this rank."""
        with self._lock:
            # First of several ranks: store the work for the ranks that wait.
            if len(submission.messages) == 1 and submission.unfinished != [rank]:
                self._keep(submission)
            self._write(_entry(submission, rank))
            self._count_out(submission, rank)

    def sent(self, submission: Submission, rank: int, message: str) -> None:
        """Record the ipyparallel message that was sent."""
        self._write(_entry(submission, rank) | {"message": message})

    def withdrawn(self, submission: Submission, rank: int) -> None:
        """Record that the submission must not be sent to this rank."""
        with self._lock:
            if rank in self._waiting.get(submission.id, ()):
                self._write(_entry(submission, rank) | {"withdrawn": True})
                self._count_out(submission, rank)

    def before(self) -> dict[str, JournalEntry]:
        """Return what earlier supervisors sent, by submission id, oldest first."""
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
        """Record that this rank no longer waits for the submission."""
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
                # Replace the file in one step: a crash leaves the old one.
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
"""The controller includes a result that it has in its first answer."""


class RecoveredWork:
    """Submissions of earlier supervisors, by id."""

    def __init__(self, line: WorkQueue, client: Client, state: ClusterState, journal: FileJournal) -> None:
        """Adopt what engines work on or still have to receive.

        Args:
            line: Queue of this supervisor.
            client: Client of the controller.
            state: State of the cluster.
            journal: Journal of the earlier supervisors.
        """
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
        """Return a submission of an earlier supervisor, even if it has ended.

        Args:
            id: Id of the submission.

        Returns:
            The submission; None if it is unknown.
        """
        with self._lock:
            if id not in self._sent:
                return None
            return self._found.get(id) or self._make(id, self._at_work())

    def newest(self, label: str) -> Submission | None:
        """Return the newest submission with a label.

        Args:
            label: The label.

        Returns:
            The submission; None if there is none.
        """
        labelled = [id for id, sent in self._sent.items() if sent.label == label]
        return self.find(labelled[-1]) if labelled else None

    def close(self) -> None:
        """Stop the polling thread."""
        self._closed.set()

    def _make(self, id: str, at_work: set[str]) -> Submission:
        """Make the submission and find out its state on each rank. Call with the lock."""
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
        """Return the messages that engines work on or have queued.

        The controller keeps the queue of a dead engine for ever, so only living engines count.
        """
        queues, there = self._client.queue_status(verbose=True), set(self._client.ids)
        entries = [queues.get(engine_id, {}) for engine_id in self._engine_ids.values() if engine_id in there]
        return {message for entry in entries for kind in ("queue", "tasks") for message in entry.get(kind, [])}

    def _at_engines(self) -> list[tuple[Submission, int]]:
        """Return (submission, rank) of earlier supervisors whose end is not known yet."""
        return [
            (one, rank)
            for one in self._found.values()
            for rank in one.unfinished
            if self._sent[one.id].messages.get(rank)  # Exclude what this supervisor has sent.
        ]

    def _follow(self) -> None:
        """Poll until everything that was sent earlier has ended."""
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
        """Fetch the result of a message that no engine works on; return False if one works on it now."""
        message = submission.messages[rank]
        for _ in range(2):  # The message may move between the two requests, but not between all four.
            try:
                task: Any = self._client.get_result(message, owner=False, block=False)
                ended = task.wait(_FETCH_SECONDS)
            except Exception:  # The controller does not know the message: it never arrived, or it is too old.
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
