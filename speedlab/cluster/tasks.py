"""Tasks on the engines: sending them, knowing which are under way, and stopping those."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import speedlab.cluster.processes as processes
from speedlab.cluster.errors import ClusterError, name_ranks
from speedlab.cluster.home import ClusterState, EngineEntry
from speedlab.cluster.wires import CUT_SIGNAL

if TYPE_CHECKING:
    from ipyparallel import Client

    from speedlab.cluster.results import RankResults

POLL_SECONDS = 0.02
RESEND_SECONDS = 0.5
"""An engine misses a signal that comes before its task has begun: it is sent again while the task goes on."""
CUT_SECONDS = 1.4
"""A rank that has not stopped by then waits for a peer in native code, most likely: its connections are cut. A trainer
needs up to 1.2 s to end its step cleanly."""


class Tasks:
    """What goes to the engines through one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._outstanding: list[RankResults] = []

    def ids(self) -> list[int]:
        """Engine ids the controller knows."""
        return self._client.ids

    def reaches(self, engine: EngineEntry) -> bool:
        return engine.engine_id in self._client.ids

    def send(
        self, state: ClusterState, ranks: list[int], function: Callable[..., Any], *arguments: Any
    ) -> dict[int, Any]:
        """One task for each rank; returns ipyparallel's AsyncResult of each. ClusterError when an engine is gone."""
        try:
            views = {rank: self._client[state.engines[rank].engine_id] for rank in ranks}
            return {rank: view.apply_async(function, *arguments) for rank, view in views.items()}
        except IndexError:  # ipyparallel's word for an engine that it does not know.
            gone = [rank for rank in ranks if not self.reaches(state.engines[rank])]
            raise ClusterError(
                f"the engine of {name_ranks(gone)} ended just now; cluster.restart(rank) helps"
            ) from None

    def watch(self, results: RankResults) -> None:
        """Count `results` among the outstanding ones until they are done."""
        self._outstanding.append(results)
        results.add_done_callback(self._outstanding.remove)

    def abandon(self, reason: str) -> None:
        """Nothing comes from the engines any more: whoever waits is told why."""
        for results in list(self._outstanding):
            results.abandon(reason)

    def under_way(self, state: ClusterState) -> dict[int, set[str]]:
        """Message ids, by rank, of tasks that ranks work on or have in their queues, whoever sent them."""
        tasks: dict[int, set[str]] = {}
        for results in list(self._outstanding):
            for rank in results.unfinished:
                tasks.setdefault(rank, set()).add(results.message_ids[rank])
        queues = self._client.queue_status(verbose=True)
        own = self._client.session.session
        for engine in state.engines:
            queue = queues.get(engine.engine_id, {})
            # Of our own tasks we know better: the controller hears of their end a little later than we do.
            others = {task for task in [*queue.get("queue", []), *queue.get("tasks", [])] if not task.startswith(own)}
            if others:
                tasks.setdefault(engine.rank, set()).update(others)
        return tasks

    def stop(
        self, state: ClusterState, tasks: dict[int, set[str]], timeout_seconds: float, on_cut: Callable[[], object]
    ) -> set[int]:
        """Stop `tasks`, and no later ones; returns the ranks that still work on one of them after `timeout_seconds`.

        `on_cut` is called when connections are cut, because some rank did not come back.
        """
        for rank, found in tasks.items():
            if len(found) > 1:  # Those that have not begun are taken out of the queue.
                with contextlib.suppress(IndexError):  # An engine that is gone has no queue.
                    self._client.abort(sorted(found), targets=[state.engines[rank].engine_id], block=False)
        start = time.monotonic()
        deadline = start + timeout_seconds
        signal_at = start
        cut_at = start + min(CUT_SECONDS, 0.7 * timeout_seconds)
        still = set(tasks)
        while still and time.monotonic() < deadline:
            if time.monotonic() >= signal_at:
                signal_at = time.monotonic() + RESEND_SECONDS
                _signal(state, still, signal.SIGINT)
            if time.monotonic() >= cut_at:
                cut_at = time.monotonic() + RESEND_SECONDS
                on_cut()
                _signal(state, still, CUT_SIGNAL)
            time.sleep(POLL_SECONDS)
            now = self.under_way(state)
            still = {rank for rank in still if tasks[rank] & now.get(rank, set()) and self.reaches(state.engines[rank])}
        return still


def _signal(state: ClusterState, ranks: set[int], number: signal.Signals) -> None:
    for rank in ranks:
        pid = state.engines[rank].pid
        if processes.is_alive(pid, state.token):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # It ended in between.
