"""Going on with a run: from which checkpoint, to which step, and in which engines.

Everything that can be wrong is found before a word is posted; the engines look once more when they carry it out.

A run on another number of engines: the configuration that fits them, and the note of the change in its folder.

Control words as a Run hands them out: the answer to one, once there is one.

A run that goes on with another number of engines: paused, saved, and, when its cluster has them, resumed from what
was saved, which any layout can load.
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
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.run_shape import changed_config, present_config, shape_of
from speedlab.telemetry.writer import note

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run import Run


def is_built_in(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Whether the model is the GPT of the configuration, so that its shape says which layouts there are."""
    said = next((event.details for event in events if event.kind == "started"), {})
    count = parameter_count(folder.config.model)
    return not (folder.path / OWN_MODEL).exists() and said.get("parameters", count) == count


def shapes_on(folder: RunFolder, had: int, engines: int) -> tuple[RunConfig, RunConfig]:
    """The configuration as the run has it on `had` engines, and as it would go on, on `engines`: the same but for dp,
    with the same global batch. Raises ConfigError or LayoutError, with the nearest layouts, where it cannot."""
    events = folder.read_events()
    before = present_config(folder.config, events, had)
    return before, changed_config(before, engines, before=had, built_in=is_built_in(folder, events))


def change_shape(
    folder: RunFolder, before: RunConfig, had: int, after: RunConfig, engines: int, *, step: int, started: float
) -> None:
    """Write down that the run goes on as `after` on another number of engines. Only while no rank advances it.

    `started`: when the change began, of `time.perf_counter`."""
    folder.update_config(after)
    shapes = {"before": shape_of(before, had), "after": shape_of(after, engines)}
    text = f"{had} → {engines} engines, {before.layout(had, built_in=False)} → {after.layout(engines, built_in=False)}"
    details = {**shapes, "through": "run folder", "seconds": time.perf_counter() - started}
    note(folder, Event(kind="reshaped", step=step, time=time.time(), text=text, details=details))


_ANSWER_GRACE_SECONDS = 0.5


class CommandFuture:
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


Saved = str | os.PathLike[str] | CommandFuture | Event
"""A checkpoint as a person has it at hand: its tag, its path, or what `run.save` returned."""


def resume_arguments(run: Run, step: int | Saved | None, tag: Saved | None, steps: int | None) -> dict[str, Any]:
    """What the word `resume` is to be given. Raises CheckpointError, ConfigError or RunError for what cannot be."""
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
    """The run's checkpoint that is named, None for none. Raises CheckpointError when it has no such one."""
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
    """Whether a word that waits will save it first: words are carried out in their order."""
    waiting = run.folder.pending(run.folder.read_status().command)
    return any(command.word == "save" and command.arguments.get("tag") == tag for command in waiting)


def resume_hint(run: Run) -> str:
    """How a run goes on whose engines the handle does not reach: in those that hold it, else from a checkpoint."""
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
    # A bare handle finds no engines by itself.
    call = f"run.resume({steps})" if run._attach else f"speedlab.attach({str(run.folder.path)!r}).resume({steps})"
    return f"its engines are gone; {'' if running else first}{call} goes on from its {where}"


def unsaved_warning(run: Run) -> str:
    """Of a run that has come to its end: what of it no checkpoint holds, and what can be done; empty when all is
    saved."""
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
    """The running cluster that the run was on, else another that runs. Raises RunError when none does."""
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
    """Note in the run's folder that it goes on in the engines of `cluster`, in a layout that fits them.

    Raises RunError, ClusterError, ConfigError or LayoutError, with nothing changed, where it cannot.
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
    """Let a run go on with another number of engines: pause, save, resize its cluster, go on from what was saved.

    The global batch stays, and so does the layout but for dp, unless `changes` (of `telemetry.shape.CHANGES`) say
    otherwise. Returns, when the run is as it was, running or paused, the word that brought it there. One that has
    failed, or has lost an engine, cannot be saved any more: it goes on from its newest checkpoint.

    Raises ConfigError, LayoutError or ClusterError before anything is changed, for what cannot be. When it fails
    later, or is interrupted, the run goes on as before, with as many engines as before.
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

    def to(self, engines: int, before: RunConfig, after: RunConfig) -> CommandFuture:
        """Change the number of engines, write down the configuration for them, and go on."""
        started, had = time.perf_counter(), self._cluster.size
        with self._cluster.runs.held(self._run.folder.path):
            self._cluster.resize(engines, progress=self._progress)
            step = int(self._run.step)
            change_shape(self._run.folder, before, had, after, engines, step=step, started=started)
        return self.go_on()

    def go_on(self) -> CommandFuture:
        word = self._run.resume() if self._word == "resume" else self._run.pause()
        word.wait()
        return word
