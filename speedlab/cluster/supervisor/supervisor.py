"""The supervisor of a cluster: one process, started with the cluster, which owns the controller's client.

It starts the engines, or takes over those that run when an earlier supervisor has ended. Kernels and terminals are its
clients (`server.py`); what must outlive them lives here: the order of submissions (`submissions.py`), the engines
(`engines.py`), the runs (`runs.py`), what ranks print (`output.py`).
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
"""What runs, the controller's client, and what can be done to the engines' processes."""
Begin = Callable[[Callable[[str], None], threading.Event], Begun]
"""begin(progress, cancelled): starts engines, or finds them."""

_WATCH_SECONDS = 1.0
_POLL_SECONDS = 0.02
_MOST_KEPT = 500
"""Submissions whose end nobody was told yet: their client may come back and ask."""
_STOP_PATIENCE_SECONDS = 1.0


class Supervisor:
    """What the process does between its first client and its end."""

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
        """What the start waits for, in words."""
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._later: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._server: Server | None = None

    def serve(self, server: Server, begin: Begin) -> None:
        """Serve until the cluster is stopped or its controller has died. `begin` starts the engines, or finds them."""
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
                    self._look_at_hosts()  # A run is not brought back on one that is lost.
                except Exception:  # The watch looks again.
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
                time.sleep(_POLL_SECONDS)  # Those who wait for it are told, and go.
            raise
        self._ready.set()
        if state.hosts:
            threading.Thread(target=self._watch_hosts, name="speedlab-hosts", daemon=True).start()
        while not self._ended.wait(_WATCH_SECONDS):
            try:
                self.runs.let_go_of_abandoned()
            except Exception:  # A folder that is gone, a full disk: the cluster goes on.
                log.exception("what is held by nobody any more cannot be let go of")
            if not self._stopping and not self.engines.state.running:
                self._controller_died()
        server.close()

    def ready(self, seconds: float) -> str | None:
        """The cluster's token, once its engines are ready; None when they are not within `seconds`. Raises ClusterError
        when they did not come up."""
        if not self._ready.wait(seconds):
            return None
        if self._problem is not None:
            raise self._problem
        return self._token

    def cancel_start(self) -> None:
        """Give up starting what is not ready."""
        self._cancelled.set()

    def _tell_of_start(self, words: str) -> None:
        self.starting = words

    def submit(self, question: m.Submit, says: Sayings | None) -> Submission:
        """`says`: is told what ranks say in it."""
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
        """Its end was told to a client that waits for it."""
        self._submissions.pop(submission.id, None)

    def _oldest_ended(self) -> str | None:
        return next((id for id, submission in list(self._submissions.items()) if submission.done), None)

    def find(self, id: str) -> Submission | None:
        """A submission of this supervisor that has not ended, or of an earlier one."""
        with self._lock:
            return self._find(id)

    def _find(self, id: str) -> Submission | None:
        return self._submissions.get(id) or self.engines.adopted.find(id)

    def interrupt(self, question: m.Interrupt) -> list[int]:
        if question.folder:
            return self.runs.interrupt(Path(question.folder), question.seconds)
        if not question.id:
            return self.engines.interrupt(None, question.seconds)
        only = self.find(question.id)
        return self.engines.interrupt(only, question.seconds) if only is not None else []

    def resize(self, engines: int, progress: Callable[[str], object], cancelled: Callable[[], bool]) -> None:
        self.engines.resize(engines, progress, cancelled)

    def stop(self) -> None:
        """End all engines, what they started, and the controller; interrupts first."""
        self._stopping = True
        self.runs.close()
        try:
            if self.engines.state.running:
                self.engines.interrupt()
        finally:  # Hosts are given back whatever their engines do.
            self.engines.abandon("the cluster was stopped")
            self.engines.hands.stop()
            self.engines.close()

    def end(self) -> None:
        """Let the process end."""
        self.later(self._ended.set)

    def left(self, client: ClientSession) -> None:
        """A client is gone."""
        if self._ready.is_set() and self._problem is None:
            for path, key in client.holds:
                self.runs.leave(path, key, client)

    def later(self, work: Callable[[], object]) -> None:
        """Do it on the thread that tells clients of what has ended, in the order of these calls."""
        self._later.put(work)

    def _serve_later(self) -> None:
        while True:
            work = self._later.get()
            try:
                work()
            except Exception:
                log.exception("a client could not be told")

    def _printed(self, ranks: list[int], stream: str, text: str) -> None:
        if self._server is None:
            return
        message = m.Printed(ranks=ranks, stream=stream, text=text)
        for client in self._server.clients:
            if client.listens:
                client.send(message)

    def _watch_hosts(self) -> None:
        """Name a host that goes, within seconds, and tell whoever waits for its ranks; or that all are taken back."""
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
        """The hosts that are lost, each told once. May take seconds."""
        lost = self.engines.hands.lost()
        for ranks, reason in self.engines.give_up(lost):
            self._printed(ranks, "stderr", f"{reason}\n")
        return lost

    def _controller_died(self) -> None:
        self._over(f"the controller of cluster {self._home.name!r} has died or was stopped")

    def _over(self, reason: str) -> None:
        """Nothing reaches the engines any more: record it, tell everybody, end what is left."""
        self._stopping = True
        log.error("%s", reason)
        self.runs.close()
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
    """Start engines on this host; the rest as for `start.start_cluster`."""

    def begin(progress: Callable[[str], None], cancelled: threading.Event) -> Begun:
        state, client = start.start_cluster(
            home, token, devices, backend, link, timeout_seconds, nursery, cancelled.is_set
        )
        return state, client, LocalProcesses(home, client, token, nursery)

    return begin


def find(home: ClusterDir) -> Begin:
    """The engines that an earlier supervisor has left."""

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
                log.info("engines that nobody counted were ended: processes %s", unknown)
            return state, client, hands
        from speedlab.cluster.supervisor.host_process_control import found_on_hosts

        return state, client, found_on_hosts(home, state, client)

    return begin
