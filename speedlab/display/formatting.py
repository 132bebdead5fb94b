"""Format tables, bytes, counts and seconds for humans, and suggest names for a typing error.

GiB is 1024³ bytes. Every number has its unit.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Sequence
from typing import Any


class Table(list[dict[str, Any]]):
    """A list of rows (dicts) that prints as a table, as text and in a notebook.

    Subclasses define the columns: `head` and `cells`.
    """

    notes: tuple[str, ...] = ()
    """Lines below the rows: explanations of columns and next steps."""

    def head(self) -> Sequence[str]:
        """Return the names of the columns."""
        raise NotImplementedError

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as text, with columns in the order of `head`."""
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


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit in which a number of bytes has one to four digits.

    Args:
        largest: number of bytes.

    Returns:
        (unit, bytes in this unit), for instance ("GiB", 1024³).
    """
    power = 0
    while abs(largest) >= 1024 and power < len(_BINARY) - 1:
        largest /= 1024
        power += 1
    return _BINARY[power], 1024**power


def bytes_text(count: float) -> str:
    """Return bytes as '1.4 GiB', '312 MiB' or '0 B'."""
    unit, size = byte_unit(count)
    value = count / size
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"


def count_text(count: float) -> str:
    """Return a count with three digits and a decimal prefix: '950', '41.2 k', '3.1 M'."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g}"


def seconds_text(seconds: float) -> str:
    """Return seconds as '12.3 ms', '1.24 s', '3 min 5 s' or '26 h 3 min'."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name, with the nearest known names first and then all of them.

    Args:
        kind: noun for the message, for instance "device".
        name: the name as given. Known names that start with it are nearest, otherwise similar ones.
        known: all valid names.

    Returns:
        A ValueError, for the caller to raise.
    """
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    begin = [candidate for candidate in folded if candidate.startswith(name.lower()) and name]
    close = [folded[match] for match in begin or difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)]
    nearest = f"nearest: {', '.join(close)}" if close else "none is near"
    return ValueError(f"{kind} {name!r} is not known; {nearest}. Known: {', '.join(names)}")
