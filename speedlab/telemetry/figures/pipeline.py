"""A step of a pipeline as a Gantt plot: a lane per pipeline rank, a bar per action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import PHASE_COLOURS, Figure, base_layout, lanes_axis
from speedlab.hardware import Device
from speedlab.telemetry.records import Span
from speedlab.telemetry.trace import Lane, PipelineTimeline

MOST_LANES = 16
MOST_BARS = 3000
"""Above these limits, the plot shows evenly spaced lanes, and the longest bars of each lane."""

_ACTIONS: dict[str, tuple[str, str]] = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("backward: inputs", "backward"),
    "W": ("backward: weights", "backward"),
    "wait": ("wait", "communication"),
    "send": ("send", "communication"),
    "reduce": ("reduce", "communication"),
    "optimizer": ("optimizer", "optimizer"),
}
"""Action -> its name, and the phase whose colour it has."""

_THIN = frozenset({"wait", "send"})
"""Drawn as a thin line, so that idle time is visible at a glance."""

_HATCHED = {"W": "/", "send": "|", "reduce": "x"}
_LANE_PIXELS = 44
_PLOT_PIXELS = 150


def pipeline_figure(timeline: PipelineTimeline, *, devices: Sequence[Device] = ()) -> Figure:
    """Return the actions of each pipeline rank over the time of a step.

    Args:
        timeline: The step.
        devices: Devices by rank, for labels.
    """
    lanes = _shown(timeline.lanes)
    data = [_trace(*group) for group in _groups(lanes)]
    some = f", {len(lanes)} of {len(timeline.lanes)} ranks drawn" if len(lanes) < len(timeline.lanes) else ""
    layout = base_layout(f"pipeline, step {timeline.step:,}: {bubble_text(timeline)}{some}", "")
    layout |= {
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "uirevision": "pipeline",
        "height": _PLOT_PIXELS + _LANE_PIXELS * len(lanes),
    }
    layout["margin"] |= {"b": 70, "r": 20}
    layout["legend"] |= {"traceorder": "normal"}
    layout["xaxis"] |= {"title": {"text": "ms", "standoff": 2}, "rangemode": "tozero"}
    layout["yaxis"] = lanes_axis([_name(lane, devices) for lane in lanes])
    return {"data": data, "layout": layout}


def bubble_text(timeline: PipelineTimeline) -> str:
    """Return 'bubble 18 % (theory 16 %), 8 micro-batches'.

    Args:
        timeline: The step.
    """
    count = timeline.micro_batches
    batches = f"{count} micro-batch{'' if count == 1 else 'es'}"
    return f"bubble {timeline.bubble:.0%} (theory {timeline.theory:.0%}), {batches}".replace("%", " %")


def _shown(lanes: Sequence[Lane]) -> list[Lane]:
    if len(lanes) <= MOST_LANES:
        return list(lanes)
    return [lanes[i] for i in np.linspace(0, len(lanes) - 1, MOST_LANES).round().astype(int)]


def _groups(lanes: Sequence[Lane]) -> Iterator[tuple[str, int, list[tuple[int, Span]]]]:
    """Yield (action, index of the stage on its rank, [(lane, span)]): bars that share a style, in the order of the
    legend.
    """
    most = MOST_BARS // len(lanes)
    found: dict[tuple[str, int], list[tuple[int, Span]]] = {}
    for number, lane in enumerate(lanes):
        stages = lane.stages
        kept = sorted(lane.spans, key=lambda span: -span.seconds)[:most] if len(lane.spans) > most else lane.spans
        for span in kept:
            chunk = stages.index(span.stage) if span.action in "FBIW" and span.stage in stages else 0
            found.setdefault((span.action, chunk), []).append((number, span))
    order = [*_ACTIONS, *sorted({action for action, _ in found} - _ACTIONS.keys())]
    for action, chunk in sorted(found, key=lambda key: (order.index(key[0]), key[1])):
        yield action, chunk, found[action, chunk]


def _trace(action: str, chunk: int, bars: list[tuple[int, Span]]) -> dict[str, Any]:
    name, phase = _ACTIONS.get(action, (escape(action), "other"))
    marker: dict[str, Any] = {"color": _faded(PHASE_COLOURS[phase], chunk), "line": {"width": 0}}
    if shape := _HATCHED.get(action):
        marker["pattern"] = {"shape": shape, "fillmode": "overlay", "size": 6, "solidity": 0.15, "fgcolor": "#1c2530"}
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": f"{name}, chunk {chunk + 1}" if chunk else name,
        "base": np.array([1000 * span.start for _, span in bars], dtype=np.float32),
        "x": np.array([1000 * span.seconds for _, span in bars], dtype=np.float32),
        "y": np.array([lane for lane, _ in bars], dtype=np.float32),
        "marker": marker,
        "width": {"wait": 0.16, "send": 0.4}.get(action, 0.72),
        "hovertemplate": f"{name} %{{x:.2f}} ms, from %{{base:.2f}} ms<extra></extra>",
    }
    if action not in _THIN and any(span.micro_batch >= 0 for _, span in bars):
        trace |= {
            "text": [str(span.micro_batch) if span.micro_batch >= 0 else "" for _, span in bars],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": "#1c2530"},
            "hovertemplate": f"{name} of micro-batch %{{text}}<br>%{{x:.2f}} ms, from %{{base:.2f}} ms<extra></extra>",
        }
    return trace


def _faded(colour: str, chunk: int) -> str:
    """Return the colour of a stage. If a rank has several stages, later ones are more transparent."""
    if not chunk:
        return colour
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{max(0.3, 1 - 0.4 * chunk):.2g})"


def _name(lane: Lane, devices: Sequence[Device]) -> str:
    """Return 'rank 0 · cpu 0-1' and the pipeline stages of the rank."""
    device = f" · {escape(devices[lane.rank].name)}" if lane.rank < len(devices) else ""
    stages = ", ".join(map(str, lane.stages))
    return f"rank {lane.rank}{device}<br>pipeline stage{'s' if len(lane.stages) > 1 else ''} {stages}"
