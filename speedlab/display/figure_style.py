"""What all plots share: colours, words, and a layout without colours of its own.

Colours mean one thing everywhere: a phase of a step wears the colour of the memory it works on. What is drawn in the
reader's own text colour is called "ink" (a trace's `meta`, a shape's `name`), and the page puts that colour in.
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
"""Of the ledger's categories, in the order in which they are stacked. Okabe and Ito's palette: told apart by
colour-blind readers, legible on light and on dark."""

LABELS = {
    **{category: category.replace("_", " ") for category in COLOURS},
    "other_framework": "other framework memory",
    "outside_framework": "outside the framework",
}

_HATCHED = "outside_framework"
"""Drawn in strokes: it is no tensor of anybody's."""


def is_hatched(category: str) -> bool:
    """Whether a category of the ledger is drawn in strokes rather than filled."""
    return category == _HATCHED


def bar_marker(category: str) -> dict[str, Any]:
    """plotly's marker of a bar of bytes."""
    if not is_hatched(category):
        return {"color": COLOURS[category], "line": {"width": 0}}
    pattern = {"shape": "/", "fgcolor": COLOURS[category], "bgcolor": "rgba(0,0,0,0)", "size": 7, "solidity": 0.25}
    return {"color": "rgba(0,0,0,0)", "pattern": pattern, "line": {"color": COLOURS[category], "width": 1}}


def swatch(category: str) -> str:
    """The CSS background of a category's mark in a legend."""
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
"""`other` is what a step took beyond its phases: shown, never hidden."""

ACCENT = "#D55E00"
INK = "#808080"
PAPER_INK, PAPER_GRID = "#1c2530", "#dde2e8"
"""Of text and grid where a picture has its own white background."""


def base_layout(title: str, unit: str) -> Figure:
    """A layout without a single colour of its own: text, grid and background are the page's."""
    return {
        "title": {"text": title, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 14}},
        "font": {"size": 12},
        "margin": {"l": 58, "r": 58, "t": 44, "b": 78},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        # At the card's lower edge, so that it never meets the axis' title, however wide the card.
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}},
        "hovermode": "x unified",
        "uirevision": title,
        "xaxis": {"automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": unit, "standoff": 6}, "zeroline": False, "automargin": True},
        "shapes": [],
        "annotations": [],
    }


def on_paper(figure: Figure) -> Figure:
    """The figure with colours of its own, dark on white, for where no page gives it any: in a saved notebook."""
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
    line = {"color": INK, "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x0, "x1": x1, "y0": y, "y1": y, "line": line, "name": "ink"}


def note(text: str, *, y: float, yref: str = "paper", yanchor: str = "top") -> dict[str, Any]:
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
    """`value` with arrays as lists of numbers of seven digits, and NaN as None: what JSON can hold."""
    if isinstance(value, np.ndarray):
        return [float(f"{number:.7g}") if np.isfinite(number) else None for number in value.tolist()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def legend_beside(layout: Figure) -> None:
    """The legend to the right, in the order in which the bars are stacked."""
    layout["legend"] = {"x": 1.02, "y": 1, "yanchor": "top", "traceorder": "reversed", "font": {"size": 11}}
    layout["margin"] |= {"r": 20, "b": 36}


def lanes_axis(names: Sequence[str], room: int = 0) -> Figure:
    """A y axis of lanes from top to bottom; `names` are markup. There is room for `room` lanes at least, so that few
    bars are no thicker than many."""
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
