"""Track the engine call of each rank, for errors of collectives that do not match or do not end.

1. An entry point of the engine runs inside `doing(...)`, which notes its name and the step: a local write.
2. Rare entry points, exceptions and the end of a world publish the note in the world's store. A thread publishes a note
   that has not changed for a quarter of the timeout. So steps of usual length publish nothing, and the note of a
   hanging rank is in the store before its peers give up.
3. The error of a failed wait calls `report`, which reads the notes of all ranks. No other code reads them.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from speedlab.comm.errors import (
    CollectiveMismatch,
    PeerLost,
    clear_frames,
    reason_of,
    reports_lost_peer,
    reports_timeout,
)
from speedlab.comm.own_note import LEFT, own_note
from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.shared.shared_tensors import PeerProcess
from speedlab.comm.timeouts import timeout_seconds

_LOOKS = 4
"""How often the publishing thread sees an unchanged note before it publishes."""

_MOST_SECONDS = 5.0
"""Longest time until an unchanged note is published. Not shorter, because a file that serves as a store grows with
every note.
"""

MODULE = "the module outside the engine"
"""Name of a forward call that bypasses the engine, as `generate` of transformers makes it."""

FORWARD = "forward without gradients"
"""Name of an engine's forward call without training."""


class Note(NamedTuple):
    """The published note of a rank."""

    text: str
    """A predicate with the rank as its subject: 'is in save_checkpoint after step 11'."""
    forwards: int
    """Forward passes of the module since the last update."""
    host: str
    pid: int


class _State:
    """State of the engine calls in this process."""

    def __init__(self) -> None:
        self.depth = 0
        """Nested entry points; only the outermost one changes the note."""
        self.forwards = 0
        """Forward passes of the module since the last update."""
        self.gave_up = False
        """Whether the last call ended because a peer was missing."""
        self.publisher: _NotePublisher | None = None


_state = _State()


class doing:  # noqa: N801  # a context manager, read like a function
    """Note that this rank is in an entry point of the engine. Of nested entry points, the outermost counts.

    Args:
        call: Name of the entry point, as the user calls it.
        step: Number of the current step or, for a `call` between two steps, of the last one; negative if unknown.
        publish: The call is between two steps; write its note to the store at once.
    """

    __slots__ = ("_call", "_publish", "_step")

    def __init__(self, call: str, step: int, *, publish: bool = False) -> None:
        self._call, self._step, self._publish = call, step, publish

    @property
    def _where(self) -> str:
        if self._publish:
            return f"{self._call} after step {self._step}" if self._step >= 0 else self._call
        return f"step {self._step} ({self._call})"

    def __enter__(self) -> bool:
        """Return whether this is the outermost entry point."""
        _state.depth += 1
        if _state.depth == 1:
            _state.gave_up = False
            own_note.set(f"is in {self._where}")
            if self._publish:
                publish()
        return _state.depth == 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.depth -= 1
        if _state.depth:
            return
        if kind is None:
            own_note.set(f"is in no call of the engine (the last one was {self._where})")
        elif issubclass(kind, PeerLost):
            _state.gave_up = True
            publish()  # Keep the note: peers that give up a moment later report it, too.
        else:
            # Publish at once: peers may already wait for this rank.
            own_note.set(f"left {self._where} with {kind.__name__}")
            publish()


def note_forward() -> None:
    """Note a forward pass of the module. Ranks that generate texts of different lengths make different numbers of
    them.
    """
    _state.forwards += 1
    own_note.set(own_note.text if _state.depth else f"called {MODULE}")


def note_update() -> None:
    """Note the end of a step and reset the count of forward passes."""
    _state.forwards = 0


def own() -> str:
    """Return the note of this rank: 'is in save_checkpoint after step 11'."""
    return own_note.text


def publish() -> None:
    """Write this rank's note to the world's store, if there is one."""
    if _state.publisher is not None:
        _state.publisher.publish()


def report() -> str:
    """Return the activity of every rank and advice, for the error of a failed wait; '' if no store can be read.

    Example: 'rank 0 is in save_checkpoint after step 11; rank 1 is in step 12 (forward). All ranks must make the same
    calls ...'
    """
    publisher = _state.publisher
    if publisher is None:
        return ""
    publisher.publish()
    notes = publisher.read()
    if not any(note.text for note in notes):
        return ""
    texts = [f"{note.text}, with {_times(note.forwards)}" if _reports_forwards(notes) else note.text for note in notes]
    return f"{_sentence(texts)}.{_advice(notes)}"


def _reports_forwards(notes: Sequence[Note]) -> bool:
    """Return whether the numbers of forward passes differ, and a call of the module may be the reason."""
    known = [note for note in notes if note.text]
    alike = len({note.text for note in known}) == 1 or any(
        word in note.text for note in known for word in (MODULE, FORWARD)
    )
    return alike and len({note.forwards for note in known}) > 1


def named_calls(calls: Sequence[tuple[str, int]]) -> str:
    """Return a sentence: 'rank 0 is in save_checkpoint after step 11; rank 1 is in evaluate after step 11'.

    Args:
        calls: (name, step) by rank; a negative step is left out.
    """
    return _sentence([f"is in {name}" + (f" after step {step}" if step >= 0 else "") for name, step in calls])


def _sentence(texts: Sequence[str]) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text or "cannot be asked", []).append(rank)
    return "; ".join(f"{_named(ranks)} {text}" for text, ranks in ranks_by_text.items())


def _times(forwards: int) -> str:
    return f"{forwards} forward{'' if forwards == 1 else 's'} since the last update"


@contextmanager
def lost_peers(waiting: str) -> Iterator[None]:
    """Turn a backend's error about a lost peer into PeerLost with the activity of each rank.

    Args:
        waiting: Start of the text: 'rank 0 waited for'.

    Raises:
        PeerLost: If a peer left or did not arrive.
    """
    try:
        yield
    except RuntimeError as error:
        if not reports_lost_peer(error):
            raise
        clear_frames(error)
        if isinstance(error, CollectiveMismatch):  # A mismatch already names the call of each rank.
            raise
        if isinstance(error, PeerLost):
            error.args = (explained(str(error)),)
            raise
        missing = "did not come" if reports_timeout(error) else "left"
        raise PeerLost(explained(f"{waiting} a peer that {missing} ({reason_of(error)})")) from error


def explained(text: str) -> str:
    """Append `report()` to an error text, unless the text has one already.

    Args:
        text: Text of an error.
    """
    said = "" if _MARK in text else report()
    return f"{text}{_MARK}{said}" if said else text


_MARK = "\nWhat each rank does: "


def _advice(notes: Sequence[Note]) -> str:
    known = [note for note in notes if note.text]
    if any(note.text.startswith(("has ended", "left ", "has not joined")) for note in known):
        return ""
    if _reports_forwards(notes):
        return (
            " All ranks must call the module equally often while its parameters are partitioned. With "
            "generate(synced_gpus=True), ranks that have finished go on calling the module."
        )
    if len({note.text for note in known}) > 1:
        return " All ranks must make the same calls of the engine, in the same order."
    return ""


def _named(ranks: Sequence[int]) -> str:
    """Return 'rank 0', or 'ranks 1-3, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"


# ---- the store of the world ------------------------------------------------------------------------------------------


def enter_world() -> None:
    """Start to publish this rank's note in the current world. A second call does nothing."""
    store = distributed_c10d._get_default_store()
    if _state.publisher is not None:
        if _state.publisher.world() is store:
            return
        _state.publisher.stop()
        _state.publisher = None
    if _state.gave_up or own_note.text.endswith(LEFT):  # The note belongs to an earlier world.
        _state.gave_up = False
        own_note.forget()
    if dist.get_world_size() > 1 and _is_there(store):
        with suppress(RuntimeError):  # A store of the user's own class may have no second connection.
            _state.publisher = _NotePublisher(store, dist.get_rank(), dist.get_world_size())


def leave_world() -> None:
    """Publish that this rank has left, and stop publishing."""
    if _state.publisher is not None:
        if not _state.gave_up:  # Otherwise keep the note, so that peers find the call in which this rank gave up.
            own_note.set(f"{own_note.text}, and {LEFT}" if own_note.is_of_an_engine else LEFT)
        publish()
        _state.publisher.stop()
        _state.publisher = None


def _is_there(store: Any) -> bool:
    """Return whether the store is readable.

    The file of a FileStore may have been deleted with a temporary folder; then each request would wait until the
    timeout.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    file: Any = store
    return not isinstance(store, dist.FileStore) or os.path.exists(file.path)


class _NotePublisher:
    """Publishes and reads the notes of one world, in its store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.world: weakref.ref[Any] = weakref.ref(store)
        """A weak reference, because the store may serve a port that the next world needs."""
        # Use a separate connection: another thread may wait in the store for minutes.
        self._store = store.clone()
        self._rank = rank
        self._keys = [f"speedlab/activity/{each}" for each in range(size)]
        self._host = host_identity()
        self._published = -1
        self._over = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="activity of this rank", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Write the current note. Errors are ignored, because without a store no rank reads the note."""
        changes = own_note.changes
        if self._published != changes and _is_there(self._store):
            self._published = changes
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], json.dumps(self._own))

    @property
    def _own(self) -> Note:
        return Note(own_note.text, _state.forwards, self._host, os.getpid())

    def read(self) -> list[Note]:
        """Return the note of each rank, in rank order; an unknown note has no text."""
        return [self._read(rank) for rank in range(len(self._keys))]

    def _read(self, rank: int) -> Note:
        if rank == self._rank:
            return self._own
        if not _is_there(self._store):
            return Note("", 0, "", 0)
        try:
            if not self._store.check([self._keys[rank]]):
                return Note("has not joined", 0, "", 0)
            note = Note(*json.loads(self._store.get(self._keys[rank])))
        except RuntimeError:
            return Note("", 0, "", 0)
        if note.host == self._host and _has_ended(note.pid):
            return note._replace(text=f"has ended: its process is gone (before, it {note.text})")
        return note

    def stop(self) -> None:
        self._over.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        seen, looks = -1, 0
        while not self._over.wait(min(timeout_seconds() / 4, _MOST_SECONDS) / _LOOKS):
            if self.world() is None:
                return  # The user has destroyed the world.
            changes = own_note.changes
            looks = looks + 1 if changes == seen else 0
            seen = changes
            if looks >= _LOOKS - 1:
                self.publish()


def _has_ended(pid: int) -> bool:
    try:
        return PeerProcess(pid).ended
    except ProcessLookupError:
        return True
    except OSError:  # No permission to check this process.
        return False


# A forked child, such as a data loader's worker, has no publishing thread and is no rank.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_state, "publisher", None))
