"""Execute cells in an engine, in the engine's namespace, as a notebook would.

`LiveCells` executes cells between two steps of a run: the output is collected, and written when the cell is done.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.getipython import get_ipython

from speedlab.cluster.debug.rank_debugger import Breakpoints
from speedlab.cluster.errors import describe
from speedlab.cluster.files.signed_files import read_signed, write_signed
from speedlab.telemetry.cell_outcomes import MOST_BYTES, CellOutcome


def run_cell(
    code: str, interruptible: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> str | None:
    """Execute a cell. The last expression is printed, as in a notebook.

    Args:
        code: Source code of the cell.
        interruptible: Context in which the user's code runs.

    Returns:
        The text of the last expression; None without one.

    Raises:
        BaseException: The exception of the cell.
    """
    from IPython.core.async_helpers import _asyncio_runner
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    shell.ask_exit = _stay
    if shell.loop_runner is _asyncio_runner:  # Keep a runner that the user has chosen with %autoawait.
        shell.loop_runner = _run_aside
    with _SilentTraceback(shell), interruptible():
        result = shell.run_cell(code, store_history=False)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        raise error
    if result.result is None or shell.displayhook.semicolon_at_end_of_expression(code):
        return None
    formats, _ = shell.display_formatter.format(result.result, include=["text/plain"])
    text = formats.get("text/plain", repr(result.result))
    print(text)
    return text


def _stay() -> None:
    """Replace `exit()` and `quit()`: ending the kernel would lose its run and its tensors."""
    print("an engine does not end from a cell; %speedlab stop ends all of them", file=sys.stderr)


def _run_aside(cell: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell with await on its own event loop: the loop of the engine is running and waits for this cell."""
    engines_loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(cell)
    finally:
        asyncio._set_running_loop(engines_loop)


class _SilentTraceback(contextlib.AbstractContextManager[None]):
    """Keep the shell from printing and storing errors.

    RankError shows errors, and a stored traceback would keep tensors alive. This is a class and not a generator,
    because an engine blocks interrupts in these two methods, but could not block them in the code that drives a
    generator.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __enter__(self) -> None:
        shell = self._shell
        self._shown = shell.showtraceback, shell.showsyntaxerror
        shell.showtraceback = shell.showsyntaxerror = lambda *arguments, **keywords: None

    def __exit__(self, *exception: object) -> None:
        shell = self._shell
        shell.showtraceback, shell.showsyntaxerror = self._shown
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        shell.last_execution_result = None


class LiveCells:
    """Executes cells between two steps, for `speedlab.trainer.cell_runner.CellRunner`."""

    def __init__(
        self, patience: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        """Prepare cells.

        Args:
            patience: Context without collective timeouts, for cells in which a user may think at the prompt of another
                rank.
        """
        self._patience = patience

    def take(self, path: Path) -> str:
        """Read and remove the file of a cell.

        Args:
            path: The file.

        Returns:
            Source code of the cell.

        Raises:
            ClusterError: If this user did not write the file.
        """
        code = read_signed(path, "Run the cell again").decode()
        path.unlink()
        return code

    def write(self, path: Path, data: bytes) -> None:
        """Write the outcome of a cell to a signed file."""
        write_signed(path, data)

    def run(
        self,
        code: str,
        door: str,
        names: Mapping[str, Any],
        interruptible: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> CellOutcome:
        """Execute a cell and collect its output.

        Args:
            code: Source code of the cell.
            door: Name of the DebugServer for `breakpoint()`; "" for none.
            names: Variables of the cell, such as `engine`.
            interruptible: Context in which the user's code runs.

        Returns:
            Output, text of the last expression, and failure.
        """
        shell: Any = get_ipython()
        heard = _Heard(shell)
        text, failure = None, None
        patience = self._patience() if door else contextlib.nullcontext()
        with heard, _with_names(shell.user_ns, names), Breakpoints(door), patience:
            try:
                text = run_cell(code, interruptible)
            except BaseException as error:  # Also an interrupt, which pauses the run.
                failure = {name: _bounded(value) for name, value in describe(error).items()}
        return CellOutcome(heard.messages, _bounded(text), failure)


def _bounded(value: Any) -> Any:
    """Shorten long text; otherwise the answer of all ranks would be too large to read."""
    if not isinstance(value, str) or len(value) <= MOST_BYTES:
        return value
    return f"{value[:MOST_BYTES]}\n… {len(value) - MOST_BYTES:,} characters are left out"


@contextlib.contextmanager
def _with_names(namespace: dict[str, Any], names: Mapping[str, Any]) -> Iterator[None]:
    """Add `names` to the namespace inside the block, and restore it: the namespace must not keep a training engine
    alive.
    """
    hidden = {name: namespace[name] for name in names if name in namespace}
    namespace.update(names)
    try:
        yield
    finally:
        for name in names:
            namespace.pop(name, None)
        namespace.update(hidden)


class _Heard:
    """Collects the output of the shell inside the block, as [kind, content] of Jupyter's messages, instead of sending
    it.
    """

    def __init__(self, shell: Any) -> None:
        self.messages: list[list[Any]] = []
        self._shell = shell
        self._left = MOST_BYTES
        self._before: tuple[Any, ...] = ()

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        if self._left <= 0:
            return
        text = json.dumps(content, default=_as_text)
        self._left -= len(text)
        if self._left > 0:
            self.messages.append([kind, json.loads(text)])
            return
        what = f"… more than {MOST_BYTES:,} bytes were said in this cell; the rest is left out\n"
        self.messages.append(["stream", {"name": "stderr", "text": what}])

    def __enter__(self) -> None:
        shell = self._shell
        hook = shell.displayhook
        self._before = sys.stdout, sys.stderr, shell.display_pub
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")
        shell.display_pub = _OutputPublisher(self)
        hook.write_format_data = self._result
        hook.finish_displayhook = lambda: None
        hook.update_user_ns = lambda result: None  # The variable `_` would keep a training engine alive.

    def __exit__(self, *exception: object) -> None:
        sys.stdout, sys.stderr, self._shell.display_pub = self._before
        hook = self._shell.displayhook
        del hook.write_format_data, hook.finish_displayhook, hook.update_user_ns

    def _result(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        self.take("execute_result", {"data": dict(data), "metadata": dict(metadata or {})})


def _as_text(value: object) -> str:
    """Return a value that is no JSON as text: the bytes of a picture as base64, anything else by str()."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class _Stream(io.TextIOBase):
    def __init__(self, heard: _Heard, name: str) -> None:
        self._heard, self._name = heard, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._heard.take("stream", {"name": self._name, "text": text})
        return len(text)


class _OutputPublisher(DisplayPublisher):
    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self._heard = heard

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **other: Any,
    ) -> None:
        kind = "update_display_data" if update else "display_data"
        content = {"data": dict(data), "metadata": dict(metadata or {}), "transient": dict(transient or {})}
        self._heard.take(kind, content)

    def clear_output(self, wait: bool = False) -> None:
        self._heard.take("clear_output", {"wait": wait})
