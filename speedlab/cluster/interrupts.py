"""Whose a KeyboardInterrupt is: a person's, or that with which Jupyter begins to restart or shut down a kernel."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_REQUEST_SECONDS = 1.0
"""Jupyter interrupts a kernel and at once asks it to end; where all cores train, this takes a while to arrive."""
_LOOK_SECONDS = 0.01


def is_the_users() -> bool:
    """Whether a KeyboardInterrupt that has just come is a person's, who wants the ranks to stop.

    In a kernel this waits a moment: the end of a kernel stops no run, and only the request that follows tells it from a
    person's interrupt.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is None:
        return True
    deadline = time.monotonic() + _REQUEST_SECONDS
    try:
        while time.monotonic() < deadline:
            if getattr(shell, "exit_now", False):
                return False
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        return True  # Somebody means it.
    return True


class _Noted:
    """SIGINT, counted on its way to whoever handles it; installed while somebody wants to know."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._before: Any = None

    def begin(self) -> None:
        self._wanted += 1
        if self._wanted == 1:
            self._before = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._hear)

    def end(self) -> None:
        self._wanted -= 1
        if self._wanted == 0 and signal.getsignal(signal.SIGINT) == self._hear:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if callable(self._before):
            self._before(number, frame)


_noted = _Noted()


@contextlib.contextmanager
def noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Yields what tells whether SIGINT has come since: an event loop that hears it may cancel what is awaited, which
    looks like any other cancellation."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    _noted.begin()
    at = _noted.count
    try:
        yield lambda: _noted.count > at
    finally:
        _noted.end()
