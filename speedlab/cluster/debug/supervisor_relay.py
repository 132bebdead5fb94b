"""The supervisor's relay between a debugged rank on another host and the kernel of the user.

1. An agent reports which ranks of its host wait, and for which DebugServer (`agent_relay.py`).
2. The supervisor connects to that DebugServer, in the cluster's folder, in place of the rank. If no DebugServer
   listens, the rank is informed at once and continues.
3. Bytes are transferred in both directions without change, with one request per host: without pause while a side sends,
   and a few times a second otherwise. If one side does not read, the other side is not asked for more.
4. The end of one connection ends the other one. A host, or agent, that does not answer ends them, too.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from speedlab.cluster.debug.agent_relay import MOST_BYTES, Given, Said
from speedlab.cluster.debug.connection import server_path
from speedlab.cluster.supervisor.channel import Channel, connect
from speedlab.cluster.supervisor.protocol import ProtocolMessage

log = logging.getLogger("speedlab.supervisor")

Exchange = Callable[[str, Mapping[str, Given]], dict[str, Said]]
"""exchange(host, given): transfer bytes with the ranks of a host; raises ClusterError."""

_LEAST_PAUSE_SECONDS = 0.01
_MOST_PAUSE_SECONDS = 0.25


class SupervisorDebugRelay:
    """The debugging sessions of all hosts of a cluster."""

    def __init__(self, folder: Path, exchange: Exchange) -> None:
        """Prepare the relay.

        Args:
            folder: Folder of the cluster.
            exchange: Transfers bytes with an agent.
        """
        self._folder, self._exchange = folder, exchange
        self._lock = threading.Lock()
        self._hosts: dict[str, dict[str, _Session]] = {}
        """Sessions by host and caller id. A host has an entry while a thread serves it."""

    def hear(self, waiting: Mapping[str, Mapping[str, str]]) -> None:
        """Start sessions for ranks that wait; known ranks are ignored.

        Args:
            waiting: By host, the name of the DebugServer by caller id.
        """
        for host, doors in waiting.items():
            with self._lock:
                known = self._hosts.get(host, {})
                new = {number: door for number, door in doors.items() if number not in known}
                if not new:
                    continue
                known.update({number: _Session(self._folder, door) for number, door in new.items()})
                if host not in self._hosts:
                    self._hosts[host] = known
                    threading.Thread(target=self._serve, args=(host,), name="speedlab-debug", daemon=True).start()

    def _serve(self, host: str) -> None:
        pause = _LEAST_PAUSE_SECONDS
        while sessions := self._of(host):
            _wait_for_any(sessions.values(), pause)
            given = {number: session.given() for number, session in sessions.items()}
            try:
                said = self._exchange(host, given)
            # Log it, because this thread has no caller; later sessions of this host still work.
            except Exception as error:
                log.warning("debugged ranks of %s are left: %s", host, error)
                said = dict.fromkeys(sessions, (b"", True))
            for number, session in sessions.items():
                session.take(*said[number])
            spoke = any(data for data, _, _ in given.values()) or any(data for data, _ in said.values())
            pause = _LEAST_PAUSE_SECONDS if spoke else min(2 * pause, _MOST_PAUSE_SECONDS)

    def _of(self, host: str) -> dict[str, _Session]:
        """Return the sessions that continue; remove the host after its last session."""
        with self._lock:
            sessions = self._hosts[host]
            for number in [number for number, session in sessions.items() if session.over]:
                del sessions[number]
            if not sessions:
                del self._hosts[host]
            return dict(sessions)


class _Session:
    """The supervisor's connection to a DebugServer for one rank."""

    def __init__(self, folder: Path, door: str) -> None:
        self.over = False
        self._door = server_path(folder, door)
        self._unsent = b""
        self._ended = self._reported = self._rank_ended = False
        """`_ended`: the user's side has ended. `_told`: the agent was informed of that. `_rank_ended`: the rank's side
        has ended.
        """
        self._channel: Channel | None = None
        self._connect()

    def _connect(self) -> None:
        try:
            # Non-blocking: this thread serves other sessions, too.
            self._channel = connect(self._door, ProtocolMessage, waits=False)
        except BlockingIOError:
            pass  # The backlog is full; `given` tries again.
        except (OSError, ValueError):
            self._ended = True

    @property
    def connection(self) -> socket.socket | None:
        """The socket, or None if it is not connected yet, or not any more."""
        return self._channel.connection if self._channel is not None and not self._ended else None

    @property
    def awaited(self) -> int:
        """Events to poll for on the socket."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def given(self) -> Given:
        """Return the bytes of the user for the agent."""
        data = b""
        if self._channel is None and not self._ended:
            self._connect()
        if (connection := self.connection) is not None:
            try:
                data = connection.recv(MOST_BYTES)
                self._ended = not data
            except BlockingIOError:
                pass
            except OSError:
                self._ended = True
        self._reported = self._ended
        return data, self._ended, not self._unsent

    def take(self, data: bytes, over: bool) -> None:
        """Send the bytes of the rank to the user.

        Args:
            data: Bytes of the rank.
            over: Whether these were the last.
        """
        self._unsent += data
        self._rank_ended |= over
        if self._unsent and (connection := self.connection) is not None:
            try:
                self._unsent = self._unsent[connection.send(self._unsent) :]
            except BlockingIOError:
                pass  # The user is busy with another rank.
            except OSError:
                self._ended = True
        if self._reported or (self._rank_ended and not self._unsent):
            self.over = True
            if self._channel is not None:
                self._channel.close()


def _wait_for_any(sessions: Iterable[_Session], seconds: float) -> None:
    """Wait until a session can read or write, at most `seconds`."""
    look = select.poll()
    for session in sessions:
        if (connection := session.connection) is not None:
            look.register(connection, session.awaited)
    look.poll(seconds * 1000)
