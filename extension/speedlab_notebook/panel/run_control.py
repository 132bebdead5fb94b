"""The run that a panel controls: its state, the commands that wait for an answer, and the thread that follows the run.

The file also holds the texts for the run's status, for commands and for their answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.cluster.errors import ClusterError, RankError
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.learn_from_run import learn_from
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
"""A paused run is polled as well, because a cell or another kernel may resume it."""

_WORTH_TELLING = 1e-3
"""Seconds. A command that only sets a flag, such as pause, took less; its time is not shown."""
ENDED = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_UNDER_WAY = frozenset({RunState.STARTING, RunState.RUNNING, RunState.PAUSED})

WORDS: dict[str, tuple[frozenset[RunState], str]] = {
    "pause": (frozenset({RunState.STARTING, RunState.RUNNING}), "Stop after the step that is being computed"),
    "resume": (frozenset({RunState.PAUSED, RunState.STOPPED}), "Resume from the current step of the run"),
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
"""Command -> the states of a run in which the command is enabled, and what the command does."""


def run_line(run: Run) -> str:
    """Return the status line of a run, with a warning if an ended run has unsaved steps.

    Args:
        run: The run to describe.

    Returns:
        For example '● run-1 running: step 120 of 2,000 · loss 5.910 · 41.2 k tokens/s'.
    """
    state, last = run.state, run.feed.last
    figures = f" · loss {last.loss:.3f} · {count_text(last.tokens_per_second)} tokens/s" if last is not None else ""
    line = f"{STATE_MARKS[state]} {run.name} {state}: step {run.step:,} of {run.feed.status.steps:,}{figures}"
    return " · ".join(filter(None, [line, unsaved_warning(run)]))


def request_line(word: str) -> str:
    """Return the message that follows a click on a command's button.

    Args:
        word: The command's name, as the button shows it.
    """
    if word == "prove":
        return (
            "proof: asked for; the ranks check the next batch after the step that is being computed, and training "
            "waits for them"
        )
    return f"{word}: asked for; the ranks act after the step that is being computed"


def proof_problem(event: Event) -> str:
    """Return which checks of a proof raised errors, or why the proof file could not be written.

    Args:
        event: The event of kind 'proof'.

    Returns:
        One line; '' if nothing failed.
    """
    failed = event.details.get("failed")
    parts = [f"proof at step {event.step:,}:"]
    if isinstance(failed, list) and failed:
        parts.append(f"{len(failed)} check{'s' if len(failed) > 1 else ''} failed. {failed[0]}")
    if problem := event.details.get("problem"):
        parts.append(str(problem))
    return " ".join(parts) if len(parts) > 1 else ""


def answer_line(event: Event) -> str:
    """Return the answer of the ranks to a command as one line.

    Args:
        event: The event that answers the command.

    Returns:
        For example 'checkpoint step-000120, 36.1 MiB in 0.2 s'.
    """
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
    """A thread that calls `look`, sleeps for the seconds that `look` returned, and ends when `look` returns None."""

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Call `look` now. Start the thread if it has ended; wake it if it sleeps."""
        with self._lock:
            self._wake.set()
            if not self._closed and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="speedlab-panel", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread for good; wait at most 2 seconds for it."""
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
                # Both tests under one lock: a later `start` makes a new thread, an earlier `start` has set `_wake`.
                if self._closed or (seconds is None and not self._wake.is_set()):
                    self._thread = None
                    return
            self._wake.wait(seconds)


TROUBLE = (RunError, RankError, ClusterError, RunFolderError, ConfigError, LayoutError)
"""Errors that the user can fix. The panel shows them without a traceback."""


class Showing(Protocol):
    """The part of the panel that PanelRun uses."""

    cluster: Cluster | None
    devices: Sequence[Device]

    def take_devices(self, devices: Sequence[Device]) -> None: ...
    def show(self, values: Any) -> None: ...
    def refresh(self) -> None: ...
    def show_run(self) -> None: ...
    def tell(self, text: str) -> None: ...
    def tell_error(self, error: Exception) -> None: ...


class PanelRun:
    """The run of a panel, one at a time. A thread polls an active run and shows its news under the panel's lock."""

    def __init__(self, panel: Showing, lock: threading.RLock) -> None:
        self._panel = panel
        self._lock = lock
        self.run: Run | None = None
        self.state: RunState | None = None
        self.running: RunConfig | None = None
        """The configuration with which the run began, with the run's present ZeRO stage and layout."""
        self._began_as = RunConfig()
        self._pending: list[CommandFuture] = []
        self._proof: Proof | None = None
        self._proof_of: tuple[Run | None, int] = None, 0
        """The run of `_proof`, and the number of proofs in that run's events when `_proof` was read."""
        self.watch = PollingThread(self._look)

    @property
    def under_way(self) -> bool:
        """Whether the run has not ended."""
        return self.state is not None and self.state not in ENDED

    @property
    def has_engines(self) -> bool:
        """Whether the run has a cluster to which commands can be sent."""
        return self.run is not None and self.run.cluster is not None

    @property
    def engines_run(self) -> bool:
        """Whether the engines of the run are alive. Without them only resume works, on the engines that run now."""
        return self.has_engines and self.run is not None and self.run.has_engines

    @property
    def waiting(self) -> set[str]:
        """Names of commands that were posted and not yet answered."""
        return {pending.word for pending in self._pending}

    def proof(self) -> Proof | None:
        """Return the newest proof of the run; read the file again if the run reports a new one.

        Returns:
            The proof; None if there is no run or the run has none.
        """
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
            if self._proof is not None or not count:  # The file of another host may arrive after the event: retry.
                self._proof_of = run, count
        return self._proof

    def take(self, run: Run, began_as: RunConfig) -> None:
        """Control `run` from now on and start following it.

        Args:
            run: The run to control.
            began_as: The configuration with which the run began; differences are computed from it.
        """
        engines = len(self._panel.devices)
        with self._lock:
            self.run, self._began_as, self._pending, self.state = run, began_as, [], None
            self.running = live_config(run, began_as, engines)
            self._panel.show(live_batch(self.running, engines))
        self.watch.start()

    def post(self, word: Callable[[Run], CommandFuture]) -> None:
        """Post a command to the run. The polling thread shows the answer.

        Args:
            word: Calls one command of the run and returns its future.
        """
        if self.run is None:
            return
        try:
            pending = word(self.run)
        except TROUBLE as error:
            with self._lock:
                self._panel.tell_error(error)
                self._panel.show_run()  # The engines of an ended run may be gone; nothing polls an ended run.
            return
        with self._lock:
            self._pending.append(pending)
            self._panel.tell(request_line(pending.word))
            self._panel.show_run()
        self.watch.start()

    def _look(self) -> float | None:
        """Show what the run has done. Return the seconds until the next poll, or None if nothing more can come."""
        run = self.run
        if run is None:
            return None
        try:
            before = self.state
            again = self._follow(run)
            if self.state is RunState.FINISHED and before not in (None, *ENDED):
                self._learn(run)
            return again
        except (*TROUBLE, OSError) as error:  # For example, the run folder was removed: stop polling.
            self._panel.tell_error(error)
            return None

    def _follow(self, run: Run) -> float | None:
        """Update state, configuration and answers under the lock. Return the seconds until the next poll, or None."""
        with self._lock:
            moved = self._take_engines(run)
            state, running = run.state, live_config(run, self._began_as, len(self._panel.devices))
            self._hear_answers()
            # Show the error of a failed run once, not at each poll.
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
        """Show the run's present engines, which `reshape(engines=…)` may have changed. Return whether they changed."""
        with suppress(ClusterError):  # The engines are gone: keep showing the last ones.
            if run.cluster is not None and (devices := run.cluster.devices) != self._panel.devices:
                self._panel.take_devices(devices)
                return True
        return False

    def _learn(self, run: Run) -> None:
        """Update this machine's calibration from a finished run, and show what was predicted and measured."""
        if store.path().exists():
            with suppress(ConfigError):  # The run teaches nothing: too few steps, or a model of the user.
                self._panel.tell(learn_from(run.folder))

    def _hear_answers(self) -> None:
        """Show the answers that have arrived, and drop their commands from `_pending`."""
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
