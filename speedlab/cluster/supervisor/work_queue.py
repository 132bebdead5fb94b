"""The queue of everything that ranks execute: submissions in one order, sent by one thread.

1. A rank works on one submission at a time. The others wait here and not in the engine. So waiting work can be removed
   at once, and an interrupt knows what it interrupts.
2. All ranks see the same order, independent of the client that submitted.
3. What was sent is recorded (`journal.py`), so that a later supervisor knows what the ranks work on.
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
"""Kind of failure if the supervisor ended while it sent the work: the rank may or may not have received it."""
_TAKEN_BACK_TEXT = "it was interrupted before it began"
_DIED_TEXT = "the process of this rank's engine ended, or stopped answering"


class Journal(Protocol):
    """Records what was sent to which rank."""

    def sending(self, submission: Submission, rank: int) -> None:
        """Record that the submission is about to be sent to this rank."""
        ...

    def sent(self, submission: Submission, rank: int, message: str) -> None:
        """Record that the submission was sent, with the id of its ipyparallel message."""
        ...

    def withdrawn(self, submission: Submission, rank: int) -> None:
        """Record that the submission has ended for this rank and must not be sent to it."""
        ...


class Submission:
    """One piece of work on some ranks, and its results."""

    def __init__(
        self, work: bytes, ranks: Sequence[int], *, id: str = "", shown: bool = False, label: str = ""
    ) -> None:
        """Describe the work; `WorkQueue.add` queues it.

        Args:
            work: Packed function and arguments.
            ranks: Ranks that execute it.
            id: Id of the submission; "" makes a random one.
            shown: Whether a client shows the output of the ranks in it.
            label: Name by which a later supervisor finds it.
        """
        self.id = id or secrets.token_hex(8)
        self.work = work
        self.ranks = list(ranks)
        self.shown = shown
        self.label = label
        self.first = False
        """Whether it goes before everything that has not begun, even while the queue is held."""
        self.place = 0
        """Position in the queue, as a time in ns: later submissions have greater values, also under later
        supervisors.
        """
        self.messages: dict[int, str] = {}
        """Message id by rank, for the ranks that it was sent to; "" while it is being sent."""
        self.values: dict[int, bytes] = {}
        self.failures: dict[int, RemoteFailure] = {}
        """Failure by rank, in the order of arrival."""
        self.stopped = False
        """Whether it was interrupted before any rank failed."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._listeners: list[Callable[[Submission, int], object]] = []
        self._callbacks: list[Callable[[Submission], object]] = []

    @property
    def done(self) -> bool:
        """Whether all ranks have returned or failed."""
        return self._done.is_set()

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have neither returned nor failed."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self.values and rank not in self.failures]

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all ranks are done.

        Args:
            seconds: Longest time to wait; None for no limit.

        Returns:
            False on timeout.
        """
        return self._done.wait(seconds)

    @property
    def error(self) -> RankError | None:
        """The exceptions of the ranks as one error; None if no rank failed."""
        if not self.failures:
            return None
        error = RankError(self.failures)
        error.stopped = self.stopped
        return error

    def results(self) -> list[Any]:
        """Return what each rank returned, in the order of `ranks`. All ranks must be done.

        Raises:
            RankError: If a rank failed.
        """
        if (error := self.error) is not None:
            raise error
        return [unpack(self.values[rank]) for rank in self.ranks]

    def stop(self) -> None:
        """Mark it as interrupted: later failures of its ranks may follow from the interrupt."""
        with self._lock:
            self.stopped = self.stopped or not self.failures

    def on_end(self, listener: Callable[[Submission, int], object]) -> None:
        """Call a listener for each rank that ends, and at once for ranks that have ended.

        Args:
            listener: Called with (submission, rank).
        """
        with self._lock:
            self._listeners.append(listener)
            ended = [*self.values, *self.failures]
        for rank in ended:
            listener(self, rank)

    def add_done_callback(self, callback: Callable[[Submission], object]) -> None:
        """Call `callback(self)` after all ranks are done; at once if they are.

        Args:
            callback: Must not wait for engines.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, rank: int, value: bytes = b"", failure: RemoteFailure | None = None) -> bool:
        """Record that a rank has ended.

        Args:
            rank: The rank.
            value: Packed return value.
            failure: Failure; None if the rank returned.

        Returns:
            False if the rank had ended before.
        """
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
        # Outside of the lock: listeners may call methods of this submission.
        for listener in listeners:
            listener(self, rank)
        for callback in callbacks:
            callback(self)
        return True


class WorkQueue:
    """Sends submissions to the ranks, in order. Methods are thread-safe."""

    def __init__(
        self,
        send: Callable[[int, bytes], Future[Any]],
        journal: Journal,
        on_failure: Callable[[Submission], object],
    ) -> None:
        """Start the thread that sends.

        Args:
            send: send(rank, work) returns ipyparallel's AsyncResult; it raises IndexError if the engine is gone.
            journal: Records what was sent.
            on_failure: Called if a rank of a submission failed while other ranks work on it.
        """
        self._send, self._journal, self._on_failure = send, journal, on_failure
        self._lock = threading.RLock()
        self._waiting: dict[int, deque[Submission]] = {}
        """Submissions by rank. A rank works on the first one after it was sent."""
        self._holds: Counter[int] = Counter()
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="speedlab-line", daemon=True)
        self._thread.start()

    def add(self, submission: Submission, *, first: bool = False) -> Submission:
        """Queue a submission.

        Args:
            submission: Submission to queue.
            first: Whether to queue it before everything that has not begun, after earlier submissions with `first`.

        Returns:
            The submission.
        """
        with self._lock:
            # The wall clock also orders submissions of successive supervisors.
            submission.place, submission.first = time.time_ns(), first
            for rank in submission.ranks:
                waiting = self._waiting.setdefault(rank, deque())
                begun = sum(1 for one in waiting if one.first or rank in one.messages) if first else len(waiting)
                waiting.insert(begun, submission)
            self._events.put(functools.partial(self._send_next, submission.ranks))
        return submission

    @contextlib.contextmanager
    def held(self, ranks: Iterable[int]) -> Iterator[None]:
        """Send nothing to these ranks inside the block, except submissions with `first`.

        An interrupt uses this: ranks become idle one by one, and each has more to do before it may join a collective.

        Args:
            ranks: Ranks that are held.
        """
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
        """Record that a rank works on a submission of an earlier supervisor, until `take` ends it.

        Args:
            submission: The submission.
            rank: The rank that received it.
        """
        with self._lock:
            self._waiting.setdefault(rank, deque()).appendleft(submission)

    def put_back(self, submission: Submission, rank: int) -> None:
        """Queue a submission of an earlier supervisor for a rank that has not received it.

        Args:
            submission: The submission. Call in the order of `Submission.place`.
            rank: The rank.
        """
        with self._lock:
            self._waiting.setdefault(rank, deque()).append(submission)
        self._events.put(functools.partial(self._send_next, [rank]))

    def take(self, submission: Submission, rank: int, task: Future[Any]) -> None:
        """End a submission on a rank with the result of `task`, which is done.

        Args:
            submission: The submission.
            rank: The rank.
            task: Completed ipyparallel task.
        """
        self._events.put(functools.partial(self._take, submission, rank, task))

    def lost(self, submission: Submission, rank: int) -> None:
        """Fail a submission on a rank, because it is unknown whether the rank received it.

        Args:
            submission: The submission.
            rank: The rank.
        """
        text = "the supervisor ended when it was about to give this rank its work; look whether it was done"
        self._fail(submission, rank, RemoteFailure(kind=LOST, message=text))

    def died(self, submission: Submission, rank: int) -> None:
        """Fail a submission on a rank whose engine, started by an earlier supervisor, is gone.

        Args:
            submission: The submission.
            rank: The rank.
        """
        self._fail(submission, rank, RemoteFailure(kind=DIED, message=_DIED_TEXT))

    def _fail(self, submission: Submission, rank: int, failure: RemoteFailure) -> None:
        """Fail it on the sending thread, because the rank may work on it and others may wait for it."""
        self._events.put(functools.partial(self._end_of, submission, rank, b"", failure))

    def withdrawn(self, submission: Submission, rank: int) -> None:
        """End a submission on a rank as interrupted: an earlier supervisor removed it from the queue.

        Args:
            submission: The submission.
            rank: The rank.
        """
        submission.end(rank, failure=RemoteFailure(kind=INTERRUPTED, message=_TAKEN_BACK_TEXT))

    def working(self, only: Submission | None = None) -> dict[int, Submission]:
        """Return what each rank works on now.

        Args:
            only: Return only the ranks that work on this submission; None for all.
        """
        with self._lock:
            heads = {rank: waiting[0] for rank, waiting in self._waiting.items() if waiting}
        return {
            rank: head
            for rank, head in heads.items()
            if rank in head.messages and rank in head.unfinished and only in (None, head)
        }

    def busy(self) -> set[int]:
        """Return the ranks that work on something, or have something in their queue."""
        with self._lock:
            return {rank for rank, waiting in self._waiting.items() if waiting}

    def take_back(self, only: Submission | None = None, why: str = _TAKEN_BACK_TEXT) -> None:
        """End, as interrupted, what ranks have not begun.

        Args:
            only: Submission to remove; None for all.
            why: Message of the failure.
        """
        with self._lock:
            line = [(rank, one) for rank, waiting in self._waiting.items() for one in waiting]
            taken = [(rank, one) for rank, one in line if only in (None, one) and rank not in one.messages]
            for rank, one in taken:
                self._forget(one, [rank])
        for rank, one in taken:
            one.end(rank, failure=RemoteFailure(kind=INTERRUPTED, message=why))
            self._journal.withdrawn(one, rank)

    def give_up(self, ranks: Iterable[int], kind: str, reason: str) -> None:
        """Fail what these ranks work on and what waits for them, because they will not answer.

        Args:
            ranks: Ranks that are gone.
            kind: Kind of the failure.
            reason: Message of the failure.
        """
        for rank in ranks:
            with self._lock:
                ended = list(self._waiting.pop(rank, ()))
            for one in ended:
                self._ended(one, rank, b"", RemoteFailure(kind=kind, message=reason))
                self._journal.withdrawn(one, rank)

    def close(self) -> None:
        """Stop the thread that sends."""
        self._events.put(None)

    # ---- on the sending thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:  # The queue must continue for the other submissions.
                log.exception("a submission could not be served")

    def _send_next(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            while (ready := self._next(rank)) is not None and not self._sent(ready, rank):
                continue

    def _next(self, rank: int) -> Submission | None:
        """Return the submission that is to be sent to this rank now; None if there is none."""
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
            # It was removed, overtaken by a `first` submission, or the rank is held.
            if not waiting or waiting[0] is not submission or not self._may_go(submission, rank):
                return False
            submission.messages[rank] = ""  # From here on, an interrupt treats it as begun.
        try:
            # Record before sending: after a takeover, the rank may have received the work.
            self._journal.sending(submission, rank)
            task: Any = self._send(rank, submission.work)
        except Exception as error:
            gone = isinstance(error, IndexError)  # ipyparallel raises this for an unknown engine.
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
        self.take(submission, rank, task)  # Leave this thread, which receives the messages of the engines.

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
        # Other ranks may wait for the failed one in a collective: release them.
        if submission.end(rank, value, failure) and failure is not None and not submission.done:
            self._on_failure(submission)

    def _forget(self, submission: Submission, ranks: Iterable[int]) -> None:
        """Remove it from the queue of these ranks. Call with the lock."""
        for rank in ranks:
            waiting = self._waiting.get(rank)
            if waiting is not None:
                with contextlib.suppress(ValueError):
                    waiting.remove(submission)


def _failure_of(error: BaseException) -> RemoteFailure:
    """Return an exception of ipyparallel as a failure."""
    if isinstance(error, TaskAborted):
        return RemoteFailure(kind=INTERRUPTED, message=_TAKEN_BACK_TEXT)
    if isinstance(error, RemoteError) and has_ended(error):
        return RemoteFailure(kind=DIED, message=_DIED_TEXT)
    if isinstance(error, RemoteError):
        # For example, the engine cannot import the function. Leave out ipyparallel's traceback, which has colour codes.
        return RemoteFailure(kind=error.ename or "RemoteError", message=error.evalue or "")
    return RemoteFailure(kind=type(error).__name__, message=str(error))
