"""SIGINT during training: first asked of all ranks together, at the end of the step; forced when the step does not
end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 1.2
"""How long after SIGINT the present step may still take before KeyboardInterrupt is raised in the middle of it."""


class Interruption:
    """While active, SIGINT sets `asked`; `PATIENCE_SECONDS` later it raises KeyboardInterrupt, unless the block has
    ended.

    A rank that stops between two steps, together with the others, leaves a state from which all can go on.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGINT, self._ask), (signal.SIGALRM, self._force)):
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            return  # The cluster repeats signals that an engine may have missed.
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)

    def _force(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("the step did not end in time")
