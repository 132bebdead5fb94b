"""The record stream: each rank publishes its newest lines, and any process of the same user may subscribe.

1. A rank binds a PUB socket to a random loopback port. It writes its address and keys to `stream/rank-<r>.json`
   (0600).
2. CurveZMQ authenticates both sides. A client checks the server's key. The rank accepts only the client key in that
   file, so that permission to read the file is permission to subscribe.
3. A message is a copy of one line of the run folder with its byte offset. Messages may get lost if a client is slow or
   late. A client that sees a gap reads the file.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from speedlab.telemetry.run_folder import RunFolderError, read_object, write_atomically

LINE_LIMIT_BYTES = 2**20
"""Maximum length of a line in a record file."""

_HEADER = struct.Struct("!cIQ")
_TOPIC = struct.Struct("!cI")
"""The start of a header, by which a client can filter."""
_KEY_FILE_LIMIT_BYTES = 4096
_QUEUED_MESSAGES = 64
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


class StreamMessage(NamedTuple):
    """One line of `records/rank-<rank>.jsonl` (kind b'r') or of `events.jsonl` (b'e') that starts at byte `start`."""

    kind: bytes
    rank: int
    start: int
    line: bytes


class Publisher:
    """The sending side, one per rank. `offer` is limited to `hz` and keeps the newest line; `send` sends at once.

    No method waits for a client. A background thread authenticates clients, and sends a held-back line when no newer
    one arrives; it sleeps otherwise.

    Args:
        directory: The `stream` folder of the run.
        rank: The rank.
        hz: Maximum rate of `offer`, per second.
    """

    def __init__(self, directory: Path, rank: int, *, hz: float) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / f"rank-{rank}.json"
        self._interval_seconds = 1.0 / hz
        self._due = 0.0
        self._held_back: StreamMessage | None = None
        self._lock = threading.Lock()  # A ZeroMQ socket belongs to one thread at a time.
        self._closed = False
        # Use an own context: the authenticator below answers for all sockets of its context.
        self._context = zmq.Context()
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._client_key = client_public
        self._authenticator = self._context.socket(zmq.REP)
        self._authenticator.bind(_ZAP_ADDRESS)
        self._wake = self._context.socket(zmq.PAIR)
        self._woken = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, _QUEUED_MESSAGES)
        # At close, wait up to 200 ms for clients to take the last messages.
        self._socket.set(zmq.LINGER, 200)
        self._socket.set_string(zmq.ZAP_DOMAIN, "speedlab")
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        self._thread = threading.Thread(target=self._serve, name=f"speedlab-stream-{rank}", daemon=True)
        self._thread.start()
        self._written = ""
        try:
            port = self._socket.bind_to_random_port("tcp://127.0.0.1")
            keys = {
                "address": f"tcp://127.0.0.1:{port}",
                "server_public": server_public.decode(),
                "client_public": client_public.decode(),
                "client_secret": client_secret.decode(),
                "pid": os.getpid(),
            }
            write_atomically(self._path, json.dumps(keys), mode=0o600)
            self._written = json.dumps(keys)
        except BaseException:
            self.close()
            raise

    def offer(self, message: StreamMessage) -> None:
        """Send a message, or hold it back until the rate allows; a newer message replaces a held-back one.

        Args:
            message: The message.
        """
        with self._lock:
            now = time.monotonic()
            if now >= self._due:
                self._send(message, now)
                return
            waiting, self._held_back = self._held_back, message
            if waiting is None:
                self._wake.send(b"held back")

    def send(self, message: StreamMessage) -> None:
        """Send a message now, after a held-back one, so that a client gets a step before the events at this step.

        Args:
            message: The message.
        """
        with self._lock:
            if self._held_back is not None:
                self._send(self._held_back, time.monotonic())
            self._put(message)

    def close(self) -> None:
        """Send a held-back message, stop the thread and remove the address file. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            if self._held_back is not None:
                self._send(self._held_back, time.monotonic())
            self._wake.send(b"stop")
        self._thread.join()
        self._socket.close()
        self._wake.close(0)
        self._context.term()
        try:
            if self._path.read_text(encoding="utf-8") == self._written:  # Keep the file of a newer writer of this rank.
                self._path.unlink()
        except FileNotFoundError:
            return  # The run folder was moved or deleted, with the address file.

    def _send(self, message: StreamMessage, now: float) -> None:
        self._held_back = None
        self._due = now + self._interval_seconds
        self._put(message)

    def _put(self, message: StreamMessage) -> None:
        # A PUB socket never blocks: without clients, or with a full queue, the message is dropped.
        header = _HEADER.pack(message.kind, message.rank, message.start)
        self._socket.send_multipart((header, message.line), zmq.NOBLOCK)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._authenticator, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        timeout_ms: int | None = None
        try:
            while True:
                ready = dict(poller.poll(timeout_ms))
                if self._authenticator in ready:
                    self._admit(self._authenticator.recv_multipart())
                if self._woken in ready and self._woken.recv() == b"stop":
                    return
                timeout_ms = self._flush()
        finally:
            self._authenticator.close(0)
            self._woken.close(0)

    def _flush(self) -> int | None:
        """Send the held-back message if it is due. Return the milliseconds until the next one is due; None if there is
        none.
        """
        with self._lock:
            if self._held_back is None:
                return None
            now = time.monotonic()
            if now < self._due:
                return int((self._due - now) * 1000) + 1
            self._send(self._held_back, now)
            return None

    def _admit(self, request: list[bytes]) -> None:
        """Answer a request of ZeroMQ's authentication protocol (RFC 27): accept only the one client key."""
        # RFC 27: version, request id, domain, address, identity, mechanism, credentials.
        version, number, mechanism = request[0], request[1], request[5]
        key = z85.encode(request[6]) if mechanism == b"CURVE" and len(request) == 7 else b""
        code, text = (b"200", b"OK") if key == self._client_key else (b"400", b"unknown key")
        self._authenticator.send_multipart((version, number, code, text, b"", b""))


@dataclass(frozen=True)
class _Address:
    address: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes


class Subscriber:
    """The receiving side: follows all ranks of a run, and reconnects to a rank that has a new address.

    A ZeroMQ socket may be used by one thread at a time, so threads that share a Subscriber need a lock, as in Feed.

    Args:
        directory: The `stream` folder of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connected: dict[str, _Address] = {}
        self._rank: int | None = None
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        for topic in _topics(None):
            self._socket.set(zmq.SUBSCRIBE, topic)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, LINE_LIMIT_BYTES)
        self._socket.set(zmq.RECONNECT_IVL, 200)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 3000)
        self._close = weakref.finalize(self, self._socket.close)
        # Threads may still receive at exit, and closing a socket under them is unsafe. The system closes it.
        self._close.atexit = False

    def refresh(self) -> None:
        """Connect to the ranks in the folder, and disconnect from those that have left."""
        found = {}
        try:
            names = os.listdir(self._directory)
        except OSError:
            names = []
        for name in names:
            if re.fullmatch(r"rank-\d{1,6}\.json", name) and (address := _read_address(self._directory / name)):
                found[name] = address
        for name in [name for name, address in self._connected.items() if found.get(name) != address]:
            self._socket.disconnect(self._connected.pop(name).address)
        for name in found.keys() - self._connected.keys():
            address = found[name]
            # The next `connect` uses these keys, so that one socket can talk to many servers.
            self._socket.curve_serverkey = address.server_public
            self._socket.curve_publickey = address.client_public
            self._socket.curve_secretkey = address.client_secret
            self._socket.connect(address.address)
            self._connected[name] = address

    def hear(self, rank: int | None) -> None:
        """Receive only the records of one rank, and all events. The publishers no longer send other records.

        Args:
            rank: The rank; None for all records, which is the default.
        """
        if rank == self._rank:
            return
        for topic in _topics(rank):
            self._socket.set(zmq.SUBSCRIBE, topic)
        for topic in _topics(self._rank):
            self._socket.set(zmq.UNSUBSCRIBE, topic)
        self._rank = rank

    def receive(self, limit: int = 10_000) -> Iterator[StreamMessage]:
        """Yield the messages that have arrived. Never waits.

        Args:
            limit: Maximum number of messages.
        """
        if not self._connected:  # Skip the system call: it is the largest cost of a poll without news.
            return
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2 and len(frames[0]) == _HEADER.size:
                yield StreamMessage(*_HEADER.unpack(frames[0]), line=frames[1])

    def close(self) -> None:
        """Close the socket."""
        self._close()


def _topics(rank: int | None) -> tuple[bytes, ...]:
    """Return the message prefixes of events and of the records of `rank`, or of all messages."""
    return (b"",) if rank is None else (b"e", _TOPIC.pack(b"r", rank))


def _read_address(path: Path) -> _Address | None:
    """Return a rank's stream address; None if the file is missing or invalid."""
    try:
        data = read_object(path, _KEY_FILE_LIMIT_BYTES, missing={})
    except RunFolderError:
        return None
    address = data.get("address")
    keys = [data.get(name) for name in ("server_public", "client_public", "client_secret")]
    # Accept only loopback: a folder from another machine must not make this process connect to a network.
    if not isinstance(address, str) or not re.fullmatch(r"tcp://127\.0\.0\.1:\d{1,5}", address):
        return None
    if not all(isinstance(key, str) and len(key) == 40 and key.isascii() for key in keys):
        return None
    return _Address(address, *(str(key).encode() for key in keys))
