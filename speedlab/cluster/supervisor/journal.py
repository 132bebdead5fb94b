"""What a supervisor has sent to the ranks, in a file of the cluster's folder: how the next one knows what they work on.

A line for each rank of a submission before it is sent and one after; that it has ended is not written down, because the
controller keeps the results. Only the newest lines are kept. While one rank was sent a submission and another one waits
for it, the work is kept, too: the next supervisor gives it to those that wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.submissions import Submission

_MOST_LINES = 4000
_KEPT_LINES = 1000


class Sent(NamedTuple):
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

    def before(self) -> dict[str, Sent]:
        """What earlier supervisors have sent, by id, oldest first."""
        found: dict[str, Sent] = {}
        for line in self._lines:
            if (sent := found.get(line["id"])) is None:
                work = self._kept(line["id"])
                sent = found[line["id"]] = Sent(
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
