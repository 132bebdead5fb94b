"""An agent's relay for debugged ranks of its host.

1. Ranks connect to a socket in the host's folder, which only its owner can enter.
2. The supervisor learns of them when it polls the agent, and transfers bytes with `exchange`, over the controller. So
   no host opens a port.
3. The relay does not interpret the bytes. A rank that the supervisor no longer asks about is disconnected.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from speedlab.cluster.debug.connection import ConnectRequest, NoClient, relay_path
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, UnfitMessageError, listen

MOST_BYTES = 2**20
"""Size of the buffer for a rank's output; when the buffer is full, the rank waits."""
_KNOCK_SECONDS = 5.0
_AGAIN_SECONDS = 0.5

Said = tuple[bytes, bool]
"""(bytes from the rank, whether these were the last)."""
Given = tuple[bytes, bool, bool]
"""(bytes for the rank, whether these are the last, whether the other side can take more output)."""


class DebugCaller:
    """One rank that has connected."""

    def __init__(self, channel: Channel, door: str) -> None:
        """Start the threads that read and write.

        Args:
            channel: Connection of the rank.
            door: Name of the DebugServer that the rank asks for.
        """
        self.door = door
        self.heard_of = False
        """Whether the supervisor has asked about this rank."""
        self.asked_at = time.monotonic()
        """Time of the supervisor's last request, or of the connection."""
        self._channel = channel
        self._said = bytearray()
        self._for_it = bytearray()
        self._spoken_to = self._ends = self._over = False
        """`_spoken_to`: the other side has sent something. `_ends`: the other side has ended. `_over`: the rank has
        ended.
        """
        self._changed = threading.Condition()
        for work in (self._listen, self._speak):
            threading.Thread(target=work, name="speedlab-lobby", daemon=True).start()

    def exchange(self, given: Given) -> Said:
        """Exchange bytes with the rank, without waiting.

        Args:
            given: Bytes for the rank.

        Returns:
            Bytes that the rank has sent.
        """
        data, last, takes = given
        self.heard_of, self.asked_at = True, time.monotonic()
        with self._changed:
            self._for_it += data
            self._ends |= last
            said = bytes(self._said) if takes else b""
            if takes:
                self._said.clear()
            self._changed.notify_all()
            return said, self._over and not self._said

    def close(self) -> None:
        """End the session of this rank."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._channel.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._channel.connection.recv(MOST_BYTES):
                with self._changed:
                    self._said += data
                    self._changed.wait_for(lambda: self._over or len(self._said) < MOST_BYTES)
        self.close()

    def _speak(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._over or self._ends or self._for_it)
                    data = bytes(self._for_it)
                    self._for_it.clear()
                if data:
                    self._spoken_to = True
                    self._channel.connection.sendall(data)
                elif self._over or self._ends:
                    break
            if self._ends and not self._spoken_to:
                self._channel.send(NoClient())
        self.close()


class DebugRelay:
    """The ranks of this host that have connected."""

    def __init__(self, folder: Path) -> None:
        """Listen in the folder of this host."""
        self._callers: dict[str, DebugCaller] = {}
        self._lock = threading.Lock()
        self._listening = listen(relay_path(folder))
        threading.Thread(target=self._accept, name="speedlab-lobby", daemon=True).start()

    def waiting(self) -> dict[str, str]:
        """Return the name of the DebugServer by caller id, for ranks that the supervisor has not asked about yet."""
        with self._lock:
            return {number: caller.door for number, caller in self._callers.items() if not caller.heard_of}

    def exchange(self, given: Mapping[str, Given]) -> dict[str, Said]:
        """Exchange bytes with several ranks; see `DebugCaller.exchange`. A rank that is gone has ended.

        Args:
            given: Bytes by caller id.
        """
        with self._lock:
            callers = {number: self._callers.get(number) for number in given}
        said = {
            number: caller.exchange(given[number]) if caller is not None else (b"", True)
            for number, caller in callers.items()
        }
        with self._lock:
            for number, (_, over) in said.items():
                if over or given[number][1]:
                    self._callers.pop(number, None)
        return said

    def end_forgotten(self, seconds: float) -> None:
        """Disconnect ranks that the supervisor no longer asks about: the user, or the supervisor, is gone.

        Args:
            seconds: Time since the last request.
        """
        with self._lock:
            gone = [number for number, caller in self._callers.items() if time.monotonic() - caller.asked_at > seconds]
            forgotten = [self._callers.pop(number) for number in gone]
        for caller in forgotten:
            caller.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # For example, this process has too many open files.
                time.sleep(_AGAIN_SECONDS)
                continue
            try:
                threading.Thread(target=self._take_in, args=(connection,), name="speedlab-lobby", daemon=True).start()
            except RuntimeError:  # No more threads can be started; the rank continues without a debugger.
                connection.close()

    def _take_in(self, connection: socket.socket) -> None:
        channel = Channel(connection, ConnectRequest)
        try:
            connection.settimeout(_KNOCK_SECONDS)
            door = channel.receive().door
            connection.settimeout(None)
            caller = DebugCaller(channel, door)
        except (ChannelClosedError, UnfitMessageError, RuntimeError):
            channel.close()  # The caller is no rank of this version, or no more threads can be started.
            return
        with self._lock:
            self._callers[secrets.token_hex(8)] = caller
