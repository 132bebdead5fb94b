"""A cell in an engine: run as a notebook would, in the engine's namespace."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any


def run_cell(
    code: str, interruptible: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> str | None:
    """Run a cell in this engine's namespace. Prints the last expression, as a notebook would, and returns its text.
    What is the user's in it runs inside `interruptible()`."""
    from IPython.core.async_helpers import _asyncio_runner
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    shell.ask_exit = _stay
    if shell.loop_runner is _asyncio_runner:  # Not where the person has chosen another, by %autoawait.
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
    """In the place of what `exit()` and `quit()` do to a kernel, which would take its run and its tensors along."""
    print("an engine does not end from a cell; %speedlab stop ends all of them", file=sys.stderr)


def _run_aside(cell: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell that awaits, on a loop of its own: the engine's is running, and waits for this cell."""
    engines_loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(cell)
    finally:
        asyncio._set_running_loop(engines_loop)


class _SilentTraceback(contextlib.AbstractContextManager[None]):
    """Keep the shell from showing and keeping errors: RankError shows them, and a kept traceback would hold tensors.
    No generator: an engine lets no interrupt into these two functions, and would into what calls a generator."""

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
