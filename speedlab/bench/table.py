"""Rows of a measurement: printed as a table for people, written as JSON for programs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `ratio` > 1 means ours is better; `spread` is (max − min) / median of our `n` rounds."""

    case: str
    ours: float
    unit: str
    peer_name: str = ""
    peer: float | None = None
    ratio: float | None = None
    limit_share: float | None = None
    n: int = 0
    spread: float | None = None


def missing() -> list[str]:
    """Peers that are not installed here."""
    return [] if importlib.util.find_spec("deepspeed") else ["DeepSpeed"]


def render(rows: list[Row]) -> str:
    """The rows as a text table, columns aligned."""
    header = [field.name for field in fields(Row)]
    lines = [header, *([_cell(getattr(row, name)) for name in header] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 2, 3) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def report(rows: list[Row], file: Path | None) -> None:
    """Print the table, and write one JSON record for each row when `file` is given."""
    print(render(rows))
    if file is not None:
        file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
