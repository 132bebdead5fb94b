"""`speedlab train`: the same job as in a notebook, from a terminal with the same engines."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import tyro

from speedlab.cli.engines import EngineOptions, cluster_for
from speedlab.cli.follow import follow, resume_command
from speedlab.cli.resume import resume
from speedlab.cluster import Run
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.given_paths import check_offload_folder
from speedlab.cluster.home import running_clusters
from speedlab.config import ConfigError, RunConfig
from speedlab.config.cli_options import read_options, refuse_two_values
from speedlab.config.run_config import SHORT_FORMS
from speedlab.data import check
from speedlab.telemetry.folder import RunFolderError


def train(argv: list[str]) -> int:
    """Train, with a progress bar on stderr; Ctrl-C saves, stops after the step and says how the run goes on."""
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
    """Refuse what cannot run before engines are started for it. The cluster checks again, with the engines it has."""
    if config.name is not None and (config.folder / config.name).exists():
        raise ConfigError(f"name: {_there_already(config.folder / config.name, options)}")
    if any(state.name == options.cluster for state in running_clusters()):
        return
    size = len(choose_devices(options.engines, options.device))
    config.batch.resolve(config.layout(size).data_size)
    check(config.data)
    check_offload_folder(config)


def _there_already(path: Path, options: EngineOptions) -> str:
    """'runs/a exists, stopped at step 12 of 40: speedlab train --resume a goes on with it; ...'"""
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
    """The configuration and engine options of a command line. Every configuration field is an option.

    Parts may be given in their short forms: `--zero 3` is `--zero.stage 3`.

    1. The file that comes first, if there is one, gives the values.
    2. A preset among the options replaces the file's model.
    3. The other options replace single values.
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
    """Options that name a part as those of the field that they stand for."""
    argv = _with_form_of_proof(argv)
    fields = {f"--{part}": f"--{part}.{field.replace('_', '-')}" for part, (field, _) in SHORT_FORMS.items()}
    refuse_two_values(argv, fields)
    words = [word.partition("=") for word in argv]
    return ["".join((fields.get(option, option), equals, value)) for option, equals, value in words]


def _with_form_of_proof(argv: list[str]) -> list[str]:
    """`--proof` alone asks for all of it."""
    forms = get_args(RunConfig.model_fields["proof"].annotation)
    made: list[str] = []
    for number, word in enumerate(argv):
        made.append(word)
        if word == "--proof" and "".join(argv[number + 1 : number + 2]) not in forms:
            made.append("full")
    return made
