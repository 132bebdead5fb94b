"""A cell in an engine: run as a notebook would, in the engine's namespace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def run_cell(
    code: str, interruptible: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> str | None:
    """Run a cell in this engine's namespace. Prints the last expression, as a notebook would, and returns its text.
    What is the user's in it runs inside `interruptible()`."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    with _silent_traceback(shell), interruptible():
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


@contextlib.contextmanager
def _silent_traceback(shell: Any) -> Iterator[None]:
    """Keep the shell from showing and keeping errors: RankError shows them, and a kept traceback would hold tensors."""
    shown = shell.showtraceback, shell.showsyntaxerror
    shell.showtraceback = shell.showsyntaxerror = lambda *arguments, **keywords: None
    try:
        yield
    finally:
        shell.showtraceback, shell.showsyntaxerror = shown
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        shell.last_execution_result = None
