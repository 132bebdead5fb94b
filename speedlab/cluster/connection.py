"""A handle's connection to the supervisor of its cluster.

The connection outlives a supervisor. If the supervisor has ended, the next request starts a new one, which takes the
cluster over. Unfinished submissions are requested again.

`ClusterRuns` holds the requests about runs.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.files.processes as processes
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState
from speedlab.cluster.interrupts import is_the_users
from speedlab.cluster.results import RankResults, RanksOutput
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor import spawn
from speedlab.cluster.supervisor.client import Client, SupervisorGoneError

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster


_MOST_ASKED = 3


class SupervisorConnection:
    """The connection to the supervisor of the cluster with this name."""

    def __init__(self, name: str) -> None:
        """Prepare the connection; nothing is started or connected.

        Args:
            name: Name of the cluster.
        """
        self.name = name
        self._home = ClusterDir(name)
        self._lock = threading.RLock()
        self._state: ClusterState | None = None
        self._stamp = 0
        self._client: Client | None = None
        self._unfinished: weakref.WeakValueDictionary[str, RankResults] = weakref.WeakValueDictionary()
        self.output = RanksOutput(self)
        """What the ranks write to stdout and stderr."""

    @property
    def running(self) -> bool:
        """Whether the cluster's controller is alive."""
        state = self._home.read()
        return state is not None and state.running

    def check_controller(self) -> None:
        """Raise ClusterError if the cluster has ended, so that no caller waits for ever. Reconnects if only the
        supervisor has ended.
        """
        state = self._state
        if state is None or not state.running:
            left = self._home.read()
            known = left.over if state is not None and left is not None and left.token == state.token else ""
            reason = known or f"the controller of cluster {self.name!r} has died or was stopped"
            self._abandon(reason)
            raise ClusterError(f"{reason}; speedlab.Cluster(name={self.name!r}) starts it again")
        if self._lost:
            self._reconnect()

    @property
    def _lost(self) -> bool:
        return self._client is None or self._client.lost

    def _ask(
        self, question: m.Question, *, progress: Callable[[str], object] | None = None, seconds: float | None = None
    ) -> Any:
        """Send a request, to a new supervisor if the old one ends meanwhile. So requests must be idempotent.

        Raises TimeoutError without an answer after `seconds`.
        """
        for _ in range(_MOST_ASKED):
            try:
                self._now()
                client = self._client
                assert client is not None
                return client.ask(question, progress=progress, seconds=seconds)
            except SupervisorGoneError:
                continue
        raise ClusterError(
            f"the supervisor of cluster {self.name!r} ended {_MOST_ASKED} times over the same question "
            f"({type(question).__name__}); its log is {self._home.log / 'supervisor.log'}"
        )

    def _submit(self, work: bytes, ranks: Iterable[int] | None, *, shown: bool = False) -> RankResults:
        results = RankResults(self, secrets.token_hex(8), work, shown=shown)
        self._now()
        chosen = results.wanted = None if ranks is None else list(ranks)
        # Register before sending: a rank may end before the answer arrives.
        self._hear_of(results)
        try:
            results.begun(self._ask(m.Submit(id=results.id, work=work, ranks=chosen, shown=shown)))
        except KeyboardInterrupt:
            del self._unfinished[results.id]  # Not requested again if the interrupt has closed the connection.
            if is_the_users():  # The caller gets no handle to the submission, so it must not continue.
                processes.uninterrupted(results.interrupt)
            raise
        return results

    def _hear_of(self, results: RankResults) -> None:
        self._unfinished[results.id] = results
        if self._client is not None:
            self._client.hear_of(results.id, results)

    def _interrupt(self, timeout_seconds: float, *, id: str = "", folder: str = "") -> list[int]:
        return self._ask(m.Interrupt(id=id, folder=folder, seconds=timeout_seconds))

    def _reconnect(self) -> None:
        """Connect again, to a new supervisor if the old one has ended."""
        with self._lock:
            if self._lost:
                with self._home.lock():
                    self._connect()

    def _connect(self) -> None:
        """Connect to the supervisor and request unfinished submissions again. Call with the lock of the cluster."""
        state = self._state
        assert state is not None
        self._client = None
        try:
            self._client = spawn.connect(self._home, state.token, self.output.printed)
        except (ClusterError, FileNotFoundError):
            if state.running:
                raise
            # The cluster has ended. The error would show unrelated logs.
            raise ClusterError(
                f"cluster {self.name!r} ended just now; speedlab.Cluster(name={self.name!r}) starts it again"
            ) from None
        self.output.connected()
        try:
            for results in [results for results in self._unfinished.values() if not results.done]:
                self._ask_again(self._client, results)
        except BaseException:
            self._client.close()  # The next connection requests all of them again.
            raise

    def _ask_again(self, client: Client, results: RankResults) -> None:
        client.hear_of(results.id, results)
        if known := client.ask(m.ResumeSubmission(id=results.id, shown=results.shown)):
            results.begun(known)
            return
        # The supervisor did not receive it, or did not begin with it.
        wanted = results.ranks or results.wanted
        try:
            results.begun(client.ask(m.Submit(id=results.id, work=results.work, ranks=wanted, shown=results.shown)))
        # The engine has died: only the caller that waits for this submission gets the error.
        except ClusterError as error:
            results.begun(wanted or range(len(self._state.devices) if self._state is not None else 1))
            results.abandon(str(error))

    def _take(self, state: ClusterState) -> None:
        self._state, self._stamp = state, self._home.stamp()

    def _disconnect(self, reason: str) -> None:
        client, self._client, self._state = self._client, None, None
        self._abandon(reason)
        if client is not None:
            client.close()

    def _abandon(self, reason: str) -> None:
        for results in list(self._unfinished.values()):
            results.abandon(reason)

    def _now(self) -> ClusterState:
        """Return the current state of the cluster. Raises ClusterError if it does not run."""
        state = self._state
        if state is None:
            raise ClusterError(f"cluster {self.name!r} is not running; cluster.start() starts it")
        # Compare the time stamp first, because every request passes here; read the file only after a change.
        stamp = self._home.stamp()
        if stamp != self._stamp:
            found = self._home.read()
            if found is None or found.token != state.token:
                raise ClusterError(
                    f"cluster {self.name!r} was stopped by another handle; "
                    f"speedlab.Cluster(name={self.name!r}) starts or finds the present one"
                )
            self._state, self._stamp, state = found, stamp, found
        self.check_controller()
        return state


_LET_GO_SECONDS = 10.0


class ClusterRuns:
    """Requests about the runs of a cluster, by folder."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = weakref.ref(cluster)

    def begin(self, folder: Path) -> None:
        """Start a new run on the ranks.

        Args:
            folder: Folder of the run.

        Raises:
            ClusterError: If another run is active.
        """
        self._ask(m.StartRun(folder=str(folder)))

    def post(self, folder: Path, word: str, arguments: dict[str, Any]) -> int:
        """Post a command to a run.

        Args:
            folder: Folder of the run.
            word: Name of the command.
            arguments: Arguments of the command.

        Returns:
            The number of the command.

        Raises:
            ClusterError: If an engine is dead.
        """
        return self._ask(m.SendCommand(folder=str(folder), word=word, arguments=arguments, key=secrets.token_hex(8)))

    def attend(self, folder: Path) -> None:
        """Submit a run if commands wait for it and no rank works on it.

        Args:
            folder: Folder of the run.

        Raises:
            ClusterError: If an engine is dead.
        """
        self._ask(m.WakeRun(folder=str(folder)))

    def standing(self, folder: Path) -> m.RunStatus:
        """Return whether a run is active or recovering, and its last problem.

        Args:
            folder: Folder of the run.
        """
        return self._ask(m.GetRunStatus(folder=str(folder)))

    def interrupt(self, folder: Path, seconds: float = 2.0) -> list[int]:
        """Interrupt the work of the ranks on this run, and nothing else.

        Args:
            folder: Folder of the run.
            seconds: Longest time to wait until the ranks stop.

        Returns:
            The ranks that are idle afterwards.
        """
        return self._ask(m.Interrupt(folder=str(folder), seconds=seconds))

    @contextlib.contextmanager
    def held(self, folder: Path, seconds: float = 10.0) -> Iterator[None]:
        """Lock a run inside the block: no rank advances it, and commands wait.

        Args:
            folder: Folder of the run, which must rest.
            seconds: Longest time to wait until it rests.

        Raises:
            ClusterError: If a rank still works on it after `seconds`.
        """
        key = secrets.token_hex(8)
        try:
            self._ask(m.LockRun(folder=str(folder), seconds=seconds, key=key))
            yield
        finally:
            # Release even after an interrupt at this point: otherwise commands wait as long as this process lives.
            # Without an answer, the lock ends with the connection.
            with contextlib.suppress(TimeoutError, ClusterError):
                processes.uninterrupted(
                    lambda: self._ask(m.ReleaseRun(folder=str(folder), key=key), seconds=_LET_GO_SECONDS)
                )

    def _ask(self, question: m.Question, *, seconds: float | None = None) -> Any:
        cluster = self._cluster()
        assert cluster is not None, "a caller that asks about a run holds its cluster"
        return cluster._ask(question, seconds=seconds)
