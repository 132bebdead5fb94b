"""Rows of a measurement: printed as a table for people, written as JSON for programs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One comparison. `ratio` > 1 means ours is better; `spread` is (max − min) / median of our `n` rounds."""

    case: str
    ours: float
    unit: str
    allocator: str = ""
    """What the C library's allocator does with freed memory in the processes of `ours`, where it matters."""
    peer_name: str = ""
    peer: float | None = None
    ratio: float | None = None
    """Median over the rounds; `ratio_range`: the smallest and the largest."""
    ratio_range: tuple[float, float] | None = None
    limit_share: float | None = None
    """Median over the rounds; `limit_range`: the smallest and the largest."""
    limit_range: tuple[float, float] | None = None
    n: int = 0
    spread: float | None = None


_RANGES = {"ratio": "ratio_range", "limit_share": "limit_range"}
"""Columns that have their range in the same cell."""

_TEXTS = ("case", "unit", "allocator", "peer_name")


def missing() -> list[str]:
    """Peers that are not installed here."""
    return [] if importlib.util.find_spec("deepspeed") else ["DeepSpeed"]


def render(rows: list[BenchRow]) -> str:
    """The rows as a text table, columns aligned. The allocator has a column where a row says something of it."""
    left_out = {*_RANGES.values(), *(() if any(row.allocator for row in rows) else ("allocator",))}
    header = [field.name for field in fields(BenchRow) if field.name not in left_out]
    lines = [header, *([_cell_of(row, name) for name in header] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _TEXTS else cell.rjust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        )
        for line in lines
    )


def report(rows: list[BenchRow], file: Path | None) -> None:
    """Print the table, and write one JSON record for each row when `file` is given."""
    print(render(rows))
    if file is not None:
        file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def _cell_of(row: BenchRow, name: str) -> str:
    text = _cell(getattr(row, name))
    limits = getattr(row, _RANGES[name]) if name in _RANGES else None
    return text if limits is None else f"{text} ({_cell(limits[0])}..{_cell(limits[1])})"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
