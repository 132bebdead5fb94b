"""What a step costs: kernels and collectives as bars by name, of the lowest rank, mean of its last steps; memory."""

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
"""Names that have a bar; what the others cost together has one more."""
_RECENT_STEPS = 20
_LINK_COLOURS = tuple(
    COLOURS[name]
    for name in ("communication_buffers", "master_weights", "gradients", "parameters", "activations", "other_framework")
)
_ROOM = 6
"""Lanes that there is room for at least."""
_NAME_LETTERS = 36
_OTHERS = "others"
_NO_LINK = "link not told"

_Costs = Mapping[str, Mapping[str, float]]
"""Name → part → what it costs."""


def cost_figures(history: History) -> dict[str, Figure]:
    """`step_memory` where a step was marked, `kernels` where any were timed, and `communication` where anything was
    sent or moved."""
    recent = list(history.records.get(history.lead_rank, ())[-_RECENT_STEPS:])
    found = {
        "step_memory": step_memory_figure(history),
        "kernels": _kernels_figure(history, recent),
        "communication": _communication_figure(history, recent),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _kernels_figure(history: History, recent: Sequence[StepRecord]) -> Figure | None:
    """Time of this project's own kernels in a step, by name; others' are in the phases alone."""
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
    """Bytes of a step that went to peers, by collective and by what they went through, and those that went between a
    rank's own places."""
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
    """Collective, or way between places → link → bytes; records of before do not tell the link."""
    sent: dict[str, dict[str, float]] = {name: {_NO_LINK: count} for name, count in record.sent_bytes.items()}
    sent |= {name: dict(links) for name, links in record.sent_through.items()}
    sent |= {way: {"own places": count} for way, count in record.moved_bytes.items()}
    return sent


def _means(steps: Sequence[_Costs]) -> dict[str, dict[str, float]]:
    """The mean of each part over the steps; what a step does not have counts 0."""
    sums: dict[str, dict[str, float]] = {}
    for costs in steps:
        for name, parts in costs.items():
            found = sums.setdefault(name, {})
            for part, value in parts.items():
                found[part] = found.get(part, 0.0) + value / len(steps)
    return sums


def _lanes(costs: _Costs) -> dict[str, list[str]]:
    """Lane → the names in it, the dearest first; of many names the last lane has the rest. Costs within a fifth of each
    other stand in the order of their names, so that bars seldom change places."""

    def dear(name: str) -> tuple[int, str]:
        total = sum(costs[name].values())
        return -round(math.log(total, 1.2)) if 0 < total < math.inf else 10**6, name

    names = sorted((name for name, parts in costs.items() if any(parts.values())), key=dear)
    if len(names) <= MOST_LANES + 1:
        return {name: [name] for name in names}
    lanes = {name: [name] for name in names[:MOST_LANES]}
    # A name of its own, whatever names there are.
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
    """A lane for each name, a trace for each of `colours`. `words` of (lane, part) are shown with a value."""
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
