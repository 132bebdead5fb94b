"""Rows of data that print as a table, as text and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict. Subclasses say how they are shown: `head` and `cells`."""

    notes: tuple[str, ...] = ()
    """Lines below the rows: what a column's name does not tell, what is to be done."""

    def head(self) -> Sequence[str]:
        """The names of the columns."""
        raise NotImplementedError

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text, in the order of `head`."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines = [tuple(self.head()), *self.cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([*rows, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        rows = "".join(line("td", cells) for cells in self.cells())
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<table>{line('th', self.head())}{rows}</table>{notes}"
