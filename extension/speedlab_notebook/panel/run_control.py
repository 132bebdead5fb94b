"""The run that a panel speaks to: what it began as and has become, words that wait for answers, a thread that looks.

What the panel can do with a run, and how it follows one: words, answers, and a thread that looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.cluster.calibration_update import learn_from
from speedlab.cluster.errors import ClusterError, RankError
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.run_commands import unsaved_warning
from speedlab.config import ConfigError, RunConfig
from speedlab.display.formatting import bytes_text, count_text, seconds_text
from speedlab.hardware import Device
from speedlab.layout import LayoutError
from speedlab.planner.calibration import store
from speedlab.telemetry.figures.markers import STATE_MARKS
from speedlab.telemetry.proof import Proof, read_proof
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.run_folder import RunFolderError
from speedlab_notebook.panel.changes import live_batch, live_config

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run
    from speedlab.cluster.run_commands import CommandFuture


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
    return " · ".join(filter(None, [line, unsaved_warning(run)]))


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


class PollingThread:
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


TROUBLE = (RunError, RankError, ClusterError, RunFolderError, ConfigError, LayoutError)
"""What a person can set right: told without a traceback."""


class Showing(Protocol):
    """What a panel does with the news of its run."""

    cluster: Cluster | None
    devices: Sequence[Device]

    def take_devices(self, devices: Sequence[Device]) -> None: ...
    def show(self, values: Any) -> None: ...
    def refresh(self) -> None: ...
    def show_run(self) -> None: ...
    def tell(self, text: str) -> None: ...
    def tell_error(self, error: Exception) -> None: ...


class PanelRun:
    """One run at a time, followed by a thread while it is under way. What it finds is shown under the panel's lock."""

    def __init__(self, panel: Showing, lock: threading.RLock) -> None:
        self._panel = panel
        self._lock = lock
        self.run: Run | None = None
        self.state: RunState | None = None
        self.running: RunConfig | None = None
        """What the run began as, with the shape that it has now."""
        self._began_as = RunConfig()
        self._pending: list[CommandFuture] = []
        self._proof: Proof | None = None
        self._proof_of: tuple[Run | None, int] = None, 0
        """The run of `_proof`, and how many proofs it had made."""
        self.watch = PollingThread(self._look)

    @property
    def under_way(self) -> bool:
        return self.state is not None and self.state not in ENDED

    @property
    def has_engines(self) -> bool:
        """Whether words reach it."""
        return self.run is not None and self.run.cluster is not None

    @property
    def engines_run(self) -> bool:
        """Whether these engines still run. Without them only resume works: engines that run now take the run."""
        return self.has_engines and self.run is not None and self.run.has_engines

    @property
    def waiting(self) -> set[str]:
        """Words that were posted and not yet answered."""
        return {pending.word for pending in self._pending}

    def proof(self) -> Proof | None:
        """What was checked of the run, read again when the run says that there is a new one; None without one."""
        run = self.run
        if run is None:
            return None
        count = sum(event.kind == "proof" for event in run.feed.events)
        if (run, count) != self._proof_of:
            self._proof = None
            try:
                self._proof = read_proof(run.folder.path) if count else None
            except RunFolderError as error:
                self._panel.tell_error(error)
                self._proof_of = run, count
            if self._proof is not None or not count:  # From another host the file may come after the event.
                self._proof_of = run, count
        return self._proof

    def take(self, run: Run, began_as: RunConfig) -> None:
        """Speak to `run` from now on; differences are told from what it began as and has become."""
        engines = len(self._panel.devices)
        with self._lock:
            self.run, self._began_as, self._pending, self.state = run, began_as, [], None
            self.running = live_config(run, began_as, engines)
            self._panel.show(live_batch(self.running, engines))
        self.watch.start()

    def post(self, word: Callable[[Run], CommandFuture]) -> None:
        """Post a control word; the thread tells the answer."""
        if self.run is None:
            return
        try:
            pending = word(self.run)
        except TROUBLE as error:
            with self._lock:
                self._panel.tell_error(error)
                self._panel.show_run()  # Engines of a run that has ended may be gone; no thread has looked since.
            return
        with self._lock:
            self._pending.append(pending)
            self._panel.tell(request_line(pending.word))
            self._panel.show_run()
        self.watch.start()

    def _look(self) -> float | None:
        """Take in what the run has done; seconds until the next look, None when nothing is to come."""
        run = self.run
        if run is None:
            return None
        try:
            before = self.state
            again = self._follow(run)
            if self.state is RunState.FINISHED and before not in (None, *ENDED):
                self._learn(run)
            return again
        except (*TROUBLE, OSError) as error:  # Its folder has been removed, say: there is nothing left to follow.
            self._panel.tell_error(error)
            return None

    def _follow(self, run: Run) -> float | None:
        with self._lock:
            moved = self._take_engines(run)
            state, running = run.state, live_config(run, self._began_as, len(self._panel.devices))
            self._hear_answers()
            if state is RunState.FAILED and self.state is not state:
                self._panel.tell_error(run.errors[-1] if run.errors else RunError(run.feed.status.text))
            news = moved or (state, running) != (self.state, self.running)
            self.state, self.running = state, running
            if news:
                self._panel.refresh()
            else:
                self._panel.show_run()
            waiting = bool(self._pending)
        if state in ENDED and not waiting:
            return None
        return RESTING_LOOK_SECONDS if state is RunState.PAUSED and not waiting else BUSY_LOOK_SECONDS

    def _take_engines(self, run: Run) -> bool:
        """Show the engines that the run has now, which `reshape(engines=…)` may have changed; whether it has."""
        with suppress(ClusterError):  # They are gone: what was there is all there is to show.
            if run.cluster is not None and (devices := run.cluster.devices) != self._panel.devices:
                self._panel.take_devices(devices)
                return True
        return False

    def _learn(self, run: Run) -> None:
        """Let a calibrated machine learn from a run that has just finished, and tell what was predicted of it."""
        if store.path().exists():
            with suppress(ConfigError):  # A run of which nothing can be learned: too few steps, somebody's own model.
                self._panel.tell(learn_from(run.folder))

    def _hear_answers(self) -> None:
        """Tell the answers to words that have come in."""
        for pending in tuple(self._pending):
            try:
                event = pending.wait(0)
            except TimeoutError:
                continue
            except TROUBLE as error:
                self._panel.tell_error(error)
            else:
                if problem := proof_problem(event):
                    self._panel.tell_error(RunError(problem))
                else:
                    self._panel.tell(answer_line(event))
            self._pending.remove(pending)
