"""Marks for the state of a run, and for its events on a step axis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from speedlab.display.figure_style import INK, Figure
from speedlab.telemetry.current_config import change_mark
from speedlab.telemetry.records import Event, RunState

STATE_MARKS = {
    RunState.STARTING: "○",
    RunState.RUNNING: "●",
    RunState.PAUSED: "‖",
    RunState.FINISHED: "■",
    RunState.STOPPED: "■",
    RunState.FAILED: "✕",
}
"""A shape next to the state's name, so that the state does not depend on a colour."""

_EVENT_MARKS = {
    "reshaped": "▼",
    "compressed": "±",
    "checkpoint": "◆",
    "paused": "‖",
    "resumed": "▶",
    "interrupted": "✕",
    "failed": "✕",
    "recovering": "↻",
    "warning": "▲",
    "stopped": "■",
    "finished": "■",
}
_MOST_MARKS = 40


def over_steps(layout: Figure, events: Sequence[Event]) -> None:
    """Set the x axis of a layout to steps, and mark the events.

    Args:
        layout: A figure's layout; changed in place.
        events: Events of the run.
    """
    layout["xaxis"] |= {"title": {"text": "step", "standoff": 4}, "rangemode": "tozero"}
    layout |= event_marks(events)


def event_marks(events: Sequence[Event]) -> Figure:
    """Return shapes and annotations that mark a run's events on a step axis; the hover text describes the event.

    Args:
        events: Events of the run.
    """
    shown = [event for event in events if event.kind in _EVENT_MARKS][-_MOST_MARKS:]
    shapes, annotations = [], []
    for event in shown:
        change = f" {change_mark(event)}" if event.kind == "reshaped" else ""
        line = {"color": INK, "width": 1, "dash": "dot"}
        shapes.append(
            {"type": "line", "x0": event.step, "x1": event.step, "yref": "paper", "y0": 0, "y1": 1, "line": line}
            | {"layer": "below", "opacity": 0.7, "name": "ink"}
        )
        annotations.append(
            {
                "text": f"{_EVENT_MARKS[event.kind]}{change}".rstrip(),
                "x": event.step,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11},
                "hovertext": escape(f"{event.kind} at step {event.step}: {event.text}"),
            }
        )
    return {"shapes": shapes, "annotations": annotations}
