"""The side channel: each rank publishes what it has just written, and any process of the same user may join.

A rank binds a PUB socket on a random loopback port and leaves its address and keys in `stream/rank-<r>.json` (0600).
CurveZMQ authenticates both ways: a client checks the server's key, and the rank admits only the one client key that
stands in that file, so that reading it (being the same user) is the permission to listen.

A message is a copy of one line of the run folder with its place in the file. Nothing depends on its arrival: messages
are dropped when a client is slow or late, and a client that sees a gap reads the file.
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
"""No line of a record file is longer."""

_HEADER = struct.Struct("!cIQ")
_TOPIC = struct.Struct("!cI")
"""How a header begins: what a client may choose by."""
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
    """The sending end, one per rank. `offer` is throttled to `hz` and keeps the newest; `send` goes out at once.

    Neither ever waits for a client. A background thread admits clients and sends the line that was held back when no
    newer one came; it sleeps otherwise.
    """

    def __init__(self, directory: Path, rank: int, *, hz: float) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / f"rank-{rank}.json"
        self._interval_seconds = 1.0 / hz
        self._due = 0.0
        self._held_back: StreamMessage | None = None
        self._lock = threading.Lock()  # A ZeroMQ socket belongs to one thread at a time.
        self._closed = False
        # A context of its own: the authenticator below answers for all sockets of its context.
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
        """Send, or hold back until it is due; a newer message takes its place."""
        with self._lock:
            now = time.monotonic()
            if now >= self._due:
                self._send(message, now)
                return
            waiting, self._held_back = self._held_back, message
            if waiting is None:
                self._wake.send(b"held back")

    def send(self, message: StreamMessage) -> None:
        """Send now, after what was held back, so that a client sees a step before what happened at it."""
        with self._lock:
            if self._held_back is not None:
                self._send(self._held_back, time.monotonic())
            self._put(message)

    def close(self) -> None:
        """Send what was held back, stop, and take the address away. Calling it again does nothing."""
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
            if self._path.read_text(encoding="utf-8") == self._written:  # Else a newer writer of this rank is there.
                self._path.unlink()
        except FileNotFoundError:
            return  # The run folder was moved or removed meanwhile, and the address with it.

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
        """Send what is held back and due; returns in how many milliseconds there will be something to do, if ever."""
        with self._lock:
            if self._held_back is None:
                return None
            now = time.monotonic()
            if now < self._due:
                return int((self._due - now) * 1000) + 1
            self._send(self._held_back, now)
            return None

    def _admit(self, request: list[bytes]) -> None:
        """Answer one request of ZeroMQ's authentication protocol (RFC 27): the one client key, no other."""
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
    """The receiving end: follows all ranks of a run, and notices when one of them comes back at another address.

    A ZeroMQ socket belongs to one thread at a time: whoever shares a Subscriber has a lock around it, as Feed has.
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
        # At exit threads may still be listening, and a socket is never closed under them. The system closes it.
        self._close.atexit = False

    def refresh(self) -> None:
        """Connect to the ranks that the folder names now and leave those that are gone."""
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
            # Keys are taken over by the connection that is made next, so one socket speaks to many servers.
            self._socket.curve_serverkey = address.server_public
            self._socket.curve_publickey = address.client_public
            self._socket.curve_secretkey = address.client_secret
            self._socket.connect(address.address)
            self._connected[name] = address

    def hear(self, rank: int | None) -> None:
        """Of records only those of `rank`: the others' are not sent here any more. None hears all, as at first."""
        if rank == self._rank:
            return
        for topic in _topics(rank):
            self._socket.set(zmq.SUBSCRIBE, topic)
        for topic in _topics(self._rank):
            self._socket.set(zmq.UNSUBSCRIBE, topic)
        self._rank = rank

    def receive(self, limit: int = 10_000) -> Iterator[StreamMessage]:
        """What has arrived, at most `limit` messages; never waits."""
        if not self._connected:  # Nothing comes, and the question takes longer than all else where nothing is new.
            return
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2 and len(frames[0]) == _HEADER.size:
                yield StreamMessage(*_HEADER.unpack(frames[0]), line=frames[1])

    def close(self) -> None:
        self._close()


def _topics(rank: int | None) -> tuple[bytes, ...]:
    """What messages begin with: events and the records of `rank`, or all."""
    return (b"",) if rank is None else (b"e", _TOPIC.pack(b"r", rank))


def _read_address(path: Path) -> _Address | None:
    """What `path` says of a rank's stream; None when it is gone or is no such file."""
    try:
        data = read_object(path, _KEY_FILE_LIMIT_BYTES, missing={})
    except RunFolderError:
        return None
    address = data.get("address")
    keys = [data.get(name) for name in ("server_public", "client_public", "client_secret")]
    # Only loopback: a folder from somewhere else must not make this process call out.
    if not isinstance(address, str) or not re.fullmatch(r"tcp://127\.0\.0\.1:\d{1,5}", address):
        return None
    if not all(isinstance(key, str) and len(key) == 40 and key.isascii() for key in keys):
        return None
    return _Address(address, *(str(key).encode() for key in keys))
