"""Collect what ranks print and display; only the supervisor receives it from the engines.

Text is written to one file per rank, and sent in folded form to the clients that subscribed. The output of a submission
with `shown` goes in full, in Jupyter's form, to the client that asked for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.session import Session

from speedlab.cluster.output_folding import LineFolder

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.work_queue import Submission

log = logging.getLogger("speedlab.supervisor")

MOST_FILE_BYTES = 4 * 2**20
"""At this size, a rank's file is renamed to its `.1` file, which replaces the earlier one."""

Lines = Callable[[list[int], str, str], object]
"""lines(ranks, stream, text): `stream` is 'stdout' or 'stderr'; `text` is one or more lines with line ends."""
Sayings = Callable[["Submission", int, str, dict[str, Any]], object]
"""says(submission, rank, kind, content): one message in Jupyter's protocol."""

_TOPIC = re.compile(rb"engine\.(\d+)\.")
_POLL_MS = 50
_IDLE_POLL_MS = 1000
_CONNECT_SECONDS = 2.0
_SETTLE_SECONDS = 0.5
_NUMBER_SECONDS = 0.2


class RankOutput:
    """Receives all output from construction until `close`."""

    def __init__(
        self, connection: Mapping[str, Any], rank_of: Callable[[int], int | None], size: int, folder: Path
    ) -> None:
        """Subscribe to the output of the engines.

        Args:
            connection: Contents of ipyparallel's client connection file.
            rank_of: Return the rank of an engine id; None if it is unknown.
            size: Number of ranks.
            folder: Folder of the ranks' files.
        """
        self.size = size
        """Number of ranks whose lines are folded. The code that adds or removes engines sets it."""
        self.on_lines: Lines = lambda ranks, stream, text: None
        self._rank_of = rank_of
        self._folding = LineFolder(range(size))
        self._files = _Files(folder)
        self._shown: list[tuple[Submission, Sayings]] = []
        self._finished: deque[str] = deque(maxlen=4096)
        self._idle = threading.Condition()
        self._hurry = False
        self._closed = threading.Event()
        self._session = Session(
            key=connection["key"].encode(),
            signature_scheme=connection["signature_scheme"],
            packer=connection["pack"],
            unpacker=connection["unpack"],
        )
        self._wake = zmq.Context.instance().socket(zmq.PAIR)
        self._wake.bind(f"inproc://speedlab-output-{id(self)}")
        # ZeroMQ drops what was sent before a subscription, so wait until it is complete.
        self._socket = _subscribed(f"{connection['interface']}:{connection['iopub']}", connection["curve_serverkey"])
        self._thread = threading.Thread(target=self._listen, name="speedlab-output", daemon=True)
        self._thread.start()

    def show(self, submission: Submission, says: Sayings) -> None:
        """Forward the output of ranks in a submission. Call before the submission is sent.

        Args:
            submission: The submission.
            says: Receives each message.
        """
        with self._idle:
            self._shown = [*(entry for entry in self._shown if entry[0] is not submission), (submission, says)]

    def hide(self, submission: Submission) -> None:
        """Stop forwarding the output of a submission."""
        with self._idle:
            self._shown = [entry for entry in self._shown if entry[0] is not submission]

    def settle(self, submission: Submission, rank: int) -> bool:
        """Wait until all output of `rank` in a submission was forwarded; return False on timeout.

        Args:
            submission: The submission.
            rank: A rank that has ended it.
        """
        message = submission.messages.get(rank, "")
        if not message or self._closed.is_set():
            return False
        deadline = time.monotonic() + _SETTLE_SECONDS
        with self._idle:
            if not self._idle.wait_for(lambda: message in self._finished, _SETTLE_SECONDS):
                return False
            if submission.unfinished:
                return True  # Other ranks may still print the same lines, which are then folded.
            self._hurry = True
        self._stir()
        with self._idle:
            return self._idle.wait_for(lambda: not self._hurry, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop the receiving thread."""
        self._closed.set()
        self._stir()
        self._thread.join(timeout=2.0)

    def _stir(self) -> None:
        with self._idle, contextlib.suppress(zmq.ZMQError):
            self._wake.send(b"", zmq.NOBLOCK)

    # ---- on the receiving thread -------------------------------------------------------------------------------------

    def _listen(self) -> None:
        woken = zmq.Context.instance().socket(zmq.PAIR)
        woken.connect(f"inproc://speedlab-output-{id(self)}")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(woken, zmq.POLLIN)
        try:
            while not self._closed.is_set():
                ready = dict(poller.poll(_POLL_MS if self._folding.waiting else _IDLE_POLL_MS))
                if woken in ready:
                    woken.recv()
                while self._socket in ready:
                    self._receive(self._socket.recv_multipart())
                    if not self._socket.poll(0):
                        break
                self._pass_on()
        finally:
            self._files.close()
            for socket in (woken, self._socket):
                socket.close(linger=0)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            topics, parts = self._session.feed_identities(frames)
            message = self._session.deserialize(parts)
        except ValueError as error:
            # A wrong signature: the sender is not one of our engines.
            log.warning("output of an engine was refused: %s", error)
            return
        kind, content = message["header"]["msg_type"], message["content"]
        parent = (message["parent_header"] or {}).get("msg_id", "")
        topic = _TOPIC.match(topics[0]) if topics else None
        rank = self._rank_of(int(topic.group(1))) if topic else None
        if rank is not None and kind == "stream":
            self._folding.feed(rank, content["name"], content["text"], time.monotonic())
            self._files.write(rank, content["text"])
        if self._shown and parent:
            self._say(parent, kind, content)
        if kind == "status" and content["execution_state"] == "idle" and parent:
            with self._idle:  # This is the last message of a task: all its output has arrived.
                self._finished.append(parent)
                self._idle.notify_all()

    def _say(self, parent: str, kind: str, content: dict[str, Any]) -> None:
        for submission, says in list(self._shown):
            for rank in submission.ranks:
                if _number(submission, rank) == parent:
                    says(submission, rank, kind, content)
                    return

    def _pass_on(self) -> None:
        hurry = self._hurry
        self._folding.expect(self.size)
        for ranks, stream, text in self._folding.drain(time.monotonic(), everything=hurry):
            self.on_lines(ranks, stream, text)
        if hurry:
            with self._idle:
                self._hurry = False
                self._idle.notify_all()


def _number(submission: Submission, rank: int) -> str:
    """Return the id of the message that sent it to `rank`. Output may arrive before the sending thread records
    the id.
    """
    deadline = time.monotonic() + _NUMBER_SECONDS
    while (message := submission.messages.get(rank)) == "" and rank in submission.unfinished:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return message or ""


def _subscribed(address: str, key: str) -> zmq.Socket[bytes]:
    """Return a socket whose subscription is complete.

    Args:
        address: Output channel of the controller.
        key: Public key of the controller.
    """
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = key.encode()
    socket.linger = 0
    socket.rcvhwm = 0  # No limit: nothing is dropped while this process is busy.
    socket.subscribe(b"")
    connected = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    if not connected.poll(int(_CONNECT_SECONDS * 1000)):
        log.warning("the engines' output channel does not answer; what ranks print may not be shown")
    socket.disable_monitor()
    connected.close(linger=0)
    return socket


class _Files:
    """The output of each rank, in `rank-<r>.log` and, after that is full, `rank-<r>.log.1`.

    A full disk loses text and raises nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, Any] = {}

    def write(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError):
            file = self._open.get(rank) or self._opened(rank)
            file.write(text.encode(errors="replace"))
            if file.tell() > MOST_FILE_BYTES:
                self._open.pop(rank).close()
                path = self._path(rank)
                path.replace(path.with_name(f"{path.name}.1"))

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, rank: int) -> Any:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = self._open[rank] = os.fdopen(os.open(self._path(rank), flags, 0o600), "ab", buffering=0)
        return file

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"
