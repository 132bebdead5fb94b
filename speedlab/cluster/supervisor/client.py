"""Client of a cluster's supervisor: send requests, receive answers and notifications."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import Any, Protocol

import msgspec

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.processes import is_suspended
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, UnfitMessageError, connect
from speedlab.config import ConfigError
from speedlab.telemetry.run_folder import RunFolderError

log = logging.getLogger("speedlab.cluster")

_CANCEL_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 60.0
"""Longest silence during a start. On a busy host, the supervisor needs some seconds for its imports."""


class SupervisorGoneError(ConnectionError):
    """The supervisor has ended, or the connection to it; a new connection can be made."""


class StartGivenUpError(ClusterError):
    """The user cancelled a start in progress."""


class OtherVersionError(ClusterError):
    """The supervisor uses another version of the protocol: it refuses the greeting, or sends unknown messages."""


_KINDS = {
    kind.__name__: kind
    for kind in (ClusterError, OtherVersionError, RunError, RunFolderError, ConfigError, ValueError, TypeError)
}


class SubmissionListener(Protocol):
    """Receives the notifications about one submission."""

    def ended(self, message: m.Ended) -> object: ...
    def said(self, message: m.DisplayMessage) -> object: ...


class Client:
    """A connection to a supervisor. Methods are thread-safe; the connection closes when the object is dropped."""

    def __init__(
        self,
        path: Path,
        printed: Callable[[list[int], str, str], object],
        progress: Callable[[str], object] = lambda words: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect and wait until the cluster is ready.

        Args:
            path: Socket of the supervisor.
            printed: Called with (ranks, stream, text) after `Subscribe` was sent.
            progress: Called with what the start waits for.
            given_up: Polled during the start; True cancels it.

        Raises:
            SupervisorGoneError: If no supervisor listens at `path`.
            ClusterError: If the cluster did not start.
        """
        try:
            self._channel = connect(path, m.FromSupervisor)
        except OSError as error:
            raise SupervisorGoneError(f"{path}: {error}") from None
        self._calls = itertools.count(1)
        self._open: dict[int, tuple[m.Question, Future[Any], Callable[[str], object] | None]] = {}
        # Weak references: results that no caller holds need no notifications.
        self._hearers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self.close = weakref.finalize(self, self._channel.close)
        try:
            self.token = self._greet(progress, given_up)
        except BaseException:
            self.close()
            raise
        # The thread must not keep the client alive: a dropped handle would listen for ever.
        arguments = (weakref.ref(self), self._channel, printed)
        threading.Thread(target=_listen, args=arguments, name="speedlab-supervisor", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return self._lost.is_set()

    def ask(
        self, question: m.Question, *, progress: Callable[[str], object] | None = None, seconds: float | None = None
    ) -> Any:
        """Send a request and wait for the answer.

        Args:
            question: Request to send.
            progress: Called with each `Progress` text.
            seconds: Longest time to wait; None for no limit.

        Returns:
            The answer, of the type `question.answer`.

        Raises:
            SupervisorGoneError: If the supervisor has ended.
            TimeoutError: If there is no answer after `seconds`.
            Exception: The error with which the supervisor refused the request.
        """
        call = next(self._calls)
        question = msgspec.structs.replace(question, call=call)
        answer: Future[Any] = Future()
        with self._lock:
            if self.lost:
                raise SupervisorGoneError("the cluster's supervisor has ended")
            self._open[call] = question, answer, progress
        try:
            self._channel.send(question)
            return self._answered(question, answer, seconds)
        except ChannelClosedError as error:
            self._end()  # Mark it as lost now: a caller may retry before the listening thread notices.
            raise SupervisorGoneError(str(error)) from None
        except NoAnswer:
            raise TimeoutError(f"the cluster's supervisor did not answer within {seconds:g} s") from None
        finally:
            with self._lock:
                self._open.pop(call, None)

    def _answered(self, question: m.Question, answer: Future[Any], seconds: float | None) -> Any:
        try:
            return answer.result(seconds)
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):  # The supervisor may have ended; still raise the interrupt.
                if isinstance(question, m.ResizeCluster | m.LockRun):
                    self._channel.send(m.Cancel(call=question.call))
                # Wait, so that the next call finds the old or the new size, not a change in progress.
                if isinstance(question, m.ResizeCluster):
                    answer.result(_CANCEL_SECONDS)
            raise

    def hear_of(self, id: str, hearer: SubmissionListener) -> None:
        """Notify `hearer` about the submission `id`, as long as the caller keeps `hearer` alive.

        Args:
            id: Id of the submission.
            hearer: Listener; only a weak reference is kept.
        """
        self._hearers[id] = hearer

    def _greet(self, progress: Callable[[str], object], given_up: Callable[[], bool]) -> str:
        try:
            self._channel.send(m.Hello())
            try:
                said = ""
                while isinstance(answer := self._hear(given_up), m.Progress):
                    if answer.text != said:
                        said = answer.text
                        progress(said)
            except (KeyboardInterrupt, StartGivenUpError):
                # Only the supervisor knows what it started on other hosts, so it cleans up.
                with contextlib.suppress(ChannelClosedError):  # The supervisor may have ended just now.
                    self._channel.send(m.Cancel(call=0))
                    while isinstance(self._hear(), m.Progress):
                        continue
                raise
        except ChannelClosedError as error:
            raise SupervisorGoneError(str(error)) from None
        if isinstance(answer, m.Refused):
            raise error_of(answer)
        return answer.token

    def _hear(self, given_up: Callable[[], bool] = lambda: False) -> Any:
        """Return the next message of a starting supervisor, which sends a sign of life regularly. Raises
        ClusterError.
        """
        deadline = time.monotonic() + _SILENT_SECONDS
        while True:
            if given_up():
                raise StartGivenUpError("the start was given up; nothing of it is left")
            if self._channel.ready(_LOOK_SECONDS):
                return self._channel.receive()
            pid = self._channel.peer_pid
            if pid is not None and is_suspended(pid):
                raise ClusterError(
                    f"the cluster's supervisor, process {pid}, is suspended; let it go on (kill -CONT {pid}), or end "
                    f"it (kill -9 {pid}): then the next client starts another one, which takes over"
                )
            if time.monotonic() > deadline:
                who = f", process {pid}," if pid is not None else ""
                raise ClusterError(
                    f"the cluster's supervisor{who} has said nothing for {_SILENT_SECONDS:g} s: it may wait for a disk "
                    "or a core. Try again, or end it; then the next client starts another one, which takes over"
                )

    # ---- on the receiving thread -------------------------------------------------------------------------------------

    def _take(self, message: Any, printed: Callable[[list[int], str, str], object]) -> None:
        if isinstance(message, m.Ended | m.DisplayMessage):
            hearer = self._hearers.get(message.id)
            if hearer is not None:
                (hearer.ended if isinstance(message, m.Ended) else hearer.said)(message)
        elif isinstance(message, m.Printed):
            printed(message.ranks, message.stream, message.text)
        else:
            with self._lock:
                question, answer, progress = self._open.get(message.call, (None, None, None))
            if question is None or answer is None:
                return  # The caller has given up.
            if isinstance(message, m.Answer):
                try:
                    answer.set_result(msgspec.msgpack.decode(message.value, type=question.answer))
                except msgspec.DecodeError as error:
                    answer.set_exception(OtherVersionError(_not_understood(error)))
            elif isinstance(message, m.Refused):
                answer.set_exception(error_of(message))
            elif progress is not None:
                progress(message.text)

    def _end(self) -> None:
        self._lost.set()
        with self._lock:
            answers = [answer for _, answer, _ in self._open.values()]
        for answer in answers:
            with contextlib.suppress(Exception):  # The answer arrived at the same moment.
                answer.set_exception(SupervisorGoneError("the cluster's supervisor has ended"))


def _listen(client_of: weakref.ref[Client], channel: Channel, printed: Callable[[list[int], str, str], object]) -> None:
    while True:
        try:
            message = channel.receive()
        except UnfitMessageError as error:
            message = m.Refused(call=error.call, kind=OtherVersionError.__name__, text=_not_understood(error))
        except ChannelClosedError:
            break
        client = client_of()
        if client is None:
            return
        try:
            client._take(message, printed)
        except Exception:
            log.exception("a message of the cluster's supervisor could not be taken")
        del client
    if (client := client_of()) is not None:
        client._end()


def _not_understood(error: Exception) -> str:
    return f"the cluster's supervisor says what this version does not understand: {error}"


def error_of(refused: m.Refused) -> Exception:
    """Return the exception that a refusal describes.

    Args:
        refused: Refusal with the class name and the text of the error.
    """
    return _KINDS.get(refused.kind, ClusterError)(
        refused.text if refused.kind in _KINDS else f"{refused.kind}: {refused.text}"
    )
