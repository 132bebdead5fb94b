"""The run that a panel speaks to: what it began as and has become, words that wait for answers, a thread that looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.cluster.calibration_update import learn_from
from speedlab.cluster.errors import ClusterError, RankError
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.hardware import Device
from speedlab.layout import LayoutError
from speedlab.planner.calibration import store
from speedlab.telemetry.proof import Proof, read_proof
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolderError
from speedlab_notebook.panel_actions import (
    BUSY_LOOK_SECONDS,
    ENDED,
    RESTING_LOOK_SECONDS,
    Watch,
    answer_line,
    proof_problem,
    request_line,
)
from speedlab_notebook.panel_changes import live_batch, live_config

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run
    from speedlab.cluster.run_commands import Pending

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
        self._pending: list[Pending] = []
        self._proof: Proof | None = None
        self._proof_of: tuple[Run | None, int] = None, 0
        """The run of `_proof`, and how many proofs it had made."""
        self.watch = Watch(self._look)

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

    def post(self, word: Callable[[Run], Pending]) -> None:
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
