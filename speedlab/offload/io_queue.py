"""Work that waits for the disk: pieces on threads of ours, jobs made of pieces, chains that do one job at a time.

1. A caller adds a job to a chain and tells the pool. Both are single operations of C, so that Ctrl-C between any two
   lines of the caller leaves nothing half done; everything below runs on the pool's threads, where Ctrl-C never comes.
2. When the chain's job before has ended, its `plan` is called and gives the pieces, which go to the pool's one queue.
3. When the last piece is done, or one has failed and the others were left out, `ended` is called; then the job is over.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

Piece = Callable[[], object]

_WAKE_SECONDS = 0.05
"""A wait is back in Python this often, so that signals are heard."""


class IORequest:
    """Pieces that run side by side."""

    def __init__(
        self,
        plan: Callable[[], Iterable[Piece]] | None,
        *,
        ended: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """`plan` None: it is given later, by `release`; until then the job holds its chain up."""
        self.error: Exception | None = None
        self._plan, self._ended = plan, ended
        self._left = 0
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether all of it is done, or it has failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until it is over. Raises what its pieces raised."""
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until it is over, well or not."""
        while not self._over.wait(_WAKE_SECONDS):
            pass


class IOThreadPool:
    """Daemon threads that take pieces off one queue, first come, first served."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, piece: Piece) -> None:
        self._queue.put(piece)

    def close(self) -> None:
        """End the threads, after what they have begun. Can be called again when it was interrupted."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_WAKE_SECONDS)


def _work(pieces: queue.SimpleQueue[Piece | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece()
        del piece  # Waiting for the next one, it would hold the memory of this one.


class IOQueue:
    """Jobs of which one runs at a time, in the order in which they were added."""

    def __init__(self, pool: IOThreadPool) -> None:
        self._pool = pool
        self._jobs: deque[IORequest] = deque()
        self._running: IORequest | None = None
        self._lock = threading.Lock()
        self.error: Exception | None = None
        """Where set, all jobs that have not begun fail with it."""
        self._given_up = False

    def add(self, *jobs: IORequest) -> None:
        self._jobs.extend(jobs)
        self.kick()

    def release(self, job: IORequest, plan: Callable[[], Iterable[Piece]]) -> None:
        """Give a job that holds the chain up its plan."""
        if job._plan is None:
            job._plan = plan
        self.kick()

    def kick(self) -> None:
        """Have the pool look whether a job can begin. Too often does no harm."""
        self._pool.put(self._advance)

    def give_up(self, error: Exception) -> None:
        """All jobs that have not begun fail with `error`, also one that holds the chain up; wait until none is left."""
        self.error, self._given_up = error, True
        last = IORequest(list)
        self.add(last)
        last.settle()

    # ---- on the pool's threads ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._lock:
            if self._running is not None or not self._jobs:
                return
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
        # The plan holds memory, and so would whoever keeps the job's transfer.
        job._plan, job._ended = list, lambda error: None
        with self._lock:
            self._running = None
        job._over.set()
        self.kick()
