"""A connection between a supervisor and a client: messages, each after its length, over a socket in the cluster's
folder that only its owner can enter."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from speedlab.cluster.supervisor.protocol import ProtocolMessage

_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")
_MOST_BYTES = 2**36
_encoder = msgspec.msgpack.Encoder()


class UnfitMessageError(TypeError):
    """A message whose fields are of the wrong kind; `call` is its number."""

    def __init__(self, text: str, call: int) -> None:
        self.call = call
        super().__init__(text)


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class Channel:
    """Messages both ways. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        """`receives`: the union of the messages that may come."""
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()
        self._coming = bytearray(_LENGTH.size)
        self._got = 0
        """How much of `_coming` is there: a length, or, once it was `_announced`, the message after it."""
        self._announced = False

    def send(self, message: ProtocolMessage) -> None:
        """Raises ChannelClosedError."""
        data = _encoder.encode(message)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)))
                self._socket.sendall(data)
        except BaseException as error:
            self.close()  # Half of a message may have gone: what follows would be read as its rest.
            if isinstance(error, OSError):
                raise ChannelClosedError(str(error)) from None
            raise

    def bound_sending(self, seconds: float) -> None:
        """Give up, and close, when the other side does not read for so long."""
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether something has come, or the end, at the latest after `seconds`."""
        if self._socket.fileno() < 0:  # Another thread has closed it.
            return True
        look = select.poll()  # A descriptor of 1024 or more is too great for select().
        look.register(self._socket, select.POLLIN)
        return bool(look.poll(seconds * 1000))

    @property
    def peer_pid(self) -> int | None:
        """The process at the other end, or the one that began to listen there; None where the system does not say."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        return peer_of(self._socket)[0]

    def receive(self) -> Any:
        """The next message. Raises ChannelClosedError at the end, and for what is no message of this protocol;
        UnfitMessageError for one with fields of the wrong kind, after which others may come."""
        while not self._read_on():
            pass
        return self._decoded()

    def receive_within(self, seconds: float) -> Any | None:
        """As `receive`; None where the next message is not there whole after `seconds`: what has come of it is kept."""
        deadline = time.monotonic() + seconds
        while self.ready(max(0.0, deadline - time.monotonic())):
            if self._read_on():
                return self._decoded()
        return None

    def _read_on(self) -> bool:
        """Take in what comes next; whether a message is whole now."""
        try:
            more = self._socket.recv_into(memoryview(self._coming)[self._got :])
        except OSError as error:
            raise ChannelClosedError(str(error)) from None
        if more == 0:
            raise ChannelClosedError("the connection was closed")
        self._got += more
        if self._got < len(self._coming):
            return False
        if self._announced:
            return True
        (length,) = _LENGTH.unpack(self._coming)
        if length > _MOST_BYTES:
            raise ChannelClosedError(f"a message of {length} bytes was announced")
        self._coming, self._got, self._announced = bytearray(length), 0, True
        return length == 0

    def _decoded(self) -> Any:
        data, self._coming, self._got, self._announced = self._coming, bytearray(_LENGTH.size), 0, False
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            if (call := _call_in(data)) is not None:
                raise UnfitMessageError(str(error), call) from None
            raise ChannelClosedError(f"what came is no message: {error}") from None
        except msgspec.DecodeError as error:
            raise ChannelClosedError(f"what came is no message: {error}") from None

    @property
    def connection(self) -> socket.socket:
        """The connection, for who only passes on what comes from now on."""
        return self._socket

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _call_in(data: bytearray) -> int | None:
    """The number of a question whose other fields may be anything."""
    try:
        loose = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return None
    call = loose.get("call") if isinstance(loose, dict) else None
    return call if isinstance(call, int) else None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other end, on systems that have SO_PEERCRED."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


@contextlib.contextmanager
def short_path(path: Path) -> Any:
    """A name of `path` that fits into a socket's address, which holds about 100 bytes."""
    if len(os.fsencode(path)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def connect(path: Path, receives: Any, *, waits: bool = True) -> Channel:
    """A channel to whoever listens at `path`. Raises OSError when nobody does. `waits`: False for one whose connection
    never waits, and is not made where too many wait there to be let in."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(waits)
        with short_path(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return Channel(connection, receives)


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`, in the place of one whose process is gone; mode 0600."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as address:
            listening.bind(address)
        os.chmod(path, 0o600)
        listening.listen(64)
    except BaseException:
        listening.close()
        raise
    return listening
