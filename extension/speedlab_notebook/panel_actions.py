"""What the panel can do with a run, and how it follows one: words, answers, and a thread that looks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from speedlab.cluster.run_commands import unsaved_text
from speedlab.display.formatting import bytes_text, count_text, seconds_text
from speedlab.telemetry.figures.markers import STATE_MARKS
from speedlab.telemetry.records import Event, RunState

if TYPE_CHECKING:
    from speedlab.cluster import Run

BUSY_LOOK_SECONDS = 0.2
RESTING_LOOK_SECONDS = 1.0
"""A paused run may be resumed from a cell or another kernel."""

_WORTH_TELLING = 1e-3
"""Seconds; a pause, which only sets a flag, took less."""
ENDED = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_UNDER_WAY = frozenset({RunState.STARTING, RunState.RUNNING, RunState.PAUSED})

WORDS: dict[str, tuple[frozenset[RunState], str]] = {
    "pause": (frozenset({RunState.STARTING, RunState.RUNNING}), "Stop after the step that is being computed"),
    "resume": (frozenset({RunState.PAUSED, RunState.STOPPED}), "Go on from where the run stands"),
    "step": (frozenset({RunState.PAUSED}), "Compute so many more steps, then pause"),
    "save": (
        frozenset({RunState.RUNNING, RunState.PAUSED, RunState.FINISHED, RunState.STOPPED}),
        "Write a checkpoint after the step that is being computed",
    ),
    "prove": (
        frozenset({RunState.RUNNING, RunState.PAUSED, RunState.FINISHED, RunState.STOPPED}),
        "Check what training on the next batch does: which tokens count, whether documents are separate, what moves",
    ),
    "stop": (_UNDER_WAY, "End the run after the step that is being computed"),
    "reshape": (_UNDER_WAY - {RunState.STARTING}, "Change the stage or layout of the run between two steps"),
}
"""Control word -> the states of a run in which it is offered, and what it does."""


def run_line(run: Run) -> str:
    """'● running: step 120 of 2,000 · loss 5.91 · 41.2 k tokens/s', and what of a run that has ended is not saved."""
    state, last = run.state, run.feed.last
    figures = f" · loss {last.loss:.3f} · {count_text(last.tokens_per_second)} tokens/s" if last is not None else ""
    line = f"{STATE_MARKS[state]} {run.name} {state}: step {run.step:,} of {run.feed.status.steps:,}{figures}"
    return " · ".join(filter(None, [line, unsaved_text(run)]))


def request_line(word: str) -> str:
    """What follows after a control word was posted, by the name of its button."""
    if word == "prove":
        return (
            "proof: asked for; the ranks check the next batch after the step that is being computed, and training "
            "waits for them"
        )
    return f"{word}: asked for; the ranks act after the step that is being computed"


def proof_problem(event: Event) -> str:
    """Which checks of a proof raised errors, or why the proof could not be written; '' if nothing failed."""
    failed = event.details.get("failed")
    parts = [f"proof at step {event.step:,}:"]
    if isinstance(failed, list) and failed:
        parts.append(f"{len(failed)} check{'s' if len(failed) > 1 else ''} failed. {failed[0]}")
    if problem := event.details.get("problem"):
        parts.append(str(problem))
    return " ".join(parts) if len(parts) > 1 else ""


def answer_line(event: Event) -> str:
    """What the ranks answered to a control word: 'checkpoint step-000120, 36.1 MiB, at step 120 in 0.2 s'."""
    size, seconds = event.details.get("bytes"), event.details.get("seconds")
    # The panel shows the findings in a table; the next step adds to them, so their text here would be out of date.
    parts = ["proof made"] if event.kind == "proof" else [f"{event.kind} {event.text}".strip()]
    if isinstance(size, int | float):
        parts.append(bytes_text(size))
    where = f"at step {event.step:,}" if event.kind == "proof" or "step" not in event.text else ""
    took = f"in {seconds_text(seconds)}" if isinstance(seconds, int | float) and seconds >= _WORTH_TELLING else ""
    line = ", ".join(parts) + "".join(f" {part}" for part in (where, took) if part)
    return f"{line}; the findings are below" if event.kind == "proof" else line


class Watch:
    """Calls `look` in a thread of its own, again after the seconds that it returns, until it returns None."""

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Look at once, and go on; also after it had ended."""
        with self._lock:
            self._wake.set()
            if not self._closed and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="speedlab-panel", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._closed = True
            self._wake.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def _work(self) -> None:
        while True:
            self._wake.clear()
            seconds = self._look()
            with self._lock:
                # One decision: whoever starts it later finds no thread, whoever did before has set the event.
                if self._closed or (seconds is None and not self._wake.is_set()):
                    self._thread = None
                    return
            self._wake.wait(seconds)
