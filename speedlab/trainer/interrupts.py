"""SIGINT during training: first asked of all ranks together, at the end of the step; forced when the step does not
end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 1.2
"""How long after SIGINT the present step may still take before KeyboardInterrupt is raised in the middle of it."""

_REPEAT_SECONDS = 1.0
"""A signal that comes sooner after the last one is the same request: the cluster repeats it, twice a second, while a
rank still works."""


class _Forced(Enum):
    """When a request is forced."""

    IN_A_WHILE = "after PATIENCE_SECONDS"
    NOT_NOW = "what is under way has to come to its end, or be taken back"
    AT_ONCE = "what is under way is a person's"


class Interruption:
    """While active, SIGINT sets `asked`; `PATIENCE_SECONDS` later it raises KeyboardInterrupt, unless all ranks have
    `heard` of it or the block has ended.

    A rank that stops between two steps, together with the others, leaves a state from which all can go on. What follows
    the step, as a save, may then take its time; only another request is forced again.
    """

    def __init__(self) -> None:
        self.asked = False
        self.came_at = float("-inf")
        """When it was asked for, by this process's clock, in seconds since 1970: now or earlier in the block."""
        self._last = float("-inf")
        """When the last signal came, or a peer's was heard of."""
        self._forced = _Forced.IN_A_WHILE
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self.asked, self.came_at, self._last = False, float("-inf"), float("-inf")
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGINT, self._ask), (signal.SIGALRM, self._force)):
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._disarm()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def heard(self) -> None:
        """All ranks know that one of them was asked, and will stop: nothing has to be forced any more."""
        self._disarm()
        if not self.asked:
            self.came_at = time.time()
        self._last = time.monotonic()  # The own signal may come after a peer's was heard of.
        self.asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing is forced: what is under way has to come to its end, or be taken back. A request that comes
        meanwhile is forced only afterwards."""
        try:
            with self._when(_Forced.NOT_NOW):
                yield
        finally:
            if self.asked and self._forced is not _Forced.NOT_NOW:
                self._arm()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a request is forced when it comes, and again after PATIENCE_SECONDS: what runs is a person's cell,
        and the state is that between two steps. One that came before it ends it here."""
        with self._when(_Forced.AT_ONCE):
            if self.asked:
                raise KeyboardInterrupt
            yield

    @contextmanager
    def _when(self, forced: _Forced) -> Iterator[None]:
        before, self._forced = self._forced, forced
        try:
            yield
        finally:
            self._forced = before

    def _arm(self) -> None:
        if self._before:
            # Again and again: an exception that is raised inside a finalizer, by chance, goes nowhere.
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS, PATIENCE_SECONDS)

    def _disarm(self) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        repeated = now - self._last < _REPEAT_SECONDS
        self._last = now
        if repeated:
            return
        self.came_at = time.time()
        if self.asked and self._forced is not _Forced.AT_ONCE:
            return
        self.asked = True
        self._arm()
        if self._forced is _Forced.AT_ONCE:
            self._force(number, frame)

    def _force(self, number: int, frame: FrameType | None) -> None:
        if self._forced is _Forced.NOT_NOW:
            return
        before = self._before[signal.SIGINT]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)  # An engine's own waits until a library is imported, and is asked again.
            return
        raise KeyboardInterrupt("the step did not end in time")
