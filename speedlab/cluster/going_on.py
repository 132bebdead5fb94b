"""Going on with a run: from which checkpoint, to which step, and in which engines.

Everything that can be wrong is found before a word is posted; the engines look once more when they carry it out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import running_clusters
from speedlab.cluster.known_runs import RunError, refuse_second_run
from speedlab.cluster.shapes import change_shape
from speedlab.cluster.words import Pending
from speedlab.config import ConfigError
from speedlab.telemetry.checkpoints import find_checkpoint, newest, step_of
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.shape import changed_config

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run import Run

Saved = str | os.PathLike[str] | Pending | Event
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
    if isinstance(saved, Pending):
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


def way_on(run: Run) -> str:
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


def unsaved_text(run: Run) -> str:
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


def take_engines(run: Run, cluster: Cluster) -> None:
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
