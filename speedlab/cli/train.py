"""`speedlab train`: the same job as in a notebook, from a terminal with the same engines."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speedlab.cli.engines import StopRequests, cluster_for
from speedlab.cli.progress import Progress
from speedlab.cluster import RankError, Run
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.errors import name_ranks
from speedlab.cluster.home import running_clusters
from speedlab.cluster.run import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.config.run import SHORT_FORMS
from speedlab.data import check
from speedlab.display.text import bytes_text
from speedlab.telemetry.records import RunState

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the run runs."""

    engines: int | None = None
    """Number of engines; one per GPU, else 4 on CPU cores, when left out."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """On what engines are started."""
    cluster: str = "default"
    """Cluster to run on; it is started, and ended afterwards, when none of that name runs."""
    keep_engines: bool = False
    """Leave engines that were started here running."""


def train(argv: list[str]) -> int:
    """Train, with a progress bar on stderr; Ctrl-C saves, stops after the step and says where everything is."""
    config, options = parse(argv)
    check_before_start(config, options)
    with cluster_for(options.cluster, options.engines, options.device, keep=options.keep_engines) as cluster:
        run = cluster.train(config)
        print(f"run {run.name}: {run.folder.path}", file=sys.stderr)
        print(config.batch.resolve(config.layout(cluster.size).data_size), file=sys.stderr)
        return follow(run)


def check_before_start(config: RunConfig, options: EngineOptions) -> None:
    """Refuse what cannot run before engines are started for it. The cluster checks again, with the engines it has."""
    if any(state.name == options.cluster for state in running_clusters()):
        return
    size = len(choose_devices(options.engines, options.device))
    config.batch.resolve(config.layout(size).data_size)
    check(config.data)
    if config.name is not None and (config.folder / config.name).exists():
        raise ConfigError(
            f"name: {config.folder / config.name} exists; give another --name, or none: names are then made up"
        )


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
        """

        config: Annotated[Path | None, tyro.conf.Positional] = None
        """JSON or YAML file."""
        where: Annotated[EngineOptions, tyro.conf.arg(name="")] = EngineOptions()
        run: Annotated[RunConfig, tyro.conf.arg(name="")] = base

    options = tyro.cli(Options, args=argv, prog="speedlab train")
    if options.config is not None and file is None:
        raise ConfigError(f"{options.config}: comes first: speedlab train {options.config} --zero.stage 3 ...")
    return options.run, options.where


def _long_forms(argv: list[str]) -> list[str]:
    """Options that name a part as those of the field that they stand for."""
    fields = {f"--{part}": f"--{part}.{field}" for part, (field, _) in SHORT_FORMS.items()}
    words = [word.partition("=") for word in argv]
    return ["".join((fields.get(option, option), equals, value)) for option, equals, value in words]


def follow(run: Run) -> int:
    """Show a run's progress until it rests; returns the command's exit status."""
    assert run.cluster is not None
    progress = Progress(run.feed)
    unsubscribe = run.cluster.output.subscribe(lambda ranks, stream, text: progress.say(_by_rank(ranks, text)))
    try:
        with StopRequests() as requests:
            state = _until_rest(run, progress, requests)
    except (RankError, RunError) as error:
        progress.close()
        print(f"{error}\n{_where(run)}", file=sys.stderr)
        return 1
    finally:
        unsubscribe()
    progress.close()
    print(_where(run), file=sys.stderr)
    return 0 if state is RunState.FINISHED else 130 if requests.count else 1


def _until_rest(run: Run, progress: Progress, requests: StopRequests) -> RunState:
    """Wait for the end of the run. A first request saves and stops after the step, a second interrupts the ranks."""
    assert run.cluster is not None
    answered = 0
    while True:
        try:
            return run.wait(timeout=_POLL_SECONDS)
        except TimeoutError:
            progress.update()
        if requests.count > answered == 0:
            progress.say("saving, then stopping after this step; Ctrl-C again stops at once")
            run.save()
            run.stop()
        elif requests.count > answered:
            progress.say("interrupting the ranks")
            run.cluster.interrupt()
            return run.state
        answered = requests.count


def _by_rank(ranks: list[int], text: str) -> str:
    return "\n".join(f"{name_ranks(ranks)}: {line}" for line in text.splitlines())


def _where(run: Run) -> str:
    """What is left of the run, and where."""
    run.feed.poll(files=True)
    lines = [f"{run.name}: {run.state} at step {run.step} of {run.config.steps}"]
    saved = [event for event in run.events if event.kind == "checkpoint"]
    if saved:
        size = saved[-1].details.get("bytes")
        path = run.folder.path / "checkpoints" / saved[-1].text
        lines.append(f"checkpoint: {path}" + (f" ({bytes_text(size)})" if isinstance(size, int) else ""))
    lines.append(f"folder:     {run.folder.path}   (speedlab report {run.name})")
    return "\n".join(lines)
