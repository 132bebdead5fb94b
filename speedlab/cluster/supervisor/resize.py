"""Change the number of engines of a running cluster.

1. Check that no engine works, and that no paused run would lose state that no checkpoint holds.
2. Start the new engines and wait until they are ready. Nothing else changes until then; a failure leaves everything as
   it was.
3. Change over in one piece: the engines that stay leave their process group, free the state of runs, and learn their
   number and cores. The state of the cluster is recorded. The engines that are too many are ended.

The next `speedlab.comm.join` forms a process group of all engines.
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
"""Longest time for engines to leave their group and free their state."""

Progress = Callable[[str], object]


class Resize:
    """One change of the number of engines. The caller holds `Engines.lock`."""

    def __init__(self, engines: Engines, progress: Progress, cancelled: Callable[[], bool]) -> None:
        """Prepare the change; `to` executes it.

        Args:
            engines: Engines of the cluster.
            progress: Called with a sentence for the user.
            cancelled: Polled until the new engines are ready; later it is too late.
        """
        self._engines, self._progress, self._cancelled = engines, progress, cancelled

    def to(self, engines: int) -> None:
        """Change the number of engines.

        Args:
            engines: New number.

        Raises:
            ClusterError: If an engine works or devices are missing. The cluster stays as it was.
        """
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
        """Raise ClusterError if an engine works, or a run would lose steps."""
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
        if not leaving:  # The state on a dead engine is lost already.
            self._require_saved(engines, runs, min(plan.stays))

    def _require_saved(self, engines: int, runs: Mapping[Path, RunFolder], rank: int) -> None:
        """Raise ClusterError if a paused run would lose steps.

        Args:
            engines: New number of engines.
            runs: Folders of runs by path.
            rank: An idle rank; all ranks hold the same runs.
        """
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
    """Undo step 3 if an earlier supervisor ended during it: bind the engines to the recorded state.

    An engine that cannot be bound is ended, because it has a wrong world size.

    Args:
        engines: Engines of the cluster.
    """
    home = engines.home
    if not home.was_amid(CHANGING):
        return
    with home.amid(CHANGING):
        _bind_back(engines, engines.state.engines, engines.state)
        engines.hands.next_generation()


def _bind_back(engines: Engines, bound: Iterable[EngineEntry], state: ClusterState) -> None:
    """Bind these engines to their ranks in `state`, after a change that was not completed."""
    for engine in bound:
        if engines.reaches(engine):
            try:
                _rebind(engines, {engine.rank: engine.rank}, state)
            except (ClusterError, RankError) as error:
                log.warning("rank %d is ended, which a resize has left half done: %s", engine.rank, error)
                engines.end([engine])


def _rebind(engines: Engines, ranks: Mapping[int, int], state: ClusterState) -> None:
    """Bind engines to ranks of `state`.

    Args:
        engines: Engines of the cluster.
        ranks: New rank by current rank.
        state: State with the new ranks.
    """
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
    """Return the change as text.

    For example '2 → 4 engines on cpu 0, cpu 1; each computes with 1 thread, so far with 2', or '4 → 2 engines on
    host-a'.
    """
    names = ", ".join(after.hosts or dict.fromkeys(device.name for device in after.devices))
    text = f"{len(before.devices)} → {len(after.devices)} engines on {names}"
    had, has = before.devices[0].threads, after.devices[0].threads
    return text if had == has else f"{text}; each computes with {has} thread{'s' if has > 1 else ''}, so far with {had}"
