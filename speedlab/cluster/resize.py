"""A run that goes on with another number of engines: paused, saved, and, when its cluster has them, resumed from what
was saved, which any layout can load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speedlab.cluster.going_on import way_on
from speedlab.cluster.known_runs import RunError, saved_step
from speedlab.cluster.shapes import change_shape
from speedlab.config import RunConfig
from speedlab.telemetry.records import RunState
from speedlab.telemetry.shape import changed_config

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run import Run
    from speedlab.cluster.words import Pending

_SAVE_SECONDS = 3600.0

Progress = Callable[[str], object]


def resize_run(run: Run, engines: int, *, progress: Progress = print, **changes: Any) -> Pending:
    """Let a run go on with another number of engines: pause, save, resize its cluster, go on from what was saved.

    The global batch stays, and so does the layout but for dp, unless `changes` (of `telemetry.shape.CHANGES`) say
    otherwise. Returns, when the run is as it was, running or paused, the word that brought it there. One that has
    failed, or has lost an engine, cannot be saved any more: it goes on from its newest checkpoint.

    Raises ConfigError, LayoutError or ClusterError before anything is changed, for what cannot be. When it fails
    later, or is interrupted, the run goes on as before, with as many engines as before.
    """
    cluster = run.cluster
    if cluster is None:
        raise RunError(f"{run.name} has no engines here: {way_on(run)}")
    before, had = run.present_config, cluster.size
    after = changed_config(before, engines, before=had, built_in=run.is_built_in, **changes)
    cluster.check_size(engines)
    state = run.state
    if state in (RunState.FINISHED, RunState.STOPPED):
        raise RunError(
            f"run {run.name!r} is {state} at step {run.step}; only one that runs, is paused or has failed can be taken "
            "along"
        )
    move = _Move(run, cluster, "pause" if state is RunState.PAUSED else "resume", progress)
    if state is RunState.FAILED or any(engine.state == "dead" for engine in cluster.status()):
        move.require_checkpoint()
        return move.to(engines, before, after)
    if state is not RunState.PAUSED:
        run.pause().wait()
    try:
        move.save()
        return move.to(engines, before, after)
    except BaseException as error:
        if cluster.size == had and run.folder.config == move.config:
            move.go_on()
        else:
            move.to(had, after, before)
        if isinstance(error, Exception):
            raise RunError(f"run {run.name!r} goes on with {had} engines as before; with {engines}: {error}") from error
        raise


class _Move:
    """A run's way from one number of engines to another, and back if need be."""

    def __init__(self, run: Run, cluster: Cluster, word: str, progress: Progress) -> None:
        """`word`: what brings the run into the state that it had."""
        self._run, self._cluster = run, cluster
        self._word, self._progress = word, progress
        self.config = run.folder.config

    def require_checkpoint(self) -> None:
        """Raise RunError where there is nothing from which the run could go on."""
        if saved_step(self._run.folder) is None:
            raise RunError(
                f"run {self._run.name!r} has failed, or lost engines, and has no checkpoint: it can only be looked at; "
                "start it again under another name, with checkpoint.every_steps set"
            )

    def save(self) -> None:
        """Have a checkpoint of the step at which the run is paused."""
        run, step = self._run, int(self._run.step)
        if saved_step(run.folder) == step:
            return
        run.save().wait()
        # It may be written behind the answer's back.
        run._until(lambda: saved_step(run.folder) == step or None, _SAVE_SECONDS, f"the checkpoint of step {step}")

    def to(self, engines: int, before: RunConfig, after: RunConfig) -> Pending:
        """Change the number of engines, write down the configuration for them, and go on."""
        started, had = time.perf_counter(), self._cluster.size
        with self._cluster.runs.held(self._run.folder.path):
            self._cluster.resize(engines, progress=self._progress)
            step = int(self._run.step)
            change_shape(self._run.folder, before, had, after, engines, step=step, started=started)
        return self.go_on()

    def go_on(self) -> Pending:
        word = self._run.resume() if self._word == "resume" else self._run.pause()
        word.wait()
        return word
