"""Control words as a Run hands them out: the answer to one, once there is one."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from speedlab.cluster.known_runs import RunError
from speedlab.telemetry.records import Event

if TYPE_CHECKING:
    from speedlab.cluster.run import Run

_ANSWER_GRACE_SECONDS = 0.5


class Pending:
    """The answer to a control word, once there is one: `.wait()`, `await`, or look at `.event`."""

    def __init__(self, run: Run, number: int, word: str) -> None:
        self.number = number
        self.word = word
        self._run = run
        self._passed_over_since: float | None = None

    @property
    def event(self) -> Event | None:
        """What the ranks answered; None until then."""
        self._run.feed.poll()
        return next((event for event in reversed(self._run.feed.events) if event.command == self.number), None)

    @property
    def done(self) -> bool:
        return self.event is not None

    def wait(self, timeout: float | None = None) -> Event:
        """Wait for the answer, and, where the run has come to rest, until its ranks are free.

        Raises RankError when a rank failed, RunError when the word was refused or the run ended before it, TimeoutError
        after `timeout` seconds. An interrupt of the kernel interrupts the ranks too.
        """
        return self._run._until(self.look, timeout, str(self))

    def __await__(self) -> Generator[Any, None, Event]:
        return self._run._until_async(self.look, str(self)).__await__()

    def look(self) -> Event | None:
        """What `wait` would return, or raise, now; None where it would wait on."""
        event = self.event
        # The status is written after the event: who asks for the run's state next shall see what the word has done.
        if event is not None and self._run.feed.status.command >= self.number:
            if event.details.get("error"):
                raise RunError(f"{self} was refused at step {event.step}: {event.text}")
            self._run._raise_trouble()
            # Who pauses wants free ranks: their task ends a moment after it has said so.
            return None if self._run.is_settling else event
        self._run._raise_trouble()
        if self._run.feed.status.command < self.number:
            return None
        # Counted as done, but without an answer: it was dropped when the run failed or ended. An event on a slow file
        # system may still be on its way.
        now = time.monotonic()
        self._passed_over_since = self._passed_over_since or now
        if now - self._passed_over_since < _ANSWER_GRACE_SECONDS:
            return None
        self._run._raise_failure()
        raise RunError(f"{self} was not carried out: {self._run._where()}")

    def __str__(self) -> str:
        return f"control word {self.number} ({self.word})"

    def __repr__(self) -> str:
        event = self.event
        return f"<{self}: {f'{event.kind} at step {event.step}' if event else 'waiting'}>"
