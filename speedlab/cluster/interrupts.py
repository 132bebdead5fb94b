"""Distinguish the KeyboardInterrupt of a user from the one with which Jupyter restarts or shuts down a kernel."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_REQUEST_SECONDS = 1.0
"""Jupyter interrupts a kernel and asks it to end at once; on a busy machine, the request takes a while to arrive."""
_LOOK_SECONDS = 0.01


def is_the_users() -> bool:
    """Return whether the last KeyboardInterrupt is from the user, who wants the ranks to stop.

    In a kernel this waits up to a second: the end of a kernel stops no run, and only the shutdown request that follows
    the interrupt distinguishes the two.
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
        return True  # A second interrupt is from the user.
    return True


class _Noted:
    """Counts SIGINT before the previous handler runs; installed while a caller needs the count."""

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
    """Yield a function that returns whether SIGINT has arrived since. An event loop may turn SIGINT into a normal
    cancellation.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    _noted.begin()
    at = _noted.count
    try:
        yield lambda: _noted.count > at
    finally:
        _noted.end()
