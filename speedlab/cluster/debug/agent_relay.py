"""Ranks of a host that want to be debugged, in its agent, which hands on what they and the person say.

They connect to a socket in the host's own folder, which only its owner can enter; the supervisor hears of them when it
asks whether the agent is there, and takes and gives bytes by `exchange`, over the controller as all that it asks. So no
host opens a port. What is said is not looked at here. Who is asked about no more has nobody to talk to, and is let go.
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
"""That are kept of what a rank says, until they are taken: then it waits."""
_KNOCK_SECONDS = 5.0
_AGAIN_SECONDS = 0.5

Said = tuple[bytes, bool]
"""What has come, and whether that was the last of it."""
Given = tuple[bytes, bool, bool]
"""What is to be passed on, whether that was the last of it, and whether more of the other side can be taken."""


class DebugCaller:
    """One rank that has knocked."""

    def __init__(self, channel: Channel, door: str) -> None:
        self.door = door
        self.heard_of = False
        """Whether the supervisor has asked about it."""
        self.asked_at = time.monotonic()
        """When it last did, or when it knocked."""
        self._channel = channel
        self._said = bytearray()
        self._for_it = bytearray()
        self._spoken_to = self._ends = self._over = False
        """Whether the other side has said anything, has ended, and whether this rank has."""
        self._changed = threading.Condition()
        for work in (self._listen, self._speak):
            threading.Thread(target=work, name="speedlab-lobby", daemon=True).start()

    def exchange(self, given: Given) -> Said:
        """Pass on what is given, without waiting; returns what the rank has said since."""
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
    """The ranks of this host that have knocked."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the host's own."""
        self._callers: dict[str, DebugCaller] = {}
        self._lock = threading.Lock()
        self._listening = listen(relay_path(folder))
        threading.Thread(target=self._accept, name="speedlab-lobby", daemon=True).start()

    def waiting(self) -> dict[str, str]:
        """The doors at which those stand whom the supervisor has not heard of, by numbers of their own."""
        with self._lock:
            return {number: caller.door for number, caller in self._callers.items() if not caller.heard_of}

    def exchange(self, given: Mapping[str, Given]) -> dict[str, Said]:
        """As `DebugCaller.exchange`, by number. Who is not here any more has said its last."""
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
        """Let those go about whom nobody has asked for so long: the person, or the supervisor, is gone."""
        with self._lock:
            gone = [number for number, caller in self._callers.items() if time.monotonic() - caller.asked_at > seconds]
            forgotten = [self._callers.pop(number) for number in gone]
        for caller in forgotten:
            caller.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # For example: this process has too many files open at the moment.
                time.sleep(_AGAIN_SECONDS)
                continue
            try:
                threading.Thread(target=self._take_in, args=(connection,), name="speedlab-lobby", daemon=True).start()
            except RuntimeError:  # There can be no more threads; whoever it was goes on.
                connection.close()

    def _take_in(self, connection: socket.socket) -> None:
        channel = Channel(connection, ConnectRequest)
        try:
            connection.settimeout(_KNOCK_SECONDS)
            door = channel.receive().door
            connection.settimeout(None)
            caller = DebugCaller(channel, door)
        except (ChannelClosedError, UnfitMessageError, RuntimeError):
            channel.close()  # It is no rank of this version; or there can be no more threads.
            return
        with self._lock:
            self._callers[secrets.token_hex(8)] = caller
