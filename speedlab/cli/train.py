"""Train a run from the terminal (`speedlab train`), or resume one (`speedlab train --resume NAME`).

The engines are the same as in a notebook. A run can be resumed after a stop, an interrupt or a crash.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from speedlab.cli.cluster import EngineOptions, cluster_for
from speedlab.cli.progress import follow, resume_command
from speedlab.cluster import Run, attach
from speedlab.cluster.files.cluster_dir import running_clusters
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.launch.placement import choose_devices
from speedlab.cluster.reattach import folder_named
from speedlab.cluster.run_commands import resume_arguments
from speedlab.cluster.start_run import check_offload_folder
from speedlab.config import ConfigError, RunConfig
from speedlab.config.command_line import read_options, refuse_two_values
from speedlab.config.run_config import SHORT_FORMS
from speedlab.data import check
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import RunFolderError


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Resume a run with its configuration, from its newest checkpoint or from another one."""

    resume: str
    """The run's name, or the path of its folder."""
    step: int | None = None
    """Go back to the checkpoint of this step."""
    tag: str | None = None
    """Go back to the checkpoint of this name."""
    steps: int | None = None
    """New length of the run in steps; required for a finished run."""
    folder: Path = RunConfig().folder
    """Folder that holds the run folders."""
    where: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)


def resume(argv: list[str]) -> int:
    """Resume a run, and follow it like `speedlab train`.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.
    """
    options = _parse(argv)
    run = attach(folder_named(options.resume, options.folder).path)
    try:
        if run.state not in RESTING and run.has_engines:
            raise RunError(
                f"run {run.name!r} is {run.state} at step {run.step} of {run.config.steps} on cluster "
                f"{run.folder.read_status().cluster!r}; nothing has to be resumed"
            )
        arguments = resume_arguments(run, options.step, options.tag, options.steps)
        if run.has_engines:  # The engines were kept, with the state of the run.
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


def train(argv: list[str]) -> int:
    """Train, with a progress bar on stderr. Ctrl-C saves, stops after the step and prints the command to resume.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.
    """
    if any(word.partition("=")[0] == "--resume" for word in argv):
        return resume(argv)
    config, options = parse(argv)
    check_before_start(config, options)
    with cluster_for(options.cluster, options.engines, options.device, keep=options.keep_engines) as cluster:
        run = cluster.train(config)
        print(f"run {run.name}: {run.folder.path}", file=sys.stderr)
        print(config.batch.resolve(config.layout(cluster.size).data_size), file=sys.stderr)
        return follow(run, options)


def check_before_start(config: RunConfig, options: EngineOptions) -> None:
    """Check the configuration before engines are started. The cluster checks again with its real engines.

    Args:
        config: the configuration.
        options: the engine options.

    Raises:
        ConfigError: the run cannot start.
        LayoutError: the layout does not fit the engines.
    """
    if config.name is not None and (config.folder / config.name).exists():
        raise ConfigError(f"name: {_there_already(config.folder / config.name, options)}")
    if any(state.name == options.cluster for state in running_clusters()):
        return
    size = len(choose_devices(options.engines, options.device))
    config.batch.resolve(config.layout(size).data_size)
    check(config.data)
    check_offload_folder(config)


def _there_already(path: Path, options: EngineOptions) -> str:
    """Return 'runs/a exists, stopped at step 12 of 40: speedlab train --resume a goes on with it; ...'."""
    another = "give another --name, or none: names are then made up"
    try:
        run = Run(path)
    except RunFolderError:
        return f"{path} exists; {another}"
    try:
        at = f"{path} exists, {run.state} at step {run.step} of {run.config.steps}"
        command = resume_command(run, options)
        return f"{at}; `{command}` goes on with it, or {another}" if command else f"{at}; {another}"
    finally:
        run.feed.close()


def parse(argv: list[str]) -> tuple[RunConfig, EngineOptions]:
    """Parse the configuration and the engine options. Every configuration field is an option.

    Short forms of sections work: `--zero 3` is `--zero.stage 3`.

    1. A file as the first argument gives the base values.
    2. A preset among the options replaces the file's model.
    3. The other options replace single values.

    Args:
        argv: arguments of the command.

    Raises:
        ConfigError: a value or an option is invalid.
    """
    argv = _long_forms(argv)
    file = argv[0] if argv and not argv[0].startswith("-") else None
    base = RunConfig.load(file) if file is not None else RunConfig()
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--model.preset", dest="preset")
    preset = early.parse_known_args(argv)[0].preset
    if preset is not None and preset != base.model.preset:
        base = base.replace(model=preset)

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Train a run. CONFIG, a JSON or YAML file as `speedlab config` prints it, comes first; options change it.

        Short forms of parts are understood: --zero 3 is --zero.stage 3, --model gpt2 is --model.preset gpt2.
        --proof alone is --proof full.

        `speedlab train --resume NAME` goes on with a run; `speedlab train --resume --help` tells its options.
        """

        config: Annotated[Path | None, tyro.conf.Positional] = None
        """JSON or YAML file."""
        where: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)
        run: Annotated[RunConfig, tyro.conf.arg(name="")] = base

    options = read_options(Options, argv, "speedlab train")
    if options.config is not None and file is None:
        raise ConfigError(f"{options.config}: comes first: speedlab train {options.config} --zero.stage 3 ...")
    return options.run, options.where


def _long_forms(argv: list[str]) -> list[str]:
    """Replace short forms of sections by the options of their fields."""
    argv = _with_form_of_proof(argv)
    fields = {f"--{part}": f"--{part}.{field.replace('_', '-')}" for part, (field, _) in SHORT_FORMS.items()}
    refuse_two_values(argv, fields)
    words = [word.partition("=") for word in argv]
    return ["".join((fields.get(option, option), equals, value)) for option, equals, value in words]


def _with_form_of_proof(argv: list[str]) -> list[str]:
    """Replace `--proof` without a value by `--proof full`."""
    forms = get_args(RunConfig.model_fields["proof"].annotation)
    made: list[str] = []
    for number, word in enumerate(argv):
        made.append(word)
        if word == "--proof" and "".join(argv[number + 1 : number + 2]) not in forms:
            made.append("full")
    return made
