"""Another number of engines: of a running cluster, and of a run that goes on with them.

The way of a change:
1. Nothing works on the engines, and no paused run would lose what no checkpoint holds.
2. New engines are started and become ready; until then nothing is changed, and a failure leaves all as it was.
3. In one piece: the engines that stay leave their process group, give up what they hold of runs and learn how many they
   are and which cores are theirs; the cluster's file says who runs; those too many are ended.
The next `speedlab.comm.join` brings all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster import processes, remote, start
from speedlab.cluster.advance import RESTING
from speedlab.cluster.connection import Connection
from speedlab.cluster.devices import devices_for
from speedlab.cluster.errors import ClusterError, name_ranks
from speedlab.cluster.home import ClusterState, EngineEntry, Home
from speedlab.cluster.known_runs import known_folders, saved_step
from speedlab.cluster.launchers import device_fields, rank_environment
from speedlab.hardware import Device
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import RunState

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

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
