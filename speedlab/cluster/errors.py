"""Errors of ranks as objects: RankError names the ranks, merges equal failures and renders itself in IPython.

1. A failure on a rank is sent as a RemoteFailure: plain strings, so that the kernel never unpickles an engine's
   exception.
2. `describe` makes these fields on the rank, without the frames of the transport.
3. `keep_failure` and `Failures` store the failures of a run in its folder.
"""

from __future__ import annotations

import bdb
import html
import json
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from speedlab.config.errors import more_in, with_more
from speedlab.telemetry.run_folder import RunFolder, open_plain


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked. The message says what it has, what was asked and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: only the message, because the frames are internal."""
        return [f"{type(self).__name__}: {with_more(self)}"]


INTERRUPTED = "KeyboardInterrupt"
"""Kind of failure of a rank that was interrupted."""
DIED = "EngineDied"
"""Kind of failure of a rank whose engine process ended during its work."""

_MOST_TRACES = 3
_IN_WORDS = frozenset({"ConfigError", "LayoutError", "CheckpointError", "BdbQuit"})
_BARE = frozenset({"Refusal", "Parted"})
"""Kinds whose message is complete, so that no traceback and no class name is shown."""
_NO_TEXT: Mapping[str, Any] = {"step": int | None, "module": str | None}
"""Types of the fields of a failure that are no text."""
_PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection closed", "connection was aborted")


@dataclass(frozen=True, kw_only=True)
class RemoteFailure:
    """The exception of one rank."""

    kind: str
    """Class name of the exception."""
    message: str
    traceback: str = ""
    """Formatted traceback on the rank, without the frames of SpeedLab's transport."""
    step: int | None = None
    """Training step in which it was raised; None outside of a step."""
    module: str | None = None
    """Module whose forward raised, such as 'blocks.3.mlp'; None otherwise."""

    @property
    def follows_another(self) -> bool:
        """Whether this rank failed because another rank failed: it was interrupted, lost a peer, or timed out."""
        return self.kind in (INTERRUPTED, "DistStoreError", "PeerLost") or any(
            sign in self.message for sign in _PEER_GONE
        )

    @property
    def place(self) -> str:
        """', step 57, in forward of blocks.3.mlp', or shorter if less is known."""
        step = f", step {self.step}" if self.step is not None else ""
        return step + (f", in forward of {self.module}" if self.module else "")

    def __str__(self) -> str:
        if self.kind in _BARE:
            return self.message
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RemoteFailure:
        """Return a failure from the fields of `to_dict`; ignore fields of a later version.

        Raises:
            ValueError: If the fields are not valid.
        """
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        for name, value in known.items():
            if not isinstance(value, _NO_TEXT.get(name, str)):
                raise ValueError(f"{name} of a failure is {value!r:.64}")
        if missing := sorted({"kind", "message"} - known.keys()):
            raise ValueError(f"a failure has no {missing[0]}")
        return cls(**known)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return for example 'rank 2', 'ranks 0–3' or 'ranks 0, 2–3'."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
    return f"rank{'s' if len(ordered) != 1 else ''} {text}"


def restart_of(ranks: Sequence[int]) -> str:
    """Return the call that restarts engines, such as 'cluster.restart(0, 2)'.

    Args:
        ranks: Ranks of the engines.
    """
    return f"cluster.restart({', '.join(map(str, sorted(ranks)))})"


class RankError(RuntimeError):
    """One or more ranks failed. `by_rank` holds each rank's RemoteFailure, in the order of arrival.

    str() is short: who, where, what, and what to do next. IPython also shows each distinct traceback once.
    """

    def __init__(self, by_rank: Mapping[int, RemoteFailure], advice: str | None = None) -> None:
        """Make an error of several ranks.

        Args:
            by_rank: Failure by rank; not empty.
            advice: What to do next; None for the default.
        """
        if not by_rank:
            raise ValueError("a RankError needs at least one rank's failure")
        self.by_rank = dict(by_rank)
        self.advice = advice
        self.notes: list[str] = []
        """Lines that explain the error, shown before the advice."""
        self.stopped = False
        """Whether the ranks were interrupted before any of them failed."""
        super().__init__(self.by_rank, advice)

    @property
    def only_interrupted(self) -> bool:
        """Whether no rank failed by itself: ranks were interrupted, or lost a peer that was interrupted."""
        return all(
            failure.kind == INTERRUPTED or (self.stopped and failure.follows_another)
            for failure in self.by_rank.values()
        )

    @property
    def groups(self) -> list[tuple[list[int], RemoteFailure]]:
        """(ranks, failure) for each distinct failure: causes first, then those that follow from them."""
        merged: dict[tuple[Any, ...], tuple[list[int], RemoteFailure]] = {}
        for rank, failure in self.by_rank.items():
            key = (failure.kind, failure.message, failure.step, failure.module)
            merged.setdefault(key, ([], failure))[0].append(rank)
        groups = [(sorted(ranks), failure) for ranks, failure in merged.values()]
        return sorted(groups, key=lambda group: group[1].follows_another)

    def __str__(self) -> str:
        return "\n".join(self._lines(traces=False))

    def __repr__(self) -> str:
        ranks, failure = self.groups[0]
        return f"<RankError on {name_ranks(ranks)}{failure.place}: {failure}>"

    def _render_traceback_(self) -> list[str]:
        return self._lines(traces=True)

    def _repr_html_(self) -> str:
        traces = "".join(
            f"<details><summary>traceback of {html.escape(name_ranks(ranks))}</summary>"
            f'<pre style="margin:0">{html.escape(failure.traceback)}</pre></details>'
            for ranks, failure in self._with_traces()
        )
        return f'<pre style="margin:0">{html.escape(str(self))}</pre>{traces}'

    def _lines(self, *, traces: bool) -> list[str]:
        groups = self.groups
        shown = [id(failure) for _, failure in self._with_traces()] if traces else []
        lines: list[str] = []
        for number, (ranks, failure) in enumerate(groups):
            same = " (same on each)" if len(ranks) > 1 else ""
            start = "RankError on " if number == 0 else "  and on "
            lines.append(f"{start}{name_ranks(ranks)}{same}{failure.place}")
            if id(failure) in shown:
                lines += [f"  {line}" for line in failure.traceback.rstrip().splitlines()]
            else:
                lines += [f"  {line}" for line in str(failure).splitlines()]
        lines += [f"  {note}" for note in self.notes]
        return [*lines, f"  {self.advice or self._default_advice()}"]

    def _with_traces(self) -> list[tuple[list[int], RemoteFailure]]:
        """Return the groups whose traceback is shown."""
        groups = self.groups
        causes = [group for group in groups if not group[1].follows_another] or groups[:1]
        reported = [group for group in causes if group[1].traceback and group[1].kind not in _IN_WORDS | _BARE]
        return reported[:_MOST_TRACES]

    def _default_advice(self) -> str:
        dead = [rank for rank, failure in self.by_rank.items() if failure.kind == DIED]
        if dead:
            them = "it" if len(dead) == 1 else "them"
            return f"The other engines keep their state. Bring {them} back: {restart_of(dead)}"
        more = "" if self.notes else f" · {more_in('ranks')}"  # Notes name their own guide.
        return f"The engines are idle and keep their state. {self.way_to_look}{more}"

    @property
    def way_to_look(self) -> str:
        """How to inspect the first rank that failed."""
        ranks, failure = self.groups[0]
        kept = not failure.follows_another and failure.kind not in _IN_WORDS | _BARE
        debug = f"%speedlab debug {ranks[0]}, or " if kept else ""
        return f"Look: {debug}%%ranks {ranks[0]}"


_TRANSPORT = (
    "speedlab/cluster/worker/remote.py",
    "speedlab/cluster/worker/cells.py",
    "IPython/core/interactiveshell.py",
)


def describe(error: BaseException) -> dict[str, Any]:
    """Return the exception of this rank as plain data.

    Args:
        error: The exception.

    Returns:
        Fields of a RemoteFailure.
    """
    return {
        "kind": type(error).__name__,
        "message": _message(error),
        "traceback": _own_frames(error),
        "step": getattr(error, "speedlab_step", None),
        "module": getattr(error, "speedlab_module", None),
    }


def _message(error: BaseException) -> str:
    if isinstance(error, bdb.BdbQuit) and not error.args:
        return "the debugger was left at its prompt, which ends the cell on this rank"
    try:
        return str(error)
    except Exception as broken:  # The exception class of a user may fail in str(); still show the rest.
        return f"(its message cannot be shown: {type(broken).__name__})"


def _own_frames(error: BaseException) -> str:
    """Return the formatted traceback without the frames of the transport and of the shell."""
    trace = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in trace.stack if not _is_transport(frame.filename)]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format())


def _is_transport(filename: str) -> bool:
    return filename.replace(os.sep, "/").endswith(_TRANSPORT)


_FILE = "failures.jsonl"
_MOST_BYTES = 2**22
_MOST_TEXT = 2**14
"""Maximum number of characters of a message or a traceback that are stored, from the end."""


def keep_failure(folder: RunFolder, error: RankError, submission: str = "") -> None:
    """Store the failures of a submission in the run folder.

    Args:
        folder: Folder of the run.
        error: Error of the ranks.
        submission: Id of the submission.

    Raises:
        OSError: If the folder cannot be written.
    """
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
    """Return whether the failures of this submission were stored.

    Args:
        folder: Folder of the run.
        submission: Id of the submission; "" is never stored.
    """
    if not submission:
        return False
    try:
        with open_plain(folder.path / _FILE) as file:
            return f'"submission": {json.dumps(submission)}'.encode() in file.read()
    except OSError:
        return False


def newest_failure(folder: RunFolder) -> tuple[str, RankError] | None:
    """Return (submission id, error) of the last stored failure; None if there is none or it cannot be read.

    Args:
        folder: Folder of the run.
    """
    try:
        with open_plain(folder.path / _FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            line = file.read().rstrip().rpartition(b"\n")[2]
    except OSError:
        return None
    error = _error_of(line)
    return (str(json.loads(line).get("submission", "")), error) if error is not None else None


class Failures:
    """The stored failures of one run; reads only new lines."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / _FILE
        self._size = 0
        self._known: list[RankError] = []

    def all(self) -> list[RankError]:
        """Return all errors, oldest first. Invalid lines are skipped."""
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
