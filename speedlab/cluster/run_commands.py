"""Commands of a Run that need checks before they are posted: resume, and resize with its checkpoint.

1. `CommandFuture` is the answer to a command.
2. `resume_arguments` and `checkpoint_of` check from which checkpoint and to which step a run continues. Errors are
   found before a command is posted; the engines check again when they execute it.
3. `find_engines` and `rebind_engines` move a run without engines to a running cluster.
4. `resize_run` changes the number of engines: pause, save, resize, and resume from the checkpoint, which any layout can
   load.
5. `shapes_on` and `change_shape` adapt the configuration to another number of engines and record the change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import running_clusters
from speedlab.cluster.files.user_model import OWN_MODEL
from speedlab.cluster.known_runs import RunError, refuse_second_run, saved_step
from speedlab.config import ConfigError, RunConfig
from speedlab.planner import parameter_count
from speedlab.telemetry.checkpoint_index import find_checkpoint, newest, step_of
from speedlab.telemetry.current_config import changed_config, present_config, shape_of
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import note

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run import Run


def is_built_in(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Return whether the model is the GPT of the configuration, so that its shape determines the possible layouts.

    Args:
        folder: Folder of the run.
        events: Events of the run.
    """
    said = next((event.details for event in events if event.kind == "started"), {})
    count = parameter_count(folder.config.model)
    return not (folder.path / OWN_MODEL).exists() and said.get("parameters", count) == count


def shapes_on(folder: RunFolder, had: int, engines: int) -> tuple[RunConfig, RunConfig]:
    """Return the current configuration, and the one for another number of engines.

    Only dp differs, and the global batch is the same.

    Args:
        folder: Folder of the run.
        had: Current number of engines.
        engines: New number of engines.

    Returns:
        (configuration on `had` engines, configuration on `engines` engines).

    Raises:
        ConfigError: If the configuration does not fit.
        LayoutError: If no such layout exists; names the nearest layouts.
    """
    events = folder.read_events()
    before = present_config(folder.config, events, had)
    return before, changed_config(before, engines, before=had, built_in=is_built_in(folder, events))


def change_shape(
    folder: RunFolder, before: RunConfig, had: int, after: RunConfig, engines: int, *, step: int, started: float
) -> None:
    """Record that the run continues on another number of engines. Call only while no rank advances the run.

    Args:
        folder: Folder of the run.
        before: Configuration before.
        had: Number of engines before.
        after: Configuration after.
        engines: Number of engines after.
        step: Current step.
        started: Start of the change, from `time.perf_counter`.
    """
    folder.update_config(after)
    shapes = {"before": shape_of(before, had), "after": shape_of(after, engines)}
    text = f"{had} → {engines} engines, {before.layout(had, built_in=False)} → {after.layout(engines, built_in=False)}"
    details = {**shapes, "through": "run folder", "seconds": time.perf_counter() - started}
    note(folder, Event(kind="reshaped", step=step, time=time.time(), text=text, details=details))


_ANSWER_GRACE_SECONDS = 0.5


class CommandFuture:
    """The answer to a command: `.wait()`, `await`, or read `.event`."""

    def __init__(self, run: Run, number: int, word: str) -> None:
        self.number = number
        self.word = word
        self._run = run
        self._passed_over_since: float | None = None

    @property
    def event(self) -> Event | None:
        """The event with which the ranks answered; None until then."""
        self._run.feed.poll()
        return next((event for event in reversed(self._run.feed.events) if event.command == self.number), None)

    @property
    def done(self) -> bool:
        """Whether the ranks have answered."""
        return self.event is not None

    def wait(self, timeout: float | None = None) -> Event:
        """Wait for the answer and, if the run rests then, until its ranks are idle. An interrupt of the kernel
        interrupts the ranks.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Returns:
            The event with which the ranks answered.

        Raises:
            RankError: If a rank failed.
            RunError: If the command was refused, or the run ended before it.
            TimeoutError: After `timeout` seconds.
        """
        return self._run._until(self.look, timeout, str(self))

    def __await__(self) -> Generator[Any, None, Event]:
        return self._run._until_async(self.look, str(self)).__await__()

    def look(self) -> Event | None:
        """Return or raise what `wait` would now; None if `wait` would continue to wait.

        Raises:
            RankError: If a rank failed.
            RunError: If the command was refused, or the run ended before it.
        """
        event = self.event
        # The status is written after the event. Wait for it, so that `run.state` shows the effect of the command.
        if event is not None and self._run.feed.status.command >= self.number:
            if event.details.get("error"):
                raise RunError(f"{self} was refused at step {event.step}: {event.text}")
            self._run._raise_trouble()
            # A caller that pauses wants idle ranks, and their task ends shortly after the answer.
            return None if self._run.is_settling else event
        self._run._raise_trouble()
        if self._run.feed.status.command < self.number:
            return None
        # The command counts as done but has no answer: it was dropped when the run failed or ended. On a slow file
        # system, its event may still be missing, so wait a moment.
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


Saved = str | os.PathLike[str] | CommandFuture | Event
"""Anything that names a checkpoint: its tag, its path, or what `run.save` returned."""


def resume_arguments(run: Run, step: int | Saved | None, tag: Saved | None, steps: int | None) -> dict[str, Any]:
    """Return the arguments of the command `resume`.

    Args:
        run: The run.
        step: Step of the checkpoint, or what `save` returned; None for the current state.
        tag: Tag or path of the checkpoint, instead of `step`.
        steps: New last step of the run.

    Raises:
        CheckpointError: If there is no such checkpoint.
        ConfigError: If the run would end before it begins.
        RunError: If there is nothing to continue from.
    """
    chosen = checkpoint_of(run, step, tag)
    if chosen is not None and _is_being_saved(run, chosen.name):
        at = run.step
    elif chosen is not None:
        at = step_of(chosen)
    elif run.has_engines:
        at = run.step
    elif (kept := newest(run.folder.path / "checkpoints")) is not None:
        at = kept.step
    elif run.step == 0:
        at = 0
    else:
        raise RunError(
            f"run {run.name!r} is {run.state} at step {run.step}, has no checkpoint, and its engines are gone: there "
            "is nothing to go on from; start it again under another name, with checkpoint.every_steps set"
        )
    end = steps if steps is not None else run.config.steps
    if at >= end:
        raise ConfigError(
            f"run {run.name!r} would go on from step {at:,} and ends at step {end:,}; give it more than {at:,} steps: "
            f"run.resume(steps={2 * at}), in a terminal --steps {2 * at}"
        )
    given = {"tag": chosen.name if chosen is not None else None, "steps": steps}
    return {name: value for name, value in given.items() if value is not None}


def checkpoint_of(run: Run, step: int | Saved | None, tag: Saved | None) -> Path | None:
    """Return the folder of a checkpoint of the run; None if none is named.

    Args:
        run: The run.
        step: Step of the checkpoint, or what `save` returned.
        tag: Tag or path of the checkpoint, instead of `step`.

    Raises:
        CheckpointError: If the run has no such checkpoint.
        ConfigError: If both are given, or the checkpoint belongs to another run.
    """
    if step is not None and tag is not None:
        raise ConfigError(f"step {step} and tag {tag!r} both name a checkpoint; give one of them")
    saved = step if tag is None else tag
    if isinstance(saved, CommandFuture):
        saved = saved.wait()
    if isinstance(saved, Event):
        if saved.kind != "checkpoint":
            raise ConfigError(f"{saved.kind!r} at step {saved.step} is the answer of another word than save")
        saved = saved.text
    folder = run.folder.path / "checkpoints"
    if saved is None:
        return None
    if isinstance(saved, int):
        return find_checkpoint(folder, step=saved)
    text = os.fspath(saved)
    if os.sep not in text:
        return folder / text if _is_being_saved(run, text) else find_checkpoint(folder, text)
    path = find_checkpoint(text)
    if path.parent.resolve() != folder:
        raise ConfigError(f"{path} is no checkpoint of run {run.name!r}, whose are in {folder}")
    return path


def _is_being_saved(run: Run, tag: str) -> bool:
    """Return whether a waiting command will save it first; commands execute in order."""
    waiting = run.folder.pending(run.folder.read_status().command)
    return any(command.word == "save" and command.arguments.get("tag") == tag for command in waiting)


def resume_hint(run: Run) -> str:
    """Return how a run without engines in this handle can continue: in the engines that hold it, or from a checkpoint.

    Args:
        run: The run.
    """
    status = run.folder.read_status()
    running = running_clusters()
    if any(state.token == status.token for state in running):
        return f"speedlab.attach({run.name!r}) finds those that hold it"
    kept = newest(run.folder.path / "checkpoints")
    if kept is None and run.step > 0:
        return (
            "its engines are gone, and no checkpoint of it was written: it can only be looked at; start it again under "
            "another name, with checkpoint.every_steps set"
        )
    first = f"speedlab.Cluster(name={status.cluster!r}, engines={len(status.rank_pids)}) starts others, then "
    steps = f"steps={2 * kept.step}" if kept is not None and kept.step >= run.config.steps else ""
    where = f"checkpoint of step {kept.step}" if kept is not None else "beginning"
    # A handle without `attach` cannot find engines.
    call = f"run.resume({steps})" if run._attach else f"speedlab.attach({str(run.folder.path)!r}).resume({steps})"
    return f"its engines are gone; {'' if running else first}{call} goes on from its {where}"


def unsaved_warning(run: Run) -> str:
    """Return which steps of an ended run no checkpoint holds, and what to do; "" if all are saved.

    Args:
        run: The run.
    """
    if run.state not in (RunState.FINISHED, RunState.STOPPED):
        return ""
    step, kept = run.step, newest(run.folder.path / "checkpoints")
    if step == (kept.step if kept is not None else 0):
        return ""
    text = f"step {step} is not saved" + (f", the newest checkpoint is of step {kept.step}" if kept is not None else "")
    if run.has_engines:
        return f"{text}: run.save() writes it, as long as the engines hold it; checkpoint.every_steps does so by itself"
    return f"{text}, and its engines are gone; in the next run save before they end, or set checkpoint.every_steps"


# ---- engines ---------------------------------------------------------------------------------------------------------


def find_engines(run: Run, attach: Callable[[str | None], Cluster]) -> Cluster:
    """Return the running cluster of the run, or another running cluster.

    Args:
        run: The run.
        attach: Return a handle to a running cluster, by name.

    Raises:
        RunError: If no cluster runs.
    """
    status = run.folder.read_status()
    for name in dict.fromkeys([status.cluster or None, None]):
        try:
            return attach(name)
        except ClusterError:
            continue
    count = len(status.rank_pids)
    raise RunError(
        f"run {run.name!r} has no engines, and no cluster runs; start one with "
        f"speedlab.Cluster({f'engines={count}' if count else ''}) and resume again"
    )


def rebind_engines(run: Run, cluster: Cluster) -> None:
    """Record that a run continues in the engines of `cluster`, in a layout that fits them.

    Args:
        run: The run.
        cluster: Cluster that runs.

    Raises:
        RunError: If the model of the run is not stored.
        ClusterError: If another run is active there.
        ConfigError: If the configuration does not fit.
        LayoutError: If no layout fits. In all cases, nothing has changed.
    """
    if not (run.own_model or run.is_built_in):
        raise RunError(
            f"run {run.name!r} trains a model of your own, which its folder does not hold; start a run with the same "
            "model by cluster.train(config, model=...), and load the checkpoint that you want"
        )
    refuse_second_run(cluster)
    pids = tuple(engine.pid for engine in cluster.status())
    status = run.folder.read_status()
    had, engines = len(status.rank_pids) or cluster.size, cluster.size
    if had != engines:
        before = run.present_config
        after = changed_config(before, engines, before=had, built_in=run.is_built_in)
        change_shape(run.folder, before, had, after, engines, step=run.step, started=time.perf_counter())
    run.folder.write_status(replace(status, cluster=cluster.name, token=cluster.token, rank_pids=pids))


_SAVE_SECONDS = 3600.0

Progress = Callable[[str], object]


def resize_run(run: Run, engines: int, *, progress: Progress = print, **changes: Any) -> CommandFuture:
    """Continue a run on another number of engines: pause, save, resize its cluster, resume from the checkpoint.

    The global batch stays the same. The layout does, too, except for dp and `changes`. A run that has failed, or has
    lost an engine, cannot be saved: it continues from its newest checkpoint. If a later step fails or is interrupted,
    the run continues as before, with as many engines as before.

    Args:
        run: The run.
        engines: New number of engines.
        progress: Called with a sentence for the user.
        **changes: Changes of the layout, see `telemetry.current_config.CHANGES`.

    Returns:
        The command that brought the run back to its state, running or paused.

    Raises:
        ConfigError: If the configuration does not fit; nothing has changed.
        LayoutError: If no layout fits; nothing has changed.
        ClusterError: If the cluster cannot have so many engines; nothing has changed.
        RunError: If the run has ended or has no checkpoint, or if a later step failed.
    """
    cluster = run.cluster
    if cluster is None:
        raise RunError(f"{run.name} has no engines here: {resume_hint(run)}")
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
        # Nothing has changed yet: only continue. Otherwise change back.
        if cluster.size == had and run.folder.config == move.config:
            move.go_on()
        else:
            move.to(had, after, before)
        if isinstance(error, Exception):
            raise RunError(f"run {run.name!r} goes on with {had} engines as before; with {engines}: {error}") from error
        raise


class _Move:
    """The change of a run from one number of engines to another, and back after a failure."""

    def __init__(self, run: Run, cluster: Cluster, word: str, progress: Progress) -> None:
        """`word`: the command that restores the state of the run, "resume" or "pause"."""
        self._run, self._cluster = run, cluster
        self._word, self._progress = word, progress
        self.config = run.folder.config

    def require_checkpoint(self) -> None:
        """Raise RunError if there is no checkpoint to continue from."""
        if saved_step(self._run.folder) is None:
            raise RunError(
                f"run {self._run.name!r} has failed, or lost engines, and has no checkpoint: it can only be looked at; "
                "start it again under another name, with checkpoint.every_steps set"
            )

    def save(self) -> None:
        """Write a checkpoint of the step at which the run is paused, unless there is one."""
        run, step = self._run, int(self._run.step)
        if saved_step(run.folder) == step:
            return
        run.save().wait()
        # The checkpoint may be written asynchronously, after the answer.
        run._until(lambda: saved_step(run.folder) == step or None, _SAVE_SECONDS, f"the checkpoint of step {step}")

    def to(self, engines: int, before: RunConfig, after: RunConfig) -> CommandFuture:
        """Change the number of engines, record the new configuration, and continue."""
        started, had = time.perf_counter(), self._cluster.size
        # Locked: no command may start the run between the resize and the new configuration.
        with self._cluster.runs.held(self._run.folder.path):
            self._cluster.resize(engines, progress=self._progress)
            step = int(self._run.step)
            change_shape(self._run.folder, before, had, after, engines, step=step, started=started)
        return self.go_on()

    def go_on(self) -> CommandFuture:
        """Restore the state that the run had, and wait for it."""
        word = self._run.resume() if self._word == "resume" else self._run.pause()
        word.wait()
        return word
