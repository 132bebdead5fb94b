"""Which call of the engine each rank is in, for the errors of collectives that do not match or do not end.

1. An entry point of the engine runs inside `doing(...)`, which notes its name and the step: a local write.
2. Rare entry points, exceptions and the end of a world publish that note in the store of the world. A thread publishes
   it when it has not changed for a quarter of the time that collectives wait. So a step of usual length publishes
   nothing, and a note is in the store before the peers of a rank that hangs give up.
3. The error of a wait that failed calls `report`, which reads the notes of all ranks. Nothing else reads them.
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
    tells_of_lost_peer,
    tells_of_timeout,
)
from speedlab.comm.own_note import LEFT, own_note
from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.shared.shared_tensors import PeerProcess
from speedlab.comm.timeouts import timeout_seconds

_LOOKS = 4
"""Looks of the publishing thread at one note before it publishes the note."""

_MOST_SECONDS = 5.0
"""Longest time until a note that does not change is published. A file that serves as a store grows with every note."""

MODULE = "the module outside the engine"
"""What a forward that did not come through the engine calls, as `generate` does."""

FORWARD = "forward without gradients"
"""The call of a forward of the engine that does not train."""


class Note(NamedTuple):
    """What a rank published."""

    text: str
    """A predicate with the rank as its subject: 'is in save_checkpoint after step 11'."""
    forwards: int
    """Forwards of the module since the last update."""
    host: str
    pid: int


class _State:
    """Where this process is in calls of the engine."""

    def __init__(self) -> None:
        self.depth = 0
        """Entry points under way; those inside another one do not change the note."""
        self.forwards = 0
        """Forwards of the module since the last update."""
        self.gave_up = False
        """Whether the last call ended because a peer was missing."""
        self.publisher: _NotePublisher | None = None


_state = _State()


class doing:  # noqa: N801  # a context manager, read like a function
    """Note that this rank is in an entry point of the engine. Of entry points inside each other the outer one counts.

    Args:
        call: name of the entry point, as the user calls it.
        step: number of the step that is under way or, for a `call` between two steps, of the last one; below 0 where
            that is not known.
        publish: the call is between two steps; its note is written to the store at once.
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
        """Whether it is no part of another entry point."""
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
            publish()  # It stays in the note: the peers that give up a moment later name it, too.
        else:
            own_note.set(f"left {self._where} with {kind.__name__}")
            publish()


def note_forward() -> None:
    """A forward of the module begins. Ranks that generate texts of unequal lengths differ in their number."""
    _state.forwards += 1
    own_note.set(own_note.text if _state.depth else f"called {MODULE}")


def note_update() -> None:
    """A step has ended: forwards are counted from here."""
    _state.forwards = 0


def own() -> str:
    """What this rank is doing: 'is in save_checkpoint after step 11'."""
    return own_note.text


def publish() -> None:
    """Write this rank's note to the store of the world, if there is one."""
    if _state.publisher is not None:
        _state.publisher.publish()


def report() -> str:
    """What every rank is doing, and what to do: for the error of a wait that failed. '' where no store can be read.

    'rank 0 is in save_checkpoint after step 11; rank 1 is in step 12 (forward). All ranks must make the same calls ...'
    """
    publisher = _state.publisher
    if publisher is None:
        return ""
    publisher.publish()
    notes = publisher.read()
    if not any(note.text for note in notes):
        return ""
    texts = [f"{note.text}, with {_times(note.forwards)}" if _tells_forwards(notes) else note.text for note in notes]
    return f"{_sentence(texts)}.{_advice(notes)}"


def _tells_forwards(notes: Sequence[Note]) -> bool:
    """Whether the ranks differ in their forwards, and a call of the module may be why."""
    known = [note for note in notes if note.text]
    alike = len({note.text for note in known}) == 1 or any(
        word in note.text for note in known for word in (MODULE, FORWARD)
    )
    return alike and len({note.forwards for note in known}) > 1


def named_calls(calls: Sequence[tuple[str, int]]) -> str:
    """'rank 0 is in save_checkpoint after step 11; rank 1 is in evaluate after step 11': of these (name, step) by rank;
    without a step where that is below 0."""
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
    """Raise PeerLost, with what each rank does, for what a backend raises of a peer that left or did not come.
    `waiting`: 'rank 0 waited for'."""
    try:
        yield
    except RuntimeError as error:
        if not tells_of_lost_peer(error):
            raise
        clear_frames(error)
        if isinstance(error, CollectiveMismatch):  # It names what each rank does.
            raise
        if isinstance(error, PeerLost):
            error.args = (explained(str(error)),)
            raise
        missing = "did not come" if tells_of_timeout(error) else "left"
        raise PeerLost(explained(f"{waiting} a peer that {missing} ({reason_of(error)})")) from error


def explained(text: str) -> str:
    """The text of an error with `report()` after it; unchanged where that is in it already."""
    said = "" if _MARK in text else report()
    return f"{text}{_MARK}{said}" if said else text


_MARK = "\nWhat each rank does: "


def _advice(notes: Sequence[Note]) -> str:
    known = [note for note in notes if note.text]
    if any(note.text.startswith(("has ended", "left ", "has not joined")) for note in known):
        return ""
    if _tells_forwards(notes):
        return (
            " All ranks must call the module equally often while its parameters are partitioned. With "
            "generate(synced_gpus=True), ranks that have finished go on calling the module."
        )
    if len({note.text for note in known}) > 1:
        return " All ranks must make the same calls of the engine, in the same order."
    return ""


def _named(ranks: Sequence[int]) -> str:
    """'rank 0', or 'ranks 1-3, 5'."""
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
    """Publish this rank's note in the present world from now on. Nothing happens where that is done already."""
    store = distributed_c10d._get_default_store()
    if _state.publisher is not None:
        if _state.publisher.world() is store:
            return
        _state.publisher.stop()
        _state.publisher = None
    if _state.gave_up or own_note.text.endswith(LEFT):  # In an earlier world.
        _state.gave_up = False
        own_note.forget()
    if dist.get_world_size() > 1 and _is_there(store):
        with suppress(RuntimeError):  # A store of the user's own class may have no second connection.
            _state.publisher = _NotePublisher(store, dist.get_rank(), dist.get_world_size())


def leave_world() -> None:
    """Publish that this rank has left, and end the publishing."""
    if _state.publisher is not None:
        if not _state.gave_up:  # Else its peers, which give up now, shall find in which call this rank was.
            own_note.set(f"{own_note.text}, and {LEFT}" if own_note.is_of_an_engine else LEFT)
        publish()
        _state.publisher.stop()
        _state.publisher = None


def _is_there(store: Any) -> bool:
    """Return whether the store can be asked. The file of a FileStore may have been deleted, as a temporary folder is;
    then each request would wait until the timeout."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    file: Any = store
    return not isinstance(store, dist.FileStore) or os.path.exists(file.path)


class _NotePublisher:
    """The notes of one world, in its store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.world: weakref.ref[Any] = weakref.ref(store)
        """Weak: the store may serve a port that the next world needs."""
        # A connection of its own: another thread may wait in the store for minutes.
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
        """Write the present note. Where the store is gone, nobody reads it either."""
        changes = own_note.changes
        if self._published != changes and _is_there(self._store):
            self._published = changes
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], json.dumps(self._own))

    @property
    def _own(self) -> Note:
        return Note(own_note.text, _state.forwards, self._host, os.getpid())

    def read(self) -> list[Note]:
        """What each rank is doing, in rank order; without a text where that is not known."""
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
    except OSError:  # Not allowed to look.
        return False


# A forked child, as of a data loader, has neither the thread nor a place among the ranks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_state, "publisher", None))
