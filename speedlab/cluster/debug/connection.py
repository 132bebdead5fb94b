"""The line between a rank that is debugged and the person who debugs it: who asks listens, the rank calls.

1. Whoever waits for the rank (a post-mortem, a cell) opens a `DebugServer`: a socket in the cluster's own folder, which
   only its owner can enter.
2. The rank connects, and is greeted once somebody serves the door. A rank that is not greeted goes on without. In a
   cluster of several hosts it does not see that folder: it connects to the agent of its host (`agent_lobby.py`), names
   the door, and the supervisor passes on what both sides say (`supervisor/debug_relay.py`), as it stands. Whether it
   heard that nobody is there, or nothing at all, is told apart.
3. It sends what the debugger says, and, when it wants a command, a prompt; it gets lines. Ranks that come while a
   person thinks are greeted, and wait for their turn.
4. The end of the connection is the end of the session, from either side: no rank waits for a person who is gone.
"""

from __future__ import annotations

import contextlib
import re
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, connect, listen
from speedlab.cluster.supervisor.protocol import ProtocolMessage

GREET_SECONDS = 15.0
"""How long a rank waits to be greeted."""
FAR_GREET_SECONDS = 15.0
"""As GREET_SECONDS, over its host's agent, which is asked once a second, and later while another host is cut off."""
_SPEAKS_SECONDS = 0.3
"""After a command its answer comes within this, most often: prompts of several ranks shall not alternate."""
_POLL_SECONDS = 0.02
_NAME = re.compile(r"\w{1,64}", re.ASCII)
_LAST_SECONDS = 2.0
"""How long the last words of ranks may be on their way."""


class Greeting(ProtocolMessage, kw_only=True):
    """Somebody is here who will be asked."""


class NoClient(ProtocolMessage, kw_only=True):
    """Of an agent: the supervisor has looked, and nobody serves that door."""


class DebuggerOutput(ProtocolMessage, kw_only=True):
    """Of the debugger. `asks`: whether it wants a line, with `text` as the prompt."""

    text: str
    asks: bool = False


class DebuggerInput(ProtocolMessage, kw_only=True):
    """What the person says."""

    text: str


class ConnectRequest(ProtocolMessage, kw_only=True):
    """To an agent: at which door the rank wants to be let in."""

    door: str


def server_path(folder: Path, name: str) -> Path:
    """Where the door `name` is, in a cluster's folder. Raises ValueError for what is no name of a door."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"no name of a door: {name!r:.80}")
    return folder / f"debug-{name}.sock"


def relay_path(folder: Path) -> Path:
    """Where a host's agent listens, in the host's folder."""
    return folder / "debug.sock"


def request_connection(folder: Path, name: str) -> Channel | None:
    """A channel to whoever serves the door; None where nobody does. `folder`: the cluster's, or the host's own. Raises
    ClusterError, with what has happened, where somebody may be there and does not answer."""
    try:
        channel = connect(server_path(folder, name), Greeting | DebuggerInput)
    except OSError:
        return _request_from_agent(folder, name)
    try:
        return _let_in(channel, GREET_SECONDS, "the kernel with the prompt has not answered")
    except ChannelClosedError:
        return None


def _request_from_agent(folder: Path, name: str) -> Channel | None:
    try:
        channel = connect(relay_path(folder), Greeting | DebuggerInput | NoClient)
    except FileNotFoundError:  # All ranks are on one host.
        return None
    except OSError as error:
        raise ClusterError(f"the agent of this host, over which a prompt is reached, has ended ({error})") from None
    try:
        channel.send(ConnectRequest(door=name))
        return _let_in(channel, FAR_GREET_SECONDS, "over the agent of this host no prompt has answered")
    except ChannelClosedError as error:
        raise ClusterError(f"the line to the prompt, over the agent of this host, has broken ({error})") from None


def _let_in(channel: Channel, seconds: float, silence: str) -> Channel | None:
    """The channel, once the rank is greeted; else it is closed. Raises ClusterError where there is only `silence`."""
    said = None
    try:
        said = channel.receive_within(seconds)
    finally:
        if not isinstance(said, Greeting):
            channel.close()
    if said is None:
        raise ClusterError(f"{silence} within {seconds:g} s")
    return channel if isinstance(said, Greeting) else None


class DebugServer:
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
        path = server_path(folder, name)
        self._listening = listen(path)
        self._shut = weakref.finalize(self, _shut, self._listening, path)
        self._ask = ask or _input
        self._inside: list[Channel] = []

    def serve(self, seconds: float = 0.0) -> None:
        """Take in who has come, and pass on, and ask for, what they say, as long as one of them speaks. Waits for the
        first word of all for `seconds`."""
        self._take_in(seconds)
        for channel in list(self._inside):
            wait = 0.0
            while channel in self._inside and self._hears(channel, wait):
                wait = _SPEAKS_SECONDS

    def finish(self) -> None:
        """Pass on the last words of ranks that are done, and close."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._inside and time.monotonic() < deadline:
            self.serve(_POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """Nobody comes in any more, and those inside are left alone: their sessions end."""
        for channel in list(self._inside):
            self._leave(channel)
        self._shut()

    def __enter__(self) -> DebugServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_in(self, seconds: float) -> None:
        """Greet who comes within `seconds`, and who has come."""
        wait = seconds
        while self._has_come(wait):
            wait = 0.0
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # It was closed meanwhile.
            channel = Channel(connection, DebuggerOutput)
            self._inside.append(channel)
            try:
                channel.send(Greeting())
            except ChannelClosedError:
                self._leave(channel)

    def _has_come(self, seconds: float) -> bool:
        if not self._shut.alive:
            return False
        look = select.poll()
        try:
            look.register(self._listening, select.POLLIN)
        except ValueError:
            return False  # It was closed just now.
        return bool(look.poll(seconds * 1000))

    @contextlib.contextmanager
    def _meanwhile(self, asks: Channel) -> Iterator[threading.Event]:
        """Inside, while a person thinks: who comes is greeted, or it would go on without; the end of the rank that
        `asks` interrupts the person, who would answer nobody. Yields what tells whether that has happened."""
        gone, person = threading.Event(), threading.current_thread()
        over, ends = socket.socketpair()

        def watch() -> None:
            look = select.poll()
            for each in (self._listening, asks.connection, over):
                look.register(each, select.POLLIN)
            while True:
                found = {descriptor for descriptor, _ in look.poll()}
                if over.fileno() in found:
                    return
                if asks.connection.fileno() in found:  # It waits for a line: this can be its end only.
                    gone.set()
                    if person is threading.main_thread():
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    return
                self._take_in(0.0)

        thread = threading.Thread(target=watch, name="speedlab-door", daemon=True)
        thread.start()
        try:
            yield gone
        finally:
            ends.close()
            thread.join()  # An interrupt of its comes in here at the latest.
            over.close()

    def _hears(self, channel: Channel, seconds: float) -> bool:
        """Whether this rank has said something within `seconds`, which is answered. Of half a message, as of a rank
        that was suspended amid one, the rest is awaited while others speak."""
        try:
            words = channel.receive_within(seconds)
            if words is not None:
                self._answer(channel, words)
        except ChannelClosedError:
            self._leave(channel)
            return False
        return words is not None

    def _answer(self, channel: Channel, words: DebuggerOutput) -> None:
        if not words.asks:
            print(words.text, end="", flush=True)
            return
        gone = threading.Event()
        try:
            with self._meanwhile(channel) as gone:
                line = self._ask(words.text)
        except NotImplementedError:  # So a kernel says that nobody sits in front of it.
            print("nobody can be asked here, which ends the rank's session")
            self._leave(channel)
            return
        except (EOFError, KeyboardInterrupt):
            print("\nthe rank is out of reach, which ends its session" if gone.is_set() else "")
            self._leave(channel)
            return
        channel.send(DebuggerInput(text=line))

    def _leave(self, channel: Channel) -> None:
        channel.close()
        with contextlib.suppress(ValueError):
            self._inside.remove(channel)


def _input(prompt: str) -> str:
    return input(prompt)  # A kernel puts its own in the place of Python's.


def _shut(listening: socket.socket, path: Path) -> None:
    listening.close()
    path.unlink(missing_ok=True)
