"""Another number of engines: of a running cluster, and of a run that goes on with them.

The way of a change:
1. Nothing works on the engines, and no paused run would lose what no checkpoint holds.
2. New engines are started and become ready; until then nothing is changed, and a failure leaves all as it was.
3. In one piece: the engines that stay leave their process group, give up what they hold of runs and learn how many they
   are and which cores are theirs; the cluster's file says who runs; those too many are ended.
The next `speedlab.comm.join` brings all of them together. A run is paused and saved before, and goes on from that
checkpoint, which any layout can load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.processes as processes
import speedlab.cluster.remote as remote
import speedlab.cluster.start as start
from speedlab.cluster.advance import RESTING
from speedlab.cluster.connection import Connection
from speedlab.cluster.devices import devices_for
from speedlab.cluster.errors import ClusterError, name_ranks
from speedlab.cluster.going_on import change_shape, way_on
from speedlab.cluster.home import ClusterState, EngineEntry, Home
from speedlab.cluster.known_runs import RunError, known_folders, saved_step
from speedlab.cluster.launchers import device_fields, rank_environment
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import RunState
from speedlab.telemetry.shape import changed_config

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.run import Run
    from speedlab.cluster.words import Pending

_SAVE_SECONDS = 3600.0
_REBIND_SECONDS = 20.0
"""How long engines may take to leave their group and free what they hold."""

Progress = Callable[[str], object]


class Resize:
    """One change of the number of engines of `cluster`, whose lock and whose home's lock the caller holds."""

    def __init__(self, cluster: Cluster, home: Home, now: Connection, progress: Progress) -> None:
        self._cluster, self._home, self._now, self._progress = cluster, home, now, progress

    def to(self, engines: int) -> None:
        before = self._now.state
        size = len(before.devices)
        devices = tuple(devices_for(engines, before.devices))
        if engines == size:
            return
        self._require_rest(engines)  # 1
        self._progress(_what_changes(before.devices, devices))
        after = replace(before, devices=devices, engines=before.engines[:engines])
        new: tuple[EngineEntry, ...] = ()
        if engines > size:
            new = start.start_engines(self._home, after, self._now.client, range(size, engines))  # 2
        after = replace(after, engines=(*after.engines, *new))
        processes.uninterrupted(lambda: self._change_over(before, after))  # 3

    def _change_over(self, before: ClusterState, after: ClusterState) -> None:
        staying = [engine.rank for engine in after.engines if engine in before.engines]
        try:
            self._rebind(staying, after)
        except BaseException:
            self._now.end([engine for engine in after.engines if engine not in before.engines])
            self._rebind([rank for rank in staying if self._now.tasks.reaches(before.engines[rank])], before)
            raise
        finally:
            self._home.next_generation()
        self._home.write(after)
        self._now.take_over(after, self._home.stamp())
        self._now.end([engine for engine in before.engines if engine not in after.engines])

    def _rebind(self, ranks: list[int], state: ClusterState) -> None:
        devices = device_fields(state.devices)
        environments = [rank_environment(rank, devices, str(self._home.rendezvous)) for rank in range(len(devices))]
        self._ask(ranks, remote.rebind, environments)

    def _ask(self, ranks: list[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return self._cluster._send(self._now, ranks, function, arguments, {}).result(_REBIND_SECONDS)
        except TimeoutError as error:
            raise ClusterError(f"the engines do not answer: {error}") from None

    def _require_rest(self, engines: int) -> None:
        """Raise ClusterError while something works on the engines, or a run would lose steps."""
        statuses = self._now.status()
        pids = {status.pid for status in statuses}
        runs = {folder.path: folder for folder in known_folders(self._cluster)}
        for folder in runs.values():
            status = folder.read_status()
            if status.state not in RESTING and pids & set(status.rank_pids):
                raise ClusterError(
                    f"run {folder.name!r} is {status.state} on {self._home.name!r}, step {status.step} of "
                    f"{status.steps}; run.reshape(engines={engines}) takes it along, or pause it first"
                )
        for word, what_to_do in (
            ("dead", "cluster.restart({rank}) brings an engine back"),
            ("frozen", "let its process go on, or cluster.restart({rank})"),
            ("busy", "wait for what it does, or cluster.interrupt()"),
        ):
            if ranks := [status.rank for status in statuses if status.state == word]:
                verb = "are" if len(ranks) > 1 else "is"
                raise ClusterError(
                    f"{name_ranks(ranks)} {verb} {word}, and all engines have to be idle for another number of them; "
                    f"{what_to_do.format(rank=ranks[0])}"
                )
        (held,) = self._ask([0], remote.held_runs)
        for path, step in held.items():
            folder = runs.get(Path(path)) or RunFolder(path)
            saved = saved_step(folder)
            if folder.read_status().state is RunState.PAUSED and saved != step:
                kept = "it has no checkpoint" if saved is None else f"its newest checkpoint is of step {saved}"
                raise ClusterError(
                    f"run {folder.name!r} is paused at step {step} and {kept}: the engines would lose what they hold; "
                    f"run.save() first, or run.reshape(engines={engines}), which saves"
                )


def _what_changes(before: Sequence[Device], after: Sequence[Device]) -> str:
    """'2 → 4 engines on cpu 0, cpu 1; each computes with 1 thread, so far with 2'"""
    names = ", ".join(dict.fromkeys(device.name for device in after))
    text = f"{len(before)} → {len(after)} engines on {names}"
    had, has = before[0].threads, after[0].threads
    return text if had == has else f"{text}; each computes with {has} thread{'s' if has > 1 else ''}, so far with {had}"


def resize_run(run: Run, engines: int, *, progress: Progress = print, **changes: Any) -> Pending:
    """Let a run go on with another number of engines: pause, save, resize its cluster, go on from what was saved.

    The global batch stays, and so does the layout but for dp, unless `changes` (of `telemetry.shape.CHANGES`) say
    otherwise. Returns, when the run is as it was, running or paused, the word that brought it there.

    Raises ConfigError, LayoutError or ClusterError before anything is changed, for what cannot be. When it fails
    later, or is interrupted, the run goes on as before, with as many engines as before.
    """
    cluster = run.cluster
    if cluster is None:
        raise RunError(f"{run.name} has no engines here: {way_on(run)}")
    before, had = run.present_config, cluster.size
    after = changed_config(before, engines, before=had, built_in=run.is_built_in, **changes)
    devices_for(engines, cluster.devices)
    state = run.state
    if state in RESTING and state is not RunState.PAUSED:
        raise RunError(
            f"run {run.name!r} is {state} at step {run.step}; only one that runs or is paused can be taken along"
        )
    move = _Move(run, cluster, "pause" if state is RunState.PAUSED else "resume", progress)
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
        assert run._advance is not None
        self._run, self._cluster, self._advance = run, cluster, run._advance
        self._word, self._progress = word, progress
        self.config = run.folder.config

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
        with self._advance.held_back():
            self._cluster.resize(engines, progress=self._progress)
            change_shape(self._run, before, had, after, engines, started=started)
        return self.go_on()

    def go_on(self) -> Pending:
        word = self._run.resume() if self._word == "resume" else self._run.pause()
        word.wait()
        return word
