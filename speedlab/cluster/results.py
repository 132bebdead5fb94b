"""RankResults: what a function returned on each rank, once it has.

Each rank ends by itself, also when another one is dead; when one fails, the supervisor releases those that wait for it.

What the ranks of a cluster print, as a handle of it hears it from the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speedlab.cluster.errors import DIED, RankError, RemoteFailure
from speedlab.cluster.interrupts import is_the_users
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.worker.serialization import unpack

if TYPE_CHECKING:
    from speedlab.cluster.connection import SupervisorConnection


CHECK_SECONDS = 1.0
"""How often whoever waits looks whether the cluster is still there."""


class RankResults:
    """Results of one submission by rank: `.result()`, `await`, `.wait(timeout)`, or `.done` to look."""

    def __init__(self, cluster: SupervisorConnection, id: str, work: bytes = b"", *, shown: bool = False) -> None:
        """`id`: the submission's; `work`: what it is, for a supervisor that has not heard of it."""
        self.id = id
        self.work = work
        self.shown = shown
        self.ranks: list[int] = []
        self.wanted: list[int] | None = None
        """The ranks that were asked for; None for all."""
        self._cluster = cluster
        self._packed: dict[int, bytes] = {}
        self._values: dict[int, Any] = {}
        self._failures: dict[int, RemoteFailure] = {}
        self._said: queue.SimpleQueue[tuple[int, str, Mapping[str, Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._callbacks: list[Callable[[RankResults], object]] = []

    @property
    def done(self) -> bool:
        """Whether every rank has returned or failed."""
        return self._finished.is_set()

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have neither returned nor failed."""
        with self._lock:
            return [rank for rank in self.ranks if rank not in self._packed and rank not in self._failures]

    @property
    def failures(self) -> dict[int, RemoteFailure]:
        """Failures so far, by rank, in the order in which they came."""
        with self._lock:
            return dict(self._failures)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank is done and its output has been passed on. False when `timeout` seconds came first.

        Raises ClusterError when the cluster has ended. An interrupt of the kernel interrupts the ranks, too: this
        submission, and no other.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._finished.is_set():
                left = CHECK_SECONDS if deadline is None else min(CHECK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                if not self._finished.wait(left):
                    self._cluster.check_controller()
        except KeyboardInterrupt:
            if is_the_users():
                self.interrupt()
            raise
        return True

    def result(self, timeout: float | None = None) -> list[Any]:
        """What each rank returned, in the order of `ranks`. Raises RankError; TimeoutError after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(
                f"ranks {self.unfinished} are not done after {timeout:g} s; wait longer, or call cluster.interrupt()"
            )
        return self._outcome()

    def interrupt(self, timeout_seconds: float = 2.0) -> list[int]:
        """Interrupt this submission, or take it back where it has not begun; returns the ranks that are idle then. What
        else the ranks work on goes on."""
        return self._cluster._interrupt(timeout_seconds, id=self.id)

    def add_done_callback(self, callback: Callable[[RankResults], object]) -> None:
        """Call `callback(self)` once all ranks are done; at once if they are. It comes on the thread that hears of the
        supervisor, so it must not wait for any answer."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def sayings(self, timeout_seconds: float) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """(rank, kind, content) of what ranks say in it, in Jupyter's protocol, that has come or comes within
        `timeout_seconds`; of a submission that is shown. The kind 'status' with the execution state 'idle' is the last
        one of a rank."""
        wait = timeout_seconds
        while True:
            try:
                yield self._said.get(timeout=wait) if wait else self._said.get_nowait()
            except queue.Empty:
                return
            wait = 0.0

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> list[Any]:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(_: RankResults) -> None:
            if not loop.is_closed():  # Nobody waits any more when it is.
                loop.call_soon_threadsafe(woken.set)

        self.add_done_callback(wake)
        while not self.done:
            try:
                await asyncio.wait_for(woken.wait(), CHECK_SECONDS)
            except TimeoutError:
                await loop.run_in_executor(None, self._cluster.check_controller)
        return self._outcome()

    def _outcome(self) -> list[Any]:
        if self._failures:
            if any(failure.kind == DIED for failure in self._failures.values()) and not self._cluster.running:
                self._cluster.check_controller()  # Says that it is the whole cluster.
            raise RankError(self._failures)
        for rank in self.ranks:
            if rank not in self._values:
                self._values[rank] = unpack(self._packed[rank])
        return [self._values[rank] for rank in self.ranks]

    # ---- what the supervisor tells -----------------------------------------------------------------------------------

    def begun(self, ranks: Sequence[int]) -> None:
        """It went to these ranks."""
        with self._lock:
            self.ranks = list(ranks)
        self._look_whether_done()  # A rank may have ended before.

    def ended(self, message: m.Ended) -> None:
        failure = RemoteFailure.from_dict(message.failure) if message.failure is not None else None
        self._set(message.rank, message.value, failure)

    def said(self, message: m.DisplayMessage) -> None:
        self._said.put((message.rank, message.kind, message.content))

    def abandon(self, reason: str) -> None:
        """Count every unfinished rank as dead, because nothing can come from it any more."""
        for rank in self.unfinished:
            self._set(rank, b"", RemoteFailure(kind=DIED, message=reason))

    def _set(self, rank: int, value: bytes, failure: RemoteFailure | None) -> None:
        with self._lock:
            if rank in self._packed or rank in self._failures:
                return
            if failure is not None:
                self._failures[rank] = failure
            else:
                self._packed[rank] = value
        self._look_whether_done()

    def _look_whether_done(self) -> None:
        with self._lock:
            if self._finished.is_set() or not self.ranks:
                return
            if len(self._packed) + len(self._failures) < len(self.ranks):
                return
            callbacks, self._callbacks = self._callbacks, []
            self._finished.set()
        for callback in callbacks:
            callback(self)

    def __repr__(self) -> str:
        if not self.done:
            return f"<RankResults: {len(self.unfinished)} of {len(self.ranks)} ranks not done>"
        return (
            f"<RankResults: {len(self._failures)} of {len(self.ranks)} ranks failed>"
            if self._failures
            else (f"<RankResults: {len(self.ranks)} ranks done>")
        )


log = logging.getLogger("speedlab.cluster")

Printed = Callable[[list[int], str, str], None]
"""printed(ranks, stream, text): `stream` is 'stdout' or 'stderr'; `text` is one or more lines with their ends."""


class RanksOutput:
    """What the ranks of a cluster print. `subscribe(callback)`; callbacks come on the thread that hears of the
    supervisor, and must not wait for any answer of it."""

    def __init__(self, cluster: SupervisorConnection) -> None:
        self._cluster = weakref.ref(cluster)
        self._callbacks: list[Printed] = []

    def subscribe(self, callback: Printed) -> Callable[[], None]:
        """Call `callback(ranks, stream, text)` for all output from now on; returns a function that ends it."""
        self._callbacks.append(callback)
        cluster = self._cluster()
        if cluster is not None:
            cluster._ask(m.Subscribe(on=True))

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def text(self, rank: int, most_bytes: int = 2**20) -> str:
        """The end of what `rank` has printed since the cluster was started, as it is kept in the cluster's folder."""
        cluster = self._cluster()
        if cluster is None:
            return ""
        data = b""
        for name in (f"rank-{rank}.log.1", f"rank-{rank}.log"):
            with contextlib.suppress(FileNotFoundError):
                data += (cluster._home.output / name).read_bytes()
        return data[-most_bytes:].decode(errors="replace")

    def printed(self, ranks: list[int], stream: str, text: str) -> None:
        """What the supervisor tells."""
        for callback in list(self._callbacks):
            try:
                callback(ranks, stream, text)
            except Exception:
                log.exception("a subscriber of the ranks' output failed and hears no more of it")
                self._callbacks.remove(callback)

    def connected(self) -> None:
        """There is a new connection to the supervisor."""
        cluster = self._cluster()
        if self._callbacks and cluster is not None and cluster._client is not None:
            cluster._client.ask(m.Subscribe(on=True))
