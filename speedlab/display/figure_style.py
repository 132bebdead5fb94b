"""Define what all plots share: colours, labels, and a layout without colours of its own.

A colour has one meaning everywhere: a phase of a step has the colour of the memory that the phase works on. "Ink" is
the text colour of the page: marked by a trace's `meta` or a shape's `name`, and filled in by the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Figure = dict[str, Any]

COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "master_weights": "#56B4E9",
    "optimizer_moments": "#009E73",
    "activations": "#CC79A7",
    "communication_buffers": "#F0E442",
    "other_framework": "#999999",
    "outside_framework": "#999999",
}
"""Colours of the ledger's categories, in stacking order.

Okabe and Ito's palette: colour-blind readers can distinguish all colours, on a light and on a dark page.
"""

LABELS = {
    **{category: category.replace("_", " ") for category in COLOURS},
    "other_framework": "other framework memory",
    "outside_framework": "outside the framework",
}

_HATCHED = "outside_framework"
"""Drawn in strokes, because no tensor of this process owns this memory."""


def is_hatched(category: str) -> bool:
    """Return whether a category of the ledger is drawn in strokes rather than filled."""
    return category == _HATCHED


def bar_marker(category: str) -> dict[str, Any]:
    """Return plotly's `marker` for a bar of bytes.

    Args:
        category: a ledger category.
    """
    if not is_hatched(category):
        return {"color": COLOURS[category], "line": {"width": 0}}
    pattern = {"shape": "/", "fgcolor": COLOURS[category], "bgcolor": "rgba(0,0,0,0)", "size": 7, "solidity": 0.25}
    return {"color": "rgba(0,0,0,0)", "pattern": pattern, "line": {"color": COLOURS[category], "width": 1}}


def swatch(category: str) -> str:
    """Return the CSS background of a category's mark in a legend."""
    colour = COLOURS[category]
    if not is_hatched(category):
        return colour
    return f"repeating-linear-gradient(135deg, {colour} 0 1.5px, transparent 1.5px 4px)"


PHASE_COLOURS = {
    "data": "#6B7A8F",
    "forward": COLOURS["activations"],
    "backward": COLOURS["gradients"],
    "communication": COLOURS["communication_buffers"],
    "offload": COLOURS["master_weights"],
    "optimizer": COLOURS["optimizer_moments"],
    "other": COLOURS["other_framework"],
}
"""Colours of the phases of a step. `other` is step time outside the phases; plots always show it."""

ACCENT = "#D55E00"
INK = "#808080"
PAPER_INK, PAPER_GRID = "#1c2530", "#dde2e8"
"""Colours of text and grid on a picture with its own white background."""


def base_layout(title: str, unit: str) -> Figure:
    """Return a plotly layout without any colour: text, grid and background have the colours of the page.

    Args:
        title: title of the figure, also the key that keeps zoom and selection over updates (`uirevision`).
        unit: title of the y axis.
    """
    return {
        "title": {"text": title, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 14}},
        "font": {"size": 12},
        "margin": {"l": 58, "r": 58, "t": 44, "b": 78},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        # At the lower edge of the card, so that the legend never overlaps the axis title at any width.
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}},
        "hovermode": "x unified",
        "uirevision": title,
        "xaxis": {"automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": unit, "standoff": 6}, "zeroline": False, "automargin": True},
        "shapes": [],
        "annotations": [],
    }


def on_paper(figure: Figure) -> Figure:
    """Return the figure with its own colours, dark on white, for places without a page style (a saved notebook).

    Args:
        figure: a plotly figure as a dict; it is not changed.
    """
    layout = figure["layout"]
    axes = [name for name in layout if name.startswith(("xaxis", "yaxis"))]
    coloured = {
        **{name: {"gridcolor": PAPER_GRID, **layout[name]} for name in axes},
        "font": {**layout["font"], "color": PAPER_INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
    }
    return {"data": figure["data"], "layout": {**layout, **coloured}}


def second_axis(title: str, tickformat: str) -> Figure:
    """Return plotly's layout of a second y axis on the right.

    Args:
        title: title of the axis.
        tickformat: d3 format of its ticks.
    """
    return {
        "title": {"text": title, "standoff": 6},
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
        "zeroline": False,
        "automargin": True,
        "tickformat": tickformat,
        "tickmode": "auto",
    }


def float32(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return both coordinates as float32 arrays, which halves what is sent to the browser.

    Args:
        x: numbers.
        y: numbers.
    """
    return np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.float32)


def curve(
    name: str,
    points: tuple[np.ndarray, np.ndarray],
    hover: str,
    *,
    color: str,
    width: float,
    dash: str = "solid",
    opacity: float = 1.0,
    second: bool = False,
) -> dict[str, Any]:
    """Return a plotly trace of one line.

    Args:
        name: name in the legend.
        points: (x, y) of equal length.
        hover: plotly's hover template after the name.
        color: CSS colour; INK marks the trace for the text colour of the page.
        width: line width in pixels.
        dash: plotly's dash style.
        opacity: 0 to 1.
        second: draw on the second y axis.
    """
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": points[0],
        "y": points[1],
        "line": {"color": color, "width": width, "dash": dash},
        "opacity": opacity,
        "hovertemplate": f"{name} {hover}<extra></extra>",
    }
    if color == INK:
        trace["meta"] = "ink"
    return trace | {"yaxis": "y2"} if second else trace


def ink_line(x0: float, x1: float, y: float, dash: str) -> dict[str, Any]:
    """Return a plotly line in the text colour of the page, from (x0, y) to (x1, y).

    Args:
        x0: start, in units of the x axis.
        x1: end, in units of the x axis.
        y: height, in units of the y axis.
        dash: plotly's dash style.
    """
    line = {"color": INK, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x0, "x1": x1, "y0": y, "y1": y, "line": line, "name": "ink"}


def note(text: str, *, y: float, yref: str = "paper", yanchor: str = "top") -> dict[str, Any]:
    """Return a plotly annotation at the right edge.

    Args:
        text: plotly markup.
        y: position, in units of `yref`.
        yref: "paper" (share of the plot) or an axis.
        yanchor: the edge of the text at `y`.
    """
    return {
        "text": text,
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": y,
        "yref": yref,
        "yanchor": yanchor,
        "showarrow": False,
        "font": {"size": 11},
    }


def plain(value: Any) -> Any:
    """Return `value` in types that JSON can hold.

    Args:
        value: numbers, text, arrays, dicts and lists, nested. Arrays become lists of numbers with seven digits; NaN and
            infinities become None.
    """
    if isinstance(value, np.ndarray):
        return [float(f"{number:.7g}") if np.isfinite(number) else None for number in value.tolist()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def legend_alongside(layout: Figure) -> None:
    """Move the legend to the right side, in stacking order of the bars.

    Args:
        layout: a plotly layout; changed in place.
    """
    layout["legend"] = {"x": 1.02, "y": 1, "yanchor": "top", "traceorder": "reversed", "font": {"size": 11}}
    layout["margin"] |= {"r": 20, "b": 36}


def lanes_axis(names: Sequence[str], room: int = 0) -> Figure:
    """Return a y axis of lanes from top to bottom.

    Args:
        names: label of each lane, as plotly markup.
        room: minimum number of lanes to leave room for. Without it, few bars would be thicker than many.
    """
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [max(len(names), room) - 0.4, -0.6],
        "automargin": True,
        "zeroline": False,
        "showgrid": False,
        "fixedrange": True,
        "ticklabelstandoff": 6,
    }
