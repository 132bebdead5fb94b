"""The supervisor's side of its client connections.

Each client has a reading thread, which answers requests in order. Slow requests (restart, interrupt, resize) get a
thread of their own, so that the client can send further requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from speedlab.cluster.errors import DIED, ClusterError
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, UnfitMessageError, peer_of
from speedlab.cluster.supervisor.run_locks import RunLock
from speedlab.cluster.supervisor.work_queue import LOST, Submission

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.supervisor import Supervisor

log = logging.getLogger("speedlab.supervisor")

_LONG = (m.Interrupt, m.Restart, m.ResizeCluster, m.Stop, m.LockRun, m.ResumeSubmission)
_READY_SECONDS = 0.05
_SIGN_SECONDS = 2.0
"""Interval at which a client gets a sign of life while its cluster starts."""
_UNREAD_SECONDS = 2.0
"""A client that does not read for this long is disconnected: a suspended kernel must not block the notifications of
other clients. It reconnects and asks again for what it waits for.
"""


class Server:
    """Accept clients on a listening socket until it is closed."""

    def __init__(self, listening: socket.socket, supervisor: Supervisor) -> None:
        """Start to accept clients.

        Args:
            listening: Listening Unix socket.
            supervisor: Executes the requests.
        """
        self._listening = listening
        self._supervisor = supervisor
        self._clients: set[ClientSession] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="speedlab-accept", daemon=True).start()

    @property
    def clients(self) -> list[ClientSession]:
        """Connected clients."""
        with self._lock:
            return list(self._clients)

    def forget(self, client: ClientSession) -> None:
        """Remove a client that has disconnected."""
        with self._lock:
            self._clients.discard(client)

    def close(self) -> None:
        """Accept no new client, and disconnect the current ones."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for client in self.clients:
            client.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            if not _is_ours(connection):
                connection.close()
                continue
            channel = Channel(connection, m.FromClient)
            # A client that does not read must not block the notifications of others.
            channel.bound_sending(_UNREAD_SECONDS)
            client = ClientSession(channel, self._supervisor, self)
            with self._lock:
                self._clients.add(client)
            client.start()


class ClientSession:
    """The connection to one client."""

    def __init__(self, channel: Channel, supervisor: Supervisor, server: Server) -> None:
        self._channel, self._supervisor, self._server = channel, supervisor, server
        self._asked_for: dict[str, Submission] = {}
        self.listens = False
        self.gone = False
        self._cancelled: dict[int, threading.Event] = {}
        self._holds: dict[str, Path] = {}
        """Runs that this client has locked, by the key of the lock."""

    def start(self) -> None:
        """Start the reading thread."""
        threading.Thread(target=self._serve, name="speedlab-client", daemon=True).start()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def send(self, message: m.ProtocolMessage) -> bool:
        """Send a message; return False if the client has disconnected."""
        try:
            self._channel.send(message)
        except ChannelClosedError:
            return False
        return True

    # ---- on the reading thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            if self._greet():
                while True:
                    try:
                        self._take(self._channel.receive())
                    except UnfitMessageError as error:
                        self.send(m.Refused(call=error.call, kind="TypeError", text=str(error)))
        except ChannelClosedError:
            pass
        finally:
            self.gone = True
            self._server.forget(self)
            self._channel.close()
            self._supervisor.left(self)

    def _greet(self) -> bool:
        hello = self._channel.receive()
        version = hello.version if isinstance(hello, m.Hello) else None
        if version != m.VERSION:
            text = (
                f"the cluster's supervisor speaks version {m.VERSION} of its protocol, and this client {version}: they "
                "come from different versions of SpeedLab; stop the cluster with the one that has started it"
            )
            self.send(m.Refused(call=0, kind="OtherVersionError", text=text))
            return False
        said_at = time.monotonic()
        said: str | None = None  # Send a first sign at once: a client that cancels the start waits for it.
        try:
            while (token := self._supervisor.ready(_READY_SECONDS)) is None:
                if self._supervisor.starting != said or time.monotonic() - said_at > _SIGN_SECONDS:
                    said, said_at = self._supervisor.starting, time.monotonic()
                    self.send(m.Progress(call=0, text=said))
                if self._channel.ready() and isinstance(self._channel.receive(), m.Cancel):
                    self._supervisor.cancel_start()
        except ClusterError as error:
            self.send(m.Refused(call=0, kind="ClusterError", text=str(error)))
            return False
        self.send(m.Welcome(token=token))
        return True

    def _take(self, question: Any) -> None:
        if isinstance(question, m.Cancel):
            if (cancelled := self._cancelled.get(question.call)) is not None:
                cancelled.set()
        elif isinstance(question, _LONG):
            # Before the thread starts, because a Cancel for this request may follow at once.
            self._cancelled[question.call] = threading.Event()
            threading.Thread(target=self._answer, args=(question,), name="speedlab-question", daemon=True).start()
        else:
            self._answer(question)

    def _answer(self, question: Any) -> None:
        try:
            value = _HANDLERS[type(question)](self, question)
        except Exception as error:
            self.send(m.Refused(call=question.call, kind=type(error).__name__, text=str(error)))
            if not isinstance(error, ClusterError | ValueError | RuntimeError | OSError):
                log.exception("%s could not be answered", type(question).__name__)
            return
        finally:
            self._cancelled.pop(question.call, None)
        self.send(m.Answer(call=question.call, value=msgspec.Raw(msgspec.msgpack.encode(value))))
        # Only after the answer was sent.
        if isinstance(question, m.Stop):
            self._supervisor.end()

    # ---- handlers of requests ----------------------------------------------------------------------------------------

    def _submit(self, question: m.Submit) -> list[int]:
        submission = self._supervisor.submit(question, self._say if question.shown else None)
        self._follow(submission)
        return submission.ranks

    def _watch(self, question: m.ResumeSubmission) -> list[int]:
        submission = self._supervisor.find(question.id)
        if submission is None:
            return []
        if question.shown:
            self._supervisor.output.show(submission, self._say)
        self._follow(submission)
        return submission.ranks

    def _follow(self, submission: Submission) -> None:
        self._asked_for[submission.id] = submission
        submission.on_end(self._tell)

    def _say(self, submission: Submission, rank: int, kind: str, content: dict[str, Any]) -> None:
        self.send(m.DisplayMessage(id=submission.id, rank=rank, kind=kind, content=content))

    def _tell(self, submission: Submission, rank: int) -> None:
        """Notify the client that a rank has ended, after the last output of the rank."""
        self._supervisor.later(lambda: self._tell_now(submission, rank))

    def _tell_now(self, submission: Submission, rank: int) -> None:
        failure = submission.failures.get(rank)
        if failure is None or failure.kind not in (DIED, LOST):  # These ranks send no further output.
            self._supervisor.output.settle(submission, rank)
        reported = self.send(
            m.Ended(
                id=submission.id,
                rank=rank,
                value=submission.values.get(rank, b""),
                failure=failure.to_dict() if failure is not None else None,
            )
        )
        if submission.done:
            self._asked_for.pop(submission.id, None)
            self._supervisor.output.hide(submission)
            if reported:
                self._supervisor.forget(submission)

    def _interrupt(self, question: m.Interrupt) -> list[int]:
        return self._supervisor.interrupt(question)

    def _look(self, question: m.GetRankStatus) -> list[m.RankStatus]:
        return self._supervisor.engines.status()

    def _restart(self, question: m.Restart) -> None:
        self._supervisor.engines.restart(question.rank, *question.more)

    def _resize(self, question: m.ResizeCluster) -> None:
        if question.only_look:
            self._supervisor.engines.check_size(question.engines)
            return
        self._supervisor.resize(
            question.engines,
            lambda text: self.send(m.Progress(call=question.call, text=text)),
            self._cancelled[question.call].is_set,
        )

    def _stop(self, question: m.Stop) -> None:
        self._supervisor.stop()

    def _listen(self, question: m.SubscribeOutput) -> None:
        self.listens = question.on

    def _begin(self, question: m.StartRun) -> None:
        self._supervisor.runs.begin(Path(question.folder))

    def _post(self, question: m.SendCommand) -> int:
        return self._supervisor.runs.post(Path(question.folder), question.word, question.arguments, question.key)

    def _attend(self, question: m.WakeRun) -> None:
        self._supervisor.runs.attend(Path(question.folder))

    def _standing(self, question: m.GetRunStatus) -> m.RunStatus:
        return self._supervisor.runs.standing(Path(question.folder))

    def _hold(self, question: m.LockRun) -> None:
        cancelled, path = self._cancelled[question.call], Path(question.folder)
        self._supervisor.runs.hold(path, RunLock.of(question.key, self._channel.peer_pid), question.seconds, self)
        self._holds[question.key] = path
        if self.gone or cancelled.is_set():  # The client left during the wait, so no other code would release the lock.
            self._holds.pop(question.key, None)
            self._supervisor.runs.leave(path, question.key, self)

    def _let_go(self, question: m.ReleaseRun) -> None:
        self._holds.pop(question.key, None)
        self._supervisor.runs.release(Path(question.folder), question.key)

    @property
    def holds(self) -> list[tuple[Path, str]]:
        """(run, key) of each run that this client has locked."""
        return [(path, key) for key, path in list(self._holds.items())]


_HANDLERS: dict[type, Callable[[ClientSession, Any], Any]] = {
    m.Submit: ClientSession._submit,
    m.ResumeSubmission: ClientSession._watch,
    m.Interrupt: ClientSession._interrupt,
    m.GetRankStatus: ClientSession._look,
    m.Restart: ClientSession._restart,
    m.ResizeCluster: ClientSession._resize,
    m.Stop: ClientSession._stop,
    m.SubscribeOutput: ClientSession._listen,
    m.StartRun: ClientSession._begin,
    m.SendCommand: ClientSession._post,
    m.WakeRun: ClientSession._attend,
    m.GetRunStatus: ClientSession._standing,
    m.LockRun: ClientSession._hold,
    m.ReleaseRun: ClientSession._let_go,
}


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the other process belongs to this user or root. Without SO_PEERCRED, the folder's mode protects
    the socket.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    return peer_of(connection)[1] in (os.getuid(), 0)
