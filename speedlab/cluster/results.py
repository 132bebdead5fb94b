"""RankResults: what a function returned on each rank, once it has.

ipyparallel's own result of a task on several engines waits for the slowest, even when one is dead. So each rank has a
task of its own, and when one fails, others that wait for it are released (`Cluster.release_waiting`).
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ipyparallel.error import RemoteError, TaskAborted

from speedlab.cluster.errors import DIED, INTERRUPTED, RankError, RemoteFailure
from speedlab.cluster.kernel_interrupt import is_the_users
from speedlab.cluster.remote import FAILED

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.output import OutputHub

_CHECK_SECONDS = 1.0


class RankResults:
    """Results of one submission by rank: `.result()`, `await`, `.wait(timeout)`, or `.done` to look."""

    def __init__(self, cluster: Cluster, output: OutputHub, tasks: Mapping[int, Any]) -> None:
        """`tasks`: ipyparallel's AsyncResult of each rank; `output`: where what they print comes out."""
        self.ranks = list(tasks)
        self.message_ids = {rank: task.msg_ids[0] for rank, task in tasks.items()}
        self._cluster = cluster
        self._output = output
        self._values: dict[int, Any] = {}
        self._failures: dict[int, RemoteFailure] = {}
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._settled = False
        self._callbacks: list[Callable[[RankResults], object]] = []
        for rank, task in tasks.items():
            task.add_done_callback(functools.partial(self._came, rank))

    @property
    def done(self) -> bool:
        """Whether every rank has returned or failed."""
        return self._finished.is_set()

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have neither returned nor failed."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self._values and rank not in self._failures]

    @property
    def failures(self) -> dict[int, RemoteFailure]:
        """Failures so far, by rank, in the order in which they came."""
        with self._lock:
            return dict(self._failures)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank is done and its output has been passed on. False when `timeout` seconds came first.

        Raises ClusterError when the controller has died. An interrupt of the kernel interrupts the ranks, too.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._finished.is_set():
                left = _CHECK_SECONDS if deadline is None else min(_CHECK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                if not self._finished.wait(left):
                    self._cluster.check_controller()
            self._settle()
        except KeyboardInterrupt:
            if is_the_users():
                self._cluster.interrupt()
            raise
        return True

    def result(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned, in the order of `ranks`. Raises RankError; TimeoutError after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(
                f"ranks {self.unfinished} are not done after {timeout:g} s; wait longer, or call cluster.interrupt()"
            )
        return self._outcome()

    def add_done_callback(self, callback: Callable[[RankResults], object]) -> None:
        """Call `callback(self)` once all ranks are done; at once if they are. It comes on the thread that serves the
        engines' messages, so it must not wait for any of them."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> list[Any]:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(_: RankResults) -> None:
            if not loop.is_closed():  # Nobody waits any more when it is.
                loop.call_soon_threadsafe(woken.set)

        self.add_done_callback(wake)
        await woken.wait()
        await loop.run_in_executor(None, self._settle)
        return self._outcome()

    def _settle(self) -> None:
        """Let the ranks' last lines of output come before whatever follows."""
        if not self._settled:
            self._settled = True
            self._output.settle(self.message_ids.values())

    def _outcome(self) -> list[Any]:
        if self._failures:
            raise RankError(self._failures)
        return [self._values[rank] for rank in self.ranks]

    def _came(self, rank: int, task: Future[Any]) -> None:
        error = task.exception()
        value = None if error is not None else task.result()
        if error is not None:
            failure = _failure_of(error)
        elif isinstance(value, dict) and FAILED in value:
            failure = RemoteFailure.from_dict(value[FAILED])
        else:
            failure = None
        self._set(rank, value, failure)

    def abandon(self, reason: str) -> None:
        """Count every unfinished rank as dead, because nothing can come from it any more."""
        for rank in self.unfinished:
            self._set(rank, None, RemoteFailure(kind=DIED, message=reason))

    def _set(self, rank: int, value: Any, failure: RemoteFailure | None) -> None:
        with self._lock:
            if rank in self._values or rank in self._failures:
                return
            if failure is not None:
                self._failures[rank] = failure
            else:
                self._values[rank] = value
            if len(self._values) + len(self._failures) < len(self.ranks):
                waiting = failure is not None
                callbacks: list[Callable[[RankResults], object]] = []
            else:
                waiting = False
                callbacks, self._callbacks = self._callbacks, []
                self._finished.set()
        if waiting:
            self._cluster.release_waiting(self)
        for callback in callbacks:
            callback(self)

    def __repr__(self) -> str:
        if not self.done:
            return f"<RankResults: {len(self.unfinished)} of {len(self.ranks)} ranks not done>"
        return (
            f"<RankResults: {len(self._failures)} of {len(self.ranks)} ranks failed>"
            if self._failures
            else (f"<RankResults: {len(self.ranks)} ranks done>")
        )


def _failure_of(error: BaseException) -> RemoteFailure:
    """What ipyparallel says of a task that brought no answer of ours."""
    if isinstance(error, TaskAborted):
        return RemoteFailure(kind=INTERRUPTED, message="it was interrupted before it began")
    if isinstance(error, RemoteError) and error.ename == "EngineError":
        return RemoteFailure(kind=DIED, message="the process of this rank's engine ended, or stopped answering")
    if isinstance(error, RemoteError):
        # For example a result that cannot be pickled. ipyparallel colours its tracebacks; ours are plain.
        return RemoteFailure(kind=error.ename or "RemoteError", message=error.evalue or "")
    return RemoteFailure(kind=type(error).__name__, message=str(error))
