"""Read clusters from their folders and ask their supervisors. A hanging supervisor delays no other request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import speedlab_server.schema as m
from speedlab.cluster.connection import ClusterRuns
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import SUPERVISOR_SOCKET, ClusterDir, ClusterState, known_clusters, this_host
from speedlab.cluster.supervisor import protocol as asked
from speedlab.cluster.supervisor.channel import ChannelClosedError, UnfitMessageError, connect
from speedlab.cluster.supervisor.client import Client, SupervisorGoneError
from speedlab.hardware import Device
from speedlab_server.errors import UnknownError

ANSWER_SECONDS = 3.0
"""Time limit for a supervisor's answer to a page."""
_STARTING_SECONDS = 0.5
MOST_WORDS = 16
"""Maximum number of page commands that wait for clusters to end."""


class Reached:
    """A cluster with a connected supervisor, with the interface that a Run needs.

    Args:
        state: The cluster's state file.
        client: Connection to its supervisor.
    """

    def __init__(self, state: ClusterState, client: Client) -> None:
        self.name, self.token = state.name, state.token
        self.size = len(state.engines)
        self.devices: tuple[Device, ...] = state.devices
        self._client = client
        self.runs = ClusterRuns(self)  # pyright: ignore[reportArgumentType] - it asks, and nothing else

    def _ask(self, question: asked.Question, *, seconds: float | None = None) -> Any:
        return self._client.ask(question, seconds=seconds or ANSWER_SECONDS)


class Clusters:
    """Connections to supervisors. Use only from the event loop; blocking calls run in own threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="speedlab-clusters")
        self._word_threads = ThreadPoolExecutor(MOST_WORDS, thread_name_prefix="speedlab-cluster-words")
        self._words: list[Future[None]] = []
        self._clients: dict[str, asyncio.Future[Client]] = {}
        """By token."""

    async def ask(self, id: str, question: asked.Question) -> Any:
        """Ask a cluster's supervisor.

        Args:
            id: Id of the cluster.
            question: The request.

        Raises:
            UnknownError: There is no such cluster.
            ClusterError: It is not running on this host, or refuses.
            SupervisorGoneError: Its supervisor has ended.
            TimeoutError: Its supervisor does not answer.
        """
        return await self.with_reached(id, lambda reached: reached._ask(question))

    async def with_reached(self, id: str, work: Callable[[Reached], Any]) -> Any:
        """Run `work` with a connected cluster in a thread and return its result. Raises the errors of `work` and of
        `ask`.

        Args:
            id: Id of the cluster.
            work: Gets the connected cluster.
        """
        _, state = await self.in_thread(lambda: find(id))
        if not isinstance(state, ClusterState) or not state.running:
            raise ClusterError(f"cluster {id!r} does not run here: {_text_of(state) or 'it is being started'}")
        client = await self._connected(state)
        return await _bounded(self.in_thread(lambda: work(Reached(state, client))), id)

    async def _connected(self, state: ClusterState) -> Client:
        future = self._clients.get(state.token)
        if future is None or (future.done() and (future.exception() is not None or future.result().lost)):
            socket = ClusterDir(state.name).supervisor_socket
            # Share the connection: only one thread waits for a silent supervisor, however many pages ask.
            future = self._clients[state.token] = asyncio.ensure_future(
                self.in_thread(lambda: Client(socket, lambda ranks, stream, text: None))
            )
            # Retrieve the exception, to avoid asyncio's warning.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            # shield: a page that stops waiting must not cancel the connection for the others.
            return await _bounded(asyncio.shield(future), state.name)
        except SupervisorGoneError:
            raise SupervisorGoneError(
                f"the supervisor of cluster {state.name!r} has ended; the next notebook or terminal that uses the "
                "cluster starts another one (speedlab.Cluster.attach()), which takes over"
            ) from None

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in a thread and return its result.

        Args:
            work: A function without arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def give_word(self, work: Callable[[], None]) -> None:
        """Run a slow command, for example one that waits for a scheduler, in a separate thread pool.

        Args:
            work: A function without arguments; its exceptions pass through.

        Raises:
            ClusterError: Too many commands are in progress.
        """
        self._words = [word for word in self._words if not word.done()]
        if len(self._words) >= MOST_WORDS:
            raise ClusterError(
                f"{MOST_WORDS} words of pages wait already for clusters to end; try again once one of them has ended"
            )
        self._words.append(word := self._word_threads.submit(work))
        await asyncio.wrap_future(word)

    async def look(self, id: str) -> m.Cluster:
        """Return a cluster with the state of its ranks, if its supervisor answers.

        Args:
            id: Id of the cluster.
        """
        folder, state = await self.in_thread(lambda: find(id))
        summary = await self.in_thread(lambda: summary_of(folder, state))
        if not isinstance(state, ClusterState):
            return m.Cluster(cluster=summary)
        statuses: dict[int, asked.RankStatus] = {}
        problem = ""
        if state.running:
            try:
                statuses = {status.rank: status for status in await self.ask(id, asked.GetRankStatus())}
            except (ClusterError, SupervisorGoneError, TimeoutError) as error:
                problem = str(error)
            except UnfitMessageError as error:
                problem = _other_version_text(error)
        return m.Cluster(cluster=summary, ranks=_ranks_of(state, statuses), problem=problem)


async def _bounded(waiting: Any, name: str) -> Any:
    try:
        return await asyncio.wait_for(waiting, ANSWER_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"the supervisor of cluster {name!r} did not answer within {ANSWER_SECONDS:g} s: it may be suspended or "
            "wait for a disk; try again"
        ) from None


def find(id: str) -> tuple[Path, ClusterState | ClusterError | None]:
    """Return the folder of a cluster and its state.

    Args:
        id: Id of the cluster.

    Raises:
        UnknownError: There is no such cluster.
    """
    for folder, state in known_clusters():
        if folder.name == id:
            return folder, state
    raise UnknownError(
        f"there is no cluster {id[:64]!r}: it was stopped, or never started; the list has those there are"
    )


def all_clusters() -> list[m.ClusterSummary]:
    """Return every cluster of this user. Waits for the disk, and half a second for each cluster that is starting."""
    return [summary_of(folder, state) for folder, state in known_clusters()]


def summary_of(folder: Path, state: ClusterState | ClusterError | None) -> m.ClusterSummary:
    """Return a cluster's entry in the list.

    Args:
        folder: The cluster's folder.
        state: Its state; an error if the file is damaged; None if there is none yet.
    """
    if isinstance(state, ClusterError):
        return m.ClusterSummary(id=folder.name, name=folder.name, state="damaged", text=str(state))
    if state is None:
        words = _starting(folder)
        kind, text = ("ended", "it did not come up") if words is None else ("starting", words)
        return m.ClusterSummary(id=folder.name, name=folder.name, state=kind, text=text)
    kind = "running" if state.running else "elsewhere" if state.host != this_host() else "ended"
    return m.ClusterSummary(
        id=folder.name,
        name=state.name,
        state=kind,
        engines=len(state.engines),
        host=state.host,
        hosts=list(state.hosts),
        link=state.link,
        started=state.started,
        text="" if kind == "running" else _text_of(state),
    )


def _text_of(state: ClusterState | ClusterError | None) -> str:
    if state is None:
        return ""
    if isinstance(state, ClusterError):
        return str(state)
    if state.host != this_host():
        return f"its controller is on host {state.host}; open Jupyter there to look at it"
    return state.over or "its controller has ended; %speedlab start begins another one of that name"


def _starting(folder: Path) -> str | None:
    """Return what the start of a cluster waits for, as its supervisor reports it; None if no start is in progress."""
    with contextlib.suppress(OSError, ChannelClosedError):
        channel = connect(folder / SUPERVISOR_SOCKET, asked.FromSupervisor)
        try:
            # Disconnecting is harmless: only a cancel command ends a start.
            channel.send(asked.Hello())
            answer = channel.receive() if channel.ready(_STARTING_SECONDS) else None
        except UnfitMessageError as error:
            return _other_version_text(error)
        finally:
            channel.close()
        return answer.text if isinstance(answer, asked.Progress | asked.Refused) else ""
    return None


def _other_version_text(error: UnfitMessageError) -> str:
    return (
        f"its supervisor says what this server does not understand ({error}): they come from different versions of "
        "SpeedLab; stop the cluster with the one that has started it"
    )


def _ranks_of(state: ClusterState, statuses: dict[int, asked.RankStatus]) -> list[m.Rank]:
    ranks = []
    for engine in state.engines:
        status = statuses.get(engine.rank)
        device = state.devices[engine.rank] if engine.rank < len(state.devices) else None
        reported = device and m.Device(
            kind=device.kind,
            name=device.name,
            capacity_bytes=device.capacity_bytes,
            free_bytes=device.free_bytes,
            cores=len(device.cores),
        )
        cores = status.cpu_cores if status else None
        ranks.append(
            m.Rank(
                rank=engine.rank,
                state=status.state if status else "unknown" if state.running else "dead",
                pid=status.pid if status else engine.pid,
                rss_bytes=status.rss_bytes if status else 0,
                host=engine.host,
                device=reported,
                cpu_share=cores / len(device.cores) if cores is not None and device and device.cores else None,
                gpu_share=status.gpu_share if status else None,
            )
        )
    return ranks
