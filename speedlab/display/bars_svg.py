"""Stacked bars of bytes as one SVG, with the capacity line: what a panel and a plan show where no script runs.

Colours are the ledger's; text and lines take the page's own. The outline says that it is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from speedlab.display.figure_style import COLOURS, LABELS, is_hatched
from speedlab.display.text import byte_unit, bytes_text

_WIDTH, _HEIGHT = 360, 208
_LEFT, _TOP, _FLOOR = 58, 16, 178
_BAR = 46
_STROKE = 5
"""Between strokes of what is hatched."""
_CAPACITY_IN_SIGHT = 2.5
"""The capacity line is drawn when it is at most so many times the highest bar; else the bars would be too flat."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a picture."""

    label: str
    categories: Mapping[str, int]
    below: str = ""
    kind: str = "speedlab-bar"
    """Its CSS class."""
    chosen: bool = False
    data: str = ""
    """Its `data-stage`."""

    @property
    def total(self) -> int:
        return sum(self.categories.values())


def bars_svg(bars: Sequence[Bar], capacity: int, *, what: str) -> str:
    """The picture; `what` begins the sentence that a screen reader hears."""
    highest = max(1, *(bar.total for bar in bars))
    shows_capacity = capacity <= _CAPACITY_IN_SIGHT * highest
    # Where the capacity is only told, its line of text stands above the highest bar's.
    top = max(highest, capacity) * 1.04 if shows_capacity else highest * 1.14
    unit, unit_bytes = byte_unit(top)
    parts = []
    for tick in _ticks(top / unit_bytes):
        height, label = _y(tick * unit_bytes, top), f"{tick:g} {unit}" if tick else "0"
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-grid"/>'
            f'<text x="{_LEFT - 5}" y="{height + 4:.1f}" text-anchor="end">{label}</text>'
        )
    step = (_WIDTH - _LEFT) / len(bars)
    parts += [_drawn(bar, _LEFT + step * (index + 0.5), min(_BAR, 0.8 * step), top) for index, bar in enumerate(bars)]
    if shows_capacity:
        height = _y(capacity, top)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-capacity"/>'
            f'<text x="{_WIDTH}" y="{height - 4:.1f}" text-anchor="end">capacity {bytes_text(capacity)}</text>'
        )
    else:
        parts.append(f'<text x="{_WIDTH}" y="10" text-anchor="end">capacity {bytes_text(capacity)}, far above</text>')
    held = ", ".join(f"{bar.label} {bytes_text(bar.total)}" for bar in bars)
    return (
        f'<svg class="speedlab-bars" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"{what}: {held}")}">{"".join(parts)}</svg>'
    )


def _y(count: float, top: float) -> float:
    return _FLOOR - (_FLOOR - _TOP) * count / top


def _ticks(top: float) -> list[float]:
    """Two to five round numbers from 0 up to `top`."""
    power = 10 ** math.floor(math.log10(top))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2, 5) if top / (factor * power) < 5)
    return [number * step for number in range(int(top / step) + 1)]


def _strokes(left: float, high: float, width: float, height: float) -> str:
    """Parallel strokes across a rectangle. No pattern of the document's: another picture may have its name."""
    offsets = range(_STROKE, int(width + height), _STROKE)
    return "".join(
        f"M{left + max(0.0, c - height):.1f} {high + min(c, height):.1f}"
        f"L{left + min(c, width):.1f} {high + max(0.0, c - width):.1f}"
        for c in offsets
    )


def _drawn(bar: Bar, middle: float, width: float, top: float) -> str:
    left, below, rects = middle - width / 2, 0, []
    for category in COLOURS:
        count = bar.categories.get(category, 0)
        if not count:
            continue
        high, low = _y(below + count, top), _y(below, top)
        fill = "transparent" if is_hatched(category) else COLOURS[category]
        rects.append(
            f'<rect x="{left:.1f}" y="{high:.1f}" width="{width:g}" height="{low - high:.1f}" '
            f'fill="{fill}"><title>{escape(bar.label)}: {LABELS[category]} {bytes_text(count)}</title>'
            "</rect>"
        )
        if is_hatched(category):
            strokes = _strokes(left, high, width, low - high)
            rects.append(f'<path d="{strokes}" stroke="{COLOURS[category]}" stroke-width="1.5" pointer-events="none"/>')
        below += count
    high = _y(below, top)
    words = [(_FLOOR + 15, bar.label), (_FLOOR + 28, bar.below), (high - 4, bytes_text(bar.total))]
    return (
        f'<g class="{bar.kind}{" speedlab-chosen" if bar.chosen else ""}" data-stage="{bar.data}">{"".join(rects)}'
        f'<rect class="speedlab-outline" x="{left:.1f}" y="{high:.1f}" width="{width:g}" '
        f'height="{_FLOOR - high:.1f}"/>'
        + "".join(
            f'<text x="{middle:.1f}" y="{place:.1f}" text-anchor="middle">{escape(text)}</text>'
            for place, text in words
            if text
        )
        + "</g>"
    )
