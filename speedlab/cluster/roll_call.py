"""Who has come: engines that register are asked which rank they are; ipyparallel's numbers do not tell."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import ipyparallel
from ipyparallel.error import RemoteError

import speedlab.cluster.remote as remote
from speedlab.cluster.agent_calls import Calls, HostLost, has_ended

_ASK_AGAIN_SECONDS = 1.0
"""How often the hub is asked who has registered."""
_SILENT_SECONDS = 3.0
"""Until an engine that has not answered is asked again who it is."""


class Register:
    """The engines that the hub counts, for who waits for new ones. A client is told of those that register after its
    subscription has reached the hub, and its first list is older than that: an engine that comes in between, when all
    start at once, it would never hear of. So the hub is asked again."""

    def __init__(self, client: ipyparallel.Client) -> None:
        self._client = client
        self._answer: Any = None
        self._asked = self._looked = time.monotonic()
        self._ever = set(client.ids)

    def ids(self) -> set[int]:
        """ipyparallel's numbers of the engines known now. Never waits."""
        now = time.monotonic()
        if now > self._looked + _ASK_AGAIN_SECONDS:  # Nobody waited: what it tells may have come and gone meanwhile.
            self._answer = None
        self._looked = now
        self._ever |= set(self._client.ids)
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer.result(), None
            self._take(answer["content"]["engines"])
        if self._answer is None and now > self._asked + _ASK_AGAIN_SECONDS:
            self._asked = now
            self._answer = self._client._send(self._client._query_stream, "connection_request")
        return set(self._client.ids)

    def _take(self, engines: dict[str, str]) -> None:
        """One that has gone since the hub wrote this must not come back: numbers are never used again."""
        unheard = {int(number): uuid for number, uuid in engines.items() if int(number) not in self._ever}
        if unheard:  # The thread that hears of all others is the one that notes them.
            self._client._io_loop.add_callback(self._client._update_engines, unheard)


class Present(NamedTuple):
    """An engine that has answered: `engine_id` is ipyparallel's number, `pid` is on its host."""

    rank: int
    pid: int
    engine_id: int


class RollCall:
    """Engines that were asked and have not answered. One that ends meanwhile is none to wait for: a supervisor that
    died may have left one that the hub counts for a while yet; whoever started an engine looks whether it runs.

    One that is silent is asked again: what is sent to an engine that the scheduler does not know yet is dropped."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._asked: dict[int, list[Any]] = {}
        """What was sent to each, the newest last."""
        self._ask_again: dict[int, float] = {}

    def ask(self, engine_ids: Iterable[int]) -> None:
        """Ask these engines who they are."""
        for engine_id in engine_ids:
            try:
                task = self._calls.send(engine_id, remote.identify)
            except HostLost:
                self._asked.pop(engine_id, None)
                continue
            self._asked.setdefault(engine_id, []).append(task)
            self._ask_again[engine_id] = time.monotonic() + _SILENT_SECONDS

    def answers(self) -> Iterator[Present]:
        """Those that have answered since the last look. Raises ipyparallel's RemoteError where one cannot."""
        for engine_id, tasks in list(self._asked.items()):
            task = next((task for task in tasks if task.done()), None)
            if task is None:
                if time.monotonic() > self._ask_again[engine_id]:
                    self.ask([engine_id])
                continue
            del self._asked[engine_id]
            try:
                who = task.get()
            except RemoteError as error:
                if has_ended(error):
                    continue
                raise
            yield Present(who["rank"], who["pid"], engine_id)
