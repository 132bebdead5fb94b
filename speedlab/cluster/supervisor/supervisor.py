"""The supervisor of a cluster: the process that owns the client of the controller.

It starts the engines, or takes over the engines that an earlier supervisor left. Kernels and terminals are its clients
(`server.py`). Everything that must outlive a client is part of this process:

- the queue of submissions (`work_queue.py`),
- the engines (`engines.py`),
- the runs (`runs.py`),
- the output of the ranks (`output.py`).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.start as start
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor.engines import Engines
from speedlab.cluster.supervisor.output import RankOutput, Sayings
from speedlab.cluster.supervisor.process_control import LocalProcesses, ProcessController
from speedlab.cluster.supervisor.resize import undo_unfinished
from speedlab.cluster.supervisor.runs import SupervisedRuns
from speedlab.cluster.supervisor.server import ClientSession, Server
from speedlab.cluster.supervisor.work_queue import Submission
from speedlab.cluster.worker.fork_server_client import ForkServer

if TYPE_CHECKING:
    from speedlab.hardware import Device

log = logging.getLogger("speedlab.supervisor")

Begun = tuple[ClusterState, Any, ProcessController]
"""(state of the cluster, client of the controller, control of the engine processes)."""
Begin = Callable[[Callable[[str], None], threading.Event], Begun]
"""begin(progress, cancelled): start engines, or find the running ones."""

_WATCH_SECONDS = 1.0
_POLL_SECONDS = 0.02
_MOST_KEPT = 500
"""Number of ended submissions that are kept for a client that reconnects and asks for their result."""
_STOP_PATIENCE_SECONDS = 1.0


class Supervisor:
    """Own the engines and runs of one cluster, and answer the clients."""

    engines: Engines
    output: RankOutput
    runs: SupervisedRuns

    def __init__(self, home: ClusterDir, token: str) -> None:
        self._home, self._token = home, token
        self._submissions: dict[str, Submission] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._problem: ClusterError | None = None
        self.starting = ""
        """What the start waits for, as a text for users."""
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._later: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._server: Server | None = None

    def serve(self, server: Server, begin: Begin) -> None:
        """Serve clients until the cluster is stopped or its controller dies.

        Args:
            server: Connections to the clients.
            begin: Start the engines, or find the running ones.

        Raises:
            ClusterError: If the engines do not start. Waiting clients get the same error first.
        """
        self._server = server
        threading.Thread(target=self._serve_later, name="speedlab-tell", daemon=True).start()
        try:
            state, client, hands = begin(self._tell_of_start, self._cancelled)
            self.engines = Engines(self._home, state, client, hands)
            self.output = self.engines.output
            self.output.on_lines = self._printed
            undo_unfinished(self.engines)
            if state.hosts:
                try:
                    self._look_at_hosts()  # Before runs are taken over: no recovery on a lost host.
                except Exception:  # The watch thread looks again.
                    log.exception("the hosts cannot be looked after")
            self.runs = SupervisedRuns(self.engines)
            self.runs.take_over()
        except BaseException as error:
            self._problem = (
                error if isinstance(error, ClusterError) else ClusterError(f"{type(error).__name__}: {error}")
            )
            self._ready.set()
            deadline = time.monotonic() + _STOP_PATIENCE_SECONDS
            while server.clients and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)  # Waiting clients receive the error and disconnect.
            raise
        self._ready.set()
        if state.hosts:
            threading.Thread(target=self._watch_hosts, name="speedlab-hosts", daemon=True).start()
        while not self._ended.wait(_WATCH_SECONDS):
            try:
                self.runs.let_go_of_abandoned()
            except Exception:  # A deleted folder or a full disk must not stop the cluster.
                log.exception("a lock that no client holds cannot be released")
            if not self._stopping and not self.engines.state.running:
                self._controller_died()
        server.close()

    def ready(self, seconds: float) -> str | None:
        """Wait until the engines are ready and return the token of the cluster; None after `seconds`.

        Raises:
            ClusterError: If the engines did not start.
        """
        if not self._ready.wait(seconds):
            return None
        if self._problem is not None:
            raise self._problem
        return self._token

    def cancel_start(self) -> None:
        """Cancel a start in progress."""
        self._cancelled.set()

    def _tell_of_start(self, words: str) -> None:
        self.starting = words

    def submit(self, question: m.Submit, says: Sayings | None) -> Submission:
        """Queue the work of a client; a repeated request with the same id returns the known submission.

        Args:
            question: Packed work and its ranks.
            says: Receives the output of the ranks in this submission; None if the client does not show it.

        Raises:
            ClusterError: If a rank does not exist or its engine is dead.
        """
        with self._lock:
            known = self._find(question.id)
            if known is not None:
                return known
            ranks = self.engines.living(question.ranks)
            submission = Submission(question.work, ranks, id=question.id, shown=question.shown)
            while len(self._submissions) >= _MOST_KEPT and (ended := self._oldest_ended()) is not None:
                del self._submissions[ended]
            self._submissions[submission.id] = submission
            if says is not None:
                self.output.show(submission, says)
            self.engines.line.add(submission)
        return submission

    def forget(self, submission: Submission) -> None:
        """Drop a submission whose end its client has received."""
        self._submissions.pop(submission.id, None)

    def _oldest_ended(self) -> str | None:
        return next((id for id, submission in list(self._submissions.items()) if submission.done), None)

    def find(self, id: str) -> Submission | None:
        """Return a submission of this supervisor that is still kept, or one of an earlier supervisor.

        Args:
            id: Id of the submission.

        Returns:
            The submission; None if it is unknown.
        """
        with self._lock:
            return self._find(id)

    def _find(self, id: str) -> Submission | None:
        return self._submissions.get(id) or self.engines.adopted.find(id)

    def interrupt(self, question: m.Interrupt) -> list[int]:
        """Interrupt a run, a submission or everything.

        Args:
            question: Request with the folder of a run, the id of a submission, or neither.

        Returns:
            The ranks that are idle afterwards.
        """
        if question.folder:
            return self.runs.interrupt(Path(question.folder), question.seconds)
        if not question.id:
            return self.engines.interrupt(None, question.seconds)
        only = self.find(question.id)
        return self.engines.interrupt(only, question.seconds) if only is not None else []

    def resize(self, engines: int, progress: Callable[[str], object], cancelled: Callable[[], bool]) -> None:
        """Change the number of engines; see `Engines.resize`."""
        self.engines.resize(engines, progress, cancelled)

    def stop(self) -> None:
        """Interrupt the ranks, then end all engines, their child processes and the controller."""
        self._stopping = True
        self.runs.close()
        try:
            if self.engines.state.running:
                self.engines.interrupt()
        finally:  # Return the hosts even if the interrupt fails.
            self.engines.abandon("the cluster was stopped")
            self.engines.hands.stop()
            self.engines.close()

    def end(self) -> None:
        """Let the process end, after everything queued with `later`."""
        self.later(self._ended.set)

    def left(self, client: ClientSession) -> None:
        """Release the run locks of a client that has disconnected."""
        if self._ready.is_set() and self._problem is None:
            for path, key in client.holds:
                self.runs.leave(path, key, client)

    def later(self, work: Callable[[], object]) -> None:
        """Execute work on the thread that notifies clients, in the order of the calls.

        Args:
            work: Function without arguments.
        """
        self._later.put(work)

    def _serve_later(self) -> None:
        while True:
            work = self._later.get()
            try:
                work()
            except Exception:
                log.exception("a client could not be notified")

    def _printed(self, ranks: list[int], stream: str, text: str) -> None:
        if self._server is None:
            return
        message = m.Printed(ranks=ranks, stream=stream, text=text)
        for client in self._server.clients:
            if client.listens:
                client.send(message)

    def _watch_hosts(self) -> None:
        """Report within seconds when hosts are lost or reachable again; end the cluster if all its hosts were taken
        away.
        """
        while not self._ended.wait(_WATCH_SECONDS) and not self._stopping:
            try:
                lost = self._look_at_hosts()
                self.engines.interrupt_those_back()
                for host in self.engines.hands.back():
                    ranks = [engine.rank for engine in self.engines.state.engines]
                    self._printed(ranks, "stderr", f"{host} answers again: run.reshape(engines=…) takes it in\n")
                if lost and (why := self.engines.hands.why_over()) is not None and not self._stopping:
                    self._over(f"cluster {self._home.name!r} is over: {why}")
            except Exception:
                if not self._stopping:
                    log.exception("the hosts cannot be looked after")

    def _look_at_hosts(self) -> Collection[str]:
        """Return the lost hosts, and report each newly lost one. May take seconds."""
        lost = self.engines.hands.lost()
        for ranks, reason in self.engines.give_up(lost):
            self._printed(ranks, "stderr", f"{reason}\n")
        return lost

    def _controller_died(self) -> None:
        self._over(f"the controller of cluster {self._home.name!r} has died or was stopped")

    def _over(self, reason: str) -> None:
        """End the cluster after its engines became unreachable: record the reason, fail what waits, end what is
        left.
        """
        self._stopping = True
        log.error("%s", reason)
        self.runs.close()
        # Record the reason first: handles that find the cluster dead show it.
        self.engines.home.write(replace(self.engines.state, over=reason))
        self.engines.abandon(reason)
        left = [found for found in processes.marked(self._token) if found.pid != os.getpid()]
        processes.end(left, patience_seconds=0.0)
        self.runs.settle(_STOP_PATIENCE_SECONDS)
        self.end()


def start_here(
    home: ClusterDir,
    token: str,
    devices: Sequence[Device],
    backend: str,
    link: str,
    timeout_seconds: float,
    nursery: ForkServer,
) -> Begin:
    """Return a function that starts engines on this host.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        devices: Devices by rank.
        backend: Backend of the process group.
        link: Simulated link between ranks.
        timeout_seconds: Timeout of collectives.
        nursery: Fork server for CPU engines.
    """

    def begin(progress: Callable[[str], None], cancelled: threading.Event) -> Begun:
        state, client = start.start_cluster(
            home, token, devices, backend, link, timeout_seconds, nursery, cancelled.is_set
        )
        return state, client, LocalProcesses(home, client, token, nursery)

    return begin


def find(home: ClusterDir) -> Begin:
    """Return a function that finds the engines that an earlier supervisor left.

    Raises:
        ClusterError: When called, if the cluster does not run.
    """

    def begin(progress: Callable[[str], None], cancelled: threading.Event) -> Begun:
        state = home.read()
        if state is None or not state.running:
            raise ClusterError(f"cluster {home.name!r} does not run")
        client = start.connect(home, state)
        if not state.hosts:
            environment = home.environment(state.token, state.backend, state.link, state.timeout_seconds)
            nursery = ForkServer({**os.environ, **environment}, home.nursery_log)
            hands = LocalProcesses(home, client, state.token, nursery)
            if unknown := hands.end_unknown(state.engines):
                log.info("engines that no record lists were ended: processes %s", unknown)
            return state, client, hands
        from speedlab.cluster.supervisor.host_process_control import found_on_hosts

        return state, client, found_on_hosts(home, state, client)

    return begin
