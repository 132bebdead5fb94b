"""RankResults: the results of a submission by rank; and RanksOutput: the output of all ranks.

Each rank completes independently, even if another one is dead. If one fails, the supervisor releases the ranks that
wait for it.
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
"""Interval at which a waiting caller checks whether the cluster still runs."""


class RankResults:
    """Results of one submission by rank: `.result()`, `await`, `.wait(timeout)`, or read `.done`."""

    def __init__(self, cluster: SupervisorConnection, id: str, work: bytes = b"", *, shown: bool = False) -> None:
        """Make empty results; the connection fills them.

        Args:
            cluster: Connection to the supervisor.
            id: Id of the submission.
            work: Packed work, for a supervisor that does not know the submission.
            shown: Whether the output of ranks in it is received.
        """
        self.id = id
        self.work = work
        self.shown = shown
        self.ranks: list[int] = []
        self.wanted: list[int] | None = None
        """Ranks that were requested; None for all."""
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
        """Failures so far, by rank, in the order of arrival."""
        with self._lock:
            return dict(self._failures)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank is done and its output was delivered. An interrupt of the kernel interrupts only this
        submission.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Returns:
            False on timeout.

        Raises:
            ClusterError: If the cluster has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._finished.is_set():
                # Wake up regularly, because a dead cluster sends no message.
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
        """Return what each rank returned, in the order of `ranks`.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Raises:
            RankError: If a rank failed.
            TimeoutError: After `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(
                f"ranks {self.unfinished} are not done after {timeout:g} s; wait longer, or call cluster.interrupt()"
            )
        return self._outcome()

    def interrupt(self, timeout_seconds: float = 2.0) -> list[int]:
        """Interrupt this submission, or remove it if it has not begun. Other work of the ranks continues.

        Args:
            timeout_seconds: Longest time to wait until the ranks stop.

        Returns:
            The ranks that are idle afterwards.
        """
        return self._cluster._interrupt(timeout_seconds, id=self.id)

    def add_done_callback(self, callback: Callable[[RankResults], object]) -> None:
        """Call `callback(self)` after all ranks are done; at once if they are.

        Args:
            callback: Called on the thread that receives messages, so it must not wait for answers.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def sayings(self, timeout_seconds: float) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Yield what ranks print and display, in Jupyter's protocol, for a submission with `shown`.

        Args:
            timeout_seconds: How long to wait for the first message.

        Yields:
            (rank, kind, content). The last message of a rank has the kind 'status' and the execution state 'idle'.
        """
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
            if not loop.is_closed():  # With a closed loop, no coroutine waits any more.
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
                self._cluster.check_controller()  # This raises ClusterError if the whole cluster has ended.
            raise RankError(self._failures)
        for rank in self.ranks:
            if rank not in self._values:
                self._values[rank] = unpack(self._packed[rank])
        return [self._values[rank] for rank in self.ranks]

    # ---- notifications of the supervisor -----------------------------------------------------------------------------

    def begun(self, ranks: Sequence[int]) -> None:
        """Record the ranks of the submission."""
        with self._lock:
            self.ranks = list(ranks)
        self._look_whether_done()  # A rank may have ended before this call.

    def ended(self, message: m.Ended) -> None:
        """Record the result or failure of a rank."""
        failure = RemoteFailure.from_dict(message.failure) if message.failure is not None else None
        self._set(message.rank, message.value, failure)

    def said(self, message: m.DisplayMessage) -> None:
        """Queue a message for `sayings`."""
        self._said.put((message.rank, message.kind, message.content))

    def abandon(self, reason: str) -> None:
        """Fail every unfinished rank as dead, because no answer can arrive.

        Args:
            reason: Message of the failures.
        """
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
"""printed(ranks, stream, text): `stream` is 'stdout' or 'stderr'; `text` is one or more lines with line ends."""


class RanksOutput:
    """Output of all ranks of a cluster; receive it with `subscribe(callback)`."""

    def __init__(self, cluster: SupervisorConnection) -> None:
        self._cluster = weakref.ref(cluster)
        self._callbacks: list[Printed] = []

    def subscribe(self, callback: Printed) -> Callable[[], None]:
        """Call `callback(ranks, stream, text)` for all output from now on.

        Args:
            callback: Called on the thread that receives messages, so it must not wait for answers.

        Returns:
            A function that ends the subscription.
        """
        self._callbacks.append(callback)
        cluster = self._cluster()
        if cluster is not None:
            cluster._ask(m.SubscribeOutput(on=True))

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def text(self, rank: int, most_bytes: int = 2**20) -> str:
        """Return the end of what `rank` has printed since the start of the cluster, from the cluster's folder.

        Args:
            rank: The rank.
            most_bytes: Maximum length in bytes.
        """
        cluster = self._cluster()
        if cluster is None:
            return ""
        data = b""
        for name in (f"rank-{rank}.log.1", f"rank-{rank}.log"):
            with contextlib.suppress(FileNotFoundError):
                data += (cluster._home.output / name).read_bytes()
        return data[-most_bytes:].decode(errors="replace")

    def printed(self, ranks: list[int], stream: str, text: str) -> None:
        """Deliver output that the supervisor sent."""
        for callback in list(self._callbacks):
            try:
                callback(ranks, stream, text)
            except Exception:
                log.exception("a subscriber of the ranks' output failed and gets no more of it")
                self._callbacks.remove(callback)

    def connected(self) -> None:
        """Subscribe again over a new connection to the supervisor."""
        cluster = self._cluster()
        if self._callbacks and cluster is not None and cluster._client is not None:
            cluster._client.ask(m.SubscribeOutput(on=True))
