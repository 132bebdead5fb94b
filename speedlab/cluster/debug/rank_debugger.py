"""Python's debugger on a rank: a post-mortem of what it raised last, and `breakpoint()` in a cell between two steps.

*What is kept* is one exception a rank, with its frames and so with the tensors in them, until the next thing that a
person lets this rank do begins: then it is freed, before anything takes memory. Nothing is kept of a rank that only
followed another one into its failure, since its frames would hold the connections that are to close, and nothing of a
cell between two steps, since the run goes on beside it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pdb
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from speedlab.cluster.debug.connection import DebuggerInput, DebuggerOutput, request_connection
from speedlab.cluster.errors import ClusterError, RemoteFailure
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError

_kept: list[BaseException] = []
"""What this rank raised last, while it is kept."""

_CALLED_BACK = ("weakref", "_weakrefset")
"""Modules whose frames the interpreter calls wherever it frees something; what is raised there is lost, a quit too."""
_SKIPPED = ("IPython.*", "traitlets.*", "contextlib", "asyncio.*", "codeop", "speedlab.cluster.*", *_CALLED_BACK)
"""Modules between a cell's statements, into which nobody wants to step."""
_ABOVE = ("speedlab/cluster/worker/remote.py", "speedlab/cluster/worker/cells.py")
_SHELL = "IPython/core/interactiveshell.py"


def keep(error: BaseException) -> None:
    """Keep what this rank has raised, instead of what it raised before."""
    forget()
    if not RemoteFailure(kind=type(error).__name__, message=_text(error)).follows_another:
        _kept.append(error)


def forget() -> None:
    """Free what is kept."""
    _kept.clear()


def post_mortem(name: str) -> bool:
    """Let whoever serves the door `name` look at what this rank raised last. False where nothing is kept. Raises
    ClusterError where nobody can be reached."""
    if not _kept:
        return False
    error = _kept[0]
    why = "that kernel, or the cluster's supervisor, has ended meanwhile"
    try:
        channel = request_connection(_folder(), name)
    except ClusterError as problem:
        channel, why = None, str(problem)
    if channel is None:
        raise ClusterError(f"rank {_rank()} does not reach who asked for a post-mortem: {why}. Ask again")
    talk = _Talk(channel)
    try:
        talk.write(f"rank {_rank()}: {RemoteFailure(kind=type(error).__name__, message=_text(error))}\n")
        debugger = _Debugger(talk)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
    finally:
        talk.close()
    return True


class Breakpoints:
    """Inside, `breakpoint()` stops, where somebody serves the door `name`; else, and where that is "", it says so, and
    goes on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._talk: _Talk | None = None
        self._debugger: _Debugger | None = None
        """Made when it stops first, as the talk is."""
        self._alone = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._before, sys.breakpointhook = sys.breakpointhook, self._stop

    def __exit__(self, *exception: object) -> None:
        if sys.breakpointhook == self._stop:  # A cell may have set one of its own.
            sys.breakpointhook = self._before
        if self._talk is None:
            return
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # They would keep the debugger, and with it the cell's tensors.
            frame.f_trace = None
            frame = frame.f_back
        self._talk.close()
        self._debugger = None

    def _stop(self, *arguments: object, header: str | None = None, **keywords: object) -> None:
        """As `breakpoint()` calls it."""
        if self._alone:
            return
        if self._talk is None or self._talk.over:
            channel = self._knock()
            if channel is None:
                self._alone = True  # To be waited for, and told, once is enough.
                return
            self._talk = _Talk(channel)
            self._debugger = _Debugger(self._talk)
        assert self._debugger is not None
        if header is not None:
            self._talk.write(f"{header}\n")
        self._debugger.set_trace(sys._getframe(1))

    def _knock(self) -> Channel | None:
        """Where somebody is to be asked; else it says why not."""
        try:
            channel = request_connection(_folder(), self._name) if self._name else None
        except ClusterError as problem:
            print(f"breakpoint(): {problem}, so this cell goes on; run it again to stop there")
            return None
        if channel is None:
            print("breakpoint(): nobody waits for this cell in front of a prompt, so it goes on; with --wait it stops")
        return channel


class _Talk(io.TextIOBase):
    """What the debugger writes and reads, over a channel. At its end there is nothing to read."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._unsent = ""
        self.over = False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        lines, newline, rest = (self._unsent + text).rpartition("\n")
        self._unsent = rest
        if newline:
            self._send(DebuggerOutput(text=lines + newline))
        return len(text)

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # of text, whatever its size
        prompt, self._unsent = self._unsent, ""
        try:
            self._send(DebuggerOutput(text=prompt, asks=True))
            line = self._channel.receive() if not self.over else None
        except (ChannelClosedError, KeyboardInterrupt):  # An interrupt ends the session: pdb would ask again.
            self.close()
            line = None
        return f"{line.text}\n" if isinstance(line, DebuggerInput) else ""

    def close(self) -> None:
        self.over = True
        self._channel.close()

    def _send(self, words: DebuggerOutput) -> None:
        with contextlib.suppress(ChannelClosedError):  # Then nothing can be read either, which ends the session.
            if not self.over:
                self._channel.send(words)


class _Debugger(pdb.Pdb):
    """pdb, whose frames are those of the user's code and of what it calls."""

    def __init__(self, talk: _Talk) -> None:
        both: Any = talk  # It is all of a file that pdb uses.
        super().__init__(stdin=both, stdout=both, skip=_SKIPPED, nosigint=True, readrc=False)
        self.prompt = f"rank {_rank()} (Pdb) "

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        first = _first_own([frame for frame, _ in stack])
        return stack[first:], max(0, index - first)

    def do_quit(self, arg: str) -> bool:
        self._user_requested_quit = True
        self.set_quit()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:  # noqa: N802  # as pdb calls it
        return self.do_quit(arg)

    def _not_here(self, arg: str) -> None:
        self.error("not on a rank: !statement runs one, and `l`, `w`, `u`, `d`, `p`, `n`, `s`, `c`, `q` work as usual")

    do_interact = do_run = do_restart = _not_here  # type: ignore[assignment]  # these ask another terminal


def _first_own(frames: list[FrameType]) -> int:
    """Where the user's code begins: behind the transport, and behind the shell that runs a cell."""
    files = [frame.f_code.co_filename.replace(os.sep, "/") for frame in frames]
    first = max((number + 1 for number, file in enumerate(files) if file.endswith(_ABOVE)), default=0)
    for number in range(first, len(frames)):
        if files[number].endswith(_SHELL) and frames[number].f_code.co_name == "run_code":
            first = number + 1
            break
    return first if first < len(frames) else 0


def _text(error: BaseException) -> str:
    from speedlab.cluster.errors import describe

    return str(describe(error)["message"])


def _rank() -> str:
    return os.environ["RANK"]


def _folder() -> Path:
    return Path(os.environ["SPEEDLAB_RENDEZVOUS"]).parent
