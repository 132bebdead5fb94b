"""A connection between a supervisor and a client: length-prefixed messages over a Unix socket.

The socket is a file in the cluster's folder, which only its owner can enter.
"""

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
    """A message with fields of a wrong type; `call` is its number."""

    def __init__(self, text: str, call: int) -> None:
        self.call = call
        super().__init__(text)


class ChannelClosedError(ConnectionError):
    """The other side has closed the connection."""


class Channel:
    """Messages in both directions. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        """Use a connected socket.

        Args:
            connection: Connected Unix socket.
            receives: Union of the message types that may arrive.
        """
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()
        self._coming = bytearray(_LENGTH.size)
        self._got = 0
        """Number of bytes received into `_coming`: of a length, or of a message if `_announced`."""
        self._announced = False

    def send(self, message: ProtocolMessage) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: If the other side has closed the connection.
        """
        data = _encoder.encode(message)
        try:
            # Several threads send: keep length and message together.
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)))
                self._socket.sendall(data)
        except BaseException as error:
            # Half of the message may have been sent: the receiver would read the next message as its rest.
            self.close()
            if isinstance(error, OSError):
                raise ChannelClosedError(str(error)) from None
            raise

    def bound_sending(self, seconds: float) -> None:
        """Limit the time of a send; the channel closes if the other side does not read for so long.

        Args:
            seconds: Limit in seconds.
        """
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait until a message, a part of one, or the end has arrived.

        Args:
            seconds: Longest time to wait.

        Returns:
            Whether `receive` has something to read.
        """
        if self._socket.fileno() < 0:  # Another thread has closed the socket: let `receive` report that.
            return True
        look = select.poll()  # select() cannot handle descriptors of 1024 and above.
        look.register(self._socket, select.POLLIN)
        return bool(look.poll(seconds * 1000))

    @property
    def peer_pid(self) -> int | None:
        """Process id of the other side, or of the process that began to listen; None if the system does not
        report it.
        """
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        return peer_of(self._socket)[0]

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelClosedError: At the end, and if the data are no message of this protocol.
            UnfitMessageError: If a field has a wrong type; later messages can still be received.
        """
        while not self._read_on():
            pass
        return self._decoded()

    def receive_within(self, seconds: float) -> Any | None:
        """Return the next message, or None if it is not complete after `seconds`; a partial message is kept.

        Raises:
            ChannelClosedError: See `receive`.
            UnfitMessageError: See `receive`.
        """
        deadline = time.monotonic() + seconds
        while self.ready(max(0.0, deadline - time.monotonic())):
            if self._read_on():
                return self._decoded()
        return None

    def _read_on(self) -> bool:
        """Read once; return whether a message is complete now."""
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
        """The socket, for code that forwards the remaining data."""
        return self._socket

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _call_in(data: bytearray) -> int | None:
    """Return the number of a request whose other fields are invalid; None if there is none."""
    try:
        loose = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return None
    call = loose.get("call") if isinstance(loose, dict) else None
    return call if isinstance(call, int) else None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a Unix socket. Needs SO_PEERCRED.

    Returns:
        (process id, user id).
    """
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


@contextlib.contextmanager
def short_path(path: Path) -> Any:
    """Yield a name of `path` that fits into a socket address, which has about 100 bytes."""
    if len(os.fsencode(path)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def connect(path: Path, receives: Any, *, waits: bool = True) -> Channel:
    """Connect to the process that listens at `path`.

    Args:
        path: Path of the Unix socket.
        receives: Union of the message types that may arrive.
        waits: False for a non-blocking socket; then a full backlog is an error.

    Raises:
        OSError: If no process listens.
    """
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
    """Listen at a path; replace the socket of a process that is gone.

    Args:
        path: Path of the Unix socket, mode 0600.

    Returns:
        The listening socket.
    """
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
