"""The line between a rank that is debugged and the person who debugs it: who asks listens, the rank calls.

1. Whoever waits for the rank (a post-mortem, a cell between two steps) opens a `Door`: a socket in the cluster's own
   folder, which only its owner can enter.
2. The rank connects, and is greeted once somebody serves the door. A rank that is not greeted goes on without.
3. It sends what the debugger says, and, when it wants a command, a prompt; it gets lines.
4. The end of the connection is the end of the session, from either side: no rank waits for a person who is gone.
"""

from __future__ import annotations

import contextlib
import select
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, connect, listen
from speedlab.cluster.supervisor.messages import Message

GREET_SECONDS = 5.0
"""How long a rank waits to be greeted."""
_SPEAKS_SECONDS = 0.05
"""After a command its answer comes at once, most often: prompts of several ranks shall not alternate."""


class Greeting(Message, kw_only=True):
    """Somebody is here who will be asked."""


class Words(Message, kw_only=True):
    """Of the debugger. `asks`: whether it wants a line, with `text` as the prompt."""

    text: str
    asks: bool = False


class Line(Message, kw_only=True):
    """What the person says."""

    text: str


def door_path(folder: Path, name: str) -> Path:
    """Where the door `name` is, in a cluster's folder."""
    return folder / f"debug-{name}.sock"


def knock(folder: Path, name: str) -> Channel | None:
    """A channel to whoever serves the door; None where nobody does."""
    try:
        channel = connect(door_path(folder, name), Greeting | Line)
    except OSError:
        return None
    with contextlib.suppress(ChannelClosedError):
        if channel.ready(GREET_SECONDS) and isinstance(channel.receive(), Greeting):
            return channel
    channel.close()
    return None


class Door:
    """Where ranks come in that want to be debugged. `serve` it often; `close` it in the end."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        ask: Callable[[str], str] | None = None,
    ) -> None:
        """`ask(prompt)` gives a line, by default `input`; EOFError and an interrupt in it end that rank's session. It
        closes when it is dropped, too."""
        path = door_path(folder, name)
        self._listening = listen(path)
        self._shut = weakref.finalize(self, _shut, self._listening, path)
        self._ask = ask or _input
        self._inside: list[Channel] = []

    def serve(self, seconds: float = 0.0) -> None:
        """Take in who has come, and pass on, and ask for, what they say, as long as one of them speaks. Waits for the
        first word of all for `seconds`."""
        if self._has_come(seconds):
            connection, _ = self._listening.accept()
            channel = Channel(connection, Words)
            self._inside.append(channel)
            self._try(channel, lambda: channel.send(Greeting()))
        for channel in list(self._inside):
            while channel in self._inside and channel.ready(_SPEAKS_SECONDS):
                self._try(channel, lambda channel=channel: self._hear(channel))  # type: ignore[misc]  # bound at once

    def close(self) -> None:
        """Nobody comes in any more, and those inside are left alone: their sessions end."""
        for channel in list(self._inside):
            self._leave(channel)
        self._shut()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _has_come(self, seconds: float) -> bool:
        if not self._shut.alive:
            return False
        look = select.poll()
        look.register(self._listening, select.POLLIN)
        return bool(look.poll(seconds * 1000))

    def _hear(self, channel: Channel) -> None:
        words = channel.receive()
        if not words.asks:
            print(words.text, end="", flush=True)
            return
        try:
            line = self._ask(words.text)
        except (EOFError, KeyboardInterrupt):
            print()
            self._leave(channel)
            return
        channel.send(Line(text=line))

    def _try(self, channel: Channel, work: Callable[[], object]) -> None:
        try:
            work()
        except ChannelClosedError:
            self._leave(channel)

    def _leave(self, channel: Channel) -> None:
        channel.close()
        with contextlib.suppress(ValueError):
            self._inside.remove(channel)


def _input(prompt: str) -> str:
    return input(prompt)  # A kernel puts its own in the place of Python's.


def _shut(listening: socket.socket, path: Path) -> None:
    listening.close()
    path.unlink(missing_ok=True)
