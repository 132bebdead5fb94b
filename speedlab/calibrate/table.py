"""Print measurements as a text table, and write them as JSON."""

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
    """How the C library's allocator treats freed memory in the processes of `ours`, if it matters."""
    peer_name: str = ""
    peer: float | None = None
    ratio: float | None = None
    """Median over the rounds; `ratio_range`: minimum and maximum."""
    ratio_range: tuple[float, float] | None = None
    limit_share: float | None = None
    """Median over the rounds; `limit_range`: minimum and maximum."""
    limit_range: tuple[float, float] | None = None
    n: int = 0
    spread: float | None = None


_RANGES = {"ratio": "ratio_range", "limit_share": "limit_range"}
"""Columns that show their range in the same cell."""

_TEXTS = ("case", "unit", "allocator", "peer_name")


def missing() -> list[str]:
    """Return the names of peers that are not installed."""
    return [] if importlib.util.find_spec("deepspeed") else ["DeepSpeed"]


def render(rows: list[BenchRow]) -> str:
    """Return the rows as an aligned text table.

    Args:
        rows: the rows. The allocator has a column only if a row uses it.
    """
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
    """Print the table.

    Args:
        rows: the rows.
        file: also write one JSON record for each row to this file; None: do not.
    """
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
