"""Manage configurations, clusters and runs from the terminal.

- Commands: `speedlab config`, `status`, `stop`, `report`, `proof` and `start` (engines that keep running, for
  notebooks, scripts and the pages of a Jupyter server).
- Shared with other commands: the options of engines, and a cluster for the duration of a command, either a running one
  or a new one that ends with the command.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import speedlab.cluster.simulated_link as pretended
from speedlab.cluster import Cluster, ClusterError, Run
from speedlab.cluster.files.cluster_dir import running_clusters
from speedlab.cluster.known_runs import known_folders, runs_here
from speedlab.cluster.launch.host_specs import of_words
from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError, RunConfig, annotated_yaml
from speedlab.config.command_line import read_options
from speedlab.display.formatting import bytes_text, seconds_text
from speedlab.telemetry.proof import Severity, read_proof
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, RunFolderError

_FLAGS = (tyro.conf.FlagCreatePairsOff,)


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Print a configuration with what every field means: the defaults, or those of CONFIG filled up with them."""

    config: Annotated[Path | None, tyro.conf.Positional] = None
    """JSON or YAML file to check and to show whole."""
    yaml: bool = False
    """As YAML, with the descriptions as comments; this is the default."""
    json: bool = False
    """As JSON, which has no comments."""
    from_deepspeed: Path | None = None
    """DeepSpeed's JSON to read instead, with a report on every key."""
    engines: int | None = None
    """With --from-deepspeed: number of ranks for which its batch equation and layout are checked."""
    ignore: tuple[str, ...] = ()
    """With --from-deepspeed: features to go on without, by the names in its refusals."""


def config(argv: list[str]) -> int:
    """Print a configuration.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0 printed, 2 a DeepSpeed file was refused.

    Raises:
        ConfigError: the configuration or an option is invalid.
    """
    options = read_options(ConfigOptions, argv, "speedlab config", config=_FLAGS)
    if options.from_deepspeed is not None:
        return _from_deepspeed(options)
    shown = RunConfig.load(options.config) if options.config is not None else RunConfig()
    print(shown.to_json() if options.json else annotated_yaml(shown).rstrip())
    return 0


def _from_deepspeed(options: ConfigOptions) -> int:
    """Print the configuration of a DeepSpeed file, with the report on its keys as comments of the YAML."""
    assert options.from_deepspeed is not None
    if options.config is not None:
        raise ConfigError(f"give one configuration: {options.config}, or --from-deepspeed {options.from_deepspeed}")
    reading = RunConfig.deepspeed_reading(options.from_deepspeed, engines=options.engines, ignore=options.ignore)
    if reading.accepted is None or options.json:
        # JSON has no comments; and for a refused file, the report is all there is to print.
        print("\n".join(reading.lines(in_terminal=True)), file=sys.stderr)
    if reading.accepted is None:
        return 2
    if options.json:
        print(reading.accepted.to_json())
    else:
        print("\n".join(f"# {line}" for line in reading.lines()))
        print(annotated_yaml(reading.accepted).rstrip())
    return 0


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show the clusters that run, their engines, and the runs they were given."""


def status(argv: list[str]) -> int:
    """Print clusters and runs.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0, also if nothing runs.
    """
    read_options(StatusOptions, argv, "speedlab status")
    states = running_clusters()
    if not states:
        print("no cluster runs; `speedlab train` and `%speedlab start` start one")
    for state in states:
        cluster = Cluster.attach(state.name)
        count = len(state.devices)
        since = seconds_text(max(0.0, time.time() - state.started))
        engines = f"{count} engine{'s' if count != 1 else ''}{pretended.note(state.link)}"
        print(f"cluster {state.name}: {engines}, up {since}")
        for engine in cluster.status():
            print(
                f"  rank {engine.rank} · {engine.place} · {engine.state} · "
                f"{bytes_text(engine.rss_bytes)} · process {engine.pid}"
            )
        _print_runs(cluster)
    return 0


def _print_runs(cluster: Cluster) -> None:
    for folder in known_folders(cluster):
        if runs_here(folder, cluster):
            print(f"  {_standing(folder)} · {folder.path}")


def _standing(folder: RunFolder) -> str:
    """Return 'run quickstart: running at step 12 of 200'.

    The status file alone has only the step of its last change.
    """
    run = Run(folder)
    try:
        return f"run {run.name}: {run.state} at step {run.step} of {run.config.steps}{_proof_in_short(folder)}"
    finally:
        run.feed.close()


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """End a cluster's engines, and with them what they hold that is not saved."""

    cluster: Annotated[str, tyro.conf.Positional] = "default"
    """Name of the cluster."""
    all: bool = False
    """Every cluster that runs."""
    yes: bool = False
    """Do not ask, even when a run is not at its end."""


def stop(argv: list[str]) -> int:
    """Stop clusters.

    If unsaved work would be lost, the command asks first, or refuses without an interactive terminal.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0 stopped, 2 nothing was stopped because of unsaved work.

    Raises:
        ClusterError: the cluster does not run.
    """
    options = read_options(StopOptions, argv, "speedlab stop", config=_FLAGS)
    running = [state.name for state in running_clusters()]
    names = running if options.all else [options.cluster]
    if not options.all and options.cluster not in running:
        others = f"; running: {', '.join(running)}" if running else "; none runs"
        raise ClusterError(f"cluster {options.cluster!r} does not run{others}")
    for name in names:
        try:
            if not _stop(name, asks=not options.yes):
                return 2
        except ClusterError:
            if any(state.name == name for state in running_clusters()):
                raise
            print(f"cluster {name} ended by itself just now")
    return 0


def _stop(name: str, *, asks: bool) -> bool:
    """Stop one cluster. Return False if the user keeps it because of unsaved work."""
    cluster = Cluster.attach(name)
    unfinished = _unfinished(cluster)
    if unfinished and asks:
        print(f"cluster {name} holds {', '.join(unfinished)}; steps since the last checkpoint would be lost")
        if not sys.stdin.isatty():
            print("nothing was stopped; --yes stops it anyway", file=sys.stderr)
            return False
        if input("stop it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was stopped")
            return False
    cluster.stop()
    print(f"cluster {name} is stopped")
    return True


def _unfinished(cluster: Cluster) -> list[str]:
    """Return the runs on the cluster that would lose something, as text."""
    found = []
    for folder in known_folders(cluster):
        at = folder.read_status()
        if at.state in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED) and runs_here(folder, cluster):
            found.append(_standing(folder))
    return found


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write a run's report.html, which shows its plots without a server."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or the path of its folder."""


def report(argv: list[str]) -> int:
    """Write the report and print its path.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.
    """
    from speedlab.telemetry.report import write_report

    options = read_options(ReportOptions, argv, "speedlab report")
    run = Run(folder_named(options.run))
    try:
        print(write_report(run.folder, run.table()))
    finally:
        run.feed.close()
    return 0


def _proof_in_short(folder: RunFolder) -> str:
    """Return ' · proof: 1 wrong, 2 suspicious' for a run whose proof needs attention; empty for others."""
    try:
        found = read_proof(folder.path)
    except RunFolderError as error:
        return f" · {error}"
    return f" · proof: {found.counts}" if found is not None and found.needs_a_look else ""


@dataclass(frozen=True, kw_only=True)
class ProofOptions:
    """Print what was checked of a run's first batch: which tokens count, whether documents are separate, what moved."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or the path of its folder."""


def proof(argv: list[str]) -> int:
    """Print a run's proof.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0, or 1 if something in the proof is wrong.
    """
    options = read_options(ProofOptions, argv, "speedlab proof")
    run = Run(folder_named(options.run))
    try:
        found = run.proof()
    finally:
        run.feed.close()
    print(found)
    return int(any(finding.severity is Severity.WRONG for finding in found.findings))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the run runs."""

    engines: int | None = None
    """Number of engines; by default one per GPU, or 4 on CPU cores; a resumed run uses as many as before."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the engines."""
    cluster: str = "default"
    """Name of the cluster. If it does not run, it is started, and ended afterwards."""
    keep_engines: bool = False
    """Leave engines running that this command started."""


@contextlib.contextmanager
def cluster_for(name: str, engines: int | None, device: str, *, keep: bool) -> Iterator[Cluster]:
    """Yield a running cluster, or start one.

    Args:
        name: name of the cluster.
        engines: number of engines; None: the default of the device.
        device: "auto", "cuda" or "cpu".
        keep: leave a started cluster running. Otherwise it ends with the block, even after an error.
    """
    found = any(state.name == name for state in running_clusters())
    begin = time.monotonic()
    if not found:
        print("starting engines ...", file=sys.stderr, flush=True)
    cluster = Cluster(engines, name=name, device=device)
    try:  # Before the message below: a user who reads it may press Ctrl-C at once.
        if found:
            print(f"using the running {cluster!r}", file=sys.stderr)
        else:
            print(f"started {cluster!r} in {time.monotonic() - begin:.1f} s", file=sys.stderr)
        yield cluster
    finally:
        if not found and not keep:
            with deaf_to_interrupts():
                print("stopping engines ...", file=sys.stderr, flush=True)
                cluster.stop()


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside the block, where it would leave processes running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class StopRequests:
    """Counts Ctrl-C and SIGTERM instead of raising.

    The first asks to stop after the step, the second to stop at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def _count(self, number: int, frame: Any) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Start a cluster and leave it running.

    Notebooks find it with speedlab.Cluster.attach(), `speedlab stop` ends it.
    """

    cluster: Annotated[str, tyro.conf.Positional] = "default"
    """Name of the cluster."""
    engines: int | None = None
    """Number of engines; by default one per GPU, or 4 on CPU cores."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the engines."""
    timeout_seconds: float | None = None
    """How long a collective waits for a missing rank; 1,800 when left out."""
    hosts: str | None = None
    """Start over SSH on these hosts, with the number of engines of each: gpu-1:8,gpu-2:8."""
    slurm: str | None = None
    """Start in a job of Slurm: nodes=4,gpus_per_node=8,partition=a100,time=8:00:00."""
    mpi: str | None = None
    """Start with mpiexec, on the hosts of this host file."""


def start(argv: list[str]) -> int:
    """Start a cluster, and return when its engines are ready. Ctrl-C cancels the start and cleans up.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.
    """
    options = read_options(StartOptions, argv, "speedlab start", config=(tyro.conf.FlagCreatePairsOff,))
    ran = any(state.name == options.cluster for state in running_clusters())
    began = time.monotonic()
    there = of_words(options.hosts, options.slurm, options.mpi)
    cluster = Cluster(
        options.engines,
        name=options.cluster,
        device=options.device,
        timeout_seconds=options.timeout_seconds,
        **there,
    )
    did = "was running" if ran else f"ready after {seconds_text(time.monotonic() - began)}"
    print(f"cluster {options.cluster}: {cluster.size} engine{'s' if cluster.size != 1 else ''}, {did}")
    return 0
