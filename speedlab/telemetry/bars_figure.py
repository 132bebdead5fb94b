"""Bytes in parts, by name: a stacked bar for each stage, layout or run that a reader compares. Data for plotly."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, ink_line, legend_beside
from speedlab.display.formatting import byte_unit, bytes_text
from speedlab.telemetry.beside import RUN_COLOURS

_PIXELS = 340
_HALF_BAR = 0.36
"""Of the distance between two bars; an outline is as wide as a bar."""
_HEADROOM = 1.12


def bars_beside(
    bars: Mapping[str, Mapping[str, int]], *, title: str, predicted: Mapping[str, int] | None = None
) -> Figure:
    """A stacked bar for each of `bars`, name -> part -> bytes, with its sum above it.

    Parts that are categories of a ledger wear their colour, others (collectives, for instance) colours of their own.
    `predicted`: name -> bytes, drawn as an outline in the colour of the text.
    """
    predicted = predicted or {}
    sums = {name: sum(parts.values()) for name, parts in bars.items()}
    highest = max([*sums.values(), *predicted.values()], default=0)
    unit, size = byte_unit(highest)
    parts = list(dict.fromkeys(part for held in bars.values() for part in held))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": escape(LABELS.get(part, part)),
            "x": [escape(name) for name in bars],
            "y": np.array([held.get(part, 0) / size for held in bars.values()], dtype=np.float32),
            "marker": _marker(part, number),
            "width": 2 * _HALF_BAR,
            "hovertemplate": f"%{{x}}<br>{escape(LABELS.get(part, part))} %{{y:.4~r}} {unit}<extra></extra>",
        }
        for number, part in enumerate(parts)
    ]
    layout = base_layout(title, unit)
    layout |= {"barmode": "stack", "hovermode": "closest", "height": _PIXELS}
    legend_beside(layout)
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["yaxis"] |= {"range": [0, _HEADROOM * highest / size or 1]}
    for number, name in enumerate(bars):
        top = max(sums[name], predicted.get(name, 0)) / size
        layout["annotations"].append({"text": bytes_text(sums[name]), "x": number, "y": top, **_ABOVE})
        if name in predicted:
            outline = ink_line(number - _HALF_BAR, number + _HALF_BAR, predicted[name] / size, "solid")
            layout["shapes"].append({**outline, "type": "rect", "y0": 0})
    return {"data": traces, "layout": layout}


_ABOVE = {"xref": "x", "yref": "y", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}


def _marker(part: str, number: int) -> dict[str, Any]:
    if part in LABELS:
        return bar_marker(part)
    return {"color": RUN_COLOURS[number % len(RUN_COLOURS)], "line": {"width": 0}}
