"""Draw a plan: memory by position and the parts of a step, for plotly and for pages without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from speedlab.display.figure_style import (
    COLOURS,
    LABELS,
    Figure,
    bar_marker,
    base_layout,
    ink_line,
    legend_alongside,
    note,
    swatch,
)
from speedlab.display.formatting import byte_unit, bytes_text, seconds_text
from speedlab.display.svg import Bar, bars_svg
from speedlab.planner.memory.places import PlaceBytes
from speedlab.planner.memory.rank_memory import CATEGORIES, RankMemory
from speedlab.planner.report import (
    MOST_ROWS,
    attention_html,
    cautions,
    found_lines,
    found_table,
    heading,
    place_lines,
    plan_table,
    positions,
    speed_lines,
    telling,
)
from speedlab.planner.time.step_time import PARTS

if TYPE_CHECKING:
    from speedlab.planner.plan import Found, Plan

PART_COLOURS = {
    "forward": COLOURS["activations"],
    "backward": COLOURS["gradients"],
    "recompute": "#A8527E",
    "logits": COLOURS["parameters"],
    "tensor parallel": COLOURS["communication_buffers"],
    "context parallel": "#CFC45C",
    "pipeline messages": "#B8AC2E",
    "bubble": "#D0D5DB",
    "data parallel": "#8C8320",
    "islands": "#5E5715",
    "optimizer": COLOURS["optimizer_moments"],
    "offload": COLOURS["master_weights"],
}
"""Colours of the parts of a step: those of their phases. Waits are shades of the colour of communication."""

_MOST_BARS = 8
_LINE_PIXELS = 18
_CAPACITY_IN_SIGHT = 2.5
_STYLE = (
    "<style>.speedlab-plan .speedlab-bars{width:380px;max-width:100%;color:inherit;overflow:visible;display:block}"
    ".speedlab-plan text{fill:currentColor;font-size:10.5px}.speedlab-plan .speedlab-grid{stroke:#88888855}"
    ".speedlab-plan .speedlab-capacity{stroke:currentColor;stroke-width:1.5}"
    ".speedlab-plan .speedlab-outline{fill:none;stroke:currentColor;stroke-width:1.5}"
    ".speedlab-plan .speedlab-row{display:flex;flex-flow:row wrap;gap:8px 28px;align-items:flex-end}"
    ".speedlab-plan i{display:inline-block;width:9px;height:9px;margin:0 4px 0 10px}</style>"
)


def shown_positions(plan: Plan) -> list[tuple[str, Any]]:
    """Return the positions that are drawn."""
    return telling(positions(plan), _MOST_BARS)


def plan_figure(plan: Plan) -> Figure:
    """Return a plan as a plotly figure.

    Args:
        plan: the plan.

    Returns:
        Bars of memory with the capacity line on the left, parts of a step on the right.
    """
    layout = base_layout("", "")
    layout |= {"barmode": "stack", "hovermode": "closest", "title": None, "height": 380}
    legend_alongside(layout)
    layout["xaxis"] |= {"type": "category", "showgrid": False, "domain": [0, 0.46]}
    layout["xaxis2"] = {"type": "category", "showgrid": False, "domain": [0.58, 0.78], "anchor": "y2"}
    layout["yaxis2"] = {**layout["yaxis"], "anchor": "x2", "title": {"text": "seconds", "standoff": 6}}
    layout["annotations"] = [
        _title("predicted memory by rank", 0.0),
        _title(f"predicted step: {seconds_text(plan.time.step_seconds)}", 0.58),
    ]
    for number, line in enumerate(place_lines(plan)[1:]):  # The device's line is part of the figure.
        below = {"x": 0.0, "xanchor": "left", "yshift": -_LINE_PIXELS * (number + 2)}
        layout["annotations"].append({**note(line, y=0.0), **below})
        layout["margin"] |= {"b": layout["margin"]["b"] + _LINE_PIXELS}
    return {"data": [*_memory_bars(plan, layout), *_step_bars(plan)], "layout": layout}


def _title(text: str, x: float) -> dict[str, Any]:
    place = {"x": x, "xref": "paper", "xanchor": "left", "y": 1.03, "yref": "paper", "yanchor": "bottom"}
    return {"text": f"<b>{text}</b>", **place, "showarrow": False, "font": {"size": 13}}


def _memory_bars(plan: Plan, layout: Figure) -> list[dict[str, Any]]:
    shown = shown_positions(plan)
    highest = max(memory.total for _, memory in shown)
    unit, size = byte_unit(highest)
    layout["yaxis"] |= {"title": {"text": unit, "standoff": 6}}
    # A capacity far above the bars would flatten them, so a note replaces the line.
    if plan.capacity_bytes <= _CAPACITY_IN_SIGHT * highest:
        height = plan.capacity_bytes / size
        layout["shapes"].append(ink_line(-0.5, len(shown) - 0.5, height, "solid"))
        layout["yaxis"] |= {"range": [0, 1.12 * max(highest / size, height)]}
        corner = {"x": len(shown) - 0.5, "xref": "x"}
        text = f"capacity {bytes_text(plan.capacity_bytes)}"
        layout["annotations"].append({**note(text, y=height, yref="y", yanchor="bottom"), **corner})
    else:
        text = f"capacity {bytes_text(plan.capacity_bytes)}, far above"
        layout["annotations"].append({**note(text, y=1.0), "x": 0.46})
    for index, (_, memory) in enumerate(shown):  # An outline marks a bar as predicted.
        outline = {**ink_line(index - 0.4, index + 0.4, memory.total / size, "solid"), "type": "rect", "y0": 0}
        layout["shapes"].append(outline)
    return [
        {
            "type": "bar",
            "name": LABELS[category],
            "x": [name for name, _ in shown],
            "y": [getattr(memory, category) / size for _, memory in shown],
            "marker": bar_marker(category),
            "hovertemplate": f"%{{x}}<br>{LABELS[category]} %{{y:.5~r}} {unit}<extra></extra>",
        }
        for category in CATEGORIES
        if any(getattr(memory, category) for _, memory in shown)
    ]


def _step_bars(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "name": part,
            "x": ["step"],
            "y": [seconds],
            "xaxis": "x2",
            "yaxis": "y2",
            "legend": "legend",
            "marker": {"color": PART_COLOURS.get(part, COLOURS["other_framework"]), "line": {"width": 0}},
            "hovertemplate": f"{PARTS.get(part, part)} %{{y:.4g}} s<extra></extra>",
        }
        for part, seconds in plan.time.parts.items()
        if seconds > 0
    ]


def plan_html(plan: Plan) -> str:
    """Return the plan as HTML without a script: escaped text, bars and table."""
    bars = [Bar(label=name, categories=memory.by_category(), chosen=True) for name, memory in shown_positions(plan)]
    away = [held for memory in plan.memory for held in memory.by_place().values()]
    used = [c for c in CATEGORIES if any(held.get(c, 0) for held in (*(bar.categories for bar in bars), *away))]
    legend = "".join(f'<i style="background:{swatch(category)}"></i>{LABELS[category]}' for category in used)
    first, *rest = heading(plan)
    lines = "".join(f"<div>{escape(line)}</div>" for line in rest)
    speed, doubts = (
        "".join(f"<div>{escape(line)}</div>" for line in lines) for lines in (speed_lines(plan), cautions(plan))
    )
    return (
        f'<div class="speedlab-plan">{_STYLE}<div><b>{escape(first)}</b></div>{lines}'
        f"{bars_svg(bars, plan.capacity_bytes, what='predicted memory')}{places_svg(plan.memory, plan.places)}"
        f"<div>{legend}</div>"
        f"{plan_table(plan, MOST_ROWS)._repr_html_()}{speed}{attention_html(plan.setup)}{doubts}</div>"
    )


def places_svg(memory: Sequence[RankMemory], found: Sequence[PlaceBytes]) -> str:
    """Return a line and a bar for each place other than the device, with the bytes of the heaviest rank.

    Args:
        memory: memory of each distinct position.
        found: the used places.
    """
    parts = []
    for place in found:
        if place.name == "device":
            continue
        fullest = max((rank.by_place().get(place.name, {}) for rank in memory), key=lambda held: sum(held.values()))
        bar = Bar(label=place.name, categories=fullest, kind="speedlab-bar speedlab-place")
        parts.append(f'<div class="speedlab-help">{escape(str(place))}</div>')
        parts.append(bars_svg([bar], place.capacity_bytes or place.held_bytes, what=f"on {place.name}"))
    return "".join(parts)


def found_html(found: Found) -> str:
    """Return the results of a search as an HTML table."""
    asked, lines = found_lines(found)
    table = found_table(found)._repr_html_() if found.candidates else ""
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f'<div class="speedlab-plan"><div><b>{escape(asked)}</b></div>{table}{below}</div>'
