"""Disk jobs on background threads: pieces run in parallel, jobs consist of pieces, and a queue runs one job at a time.

1. A caller adds a job to a queue and notifies the pool. Both are single C operations, so Ctrl-C between two lines of
   the caller leaves nothing half done. All else runs on the pool's threads, which Ctrl-C never interrupts.
2. After the previous job of the queue has ended, the pool calls the job's `plan`. It returns the pieces, which go into
   the pool's single queue.
3. After the last piece (a failed piece skips the remaining ones), the pool calls `ended`. Then the job is over.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

Piece = Callable[[], object]

_WAKE_SECONDS = 0.05
"""A wait returns to Python this often, so that signals are handled."""


class IORequest:
    """A job: pieces that run in parallel."""

    def __init__(
        self,
        plan: Callable[[], Iterable[Piece]] | None,
        *,
        ended: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """Start nothing yet.

        Args:
            plan: Returns the pieces when the job starts. None: `release` gives the plan later; until then the job
                blocks its queue.
            ended: Called with the error, or None, after the last piece.
        """
        self.error: Exception | None = None
        self._plan, self._ended = plan, ended
        self._left = 0
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether the job has ended or failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end of the job. Raises the exception of a failed piece."""
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait for the end of the job, without raising its error."""
        while not self._over.wait(_WAKE_SECONDS):
            pass


class IOThreadPool:
    """Daemon threads that run pieces from one queue, in order."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, piece: Piece) -> None:
        """Add a piece to the queue. Thread-safe."""
        self._queue.put(piece)

    def close(self) -> None:
        """End the threads after their current pieces. Safe to call again after an interruption."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_WAKE_SECONDS)


def _work(pieces: queue.SimpleQueue[Piece | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece()
        del piece  # Otherwise the thread would keep the memory of this piece while it waits for the next one.


class IOQueue:
    """Jobs that run one at a time, in the order in which they were added."""

    def __init__(self, pool: IOThreadPool) -> None:
        self._pool = pool
        self._jobs: deque[IORequest] = deque()
        self._running: IORequest | None = None
        self._lock = threading.Lock()
        self.error: Exception | None = None
        """If set, all jobs that have not started fail with this error."""
        self._given_up = False

    def add(self, *jobs: IORequest) -> None:
        """Add jobs, and notify the pool."""
        self._jobs.extend(jobs)
        self.kick()

    def release(self, job: IORequest, plan: Callable[[], Iterable[Piece]]) -> None:
        """Give a blocking job its plan, so that it can start.

        Args:
            job: A job without a plan.
            plan: Returns the pieces when the job starts.
        """
        if job._plan is None:
            job._plan = plan
        self.kick()

    def kick(self) -> None:
        """Notify the pool that a job may be able to start. Extra calls are harmless."""
        self._pool.put(self._advance)

    def give_up(self, error: Exception) -> None:
        """Fail all jobs that have not started, also a blocking one, and wait until none is left.

        Args:
            error: Their error.
        """
        self.error, self._given_up = error, True
        last = IORequest(list)
        self.add(last)
        last.settle()

    # ---- on the pool's threads ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._lock:
            if self._running is not None or not self._jobs:
                return
            # A turn that has not ended blocks the queue.
            if self._jobs[0]._plan is None and not self._given_up:
                return
            job = self._running = self._jobs.popleft()
        pieces: list[Piece] = []
        job.error = self.error
        if job.error is None and job._plan is not None:
            try:
                pieces = list(job._plan())
            except Exception as error:
                job.error = error
        job._left = len(pieces)
        if not pieces:
            self._end(job)
        for piece in pieces:
            self._pool.put(partial(self._do, job, piece))

    def _do(self, job: IORequest, piece: Piece) -> None:
        try:
            # After a failed piece, the remaining ones are skipped.
            if job.error is None and not self._given_up:
                piece()
        except Exception as error:
            job.error = job.error or error
        with self._lock:
            job._left -= 1
            last = job._left == 0
        if last:
            if job.error is None and self._given_up:
                job.error = self.error
            self._end(job)

    def _end(self, job: IORequest) -> None:
        try:
            job._ended(job.error)
        except Exception as error:
            job.error = job.error or error
        # The plan refers to memory. A transfer that refers to the job would keep this memory alive.
        job._plan, job._ended = list, lambda error: None
        with self._lock:
            self._running = None
        job._over.set()
        self.kick()
