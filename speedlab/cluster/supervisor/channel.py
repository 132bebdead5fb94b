"""A connection between a supervisor and a client: messages, each after its length, over a socket in the cluster's
folder that only its owner can enter."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec

from speedlab.cluster.supervisor.messages import Message

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

    def send(self, message: Message) -> None:
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
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_BYTES:
            raise ChannelClosedError(f"a message of {length} bytes was announced")
        data = self._exactly(length)
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            if (call := _call_in(data)) is not None:
                raise UnfitMessageError(str(error), call) from None
            raise ChannelClosedError(f"what came is no message: {error}") from None
        except msgspec.DecodeError as error:
            raise ChannelClosedError(f"what came is no message: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                more = self._socket.recv_into(view[got:])
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            if more == 0:
                raise ChannelClosedError("the connection was closed")
            got += more
        return data


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


def connect(path: Path, receives: Any) -> Channel:
    """A channel to whoever listens at `path`. Raises OSError when nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
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
