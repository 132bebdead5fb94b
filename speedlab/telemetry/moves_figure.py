"""Where a run's states lay, step by step: a lane for each place, so that one sees them move."""

from __future__ import annotations

from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, ink_line, legend_beside
from speedlab.display.formatting import byte_unit
from speedlab.telemetry.beside import first_rank, kept_at
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import CATEGORIES, PLACES

_LANE_PIXELS, _REST_PIXELS = 110, 100
_GAP = 0.1
"""Of the height, between two lanes."""


def moves_figure(feed: Feed) -> Figure:
    """A stacked bar of states and buffers for each step of the first rank, in a lane for each place where something
    lay; changes of shape or place are dashed lines."""
    records = first_rank(feed)
    steps = np.array([record.step for record in records], dtype=np.float32)
    held = {place: [kept_at(record.ledger, place) for record in records] for place in PLACES}
    lanes = [place for place in PLACES if any(held[place])]
    highest = max(sum(kept.values()) for place in lanes for kept in held[place])
    unit, size = byte_unit(highest)
    layout = base_layout("where states lay, by step", "")
    layout |= {"barmode": "stack", "bargap": 0.15, "hovermode": "closest"}
    layout |= {"height": _REST_PIXELS + _LANE_PIXELS * len(lanes)}
    legend_beside(layout)
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    for number, place in enumerate(lanes):
        axis = "" if number == 0 else str(number + 1)
        high = 1 - number / len(lanes)
        layout[f"yaxis{axis}"] = {
            **layout["yaxis"],
            "domain": [max(0.0, high - 1 / len(lanes) + _GAP), high],
            "title": {"text": f"{place}, {unit}", "standoff": 6},
            "range": [0, 1.08 * highest / size],  # The same in each lane.
            "nticks": 4,
        }
        for category in CATEGORIES:
            heights = [kept.get(category, 0) / size for kept in held[place]]
            if not any(heights):
                continue
            traces.append(
                {
                    "type": "bar",
                    "name": LABELS[category],
                    "legendgroup": category,
                    "showlegend": category not in named,
                    "x": steps,
                    "y": np.array(heights, dtype=np.float32),
                    "yaxis": f"y{axis}",
                    "marker": bar_marker(category),
                    "hovertemplate": f"step %{{x}}, {place}<br>{LABELS[category]} %{{y:.4~r}} {unit}<extra></extra>",
                }
            )
            named.add(category)
    layout["xaxis"] |= {"title": {"text": "step"}, "showgrid": False, "anchor": f"y{len(lanes) if lanes[1:] else ''}"}
    for event in feed.events:
        if event.kind == "reshaped":
            at = event.step + 0.5
            layout["shapes"].append({**ink_line(at, at, 0.0, "dash"), "yref": "paper", "y1": 1.0})
    return {"data": traces, "layout": layout}
