"""Connection between a debugged rank and the kernel of the user: the kernel listens, the rank connects.

1. The code that waits for the rank (a post-mortem, a cell) opens a `DebugServer`: a socket in the cluster's folder,
   which only its owner can enter.
2. The rank connects, and is greeted when the server is served. A rank that is not greeted continues without a debugger.
   On another host, the rank does not see the cluster's folder. It connects to the agent of its host (`agent_relay.py`)
   and names the server, and the supervisor transfers the bytes (`supervisor_relay.py`). The rank distinguishes "no
   server" (`NoClient`) from no answer.
3. The rank sends the debugger's output and, for each command, a prompt; it receives lines. Ranks that connect while the
   user thinks are greeted, and wait for their turn.
4. The end of the connection ends the session, from either side. So no rank waits for a user who has left.
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
"""How long a rank waits for its greeting."""
FAR_GREET_SECONDS = 15.0
"""As GREET_SECONDS, through an agent. The agent is polled once a second, and later while another host is cut off."""
_SPEAKS_SECONDS = 0.3
"""Usual time between a command and its answer. Waiting this long keeps prompts of several ranks from alternating."""
_POLL_SECONDS = 0.02
_NAME = re.compile(r"\w{1,64}", re.ASCII)
_LAST_SECONDS = 2.0
"""How long to wait for the last output of ranks."""


class Greeting(ProtocolMessage, kw_only=True):
    """A user is there to answer prompts."""


class NoClient(ProtocolMessage, kw_only=True):
    """From an agent: the supervisor found no DebugServer of that name."""


class DebuggerOutput(ProtocolMessage, kw_only=True):
    """Output of the debugger; with `asks`, `text` is a prompt and a line is expected."""

    text: str
    asks: bool = False


class DebuggerInput(ProtocolMessage, kw_only=True):
    """A line of the user."""

    text: str


class ConnectRequest(ProtocolMessage, kw_only=True):
    """To an agent: the name of the DebugServer that the rank wants to reach."""

    door: str


def server_path(folder: Path, name: str) -> Path:
    """Return the path of the DebugServer `name` in a cluster's folder.

    Args:
        folder: Folder of the cluster.
        name: Name of the server.

    Raises:
        ValueError: If the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"no name of a door: {name!r:.80}")
    return folder / f"debug-{name}.sock"


def relay_path(folder: Path) -> Path:
    """Return the path at which a host's agent listens, in the folder of the host."""
    return folder / "debug.sock"


def request_connection(folder: Path, name: str) -> Channel | None:
    """Connect to a DebugServer.

    Args:
        folder: Folder of the cluster, or the host's own.
        name: Name of the server.

    Returns:
        The channel after the greeting; None if no server listens.

    Raises:
        ClusterError: If a server may be there and does not answer.
    """
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
    except FileNotFoundError:  # There is no agent: all ranks are on one host.
        return None
    except OSError as error:
        raise ClusterError(f"the agent of this host, over which a prompt is reached, has ended ({error})") from None
    try:
        channel.send(ConnectRequest(door=name))
        return _let_in(channel, FAR_GREET_SECONDS, "over the agent of this host no prompt has answered")
    except ChannelClosedError as error:
        raise ClusterError(f"the line to the prompt, over the agent of this host, has broken ({error})") from None


def _let_in(channel: Channel, seconds: float, silence: str) -> Channel | None:
    """Return the channel after the greeting; otherwise close it. Raises ClusterError with `silence` if there is no
    answer.
    """
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
    """Server to which ranks connect that want to be debugged. Call `serve` often and `close` at the end."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        ask: Callable[[str], str] | None = None,
    ) -> None:
        """Listen for ranks. The server also closes when it is dropped.

        Args:
            folder: Folder of the cluster.
            name: Name of the server.
            ask: ask(prompt) returns a line; None for `input`. EOFError and an interrupt in it end the session of that
                rank.
        """
        path = server_path(folder, name)
        self._listening = listen(path)
        self._shut = weakref.finalize(self, _shut, self._listening, path)
        self._ask = ask or _input
        self._inside: list[Channel] = []

    def serve(self, seconds: float = 0.0) -> None:
        """Accept ranks, print their output, and ask for their commands while one of them sends.

        Args:
            seconds: How long to wait for the first connection.
        """
        self._take_in(seconds)
        for channel in list(self._inside):
            wait = 0.0
            while channel in self._inside and self._receives(channel, wait):
                wait = _SPEAKS_SECONDS

    def finish(self) -> None:
        """Print the last output of ranks that are done, and close."""
        deadline = time.monotonic() + _LAST_SECONDS
        while self._inside and time.monotonic() < deadline:
            self.serve(_POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """Stop listening and end all sessions."""
        for channel in list(self._inside):
            self._leave(channel)
        self._shut()

    def __enter__(self) -> DebugServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_in(self, seconds: float) -> None:
        """Greet the ranks that connect within `seconds`."""
        wait = seconds
        while self._has_come(wait):
            wait = 0.0
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # The server was closed.
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
            return False  # The server was closed just now.
        return bool(look.poll(seconds * 1000))

    @contextlib.contextmanager
    def _meanwhile(self, asks: Channel) -> Iterator[threading.Event]:
        """Watch for connections while the user thinks.

        New ranks are greeted, because otherwise they would continue without a debugger. If the rank of `asks`
        disconnects, the prompt is interrupted. Yields an event that is set then.
        """
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
                if asks.connection.fileno() in found:  # The rank waits for a line, so this can only be its end.
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
            thread.join()  # An interrupt from the watching thread arrives here at the latest.
            over.close()

    def _receives(self, channel: Channel, seconds: float) -> bool:
        """Handle one message of a rank within `seconds`; return whether there was one.

        If a message is incomplete, for example from a suspended rank, the rest is awaited while other ranks are served.
        """
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
        except NotImplementedError:  # A kernel without a frontend raises this.
            print("no input is possible here, which ends the rank's session")
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
    return input(prompt)  # A kernel replaces Python's `input`.


def _shut(listening: socket.socket, path: Path) -> None:
    listening.close()
    path.unlink(missing_ok=True)
