"""Draw figures and memory bars as static SVG, without JavaScript.

The file has two independent parts:

1. `figures_svg` and `figure_svg`: the plotly figures of a dashboard. Supported: curves on one or two y axes, stacked
   bars, lanes of bars, lines and notes. The ink is dark and the background white on every page. Plotly's markup becomes
   plain text.
2. `bars_svg`: stacked bars of bytes with the capacity line, for the panel and for plans. Bars have the ledger's
   colours; text and lines have the text colour of the page. The outline style marks bars as predicted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import pairwise
from typing import Any

import numpy as np

from speedlab.display.figure_style import COLOURS, LABELS, PAPER_GRID, PAPER_INK, Figure, is_hatched
from speedlab.display.formatting import byte_unit, bytes_text, count_text

_WIDTH, _HEIGHT = 620, 340
_HEAD = 40
_LEFT, _RIGHT, _TOP, _BELOW = 62, 62, 52, 74
_LEGEND_LINE, _NOTE_LINE = 17, 13
_LETTER = 6.3
"""Approximate width in pixels of a letter of the small text."""
_BROAD = 0.6
"""Approximate width of a bold letter, as a share of its font size."""
_DASHES = {"dot": "2 3", "dash": "6 4"}
_BARE: Mapping[str, Any] = {"title": {"text": ""}, "xaxis": {}, "yaxis": {}, "shapes": (), "annotations": ()}
"""Defaults of the layout keys that a figure may omit."""
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def figures_svg(figures: Sequence[Figure], *, title: str) -> str:
    """Return one SVG with all figures: the first four in a 2 × 2 grid, each further one below across both columns.

    Args:
        figures: plotly figures as dicts with `data` and `layout`.
        title: heading of the picture, also its accessible label.
    """
    parts, bottom = [], _HEAD + 2 * _HEIGHT
    for number, figure in enumerate(figures):
        if wide := number >= 4:
            x, y, width, height = 0, bottom, 2 * _WIDTH, _HEIGHT
            bottom += height
        else:
            x, y, width, height = number % 2 * _WIDTH, _HEAD + number // 2 * _HEIGHT, _WIDTH, _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_Panel(figure, width, height, wide=wide).drawn()}</g>')
    width = 2 * _WIDTH
    head = f'<text x="14" y="26" font-size="{_size(title, width):.3g}" font-weight="600">{_text(title)}</text>'
    return _document(head + "".join(parts), width, bottom, title)


def figure_svg(figure: Figure) -> str | None:
    """Return one figure as an SVG, or None if this module cannot draw its kind.

    Traces that contain only text are left out.

    Args:
        figure: a plotly figure as a dict with `data` and `layout`.
    """
    layout = {**_BARE, **figure["layout"]}
    data = [trace for trace in figure["data"] if trace.get("mode") != "text"]
    if not _is_drawn(data, layout):
        return None
    panel = _Panel({"data": data, "layout": layout}, _WIDTH, _HEIGHT, wide="ticktext" in layout["yaxis"])
    return _document(panel.drawn(), _WIDTH, _HEIGHT, plain_text(layout["title"]["text"]))


def _is_drawn(data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> bool:
    """Return whether this module can draw the figure.

    Not supported: logarithmic axes, category axes with two names for each place, horizontal bars (except lanes), and
    curves over names.
    """
    x, y = (layout[axis].get("type", "linear") for axis in ("xaxis", "yaxis"))
    if x not in ("linear", "category") or y != "linear":
        return False
    for trace in data:
        places = np.asarray(trace["x"])
        is_horizontal = trace.get("orientation") == "h" and "base" not in trace
        fits = trace["type"] == "bar" if x == "category" else places.dtype.kind in "fiu"
        if is_horizontal or places.ndim != 1 or not fits:
            return False
    return True


def _document(inner: str, width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{_text(title)}" font-family="system-ui, sans-serif" font-size="11" fill="{PAPER_INK}">'
        f'<rect width="{width}" height="{height}" fill="white"/>{inner}</svg>'
    )


def _size(title: str, width: int) -> float:
    """Return the font size of the title: smaller for a long title, because its end shows the state of the run."""
    return max(8.0, min(15.0, (width - 28) / (_BROAD * max(1, len(title)))))


def plain_text(markup: str) -> str:
    """Return plotly's markup as plain text: no bold tags, line breaks as commas, entities decoded."""
    return unescape(re.sub(r"</?b>", "", markup.replace("<br>", ", ")))


def _text(text: str) -> str:
    """Escape plain text for XML. Characters that XML forbids become a replacement character."""
    return escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", text))


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to pixels; values far outside are clamped."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        # The clamp below keeps an outlier from drawing paths of millions of pixels.
        share = (value - self.low) / (self.high - self.low)
        return self.first + min(2.0, max(-1.0, share)) * (self.last - self.first)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers within the range.

        Args:
            most: approximate number of ticks.
        """
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
        return [step * i for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


class _Panel:
    """One figure, drawn into a rectangle of `width` × `height` pixels."""

    def __init__(self, figure: Figure, width: int, height: int, *, wide: bool) -> None:
        self._data, self._layout = figure["data"], figure["layout"]
        self._width = width
        self._left, self._right = (130 if wide else _LEFT), width - _RIGHT
        self._floor = height - _BELOW
        self._names = [plain_text(str(name)) for name in self._data[0]["x"]] if self._is_category and self._data else []
        self._lanes: Sequence[str] = self._layout["yaxis"].get("ticktext", ())
        self._x = _Scale(*self._across(), self._left, self._right)
        self._y = {axis: _Scale(*self._up(axis), self._floor, _TOP) for axis in ("y", "y2")}

    def drawn(self) -> str:
        """Return the SVG elements of the figure, back to front."""
        parts = [self._grid(), self._shapes("below")]
        below: dict[int, list[float]] = {}
        for trace in self._data:
            parts.append(self._bars(trace, below) if trace["type"] == "bar" else self._curve(trace))
        return "".join([*parts, self._shapes("above"), self._notes(), self._legend(), self._title()])

    @property
    def _is_category(self) -> bool:
        return self._layout["xaxis"].get("type") == "category"

    def _across(self) -> tuple[float, float]:
        if self._is_category:
            return -0.5, max(1, len(self._names)) - 0.5
        ends = [np.asarray(t["x"], dtype=float) + t.get("base", 0.0) for t in self._data if len(t["x"])]
        if not ends:
            return 0.0, 1.0
        half = max(float(trace.get("width", 0)) for trace in self._data) / 2 if not self._lanes else 0.0
        low = 0.0 if self._lanes else min(float(end.min()) for end in ends) - half
        return _separate(low, max(float(end.max()) for end in ends) + half)

    def _up(self, axis: str) -> tuple[float, float]:
        reported: Mapping[str, Any] = self._layout.get("yaxis2" if axis == "y2" else "yaxis", {})
        if "range" in reported:
            return _separate(*reported["range"])
        own = [trace for trace in self._data if trace.get("yaxis", "y") == axis and len(trace["y"])]
        if not own:
            return 0.0, 1.0
        if own[0]["type"] == "bar":
            total = np.sum([np.maximum(np.nan_to_num(trace["y"]), 0) for trace in own], axis=0)
            return _separate(0.0, 1.05 * float(total.max()))
        values = np.concatenate([np.asarray(trace["y"], dtype=float) for trace in own])
        values = values[np.isfinite(values)]
        if not len(values):
            return 0.0, 1.0
        low, high = float(values.min()), float(values.max())
        # Leave 5 % above and below a curve.
        room = 0.05 * (high - low)
        return _separate(0.0 if reported.get("rangemode") == "tozero" else low - room, high + room)

    def _grid(self) -> str:
        parts = []
        for value in () if self._lanes else self._y["y"].ticks(5):
            y = self._y["y"](value)
            parts.append(
                f'<path d="M{self._left} {y:.1f}H{self._right}" stroke="{PAPER_GRID}"/>'
                + _words(self._left - 6, y + 4, _number(value, self._layout["yaxis"]), "end")
            )
        for number, name in enumerate(self._lanes):
            parts.append(_words(self._left - 6, self._y["y"](number) + 4, _cut(plain_text(name), 22), "end"))
        if "yaxis2" in self._layout:
            for value in self._y["y2"].ticks(5):
                text = _number(value, self._layout["yaxis2"])
                parts.append(_words(self._right + 6, self._y["y2"](value) + 4, text, "start"))
        if self._is_category:
            room = int((self._right - self._left) / max(1, len(self._names)) / _LETTER)
            labels = [(self._x(i), _cut(name, max(3, room))) for i, name in enumerate(self._names)]
        else:
            labels = [(self._x(value), f"{value:,g}") for value in self._x.ticks(6)]
            title = plain_text(self._layout["xaxis"].get("title", {}).get("text", ""))
            labels.append((min(self._right + 24, self._width - 4 - _LETTER * len(title) / 2), title))
        parts += [_words(x, self._floor + 16, text, "middle") for x, text in labels]
        return "".join(parts)

    def _curve(self, trace: Mapping[str, Any]) -> str:
        scale = self._y[trace.get("yaxis", "y")]
        points = [
            (self._x(float(x)), scale(float(y))) if math.isfinite(y) else None
            for x, y in zip(trace["x"], trace["y"], strict=True)
        ]
        path = "".join(
            f"{'L' if before else 'M'}{point[0]:.1f} {point[1]:.1f}"
            for before, point in pairwise([None, *points])
            if point is not None
        )
        marks = "".join(
            f"M{x - 4:.1f} {y:.1f}l4 -4l4 4l-4 4z" for x, y in filter(None, points) if "markers" in trace["mode"]
        )
        drawn = path + marks
        if len(points) == 1 and not marks and points[0] is not None:
            drawn += "h0.1"  # A single step is drawn as a dot.
        return _path(drawn, _line(trace["line"], _colour(trace), trace.get("opacity", 1)))

    def _bars(self, trace: Mapping[str, Any], below: dict[int, list[float]]) -> str:
        """Return the bars of one trace, and update `below` for the next trace of the stack.

        Args:
            below: for each bar the height of the stack so far, above and below zero.
        """
        fill = trace["marker"]["color"]
        # `bar_marker` fills hatched bars with transparency and draws a pattern instead.
        hatched = fill == "rgba(0,0,0,0)"
        rects = []
        if self._lanes:
            for base, length, lane in zip(trace["base"], trace["x"], trace["y"], strict=True):
                half = float(trace["width"]) / 2
                rects.append(
                    _rect(self._x(base), self._x(base + length), *map(self._y["y"], (lane - half, lane + half)))
                )
        else:
            half = 0.35 if self._is_category else 0.46 * float(trace.get("width", 1))
            for i, height in enumerate(np.nan_to_num(trace["y"])):
                x = i if self._is_category else float(trace["x"][i])
                stack = below.setdefault(i, [0.0, 0.0])
                side = int(height < 0)
                low, stack[side] = stack[side], stack[side] + float(height)
                if height:
                    rects.append(
                        _rect(self._x(x - half), self._x(x + half), self._y["y"](low), self._y["y"](stack[side]))
                    )
        if hatched:
            return _path("".join(rects), {"stroke": trace["marker"]["line"]["color"], "stroke-dasharray": "3 2"})
        return _path("".join(rects), {"fill": fill})

    def _shapes(self, layer: str) -> str:
        parts = []
        for shape in self._layout["shapes"]:
            if shape.get("layer", "above") != layer:
                continue
            y0, y1 = (
                (self._floor, _TOP) if shape.get("yref") == "paper" else (self._y["y"](shape[k]) for k in ("y0", "y1"))
            )
            x0, x1 = self._x(shape["x0"]), self._x(shape["x1"])
            d = _rect(x0, x1, y0, y1) if shape["type"] == "rect" else f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"
            parts.append(_path(d, _line(shape["line"], PAPER_INK, shape.get("opacity", 1))))
        return "".join(parts)

    def _notes(self) -> str:
        parts, corner = [], 0
        for note in self._layout["annotations"]:
            text = plain_text(note["text"])
            if note.get("xref") == "paper" and note.get("yref") == "paper":
                x, anchor = (self._left, "start") if note["xanchor"] == "left" else (self._right, "end")
                parts.append(_words(x, _TOP - 4 - _NOTE_LINE * corner, text, anchor))
                corner += 1
            elif note.get("xref") == "paper":
                parts.append(_words(self._right, self._y["y"](note["y"]) - 4, text, "end"))
            else:
                hover = f"<title>{_text(plain_text(note.get('hovertext', text)))}</title>"
                parts.append(_words(self._x(note["x"]), _TOP - 4, text, "middle", hover))
        return "".join(parts)

    def _legend(self) -> str:
        parts, x, y = [], float(self._left), float(self._floor + 36)
        for trace in self._data:
            if trace.get("showlegend") is False:
                continue
            name = plain_text(trace["name"])
            width = 27 + _LETTER * len(name)
            if x + width > self._width and x > self._left:
                x, y = float(self._left), y + _LEGEND_LINE
            if trace["type"] == "bar":
                fill = trace["marker"]["line"].get("color", _colour(trace))
                parts.append(f'<rect x="{x:.0f}" y="{y - 8:.0f}" width="10" height="8" fill="{fill}"/>')
            else:
                line = _line(trace["line"], _colour(trace), trace.get("opacity", 1))
                parts.append(_path(f"M{x:.0f} {y - 4:.0f}h11", line))
            parts.append(_words(x + 15, y, name, "start"))
            x += width
        return "".join(parts)

    def _title(self) -> str:
        unit = plain_text(self._layout["yaxis"].get("title", {}).get("text", ""))
        title = plain_text(self._layout["title"]["text"])
        reported = f"{title}, {unit}" if unit and unit != title else title
        return f'<text x="14" y="20" font-size="13" font-weight="600">{_text(reported)}</text>'


def _separate(low: float, high: float) -> tuple[float, float]:
    """Return the two ends of an axis, widened if they are equal (a scale of length zero would divide by zero)."""
    return (low, high) if low != high else (low - 0.5, high + 0.5)


def _number(value: float, axis: Mapping[str, Any]) -> str:
    kind = axis.get("tickformat", "")
    return count_text(value) if kind == "~s" else f"{value:.1e}" if kind == ".1e" and value else f"{value:,g}"


def _colour(trace: Mapping[str, Any]) -> str:
    if trace.get("meta") == "ink":
        return PAPER_INK
    return str(trace["line"]["color"] if "line" in trace else trace["marker"]["color"])


def _line(line: Mapping[str, Any], colour: str, opacity: float) -> dict[str, object]:
    """Return the SVG attributes of a plotly line."""
    dash = _DASHES.get(line.get("dash", ""))
    reported: dict[str, object] = {"stroke": colour, "stroke-width": line["width"], "opacity": opacity}
    return reported | ({"stroke-dasharray": dash} if dash else {})


def _path(d: str, attributes: Mapping[str, object]) -> str:
    if not d:
        return ""
    reported = " ".join(f'{name}="{value}"' for name, value in {"d": d, "fill": "none", **attributes}.items())
    return f"<path {reported}/>"


def _rect(x0: float, x1: float, y0: float, y1: float) -> str:
    return f"M{x0:.1f} {y0:.1f}H{x1:.1f}V{y1:.1f}H{x0:.1f}z"


def _words(x: float, y: float, text: str, anchor: str, inside: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}{inside}</text>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_BARS_WIDTH, _BARS_HEIGHT = 360, 208
_BARS_LEFT, _BARS_TOP, _BARS_FLOOR = 58, 16, 178
_BAR = 46
_STROKE = 5
"""Distance in pixels between the strokes of a hatched bar."""
_CAPACITY_IN_SIGHT = 2.5
"""The capacity line is drawn up to this multiple of the highest bar. A higher line would flatten the bars."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar: its label, bytes by ledger category, and CSS hooks."""

    label: str
    categories: Mapping[str, int]
    below: str = ""
    kind: str = "speedlab-bar"
    """CSS class of the bar."""
    chosen: bool = False
    data: str = ""
    """Value of the `data-stage` attribute."""

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(self.categories.values())


def bars_svg(bars: Sequence[Bar], capacity: int, *, what: str) -> str:
    """Return the stacked bars as one SVG.

    Args:
        bars: at least one bar.
        capacity: bytes of the device, drawn as a line if it is near enough to the bars.
        what: start of the accessible label, read aloud by screen readers.
    """
    highest = max(1, *(bar.total for bar in bars))
    shows_capacity = capacity <= _CAPACITY_IN_SIGHT * highest
    # If the line is not drawn, the text about the capacity needs room above the label of the highest bar.
    top = max(highest, capacity) * 1.04 if shows_capacity else highest * 1.14
    unit, unit_bytes = byte_unit(top)
    parts = []
    for tick in _ticks(top / unit_bytes):
        height, label = _y(tick * unit_bytes, top), f"{tick:g} {unit}" if tick else "0"
        parts.append(
            f'<line x1="{_BARS_LEFT}" x2="{_BARS_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-grid"/>'
            f'<text x="{_BARS_LEFT - 5}" y="{height + 4:.1f}" text-anchor="end">{label}</text>'
        )
    step = (_BARS_WIDTH - _BARS_LEFT) / len(bars)
    parts += [
        _drawn(bar, _BARS_LEFT + step * (index + 0.5), min(_BAR, 0.8 * step), top) for index, bar in enumerate(bars)
    ]
    if shows_capacity:
        height = _y(capacity, top)
        parts.append(
            f'<line x1="{_BARS_LEFT}" x2="{_BARS_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" '
            'class="speedlab-capacity"/>'
            f'<text x="{_BARS_WIDTH}" y="{height - 4:.1f}" text-anchor="end">capacity {bytes_text(capacity)}</text>'
        )
    else:
        parts.append(
            f'<text x="{_BARS_WIDTH}" y="10" text-anchor="end">capacity {bytes_text(capacity)}, far above</text>'
        )
    held = ", ".join(f"{bar.label} {bytes_text(bar.total)}" for bar in bars)
    return (
        f'<svg class="speedlab-bars" viewBox="0 0 {_BARS_WIDTH} {_BARS_HEIGHT}" role="img" '
        f'aria-label="{escape(f"{what}: {held}")}">{"".join(parts)}</svg>'
    )


def _y(count: float, top: float) -> float:
    return _BARS_FLOOR - (_BARS_FLOOR - _BARS_TOP) * count / top


def _ticks(top: float) -> list[float]:
    """Return two to five round numbers from 0 up to `top`."""
    power = 10 ** math.floor(math.log10(top))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2, 5) if top / (factor * power) < 5)
    return [number * step for number in range(int(top / step) + 1)]


def _strokes(left: float, high: float, width: float, height: float) -> str:
    """Return the path of parallel strokes across a rectangle.

    An SVG pattern would need an id, and another picture on the page may have the same id.
    """
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
    words = [(_BARS_FLOOR + 15, bar.label), (_BARS_FLOOR + 28, bar.below), (high - 4, bytes_text(bar.total))]
    return (
        f'<g class="{bar.kind}{" speedlab-chosen" if bar.chosen else ""}" data-stage="{bar.data}">{"".join(rects)}'
        f'<rect class="speedlab-outline" x="{left:.1f}" y="{high:.1f}" width="{width:g}" '
        f'height="{_BARS_FLOOR - high:.1f}"/>'
        + "".join(
            f'<text x="{middle:.1f}" y="{place:.1f}" text-anchor="middle">{escape(text)}</text>'
            for place, text in words
            if text
        )
        + "</g>"
    )
