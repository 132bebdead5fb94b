"""SIGINT during training: all ranks stop together at the end of the step, or by force if the step takes too long."""

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
"""How long the current step may continue after SIGINT before KeyboardInterrupt is raised inside it."""

_REPEAT_SECONDS = 1.0
"""A signal within this time after the last one is the same request. The cluster repeats the signal twice a second while
a rank still works.
"""


class _Forced(Enum):
    """When a request raises KeyboardInterrupt."""

    IN_A_WHILE = "after PATIENCE_SECONDS"
    NOT_NOW = "what is under way has to come to its end, or be taken back"
    AT_ONCE = "what is under way is a person's"


class Interruption:
    """Handles SIGINT while its context is active.

    1. SIGINT sets `asked`.
    2. The ranks exchange `asked` at the end of the step and call `heard`. They stop together between two steps, in a
       state from which all can continue. A following save may take its time.
    3. If `heard` is not called within `PATIENCE_SECONDS`, KeyboardInterrupt is raised. The same holds for later
       requests.
    """

    def __init__(self) -> None:
        self.asked = False
        self.came_at = float("-inf")
        """Time of the request, by this process's clock, in seconds since 1970."""
        self._last = float("-inf")
        """Time of the last signal, or of a peer's request."""
        self._forced = _Forced.IN_A_WHILE
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self.asked, self.came_at, self._last = False, float("-inf"), float("-inf")
        # Python allows signal handlers in the main thread only.
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
        """Note that all ranks know of the request and will stop, so that KeyboardInterrupt is no longer needed."""
        self._disarm()
        if not self.asked:
            self.came_at = time.time()
        self._last = time.monotonic()  # This rank's signal may arrive after a peer's request.
        self.asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay KeyboardInterrupt until the end of this context, for work that must complete or be rolled back."""
        try:
            with self._when(_Forced.NOT_NOW):
                yield
        finally:
            if self.asked and self._forced is not _Forced.NOT_NOW:
                self._arm()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once inside this context, and again after PATIENCE_SECONDS.

        This context runs the user's cells; the state is that between two steps.

        Raises:
            KeyboardInterrupt: On entry, if a request came before.
        """
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
            # Repeat the timer: Python swallows an exception that is raised inside a finalizer.
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS, PATIENCE_SECONDS)

    def _disarm(self) -> None:
        if self._before:
            # 0 stops the timer.
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
            # The handler of the engine process may delay until an import ends; the timer repeats.
            before(number, frame)
            return
        raise KeyboardInterrupt("the step did not end in time")
