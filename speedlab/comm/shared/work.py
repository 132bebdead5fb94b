"""Collectives under way, as torch.distributed hands them to its callers, and the thread that carries them out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from speedlab.comm.errors import PeerLost, clear_frames, without_frames


class Work(dist._Work):
    """One collective or message. `finish` does what is left of it, when somebody waits; `there`: whether that would
    not wait any more."""

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
        """Return when the result is there. Raises what went wrong, every time."""
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
        return self._finish is None or self._there()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; waits for what is not carried out by a thread."""
        if self._future is None:
            self._future = torch.futures.Future()
            try:
                self.wait()
            except Exception as error:
                self._future.set_exception(without_frames(error))  # No collector of garbage looks into a future.
            else:
                self._future.set_result(self._result)
        return self._future


class ThreadWork(Work):
    """A collective that a `Worker` carries out."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__(result)
        self._over = threading.Event()
        self._future = torch.futures.Future()

    def settle(self, error: BaseException | None) -> None:
        """The worker has carried it out, or failed."""
        assert self._future is not None
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        self._over.wait()
        if self._error is not None:
            # A copy: the future holds the error, and no collector of garbage looks into a future.
            raise without_frames(self._error).with_traceback(self._error.__traceback__)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()


class Worker:
    """A thread that carries out the asynchronous collectives of one group, in order. It starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], ThreadWork] | None] = queue.SimpleQueue()
        self._open = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether a collective may be carried out by the caller itself, without overtaking another one."""
        return self._open == 0

    def submit(self, task: Callable[[], None], result: list[Any]) -> ThreadWork:
        """Raises PeerLost after `stop`: nobody would carry it out, and who waits for it would wait for ever."""
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
        """End the thread after what it has been given."""
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
        done()  # Before it is known to be over: the next collective may then skip the queue.
        work.settle(error)
        del entry, task, work, error  # While it waits for the next one, it must not keep tensors and the group alive.
