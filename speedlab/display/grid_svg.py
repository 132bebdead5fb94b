"""Draw which keys each query sees as shaded cells, as static SVG or as lines of text.

Causal attention is a triangle. The picture has the text colour of the page. All cells of one shade are a single path,
so the picture stays small. This file imports no arrays: every process that reads a configuration imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

SIDE = 64
"""Maximum number of cells on a side of a picture."""

_TEXT_SIDE = 32
"""Maximum number of cells on a side in text, which prints one letter for each cell."""

_SHADES = 8
"""Number of shades between empty and full. The smallest share still gets a visible shade."""
_LETTERS = "·░▒▓■"
_EDGE, _LEFT, _TOP, _BELOW = 176, 14, 16, 16


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Shares of attention, row by row from the first query; each row ends at the last key that dense attention sees."""

    shares: tuple[tuple[float, ...], ...]
    """For each cell that dense attention sees, the share that is seen: 0 to 1."""
    titles: tuple[str, ...]
    """Text for each row, shown on hover."""
    length: int
    """Tokens on a side."""


def grid_svg(grid: Grid, *, what: str) -> str:
    """Return the grid as one SVG.

    Args:
        grid: the shares to draw.
        what: accessible label, read aloud by screen readers.
    """
    side = len(grid.shares)
    size = _EDGE / side
    parts = [f'<path d="{_outline(grid, size)}" fill="currentColor" fill-opacity="0.07"/>']
    for shade in range(1, _SHADES + 1):
        if outline := _of_shade(grid, shade, size):
            parts.append(
                f'<path d="{outline}" fill="currentColor" fill-opacity="{0.15 + 0.75 * shade / _SHADES:.2f}"/>'
            )
    for row, title in enumerate(grid.titles):
        parts.append(
            f'<rect x="0" y="{row * size:.2f}" width="{_EDGE}" height="{size:.2f}" fill="transparent">'
            f"<title>{escape(title)}</title></rect>"
        )
    wide, high = _EDGE + _LEFT + 2, _EDGE + _TOP + _BELOW
    return (
        f'<svg class="speedlab-grid-picture" viewBox="{-_LEFT} {-_TOP} {wide} {high}" '
        f'width="{wide}" height="{high}" role="img" aria-label="{escape(what)}">'
        f'{"".join(parts)}<path d="M0 0V{_EDGE}H{_EDGE}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<g fill="currentColor" font-size="10.5"><text x="0" y="{_EDGE + 12}">0</text>'
        f'<text x="{_EDGE / 2}" y="{_EDGE + 12}" text-anchor="middle">keys →</text>'
        f'<text x="{_EDGE}" y="{_EDGE + 12}" text-anchor="end">{grid.length:,}</text>'
        f'<text transform="translate(-4 {_EDGE / 2}) rotate(-90)" text-anchor="middle">← queries</text></g></svg>'
    )


def _outline(grid: Grid, size: float) -> str:
    """Return the outline of the cells that dense attention sees."""
    steps = "".join(f"H{len(cells) * size:.2f}V{row * size:.2f}" for row, cells in enumerate(grid.shares, start=1))
    return f"M0 0{steps}H0Z"


def _of_shade(grid: Grid, shade: int, size: float) -> str:
    """Return the path of all cells of one shade, neighbours in a row merged into one rectangle."""
    found = []
    for row, shares in enumerate(grid.shares):
        start = None
        for column, share in enumerate((*shares, 0.0)):
            if _level(share, _SHADES) == shade:
                start = column if start is None else start
            elif start is not None:
                width = (column - start) * size
                found.append(f"M{start * size:.2f} {row * size:.2f}h{width:.2f}v{size:.2f}h{-width:.2f}z")
                start = None
    return "".join(found)


def grid_text(grid: Grid) -> list[str]:
    """Return the grid as lines of text with one letter for each cell.

    Args:
        grid: the shares. Above 32 rows, several cells share a letter, which shows their mean.
    """
    per_cell = -(-len(grid.shares) // _TEXT_SIDE) if len(grid.shares) > SIDE // 2 else 1
    lines = []
    for first in range(0, len(grid.shares), per_cell):
        sums: dict[int, list[float]] = {}
        for shares in grid.shares[first : first + per_cell]:
            for column, share in enumerate(shares):
                sums.setdefault(column // per_cell, []).append(share)
        lines.append("".join(_LETTERS[_level(sum(own) / len(own), len(_LETTERS) - 1)] for own in sums.values()))
    return lines


def _level(share: float, levels: int) -> int:
    """Return 0 for an empty cell, otherwise 1 to `levels`."""
    return min(levels, max(1, round(share * levels))) if share > 0 else 0
