"""What queries see of keys, as shaded cells, of causal attention a triangle: one SVG without script or style sheet, and
lines of text.

A picture takes the page's own text colour. Cells of one shade are one path, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

SIDE = 64
"""Most cells on a side of a picture."""

_TEXT_SIDE = 32
"""Of text, which shows one letter a cell."""

_SHADES = 8
"""Between nothing and all of a cell; the least share still shows."""
_LETTERS = "·░▒▓■"
_EDGE, _LEFT, _TOP, _BELOW = 176, 14, 16, 16


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Row by row from the first query on, cells from the first key to the last one that dense attention sees."""

    shares: tuple[tuple[float, ...], ...]
    """Of each cell that dense attention sees, how much is seen: 0 to 1."""
    titles: tuple[str, ...]
    """Of each row, told on hover."""
    length: int
    """Tokens on a side."""


def grid_svg(grid: Grid, *, what: str) -> str:
    """The picture; `what` is the sentence that a screen reader hears."""
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
    return (
        f'<svg class="speedlab-grid-picture" viewBox="{-_LEFT} {-_TOP} {_EDGE + _LEFT + 2} {_EDGE + _TOP + _BELOW}" '
        f'width="{_EDGE + _LEFT + 2}" height="{_EDGE + _TOP + _BELOW}" role="img" aria-label="{escape(what)}">'
        f'{"".join(parts)}<path d="M0 0V{_EDGE}H{_EDGE}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<g fill="currentColor" font-size="10.5"><text x="0" y="{_EDGE + 12}">0</text>'
        f'<text x="{_EDGE / 2}" y="{_EDGE + 12}" text-anchor="middle">keys →</text>'
        f'<text x="{_EDGE}" y="{_EDGE + 12}" text-anchor="end">{grid.length:,}</text>'
        f'<text transform="translate(-4 {_EDGE / 2}) rotate(-90)" text-anchor="middle">← queries</text></g></svg>'
    )


def _outline(grid: Grid, size: float) -> str:
    """What dense attention sees."""
    steps = "".join(f"H{len(cells) * size:.2f}V{row * size:.2f}" for row, cells in enumerate(grid.shares, start=1))
    return f"M0 0{steps}H0Z"


def _of_shade(grid: Grid, shade: int, size: float) -> str:
    """The cells of one shade, neighbours in a row as one rectangle."""
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
    """A letter for each cell, more cells in one where there are many."""
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
    """0 for nothing, else 1 to `levels`."""
    return min(levels, max(1, round(share * levels))) if share > 0 else 0
