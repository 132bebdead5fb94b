"""Compare the largest models that fit on several machines with the announced ones. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from speedlab.display.figure_style import COLOURS, Figure, base_layout
from speedlab.display.formatting import Table, count_text, seconds_text
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.memory.places import PlaceBytes
from speedlab.planner.search import Candidate

_ROW_PIXELS, _REST_PIXELS = 46, 90
_BAR, _HALF_GAP = 0.38, 0.02
"""Shares of a row's height: a bar, and half of the gap between two bars."""
_PALE = "rgba(0,114,178,0.25)"
"""Fill of planned bars: a transparent version of the colour of parameters, which announced bars have."""
_ALONGSIDE = 12.0
"""Factor by which the axis extends beyond the longest bar, to leave room for labels."""


class LargestTable(Table):
    """The rows of `largest_table`."""

    def head(self) -> list[str]:
        """Return the names of the columns."""
        return ["", "planned", "announced", "layers", "hidden", *_PLACES, "full first", "step", "tokens/s"]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as text."""
        return [
            (
                row["name"],
                count_text(row["planned"]),
                "–" if row["announced"] is None else count_text(row["announced"]),
                f"{row['layers']}",
                f"{row['hidden']:,}",
                *(f"{row[place].share:.0%}" if row[place] else "–" for place in _PLACES),
                row["full"],
                seconds_text(row["step_seconds"]),
                count_text(row["tokens_per_second"]),
            )
            for row in self
        ]


_PLACES = ("device", "host", "disk")


def largest_table(found: Mapping[str, Candidate], announced: Mapping[str, float]) -> LargestTable:
    """Return a row for each name: parameters, fill of each place, the first full place, and the step time.

    Args:
        found: name -> the largest model that fits.
        announced: name -> announced parameters, if there are any.
    """
    rows = []
    for name, largest in found.items():
        places = {place.name: place for place in largest.places}
        rows.append(
            {
                "name": name,
                "planned": shape_parameters(largest.setup.shape),
                "announced": announced.get(name),
                "layers": largest.setup.shape.layers,
                "hidden": largest.setup.shape.hidden,
                **{place: places.get(place) for place in _PLACES},
                "full": _fullest(largest).name,
                "step_seconds": largest.time.step_seconds,
                "tokens_per_second": largest.time.tokens_per_second,
            }
        )
    return LargestTable(rows)


def _fullest(largest: Candidate) -> PlaceBytes:
    """Return the place that limits the size of the model."""
    return max(largest.places, key=lambda place: place.share)


def largest_figure(found: Mapping[str, Candidate], announced: Mapping[str, float]) -> Figure:
    """Return a plotly figure with a bar for each name, on a logarithmic axis of parameters.

    Planned bars are outlined; announced ones are below them.

    Args:
        found: name -> the largest model that fits.
        announced: name -> announced parameters, if there are any.
    """
    rows = largest_table(found, announced)
    names = [row["name"] for row in rows]
    reported = [row for row in rows if row["announced"] is not None]
    full = COLOURS["parameters"]
    traces = [
        _bars(
            "planned",
            {row["name"]: row["planned"] for row in rows},
            [f"<b>{count_text(row['planned'])}</b>, the {row['full']} full" for row in rows],
            offsets=[-_BAR / 2 if row["announced"] is None else _HALF_GAP for row in rows],
            marker={"color": _PALE, "line": {"color": full, "width": 1.5}},
        ),
        _bars(
            "announced",
            {row["name"]: row["announced"] for row in reported},
            [count_text(row["announced"]) for row in reported],
            offsets=[-_BAR - _HALF_GAP] * len(reported),
            marker={"color": full, "line": {"color": full, "width": 1.5}},
        ),
    ]
    values = [bar for trace in traces for bar in trace["x"]]
    layout = base_layout("the largest model that fits, parameters", "")
    layout |= {"barmode": "overlay", "hovermode": "closest", "height": _REST_PIXELS + _ROW_PIXELS * len(rows)}
    layout["margin"] |= {"l": 20, "r": 20, "b": 40}
    layout["legend"] = {"x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "orientation": "h"}
    bounds = [math.floor(math.log10(min(values))), math.log10(max(values) * _ALONGSIDE)]
    layout["xaxis"] |= {"type": "log", "range": bounds, "dtick": 1, "exponentformat": "SI"}
    layout["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "showgrid": False}
    return {"data": traces, "layout": layout}


def _bars(
    name: str, values: Mapping[str, float], texts: list[str], *, offsets: list[float], marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(values),
        "x": list(values.values()),
        "offset": offsets,
        "width": _BAR,
        "text": texts,
        "textposition": "outside",
        "cliponaxis": False,
        "marker": marker,
        "hovertemplate": f"%{{y}}<br>{name} %{{x:.4s}}<extra></extra>",
    }
