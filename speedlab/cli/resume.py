"""`speedlab train --resume NAME`: a run that was stopped, interrupted or cut off goes on."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from speedlab.cli.engines import EngineOptions, cluster_for
from speedlab.cli.follow import follow
from speedlab.cluster import Run, attach
from speedlab.cluster.going_on import resume_arguments
from speedlab.cluster.home import running_clusters
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry.records import RESTING


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Go on with a run, as it is configured: from its newest checkpoint, or from another."""

    resume: str
    """The run's name, or the path of its folder."""
    step: int | None = None
    """Go back to the checkpoint of this step."""
    tag: str | None = None
    """Go back to the checkpoint of this name."""
    steps: int | None = None
    """Make the run this many steps long; a finished one goes on only so."""
    folder: Path = RunConfig().folder
    """Folder that holds the run folders."""
    where: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)


def resume(argv: list[str]) -> int:
    """Go on with a run, and follow it as `speedlab train` does."""
    options = _parse(argv)
    run = attach(folder_named(options.resume, options.folder).path)
    try:
        if run.state not in RESTING and run.has_engines:
            raise RunError(
                f"run {run.name!r} is {run.state} at step {run.step} of {run.config.steps} on cluster "
                f"{run.folder.read_status().cluster!r}; nothing has to be resumed"
            )
        arguments = resume_arguments(run, options.step, options.tag, options.steps)
        if run.has_engines:  # They were kept, and hold its state.
            return _go_on(run, arguments, options.where)
        running = {state.name for state in running_clusters()}
        engines = options.where.engines
        if engines is None and options.where.cluster not in running:
            engines = len(run.folder.read_status().rank_pids) or None
        where = options.where
        with cluster_for(where.cluster, engines, where.device, keep=where.keep_engines) as cluster:
            run.go_on_in(cluster)
            return _go_on(run, arguments, where)
    finally:
        run.feed.close()


def _go_on(run: Run, arguments: dict[str, Any], where: EngineOptions) -> int:
    print(f"run {run.name}: {run.folder.path}", file=sys.stderr)
    return follow(run, where, run.resume(**arguments))


def _parse(argv: list[str]) -> ResumeOptions:
    if {"-h", "--help"} & set(argv):
        argv = ["--help"]
    options, rest = tyro.cli(ResumeOptions, args=argv, prog="speedlab train", return_unknown_args=True)
    if rest:
        raise ConfigError(
            f"{' '.join(rest)}: a run goes on as it is configured; with --resume there are --step, --tag, --steps and "
            "the options of the engines (`speedlab train --resume --help`), and run.reshape in a notebook"
        )
    return options
