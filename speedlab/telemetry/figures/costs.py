"""What a step costs: kernels and collectives as bars, mean of the last steps of the lowest rank, and memory
over a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from speedlab.display.figure_style import COLOURS, Figure, base_layout, lanes_axis
from speedlab.display.formatting import byte_unit, bytes_text, count_text
from speedlab.telemetry.figures.steps import step_memory_figure
from speedlab.telemetry.history import History
from speedlab.telemetry.records import StepRecord

MOST_LANES = 12
"""Maximum number of names with an own bar; one more bar shows the sum of the others."""
_RECENT_STEPS = 20
_LINK_COLOURS = tuple(
    COLOURS[name]
    for name in ("communication_buffers", "master_weights", "gradients", "parameters", "activations", "other_framework")
)
_ROOM = 6
"""Minimum number of lanes for which there is room."""
_NAME_LETTERS = 36
_OTHERS = "others"
_NO_LINK = "link unknown"

_Costs = Mapping[str, Mapping[str, float]]
"""Name → part → cost."""


def cost_figures(history: History) -> dict[str, Figure]:
    """Return the cost figures for which there is data.

    Args:
        history: The run's data.

    Returns:
        `step_memory` if a step was marked, `kernels` if any were timed, `communication` if data was sent or moved.
    """
    recent = list(history.records.get(history.lead_rank, ())[-_RECENT_STEPS:])
    found = {
        "step_memory": step_memory_figure(history),
        "kernels": _kernels_figure(history, recent),
        "communication": _communication_figure(history, recent),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _kernels_figure(history: History, recent: Sequence[StepRecord]) -> Figure | None:
    """Return the time of this project's kernels in a step, by name. Other kernels are only part of the phases."""
    uses = _means([record.kernels for record in recent])
    milliseconds = {name: {"time": 1000 * use.get("seconds", 0.0)} for name, use in uses.items()}
    lanes = _lanes(milliseconds)
    if not lanes:
        return None

    def words(name: str, _: str) -> str:
        parts = [uses[each] for each in lanes[name]]
        calls, nbytes, seconds = (sum(part.get(word, 0.0) for part in parts) for word in ("calls", "bytes", "seconds"))
        speed = f", {bytes_text(nbytes / seconds)}/s" if seconds > 0 else ""
        return f"{count_text(calls)} calls, {bytes_text(nbytes)} read and written{speed}"

    title = f"kernels by time in a step, rank {history.lead_rank}"
    colour = {"time": COLOURS["optimizer_moments"]}
    return _figure(title, "ms", lanes, milliseconds, colour, words, lambda value: f"{value:.3g} ms")


def _communication_figure(history: History, recent: Sequence[StepRecord]) -> Figure | None:
    """Return the bytes of a step sent to peers, by collective and link, and those moved between a rank's own places."""
    sent = _means([_sent(record) for record in recent])
    lanes = _lanes(sent)
    if not lanes:
        return None
    unit, size = byte_unit(max(sum(parts.values()) for parts in sent.values()))
    scaled = {name: {link: count / size for link, count in parts.items()} for name, parts in sent.items()}
    links = list(dict.fromkeys(link for parts in sent.values() for link in parts))
    colours = {link: _LINK_COLOURS[i % len(_LINK_COLOURS)] for i, link in enumerate(sorted(links))}
    title = f"communication of a step, rank {history.lead_rank}"
    return _figure(title, unit, lanes, scaled, colours, lambda _, link: link, lambda value: bytes_text(value * size))


def _sent(record: StepRecord) -> dict[str, dict[str, float]]:
    """Return collective or move → link → bytes. Records of old versions have no link."""
    sent: dict[str, dict[str, float]] = {name: {_NO_LINK: count} for name, count in record.sent_bytes.items()}
    sent |= {name: dict(links) for name, links in record.sent_through.items()}
    sent |= {way: {"own places": count} for way, count in record.moved_bytes.items()}
    return sent


def _means(steps: Sequence[_Costs]) -> dict[str, dict[str, float]]:
    """Return the mean of each part over the steps; missing parts count as 0."""
    sums: dict[str, dict[str, float]] = {}
    for costs in steps:
        for name, parts in costs.items():
            found = sums.setdefault(name, {})
            for part, value in parts.items():
                found[part] = found.get(part, 0.0) + value / len(steps)
    return sums


def _lanes(costs: _Costs) -> dict[str, list[str]]:
    """Return lane → its names, the most expensive first. Above the limit, the last lane has the rest.

    Costs within a fifth of each other are sorted by name, so that bars seldom change places.
    """

    def dear(name: str) -> tuple[int, str]:
        total = sum(costs[name].values())
        return -round(math.log(total, 1.2)) if 0 < total < math.inf else 10**6, name

    names = sorted((name for name, parts in costs.items() if any(parts.values())), key=dear)
    if len(names) <= MOST_LANES + 1:
        return {name: [name] for name in names}
    lanes = {name: [name] for name in names[:MOST_LANES]}
    # Add a space if a cost already has this name.
    return lanes | {_OTHERS if _OTHERS not in lanes else f"{_OTHERS} ": names[MOST_LANES:]}


def _figure(
    title: str,
    unit: str,
    lanes: Mapping[str, Sequence[str]],
    costs: _Costs,
    colours: Mapping[str, str],
    words: Callable[[str, str], str],
    value_text: Callable[[float], str],
) -> Figure:
    """Return a figure with a lane per name and a trace per colour. The hover text adds `words(lane, part)` to
    the value.
    """
    data = []
    for part, colour in colours.items():
        values = [sum(costs[name].get(part, 0.0) for name in names) for names in lanes.values()]
        if any(values):
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": escape(part),
                    "x": np.array(values, dtype=np.float32),
                    "y": np.arange(len(lanes), dtype=np.float32),
                    "marker": {"color": colour, "line": {"width": 0}},
                    "text": [
                        escape(f"{lane}: {value_text(value)}, {words(lane, part)}")
                        for lane, value in zip(lanes, values, strict=True)
                    ],
                    "textposition": "none",
                    "hovertemplate": "%{text}<extra></extra>",
                }
            )
    layout = base_layout(title, "")
    layout |= {"barmode": "stack", "bargap": 0.25, "hovermode": "closest", "showlegend": "time" not in colours}
    layout["margin"] |= {"r": 20, "b": 64}
    layout["legend"] |= {"traceorder": "normal"}
    layout["xaxis"] |= {"title": {"text": unit, "standoff": 2}, "rangemode": "tozero"}
    layout["yaxis"] = lanes_axis([escape(_short(lane)) for lane in lanes], _ROOM)
    return {"data": data, "layout": layout}


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LETTERS else f"{name[: _NAME_LETTERS - 1]}…"
