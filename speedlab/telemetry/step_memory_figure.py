"""Memory over the time of one step: what the allocator had given out at the ends of its phases."""

from __future__ import annotations

from html import escape

import numpy as np

from speedlab.display.figure_style import INK, PHASE_COLOURS, Figure, base_layout, curve, float32
from speedlab.display.formatting import byte_unit
from speedlab.telemetry.series import History


def step_memory_figure(history: History) -> Figure | None:
    """Of the newest step of the lowest rank that was marked; None where none was. A line through all marks, and the
    marks in the colours of the phases that ended there."""
    step, marks = history.lead.marked
    if len(marks) < 2 or not any(mark.bytes for mark in marks):
        return None
    unit, size = byte_unit(max(mark.bytes for mark in marks))
    times = np.array([1000 * mark.seconds for mark in marks])
    heights = np.array([mark.bytes / size for mark in marks])
    line = curve("allocated", float32(times, heights), "", color=INK, width=1.5)
    data = [{**line, "hoverinfo": "skip", "hovertemplate": None}]
    for phase in dict.fromkeys(mark.phase for mark in marks):
        chosen = [i for i, mark in enumerate(marks) if mark.phase == phase]
        colour = PHASE_COLOURS.get(phase, PHASE_COLOURS["other"])
        name = escape(phase)
        moment = "start" if phase == "start" else f"end of {name}"
        data.append(
            {
                **curve(name, float32(times[chosen], heights[chosen]), "", color=colour, width=0),
                "mode": "markers",
                "marker": {"size": 8, "color": colour},
                "hovertemplate": f"{moment}, %{{x:.4~r}} ms<br>%{{y:.4~r}} {unit}<extra></extra>",
            }
        )
    layout = base_layout(f"memory at the ends of phases, step {step:,}, rank {history.lead_rank}", unit)
    layout["hovermode"] = "closest"
    layout["uirevision"] = "memory over a step"
    layout["xaxis"] |= {"title": {"text": "ms", "standoff": 2}, "rangemode": "tozero"}
    return {"data": data, "layout": layout}
