"""Another number of engines of a running cluster.

The way of a change:
1. Nothing works on the engines, and no paused run would lose what no checkpoint holds.
2. New engines are started and become ready; until then nothing is changed, and a failure leaves all as it was.
3. In one piece: the engines that stay leave their process group, give up what they hold of runs and learn how many they
   are and which cores are theirs; the cluster's file says who runs; those too many are ended.
The next `speedlab.comm.join` brings all of them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import speedlab.cluster.worker.remote as remote
from speedlab.cluster.errors import ClusterError, RankError, name_ranks, restart_of
from speedlab.cluster.files.cluster_dir import CHANGING, ClusterState, EngineEntry
from speedlab.cluster.known_runs import remembered_folders, saved_step
from speedlab.telemetry.records import RESTING, RunState
from speedlab.telemetry.run_folder import RunFolder

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.engines import Engines
    from speedlab.cluster.supervisor.process_control import ResizePlan
    from speedlab.cluster.supervisor.protocol import RankStatus

log = logging.getLogger("speedlab.supervisor")

_REBIND_SECONDS = 20.0
"""How long engines may take to leave their group and free what they hold."""

Progress = Callable[[str], object]


class Resize:
    """One change of the number of engines, whose lock the caller holds."""

    def __init__(self, engines: Engines, progress: Progress, cancelled: Callable[[], bool]) -> None:
        """`cancelled`: asked until the new engines are ready; then it is too late."""
        self._engines, self._progress, self._cancelled = engines, progress, cancelled

    def to(self, engines: int) -> None:
        """Raises ClusterError, with the cluster as it was, while something works on them or devices are missing."""
        before, hands = self._engines.state, self._engines.hands
        plan = hands.plan(before, engines)
        if engines == len(before.devices):
            return
        self._require_rest(engines, plan)  # 1
        self._progress(_what_changes(before, plan.state))
        hands.turn_to(plan.state)
        new: tuple[EngineEntry, ...] = ()
        if wanted := sorted(set(range(engines)) - set(plan.stays.values())):
            try:
                new = self._engines.start(plan.state, wanted, self._cancelled)  # 2
            except BaseException:
                hands.turn_to(before)
                raise
        self._change_over(before, plan, new)  # 3

    def _change_over(self, before: ClusterState, plan: ResizePlan, new: tuple[EngineEntry, ...]) -> None:
        with self._engines.home.amid(CHANGING), self._engines.line.held(range(len(before.engines))):
            try:
                _rebind(self._engines, plan.stays, plan.state)
            except BaseException:
                self._engines.end(new)
                self._engines.hands.turn_to(before)
                _bind_back(self._engines, [before.engines[rank] for rank in plan.stays], before)
                raise
            finally:
                self._engines.hands.next_generation()
            engines = sorted([*plan.state.engines, *new], key=lambda engine: engine.rank)
            self._engines.take(replace(plan.state, engines=tuple(engines)))
        self._engines.end([engine for engine in before.engines if engine.rank not in plan.stays])

    def _require_rest(self, engines: int, plan: ResizePlan) -> None:
        """Raise ClusterError while something works on the engines, or a run would lose steps."""
        statuses = self._engines.status()
        runs = {folder.path: folder for folder in remembered_folders(self._engines)}
        for folder in runs.values():
            status = folder.read_status()
            if status.state not in RESTING and status.token == self._engines.token:
                raise ClusterError(
                    f"run {folder.name!r} is {status.state} on {self._engines.name!r}, step {status.step} of "
                    f"{status.steps}; run.reshape(engines={engines}) takes it along, or pause it first"
                )
        leaving = {status.rank for status in statuses if status.state == "dead" and status.rank not in plan.stays}
        _require_idle(status for status in statuses if status.rank not in leaving)
        if not leaving:  # What a run had on an engine that is gone is lost already.
            self._require_saved(engines, runs, min(plan.stays))

    def _require_saved(self, engines: int, runs: Mapping[Path, RunFolder], rank: int) -> None:
        """`rank`: one that is idle, and holds what the others hold."""
        (held,) = self._engines.ask([rank], remote.held_runs, seconds=_REBIND_SECONDS)
        for path, step in held.items():
            folder = runs.get(Path(path)) or RunFolder(path)
            saved = saved_step(folder)
            if folder.read_status().state is RunState.PAUSED and saved != step:
                kept = "it has no checkpoint" if saved is None else f"its newest checkpoint is of step {saved}"
                raise ClusterError(
                    f"run {folder.name!r} is paused at step {step} and {kept}: the engines would lose what they hold; "
                    f"run.save() first, or run.reshape(engines={engines}), which saves"
                )


def undo_unfinished(engines: Engines) -> None:
    """Bind the engines to what the cluster's file says, where an earlier supervisor has ended in the middle of 3. One
    that does not let itself be bound is ended: it counts other ranks than there are."""
    home = engines.home
    if not home.was_amid(CHANGING):
        return
    with home.amid(CHANGING):
        _bind_back(engines, engines.state.engines, engines.state)
        engines.hands.next_generation()


def _bind_back(engines: Engines, bound: Iterable[EngineEntry], state: ClusterState) -> None:
    """Bind these engines to the ranks that they have in `state`, after a change that was not made."""
    for engine in bound:
        if engines.reaches(engine):
            try:
                _rebind(engines, {engine.rank: engine.rank}, state)
            except (ClusterError, RankError) as error:
                log.warning("rank %d is ended, which a resize has left half done: %s", engine.rank, error)
                engines.end([engine])


def _rebind(engines: Engines, ranks: Mapping[int, int], state: ClusterState) -> None:
    """`ranks`: what each of these is to be in `state`."""
    environments = engines.hands.environments(state)
    given = {old: (environments[new],) for old, new in ranks.items()}
    engines.ask_each(remote.rebind, given, seconds=_REBIND_SECONDS)


def _require_idle(statuses: Iterable[RankStatus]) -> None:
    statuses = list(statuses)
    for word, what_to_do in (
        ("dead", "{restart} brings {them} back"),
        ("frozen", "let its process go on, or {restart}"),
        ("busy", "wait for what it does, or cluster.interrupt()"),
    ):
        if ranks := [status.rank for status in statuses if status.state == word]:
            verb, them = ("are", "them") if len(ranks) > 1 else ("is", "it")
            raise ClusterError(
                f"{name_ranks(ranks)} {verb} {word}, and all engines have to be idle for another number of them; "
                f"{what_to_do.format(restart=restart_of(ranks), them=them)}"
            )


def _what_changes(before: ClusterState, after: ClusterState) -> str:
    """'2 → 4 engines on cpu 0, cpu 1; each computes with 1 thread, so far with 2', or, of hosts, '4 → 2 engines on
    host-a'"""
    names = ", ".join(after.hosts or dict.fromkeys(device.name for device in after.devices))
    text = f"{len(before.devices)} → {len(after.devices)} engines on {names}"
    had, has = before.devices[0].threads, after.devices[0].threads
    return text if had == has else f"{text}; each computes with {has} thread{'s' if has > 1 else ''}, so far with {had}"
