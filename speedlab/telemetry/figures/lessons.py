"""Figures and tables of the lessons: several runs side by side, under names that the lesson chooses.

- `runs_table`, `compare_memory`, `compare_bytes`, `compare_losses`, `compare_lines`: runs of the first rank compared.
- `compare_bars`: stacked bars of bytes, for any parts, with a prediction.
- `moves_figure`: where a run's states were, step by step, one lane per place.

Figures are plain data for plotly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, curve, ink_line, legend_alongside
from speedlab.display.formatting import Table, byte_unit, bytes_text, seconds_text
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import CATEGORIES, PLACES, Ledger, StepRecord

Feeds = Mapping[str, Feed]
"""Name of a run in the lesson -> its feed."""

RUN_COLOURS = ("#332288", "#CC6677", "#117733", "#88CCEE", "#AA4499", "#999933")
"""Colours of runs: colour-blind readers can distinguish them, and no kind of memory has one of them."""

STATES = CATEGORIES[:4]
"""Parameters, gradients, master weights and moments."""

_KEPT = (*STATES, "communication_buffers")
"""What depends on the place of the states: the states themselves and the transfer buffers."""

_PIXELS = 360
_WIDEST, _NARROWER = 9.0, 2.5
_MARK = 4.0
"""Pixels by which a mark is larger than the width of its line."""


class RunsTable(Table):
    """Rows of `runs_table`."""

    def head(self) -> list[str]:
        """Return the column titles."""
        held_out = ["held-out loss"] if self._held_out else []
        return ["", *(f"on {place}" for place in self._places), "bytes a parameter", "step", "loss", *held_out]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the text of each row's cells."""
        return [
            (
                row["run"],
                *(bytes_text(row[place]) for place in self._places),
                f"{row['bytes_a_parameter']:.2f}",
                seconds_text(row["step_seconds"]),
                f"{row['loss']:.6f}",
                *(["–" if row["heldout_loss"] is None else f"{row['heldout_loss']:.4f}"] if self._held_out else []),
            )
            for row in self
        ]

    @property
    def _places(self) -> list[str]:
        return [place for place in PLACES if place == "device" or any(row[place] for row in self)]

    @property
    def _held_out(self) -> bool:
        return any(row["heldout_loss"] is not None for row in self)


def runs_table(feeds: Feeds) -> RunsTable:
    """Return a row per run, at its last step.

    Args:
        feeds: The runs.

    Returns:
        Bytes of states and transfer buffers by place; bytes of states per parameter over all places; median duration
        of the later half of the steps; losses.

    Raises:
        ValueError: A run has no step yet.
    """
    rows = []
    for name, feed in feeds.items():
        records = first_rank(feed)
        ledger = records[-1].ledger
        held_out = [record.heldout_loss for record in records if record.heldout_loss is not None]
        rows.append(
            {
                "run": name,
                **{place: sum(kept_at(ledger, place).values()) for place in PLACES},
                "bytes_a_parameter": sum(map(ledger.anywhere, STATES)) / parameters_of(feed),
                "step_seconds": median(record.seconds for record in records[len(records) // 2 :]),
                "loss": records[-1].loss,
                "heldout_loss": held_out[-1] if held_out else None,
            }
        )
    return RunsTable(rows)


def parameters_of(feed: Feed) -> int:
    """Return the number of parameters of the run's whole model, from its 'started' event.

    Args:
        feed: The run.
    """
    return next(event.details["parameters"] for event in feed.events if event.kind == "started")


def compare_memory(feeds: Feeds) -> Figure:
    """Return a stacked bar for each run and place: what the first rank holds there at its last step.

    Args:
        feeds: The runs.
    """
    held = {
        (name, place): kept_at(first_rank(feed)[-1].ledger, place) for name, feed in feeds.items() for place in PLACES
    }
    unit, size = byte_unit(max(sum(kept.values()) for kept in held.values()))
    across = [[name for name, _ in held], [place for _, place in held]]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": LABELS[category],
            "x": across,
            "y": np.array([kept.get(category, 0) / size for kept in held.values()], dtype=np.float32),
            "marker": bar_marker(category),
            "hovertemplate": f"%{{x}}<br>{LABELS[category]} %{{y:.4~r}} {unit}<extra></extra>",
        }
        for category in _KEPT
        if any(kept.get(category) for kept in held.values())
    ]
    totals = [sum(kept.values()) for kept in held.values()]
    traces.append(_words(across, [total / size for total in totals], [bytes_text(t) if t else "" for t in totals]))
    layout = base_layout("states, and the buffers through which they pass, by place", unit)
    layout |= {"barmode": "stack", "bargap": 0.25, "hovermode": "closest", "height": _PIXELS}
    legend_alongside(layout)
    layout["xaxis"] |= {"showgrid": False}
    return {"data": traces, "layout": layout}


def compare_bytes(feeds: Feeds) -> Figure:
    """Return a stacked bar for each run: bytes of states per parameter of the model, over all places.

    Args:
        feeds: The runs.
    """
    held = {
        name: {state: first_rank(feed)[-1].ledger.anywhere(state) / parameters_of(feed) for state in STATES}
        for name, feed in feeds.items()
    }
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": LABELS[state],
            "x": list(held),
            "y": np.array([kept[state] for kept in held.values()], dtype=np.float32),
            "marker": bar_marker(state),
            "hovertemplate": f"%{{x}}<br>{LABELS[state]} %{{y:.3f}} bytes a parameter<extra></extra>",
        }
        for state in STATES
        if any(kept[state] for kept in held.values())
    ]
    totals = [sum(kept.values()) for kept in held.values()]
    traces.append(_words(list(held), totals, [f"<b>{total:.2f}</b>" for total in totals]))
    layout = base_layout("bytes a parameter between two steps", "bytes")
    layout |= {"barmode": "stack", "bargap": 0.45, "hovermode": "closest", "height": _PIXELS}
    legend_alongside(layout)
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    return {"data": traces, "layout": layout}


def _words(across: Any, heights: list[float], texts: list[str]) -> dict[str, Any]:
    """Return a trace with texts on top of bars."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": across,
        "y": np.array(heights, dtype=np.float32),
        "text": texts,
        "textposition": "top center",
        "textfont": {"size": 10},
        "cliponaxis": False,
        "showlegend": False,
        "hoverinfo": "skip",
    }


def compare_losses(feeds: Feeds) -> Figure:
    """Return the losses of each run over its steps, with held-out losses as marks.

    Each curve is thinner than the previous one, so that equal curves stay visible.

    Args:
        feeds: The runs.
    """
    traces: list[dict[str, Any]] = []
    for number, (name, feed) in enumerate(feeds.items()):
        records, colour = first_rank(feed), RUN_COLOURS[number % len(RUN_COLOURS)]
        width = max(1.0, _WIDEST - _NARROWER * number)
        points = _float32([(record.step, record.loss) for record in records])
        traces.append(curve(name, points, "%{y:.6f}", color=colour, width=width))
        if held_out := [(record.step, record.heldout_loss) for record in records if record.heldout_loss is not None]:
            marks = curve(f"{name}, held-out", _float32(held_out), "%{y:.4f}", color=colour, width=1, dash="dot")
            marker = {"symbol": "diamond", "size": 9, "color": colour}
            traces.append(marks | {"mode": "lines+markers", "marker": marker, "showlegend": False})
    marked = any(trace["mode"] == "lines+markers" for trace in traces)
    layout = base_layout("loss" + (", and of held-out text (◆)" if marked else ""), "")
    legend_alongside(layout)
    layout["legend"]["traceorder"] = "normal"
    layout["height"] = _PIXELS
    layout["xaxis"] |= {"title": {"text": "step"}}
    return {"data": traces, "layout": layout}


def compare_lines(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str, across: str, unit: str, log: bool = False
) -> Figure:
    """Return lines with marks, each in the colour of a run and thinner than the previous one.

    Args:
        curves: Name -> (x, value in `unit`).
        title: Title of the figure.
        across: Title of the x axis.
        unit: Unit of the values.
        log: Use logarithmic axes, with a tick at each x, so that a power law is a straight line.
    """
    traces: list[dict[str, Any]] = []
    for number, (name, points) in enumerate(curves.items()):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        width = max(1.0, _WIDEST - _NARROWER * number)
        line = curve(name, _float32(list(points)), f"%{{y:.4~r}} {unit}", color=colour, width=width)
        traces.append(line | {"mode": "lines+markers", "marker": {"size": width + _MARK, "color": colour}})
    layout = base_layout(title, unit)
    legend_alongside(layout)
    layout["legend"]["traceorder"] = "normal"
    layout["height"] = _PIXELS
    layout["xaxis"] |= {"title": {"text": across}}
    if log:
        places = sorted({place for points in curves.values() for place, _ in points})
        layout["xaxis"] |= {"type": "log", "tickvals": places, "ticktext": [f"{place:,}" for place in places]}
        layout["yaxis"] |= {"type": "log"}
    return {"data": traces, "layout": layout}


def _float32(points: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.array(points, dtype=np.float32).T
    return steps, values


def kept_at(ledger: Ledger, place: str) -> dict[str, int]:
    """Return category -> bytes of states and transfer buffers at a place.

    Args:
        ledger: The ledger of a rank.
        place: One of PLACES.
    """
    held = ledger.by_place().get(place, {})
    return {category: held[category] for category in _KEPT if held.get(category)}


def first_rank(feed: Feed) -> Sequence[StepRecord]:
    """Return the records of rank 0.

    Args:
        feed: The run; polled first.

    Raises:
        ValueError: There is no step yet.
    """
    feed.poll()
    if not feed.records.get(0):
        raise ValueError(f"run {feed.folder.name!r} has no step yet; wait_until(1) first")
    return feed.records[0]


_BARS_PIXELS = 340
_HALF_BAR = 0.36
"""Half the width of a bar and of an outline, as a share of the distance between two bars."""
_HEADROOM = 1.12


def compare_bars(
    bars: Mapping[str, Mapping[str, int]], *, title: str, predicted: Mapping[str, int] | None = None
) -> Figure:
    """Return a stacked bar with its sum above it for each of `bars`.

    Args:
        bars: Name -> part -> bytes. Parts that are ledger categories get their colour, others an own one.
        title: Title of the figure.
        predicted: Name -> bytes, drawn as an outline in the colour of the text.
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
    layout |= {"barmode": "stack", "hovermode": "closest", "height": _BARS_PIXELS}
    legend_alongside(layout)
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


_LANE_PIXELS, _REST_PIXELS = 110, 100
_GAP = 0.1
"""Space between two lanes, as a share of the height."""


def moves_figure(feed: Feed) -> Figure:
    """Return a stacked bar of states and buffers for each step of the first rank, in a lane per used place.

    Changes of shape or place are dashed lines.

    Args:
        feed: The run.
    """
    records = first_rank(feed)
    steps = np.array([record.step for record in records], dtype=np.float32)
    held = {place: [kept_at(record.ledger, place) for record in records] for place in PLACES}
    lanes = [place for place in PLACES if any(held[place])]
    highest = max(sum(kept.values()) for place in lanes for kept in held[place])
    unit, size = byte_unit(highest)
    layout = base_layout("where states lay, by step", "")
    layout |= {"barmode": "stack", "bargap": 0.15, "hovermode": "closest"}
    layout |= {"height": _REST_PIXELS + _LANE_PIXELS * len(lanes)}
    legend_alongside(layout)
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
