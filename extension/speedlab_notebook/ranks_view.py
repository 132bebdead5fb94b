"""Where a cell on ranks shows what they say: a display that is replaced, or lines in a terminal."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Protocol

from speedlab.cluster.errors import name_ranks

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import RankError
    from speedlab_notebook.transcript import Transcript

Came = list[tuple[list[int], str]]
"""New output as (ranks, text)."""


class View(Protocol):
    """One cell's place."""

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Show what has come; returns how many bytes it took."""
        ...

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Show everything, with the error or the last line."""
        ...


def view_in(shell: InteractiveShell, note: str) -> View:
    """A view in the cell that `shell` runs; `note` is what it says first."""
    return HandleView(note) if hasattr(shell, "kernel") else TerminalView(note)


class HandleView:
    """A display in a notebook that is replaced as output comes."""

    def __init__(self, note: str) -> None:
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        # From the kernel's thread: later updates find their cell by the display's id.
        self._handle.display({"text/plain": note, "text/html": _note_html(note)}, raw=True)

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Show what has come; returns how many bytes it took."""
        return self._replace(transcript, note, None)

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Show everything, with the error or the last line."""
        self._replace(transcript, line, error)

    def _replace(self, transcript: Transcript, note: str, error: RankError | None) -> int:
        text = "\n".join(filter(None, (transcript.text(), str(error) if error else "", note)))
        page = transcript.html() + (error._repr_html_() if error else "") + _note_html(note)
        self._handle.update({"text/plain": text, "text/html": page}, raw=True)
        return len(text) + len(page)


class TerminalView:
    """Lines on stdout, where a display cannot be replaced."""

    def __init__(self, note: str) -> None:
        print(note)

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Print what has come."""
        lines = [f"{name_ranks(ranks)}: {line}" for ranks, text in came for line in text.splitlines()]
        if lines:
            print("\n".join(lines), flush=True)
        return 0

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Print the rest, with the error or the last line."""
        self.update(transcript, came, line)
        print(f"{error}\n{line}" if error else line, flush=True)


def _note_html(note: str) -> str:
    style = "color:var(--jp-ui-font-color2,#767676);font-family:var(--jp-ui-font-family,sans-serif)"
    return f'<div class="speedlab-ranks-note" style="{style}">{html.escape(note)}</div>'
