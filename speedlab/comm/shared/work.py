"""Collectives in flight with torch's Work interface, and the thread that executes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from speedlab.comm.errors import PeerLost, clear_frames, without_frames


class Work(dist._Work):
    """One collective or message.

    Args:
        result: Tensors of the result.
        finish: Does the remaining work at the first wait.
        there: Returns whether `finish` would not wait.
    """

    def __init__(
        self,
        result: list[Any],
        finish: Callable[[], None] | None = None,
        there: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._result, self._finish, self._there = result, finish, there
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the result. Raises the error of the work, at every call.

        Args:
            timeout: Ignored; the group's timeout holds.
        """
        # Remove `finish` first, so that it runs only once.
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except BaseException as error:
                self._error = without_frames(error)
                raise
        if self._error is not None:
            raise without_frames(self._error)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not block."""
        return self._finish is None or self._there()

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self.is_completed() and self._error is None

    def result(self) -> list[Any]:
        """Return the tensors of the result."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result. Work without a thread is finished first."""
        if self._future is None:
            self._future = torch.futures.Future()
            try:
                self.wait()
            except Exception as error:
                # Store a copy: the garbage collector cannot see into a future.
                self._future.set_exception(without_frames(error))
            else:
                self._future.set_result(self._result)
        return self._future


class ThreadWork(Work):
    """A collective that a `Worker` executes."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__(result)
        self._over = threading.Event()
        self._future = torch.futures.Future()

    def settle(self, error: BaseException | None) -> None:
        """Store the outcome. The worker calls this.

        Args:
            error: Error of the collective, or None.
        """
        assert self._future is not None
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the worker. Raises the error of the collective.

        Args:
            timeout: Ignored; the group's timeout holds.
        """
        self._over.wait()
        if self._error is not None:
            # Raise a copy: the future holds the error, and the garbage collector cannot see into a future.
            raise without_frames(self._error).with_traceback(self._error.__traceback__)
        return True

    def is_completed(self) -> bool:
        """Return whether the worker has finished the collective."""
        return self._over.is_set()


class Worker:
    """A thread that executes the asynchronous collectives of one group in order. It starts at the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], ThreadWork] | None] = queue.SimpleQueue()
        self._open = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether the caller may execute a collective itself, without overtaking another one."""
        return self._open == 0

    def submit(self, task: Callable[[], None], result: list[Any]) -> ThreadWork:
        """Queue a collective.

        Args:
            task: Executes the collective.
            result: Tensors of the result.

        Raises:
            PeerLost: After `stop`, because a queued task would never run.
        """
        work = ThreadWork(result)
        with self._lock:
            if self._stopped:
                raise PeerLost(f"{self._name}: this rank has left the group")
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._tasks, self._done), name=self._name)
                self._thread.daemon = True
                self._thread.start()
            self._tasks.put((task, work))
        return work

    def stop(self) -> None:
        """End the thread after the queued collectives."""
        with self._lock:
            self._stopped = True
            self._tasks.put(None)

    def _done(self) -> None:
        with self._lock:
            self._open -= 1


def _serve(tasks: queue.SimpleQueue[tuple[Callable[[], None], ThreadWork] | None], done: Callable[[], None]) -> None:
    while (entry := tasks.get()) is not None:
        task, work = entry
        error: BaseException | None = None
        try:
            task()
        except Exception as raised:
            clear_frames(raised)
            error = raised
        done()  # Decrement before the waiter wakes up, so that its next collective may bypass the queue.
        work.settle(error)
        del entry, task, work, error  # Release tensors and the group before this thread blocks for the next task.
