"""The order of everything that ranks do: one line of submissions, each for some ranks, served by one thread.

1. A rank works on one submission at a time; the others wait here, not in the engine. So what has not begun can be taken
   back at once, and an interrupt knows what it interrupts.
2. All ranks see the same order, whoever submitted.
3. What was sent is written down (`journal.py`), so that a supervisor that takes over knows what the ranks work on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ipyparallel.error import RemoteError, TaskAborted

import speedlab.cluster.worker.remote as remote
from speedlab.cluster.agents.rpc import has_ended
from speedlab.cluster.errors import DIED, INTERRUPTED, RankError, RemoteFailure
from speedlab.cluster.worker.serialization import unpack

log = logging.getLogger("speedlab.supervisor")

LOST = "SupervisorEnded"
"""Kind of the failure of a rank of which nobody knows whether it was given its work: the supervisor ended meanwhile."""
_TAKEN_BACK_TEXT = "it was interrupted before it began"
_DIED_TEXT = "the process of this rank's engine ended, or stopped answering"


class Journal(Protocol):
    """Where submissions are written down."""

    def sending(self, submission: Submission, rank: int) -> None:
        """The next thing done is to send it to this rank."""
        ...

    def sent(self, submission: Submission, rank: int, message: str) -> None:
        """It was sent, as ipyparallel's message of this id."""
        ...

    def withdrawn(self, submission: Submission, rank: int) -> None:
        """This rank, for which it has ended, is not to be given it any more."""
        ...


class Submission:
    """One piece of work on some ranks, and what has come of it."""

    def __init__(
        self, work: bytes, ranks: Sequence[int], *, id: str = "", shown: bool = False, label: str = ""
    ) -> None:
        """`shown`: whether a client hears what ranks say in it; `label`: by which a later supervisor finds it."""
        self.id = id or secrets.token_hex(8)
        self.work = work
        self.ranks = list(ranks)
        self.shown = shown
        self.label = label
        self.first = False
        """Whether it goes before everything that has not begun, also while the line is held."""
        self.place = 0
        """In the line of all submissions: what was put there later has a greater one, also under later supervisors."""
        self.messages: dict[int, str] = {}
        """Message ids by rank, of those ranks that were given it."""
        self.values: dict[int, bytes] = {}
        self.failures: dict[int, RemoteFailure] = {}
        """In the order in which they came."""
        self.stopped = False
        """Whether it was interrupted before any rank failed."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._listeners: list[Callable[[Submission, int], object]] = []
        self._callbacks: list[Callable[[Submission], object]] = []

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have neither returned nor failed."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self.values and rank not in self.failures]

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all ranks are done, at the latest after `seconds`."""
        return self._done.wait(seconds)

    @property
    def error(self) -> RankError | None:
        """What the ranks raised; None where none did."""
        if not self.failures:
            return None
        error = RankError(self.failures)
        error.stopped = self.stopped
        return error

    def results(self) -> list[Any]:
        """What each rank returned, of one that is done. Raises RankError."""
        if (error := self.error) is not None:
            raise error
        return [unpack(self.values[rank]) for rank in self.ranks]

    def stop(self) -> None:
        """Somebody interrupts it: what fails on its ranks from now on may follow from that."""
        with self._lock:
            self.stopped = self.stopped or not self.failures

    def on_end(self, listener: Callable[[Submission, int], object]) -> None:
        """Call `listener(self, rank)` for each rank that ends, also for those that have."""
        with self._lock:
            self._listeners.append(listener)
            ended = [*self.values, *self.failures]
        for rank in ended:
            listener(self, rank)

    def add_done_callback(self, callback: Callable[[Submission], object]) -> None:
        """Call `callback(self)` once all ranks are done; at once if they are. It must not wait for engines."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, rank: int, value: bytes = b"", failure: RemoteFailure | None = None) -> bool:
        """Count `rank` as done; False when it was."""
        with self._lock:
            if rank in self.values or rank in self.failures:
                return False
            if failure is not None:
                self.failures[rank] = failure
            else:
                self.values[rank] = value
            callbacks: list[Callable[[Submission], object]] = []
            if len(self.values) + len(self.failures) == len(self.ranks):
                callbacks, self._callbacks = self._callbacks, []
                self._done.set()
            listeners = list(self._listeners)
        for listener in listeners:
            listener(self, rank)
        for callback in callbacks:
            callback(self)
        return True


class WorkQueue:
    """Sends submissions to the ranks, in their order. Its methods may be called from any thread."""

    def __init__(
        self,
        send: Callable[[int, bytes], Future[Any]],
        journal: Journal,
        on_failure: Callable[[Submission], object],
    ) -> None:
        """`send(rank, work)`: ipyparallel's AsyncResult of it, or an IndexError where the engine is gone; `on_failure`:
        called when a rank of a submission has failed and others work on it."""
        self._send, self._journal, self._on_failure = send, journal, on_failure
        self._lock = threading.RLock()
        self._waiting: dict[int, deque[Submission]] = {}
        """By rank; the first is the one that the rank works on, once it was sent."""
        self._holds: Counter[int] = Counter()
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="speedlab-line", daemon=True)
        self._thread.start()

    def add(self, submission: Submission, *, first: bool = False) -> Submission:
        """Put it at the end of the line; or `first`: before everything that has not begun, but behind what came first
        before."""
        with self._lock:
            submission.place, submission.first = time.time_ns(), first
            for rank in submission.ranks:
                waiting = self._waiting.setdefault(rank, deque())
                begun = sum(1 for one in waiting if one.first or rank in one.messages) if first else len(waiting)
                waiting.insert(begun, submission)
            self._events.put(functools.partial(self._send_next, submission.ranks))
        return submission

    @contextlib.contextmanager
    def held(self, ranks: Iterable[int]) -> Iterator[None]:
        """Inside, these ranks are given nothing but what goes first. Who interrupts them has more for each to do before
        they may meet again, and they come free one after the other."""
        ranks = list(ranks)
        with self._lock:
            self._holds.update(ranks)
        try:
            yield
        finally:
            with self._lock:
                self._holds.subtract(ranks)
                self._events.put(functools.partial(self._send_next, ranks))

    def adopt(self, submission: Submission, rank: int) -> None:
        """Count what an earlier supervisor has sent to `rank` as what it works on, until `take` says that it ended."""
        with self._lock:
            self._waiting.setdefault(rank, deque()).appendleft(submission)

    def put_back(self, submission: Submission, rank: int) -> None:
        """Let `rank` wait for what an earlier supervisor was to send to it. Called in the order of their places."""
        with self._lock:
            self._waiting.setdefault(rank, deque()).append(submission)
        self._events.put(functools.partial(self._send_next, [rank]))

    def take(self, submission: Submission, rank: int, task: Future[Any]) -> None:
        """`task`, which is done, is what `submission` was on `rank`."""
        self._events.put(functools.partial(self._take, submission, rank, task))

    def lost(self, submission: Submission, rank: int) -> None:
        """Nobody knows whether `rank` was given it."""
        text = "the supervisor ended when it was about to give this rank its work; look whether it was done"
        self._fail(submission, rank, RemoteFailure(kind=LOST, message=text))

    def died(self, submission: Submission, rank: int) -> None:
        """The engine that an earlier supervisor has sent it to is gone."""
        self._fail(submission, rank, RemoteFailure(kind=DIED, message=_DIED_TEXT))

    def _fail(self, submission: Submission, rank: int, failure: RemoteFailure) -> None:
        """It may be what the rank works on, as far as is known; others wait behind it."""
        self._events.put(functools.partial(self._end_of, submission, rank, b"", failure))

    def withdrawn(self, submission: Submission, rank: int) -> None:
        """An earlier supervisor was not to give it to `rank` any more."""
        submission.end(rank, failure=RemoteFailure(kind=INTERRUPTED, message=_TAKEN_BACK_TEXT))

    def working(self, only: Submission | None = None) -> dict[int, Submission]:
        """What each rank works on now, or those ranks that work on `only`."""
        with self._lock:
            heads = {rank: waiting[0] for rank, waiting in self._waiting.items() if waiting}
        return {
            rank: head
            for rank, head in heads.items()
            if rank in head.messages and rank in head.unfinished and only in (None, head)
        }

    def busy(self) -> set[int]:
        """Ranks that work on something, or for which something waits."""
        with self._lock:
            return {rank for rank, waiting in self._waiting.items() if waiting}

    def take_back(self, only: Submission | None = None, why: str = _TAKEN_BACK_TEXT) -> None:
        """End, as interrupted, what ranks have not begun with; of `only`, or of all."""
        with self._lock:
            line = [(rank, one) for rank, waiting in self._waiting.items() for one in waiting]
            taken = [(rank, one) for rank, one in line if only in (None, one) and rank not in one.messages]
            for rank, one in taken:
                self._forget(one, [rank])
        for rank, one in taken:
            one.end(rank, failure=RemoteFailure(kind=INTERRUPTED, message=why))
            self._journal.withdrawn(one, rank)

    def give_up(self, ranks: Iterable[int], kind: str, reason: str) -> None:
        """Nothing comes from these ranks any more: end what they work on and what waits for them."""
        for rank in ranks:
            with self._lock:
                ended = list(self._waiting.pop(rank, ()))
            for one in ended:
                self._ended(one, rank, b"", RemoteFailure(kind=kind, message=reason))
                self._journal.withdrawn(one, rank)

    def close(self) -> None:
        self._events.put(None)

    # ---- on the thread that serves the line --------------------------------------------------------------------------

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:  # The line must go on for the others.
                log.exception("a submission could not be served")

    def _send_next(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            while (ready := self._next(rank)) is not None and not self._sent(ready, rank):
                continue

    def _next(self, rank: int) -> Submission | None:
        """The submission that this rank is to be given now."""
        with self._lock:
            waiting = self._waiting.get(rank)
            if not waiting or rank in waiting[0].messages or not self._may_go(waiting[0], rank):
                return None
            return waiting[0]

    def _may_go(self, submission: Submission, rank: int) -> bool:
        return submission.first or not self._holds[rank]

    def _sent(self, submission: Submission, rank: int) -> bool:
        with self._lock:
            waiting = self._waiting.get(rank)
            # Taken back meanwhile, or something goes before it, or it has to wait.
            if not waiting or waiting[0] is not submission or not self._may_go(submission, rank):
                return False
            submission.messages[rank] = ""  # From here on an interrupt finds it begun.
        try:
            self._journal.sending(submission, rank)
            task: Any = self._send(rank, submission.work)
        except Exception as error:
            gone = isinstance(error, IndexError)  # ipyparallel's word for an engine that it does not know.
            text = _DIED_TEXT if gone else str(error)
            self._end_of(
                submission, rank, b"", RemoteFailure(kind=DIED if gone else type(error).__name__, message=text)
            )
            return False
        submission.messages[rank] = task.msg_ids[0]
        self._journal.sent(submission, rank, task.msg_ids[0])
        task.add_done_callback(functools.partial(self._came, submission, rank))
        return True

    def _came(self, submission: Submission, rank: int, task: Future[Any]) -> None:
        self.take(submission, rank, task)  # Not on this thread: it serves the engines' messages.

    def _take(self, submission: Submission, rank: int, task: Future[Any]) -> None:
        error = task.exception()
        value = None if error is not None else task.result()
        if error is not None:
            self._end_of(submission, rank, b"", _failure_of(error))
        elif isinstance(value, dict) and remote.FAILED in value:
            self._end_of(submission, rank, b"", RemoteFailure.from_dict(value[remote.FAILED]))
        else:
            self._end_of(submission, rank, bytes(value or b""), None)

    def _end_of(self, submission: Submission, rank: int, value: bytes, failure: RemoteFailure | None) -> None:
        with self._lock:
            self._forget(submission, [rank])
        self._ended(submission, rank, value, failure)
        self._send_next([rank])

    def _ended(self, submission: Submission, rank: int, value: bytes, failure: RemoteFailure | None) -> None:
        if submission.end(rank, value, failure) and failure is not None and not submission.done:
            self._on_failure(submission)

    def _forget(self, submission: Submission, ranks: Iterable[int]) -> None:
        """Take it out of the line of these ranks. Called with the lock."""
        for rank in ranks:
            waiting = self._waiting.get(rank)
            if waiting is not None:
                with contextlib.suppress(ValueError):
                    waiting.remove(submission)


def _failure_of(error: BaseException) -> RemoteFailure:
    """What ipyparallel says of a task that brought no answer of ours."""
    if isinstance(error, TaskAborted):
        return RemoteFailure(kind=INTERRUPTED, message=_TAKEN_BACK_TEXT)
    if isinstance(error, RemoteError) and has_ended(error):
        return RemoteFailure(kind=DIED, message=_DIED_TEXT)
    if isinstance(error, RemoteError):
        # For example an engine that cannot find what it is to call. ipyparallel colours its tracebacks; ours are plain.
        return RemoteFailure(kind=error.ename or "RemoteError", message=error.evalue or "")
    return RemoteFailure(kind=type(error).__name__, message=str(error))
