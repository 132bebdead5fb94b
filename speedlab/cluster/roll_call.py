"""Who has come: engines that register are asked which rank they are; ipyparallel's numbers do not tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ipyparallel.error import RemoteError

import speedlab.cluster.remote as remote
from speedlab.cluster.agent_calls import Calls, HostLost, has_ended


class Present(NamedTuple):
    """An engine that has answered: `engine_id` is ipyparallel's number, `pid` is on its host."""

    rank: int
    pid: int
    engine_id: int


class RollCall:
    """Engines that were asked and have not answered. One that ends meanwhile is none to wait for: a supervisor that
    died may have left one that the hub counts for a while yet; whoever started an engine looks whether it runs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._asked: list[tuple[int, Any]] = []

    def ask(self, engine_ids: Iterable[int]) -> None:
        """Ask these engines who they are."""
        for engine_id in engine_ids:
            with contextlib.suppress(HostLost):
                self._asked.append((engine_id, self._calls.send(engine_id, remote.identify)))

    def answers(self) -> Iterator[Present]:
        """Those that have answered since the last look. Raises ipyparallel's RemoteError where one cannot."""
        done = [each for each in self._asked if each[1].done()]
        self._asked = [each for each in self._asked if each not in done]
        for engine_id, task in done:
            try:
                who = task.get()
            except RemoteError as error:
                if has_ended(error):
                    continue
                raise
            yield Present(who["rank"], who["pid"], engine_id)
