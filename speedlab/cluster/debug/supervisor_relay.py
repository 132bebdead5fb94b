"""What a rank on another host and the person who debugs it say to each other, passed on by the supervisor.

1. An agent tells which ranks of its host have knocked, and at which door (`agent_lobby.py`).
2. The supervisor connects to that door, in the cluster's own folder, in the rank's place. Where nobody serves it, the
   rank is told at once, and goes on.
3. Bytes go both ways as they stand, one question to the agent for all ranks of its host: at once while somebody speaks,
   and a few times a second while a person thinks. What one side does not take is not asked of the other.
4. The end of either connection ends the other one; so does a host, or its agent, that does not answer.
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
"""exchange(host, given): what an agent answers. Raises ClusterError."""

_LEAST_PAUSE_SECONDS = 0.01
_MOST_PAUSE_SECONDS = 0.25


class SupervisorDebugRelay:
    """The sessions of all hosts of a cluster."""

    def __init__(self, folder: Path, exchange: Exchange) -> None:
        """`folder`: the cluster's own."""
        self._folder, self._exchange = folder, exchange
        self._lock = threading.Lock()
        self._hosts: dict[str, dict[str, _Session]] = {}
        """Sessions by host and number; a host is in it while a thread serves it."""

    def hear(self, waiting: Mapping[str, Mapping[str, str]]) -> None:
        """`waiting`: by host, the door at which each rank stands, by its number there; also of those that are known."""
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
            except Exception as error:  # Nobody else would hear of it, and the next one on this host is served, too.
                log.warning("debugged ranks of %s are left: %s", host, error)
                said = dict.fromkeys(sessions, (b"", True))
            for number, session in sessions.items():
                session.take(*said[number])
            spoke = any(data for data, _, _ in given.values()) or any(data for data, _ in said.values())
            pause = _LEAST_PAUSE_SECONDS if spoke else min(2 * pause, _MOST_PAUSE_SECONDS)

    def _of(self, host: str) -> dict[str, _Session]:
        """Those that go on; the host is forgotten with the last one."""
        with self._lock:
            sessions = self._hosts[host]
            for number in [number for number, session in sessions.items() if session.over]:
                del sessions[number]
            if not sessions:
                del self._hosts[host]
            return dict(sessions)


class _Session:
    """The supervisor's end of one rank's connection to a door."""

    def __init__(self, folder: Path, door: str) -> None:
        self.over = False
        self._door = server_path(folder, door)
        self._unsent = b""
        self._ended = self._told = self._rank_ended = False
        """Whether the person's side has ended, the agent was told so, and the rank's side has ended."""
        self._channel: Channel | None = None
        self._connect()

    def _connect(self) -> None:
        try:
            self._channel = connect(self._door, ProtocolMessage, waits=False)  # Others are watched on this thread.
        except BlockingIOError:
            pass  # Too many wait there to be let in: it is tried again.
        except (OSError, ValueError):
            self._ended = True

    @property
    def connection(self) -> socket.socket | None:
        """None where nobody is there yet, or any more."""
        return self._channel.connection if self._channel is not None and not self._ended else None

    @property
    def awaited(self) -> int:
        """What to wait for on the connection, as poll() has it."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def given(self) -> Given:
        """What the person has said, for the agent."""
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
        self._told = self._ended
        return data, self._ended, not self._unsent

    def take(self, data: bytes, over: bool) -> None:
        """What the rank has said, for the person."""
        self._unsent += data
        self._rank_ended |= over
        if self._unsent and (connection := self.connection) is not None:
            try:
                self._unsent = self._unsent[connection.send(self._unsent) :]
            except BlockingIOError:
                pass  # A person thinks about another rank.
            except OSError:
                self._ended = True
        if self._told or (self._rank_ended and not self._unsent):
            self.over = True
            if self._channel is not None:
                self._channel.close()


def _wait_for_any(sessions: Iterable[_Session], seconds: float) -> None:
    """Until one of these persons says something, or takes more, at the latest after `seconds`."""
    look = select.poll()
    for session in sessions:
        if (connection := session.connection) is not None:
            look.register(connection, session.awaited)
    look.poll(seconds * 1000)
