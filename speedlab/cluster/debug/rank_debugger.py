"""Python's debugger on a rank: post-mortem of its last exception, and `breakpoint()` in a cell between two steps.

A rank keeps one exception, with its frames and so with the tensors in them. It is freed when the next work of the user
begins, before that work takes memory. Two kinds of exceptions are not kept:

- those of a rank that only followed another rank's failure: its frames would hold connections that must close;
- those of a cell between two steps: the run continues.
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
"""The last exception of this rank, while it is kept."""

_CALLED_BACK = ("weakref", "_weakrefset")
"""Modules whose frames the interpreter calls when it frees objects. An exception raised there is lost, and so is a
quit.
"""
_SKIPPED = ("IPython.*", "traitlets.*", "contextlib", "asyncio.*", "codeop", "speedlab.cluster.*", *_CALLED_BACK)
"""Modules between the statements of a cell, which are not stepped into."""
_ABOVE = ("speedlab/cluster/worker/remote.py", "speedlab/cluster/worker/cells.py")
_SHELL = "IPython/core/interactiveshell.py"


def keep(error: BaseException) -> None:
    """Keep the exception of this rank instead of an earlier one.

    Args:
        error: Exception; not kept if it follows another rank's failure.
    """
    forget()
    if not RemoteFailure(kind=type(error).__name__, message=_text(error)).follows_another:
        _kept.append(error)


def forget() -> None:
    """Free the kept exception."""
    _kept.clear()


def post_mortem(name: str) -> bool:
    """Let the user inspect the last exception of this rank.

    Args:
        name: Name of the DebugServer.

    Returns:
        False if no exception is kept.

    Raises:
        ClusterError: If the server cannot be reached.
    """
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
    """Context in which `breakpoint()` stops if a DebugServer listens; otherwise it prints why not, and continues."""

    def __init__(self, name: str) -> None:
        """`name`: name of the DebugServer; "" if there is none."""
        self._name = name
        self._talk: _Talk | None = None
        self._debugger: _Debugger | None = None
        """Made at the first stop, as is the talk."""
        self._alone = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._before, sys.breakpointhook = sys.breakpointhook, self._stop

    def __exit__(self, *exception: object) -> None:
        if sys.breakpointhook == self._stop:  # The cell may have set its own hook.
            sys.breakpointhook = self._before
        if self._talk is None:
            return
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # Trace functions would keep the debugger alive, and with it the tensors of the cell.
            frame.f_trace = None
            frame = frame.f_back
        self._talk.close()
        self._debugger = None

    def _stop(self, *arguments: object, header: str | None = None, **keywords: object) -> None:
        """Handle a call of `breakpoint()`."""
        if self._alone:
            return
        if self._talk is None or self._talk.over:
            channel = self._knock()
            if channel is None:
                self._alone = True  # Wait and report only once.
                return
            self._talk = _Talk(channel)
            self._debugger = _Debugger(self._talk)
        assert self._debugger is not None
        if header is not None:
            self._talk.write(f"{header}\n")
        self._debugger.set_trace(sys._getframe(1))

    def _knock(self) -> Channel | None:
        """Connect to the DebugServer; print why if that fails."""
        try:
            channel = request_connection(_folder(), self._name) if self._name else None
        except ClusterError as problem:
            print(f"breakpoint(): {problem}, so this cell goes on; run it again to stop there")
            return None
        if channel is None:
            print("breakpoint(): no prompt waits for this cell, so it goes on; with --wait it stops")
        return channel


class _Talk(io.TextIOBase):
    """File object of the debugger over a channel. Reading returns "" after the channel has closed."""

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
        except (ChannelClosedError, KeyboardInterrupt):  # An interrupt ends the session; pdb alone would prompt again.
            self.close()
            line = None
        return f"{line.text}\n" if isinstance(line, DebuggerInput) else ""

    def close(self) -> None:
        self.over = True
        self._channel.close()

    def _send(self, words: DebuggerOutput) -> None:
        with contextlib.suppress(ChannelClosedError):  # Reading fails then, too, and ends the session.
            if not self.over:
                self._channel.send(words)


class _Debugger(pdb.Pdb):
    """pdb that shows only frames of the user's code and of what the code calls."""

    def __init__(self, talk: _Talk) -> None:
        both: Any = talk  # pdb needs only these methods of a file.
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
    """Return the index of the first frame of the user's code, below the transport and the shell that runs a cell."""
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
