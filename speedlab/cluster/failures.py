"""What the ranks of a run raised, kept in its folder: whoever looks at the run later finds it, too."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import Any

from speedlab.cluster.errors import RankError, RemoteFailure
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.plain_file import open_plain

_FILE = "failures.jsonl"
_MOST_BYTES = 2**22
_MOST_TEXT = 2**14
"""Characters of a message or a traceback that are kept, from the end."""


def keep_failure(folder: RunFolder, error: RankError, submission: str = "") -> None:
    """Write down what the ranks raised in this submission. Raises OSError where the folder cannot be written."""
    by_rank = {rank: asdict(failure) for rank, failure in error.by_rank.items()}
    for failure in by_rank.values():
        failure |= {name: failure[name][-_MOST_TEXT:] for name in ("message", "traceback")}
    line = {
        "time": time.time(),
        "submission": submission,
        "by_rank": by_rank,
        "advice": error.advice,
        "notes": error.notes,
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with os.fdopen(os.open(folder.path / _FILE, flags, 0o600), "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")


def is_kept(folder: RunFolder, submission: str) -> bool:
    """Whether what was raised in this submission was written down."""
    if not submission:
        return False
    try:
        with open_plain(folder.path / _FILE) as file:
            return f'"submission": {json.dumps(submission)}'.encode() in file.read()
    except OSError:
        return False


def newest_failure(folder: RunFolder) -> tuple[str, RankError] | None:
    """The submission in which something was raised last, and what; None where nothing was, or it cannot be read."""
    try:
        with open_plain(folder.path / _FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            line = file.read().rstrip().rpartition(b"\n")[2]
    except OSError:
        return None
    error = _error_of(line)
    return (str(json.loads(line).get("submission", "")), error) if error is not None else None


class Failures:
    """The failures of one run, read again when there are more."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / _FILE
        self._size = 0
        self._known: list[RankError] = []

    def all(self) -> list[RankError]:
        """Oldest first. Lines that are no failure are passed over."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return self._known
        if size != self._size:
            with open_plain(self._path) as file:
                file.seek(max(0, size - _MOST_BYTES) if size < self._size or not self._size else self._size)
                data = file.read(_MOST_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            self._known = [*self._known, *filter(None, map(_error_of, whole.splitlines()))]
            self._size = size - (len(data) - len(whole))
        return self._known


def _error_of(line: bytes) -> RankError | None:
    try:
        data: dict[str, Any] = json.loads(line)
        by_rank = {int(rank): RemoteFailure.from_dict(failure) for rank, failure in data["by_rank"].items()}
        error = RankError(by_rank, data.get("advice"))
        error.notes = [str(note) for note in data.get("notes", [])]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return error
