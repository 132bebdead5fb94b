"""The plots of a run as plotly figures: pure functions from a History to plain dicts. No Jupyter, no plotly import.

A figure is {"data": [...], "layout": {...}} with numpy float32 arrays where plotly takes arrays; `plain` makes it JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import PAPER_GRID, PAPER_INK, Figure, plain
from speedlab.display.text import count_text, seconds_text
from speedlab.hardware import Device
from speedlab.telemetry.folder import Status
from speedlab.telemetry.marks import STATE_MARKS
from speedlab.telemetry.memory_figure import memory_figure, states_are_small, states_figure
from speedlab.telemetry.pipeline_figure import pipeline_figure
from speedlab.telemetry.places_figure import places_figure
from speedlab.telemetry.prediction import error_text
from speedlab.telemetry.records import RunState, StepRecord
from speedlab.telemetry.series import History
from speedlab.telemetry.step_figures import (
    RECENT_STEPS,
    anatomy_by_rank_figure,
    anatomy_figure,
    cut_for,
    exchange_figure,
    loss_figure,
    throughput_figure,
)
from speedlab.telemetry.timeline import timeline_of

__all__ = [
    "Header",
    "History",
    "anatomy_by_rank_figure",
    "anatomy_figure",
    "exchange_figure",
    "figures",
    "header",
    "loss_figure",
    "memory_figure",
    "overview_figure",
    "places_figure",
    "plain",
    "states_figure",
    "throughput_figure",
]


def figures(history: History, *, devices: Sequence[Device] = ()) -> dict[str, Figure]:
    """All plots by name, in the order in which they are laid out: by place where something is not on the device, the
    exchange's where an optimizer sums gradients itself, the pipeline's last, where there is one."""
    timeline = timeline_of(history.records)
    pipeline = {} if timeline is None else {"pipeline": pipeline_figure(timeline, devices=devices)}
    by_place = places_figure(history)
    return {
        "memory": memory_figure(history, devices=devices),
        **({} if by_place is None else {"places": by_place}),
        "states": states_figure(history, devices=devices),
        "loss": loss_figure(history),
        "throughput": throughput_figure(history),
        "anatomy": anatomy_figure(history),
        "ranks": anatomy_by_rank_figure(history, devices=devices),
        **({"exchange": exchange_figure(history)} if history.lead.exchanges else {}),
        **pipeline,
    }


_OVERVIEW_POINTS = 100
_OVERVIEW_BARS = 40
_OVERVIEW_PIXELS = 640
_GRID = {"gridcolor": PAPER_GRID}


def overview_figure(history: History, *, title: str = "", devices: Sequence[Device] = ()) -> Figure:
    """The four plots, and a pipeline's timeline below them, as one figure of plain lists, small enough to stay in a
    saved notebook."""
    data: list[dict[str, Any]] = []
    layout: Figure = {
        "title": {"text": escape(title), "x": 0.01, "xanchor": "left", "font": {"size": 14}},
        "font": {"size": 11, "color": PAPER_INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "barmode": "relative",
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.08, "font": {"size": 10}},
        "margin": {"l": 55, "r": 55, "t": 60, "b": 40},
        "height": _OVERVIEW_PIXELS,
        "annotations": [],
        "shapes": [],
    }
    plots = [
        (states_figure if states_are_small(history) else memory_figure)(history, devices=devices),
        loss_figure(history, cut_for(history, _OVERVIEW_POINTS)),
        throughput_figure(history, cut_for(history, _OVERVIEW_POINTS)),
        anatomy_figure(history, cut_for(history, _OVERVIEW_BARS)),
    ]
    timeline = timeline_of(history.records)
    wide = None if timeline is None else pipeline_figure(timeline, devices=devices)
    layout["height"] += wide["layout"]["height"] if wide is not None else 0
    below = 1 - _OVERVIEW_PIXELS / layout["height"]
    for number, figure in enumerate(plots):
        left, bottom = 0.55 * (number % 2), below + (1 - below) * 0.56 * (1 - number // 2)
        _place(figure, number, (left, left + 0.42), (bottom, bottom + (1 - below) * 0.40), data, layout)
    if wide is not None:
        layout["uniformtext"] = wide["layout"]["uniformtext"]
        known = {trace["name"] for trace in data}  # Phases wear the colours that they have in the plot above.
        traces = [{**trace, "showlegend": trace["name"] not in known} for trace in wide["data"]]
        _place({**wide, "data": traces}, len(plots), (0.06, 1.0), (0.02, 0.6 * below), data, layout)
    return plain({"data": data, "layout": layout})


def _place(
    figure: Figure,
    number: int,
    across: tuple[float, float],
    up: tuple[float, float],
    data: list[dict[str, Any]],
    layout: Figure,
) -> None:
    """Add a figure as number `number`, between these shares of the width and of the height."""
    first, second = str(2 * number + 1) if number else "", str(2 * number + 2)
    inner = figure["layout"]
    layout[f"xaxis{first}"] = {**inner["xaxis"], **_GRID, "domain": list(across), "anchor": f"y{first}"}
    layout[f"yaxis{first}"] = {**inner["yaxis"], **_GRID, "domain": list(up), "anchor": f"x{first}"}
    if "yaxis2" in inner:
        layout[f"yaxis{second}"] = {**inner["yaxis2"], "anchor": f"x{first}", "overlaying": f"y{first}"}
    for trace in figure["data"]:
        axis = second if trace.get("yaxis") == "y2" else first
        data.append({**trace, "xaxis": f"x{first}", "yaxis": f"y{axis}"})
    caption = {"text": f"<b>{inner['title']['text']}</b>", "showarrow": False, "font": {"size": 12}}
    above = up[1] + 0.035 * _OVERVIEW_PIXELS / layout["height"]
    corner = {"x": across[0], "xref": "paper", "xanchor": "left", "y": above, "yref": "paper"}
    layout["annotations"].append({**caption, **corner, "yanchor": "bottom"})
    for shape in inner["shapes"]:
        yref = f"y{first} domain" if shape.get("yref") == "paper" else f"y{first}"
        layout["shapes"].append({**shape, "xref": f"x{first}", "yref": yref})
    for note in inner["annotations"]:
        xref = f"x{first} domain" if note.get("xref") == "paper" else f"x{first}"
        yref = f"y{first} domain" if note.get("yref") == "paper" else f"y{first}"
        layout["annotations"].append({**note, "xref": xref, "yref": yref})


_SILENT_SECONDS = 5.0
_SILENT_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Header:
    """The line above the plots: `text`, and the state as a word with its mark; `note` is what else is to be told."""

    text: str
    state: str
    mark: str
    note: str = ""


def header(history: History, *, name: str, status: Status, now: float | None = None) -> Header:
    """'quickstart · step 131/2,000 · 41.2 k tokens/s · 38 % of peak · loss 5.91 (held-out 6.02) · 4 engines'.

    With `now` (seconds since the epoch) its note says when a run that should compute has not finished a step for long.
    """
    lead = history.lead
    steps = int(lead.column("step")[-1]) if lead.length else status.step
    parts = [name, f"step {steps:,}/{status.steps:,}" if status.steps else f"step {steps:,}"]
    if lead.length:
        speed = lead.column("tokens_per_second")[-RECENT_STEPS:]
        parts.append(
            f"{count_text(float(np.median(speed)))} tokens/s{_predicted_text(history, float(np.median(speed)))}"
        )
        share = history.share_of_peak(lead.column("flops_per_second")[-RECENT_STEPS:])
        if share is not None:
            parts.append(f"{float(np.median(share)) * 100:.2g} % of peak")
        heldout = f" (held-out {history.heldout[-1][1]:.2f})" if history.heldout else ""
        parts.append(f"loss {lead.smoothed[-1]:.2f}{heldout}")
        newest = history.latest[min(history.latest)]
        parts.append(f"ZeRO stage {newest.zero_stage}{_exchange_text(newest)}")
    note = status.text or ("" if now is None else _silence(history, status, now))
    engines = len(status.rank_pids) or len(history.ranks)
    link = history.pretended_link
    parts.append(f"{engines} engine{'' if engines == 1 else 's'}{f' over a pretended link of {link}' if link else ''}")
    return Header(text=" · ".join(parts), state=str(status.state), mark=STATE_MARKS[status.state], note=note)


def _exchange_text(record: StepRecord) -> str:
    """' · compressed, 3.14 % of float32 sent' or ' · warm-up before compression', of islands ' · islands meet in 12
    steps', of ranks that make steps of their own ' · ranks exchange in 3 steps'; '' where nothing is exchanged but
    gradients."""
    told = record.exchange
    if not told:
        return ""
    if "steps_to_meeting" in told:
        left = told["steps_to_meeting"]
        return f" · islands meet in {left:,.0f} step{'' if left == 1 else 's'}"
    if "steps_to_exchange" in told:
        left = told["steps_to_exchange"]
        return f" · ranks exchange in {left:,.0f} step{'' if left == 1 else 's'}"
    if told.get("variance_updated"):
        return " · gradients sent whole, for the variance"
    if not told.get("compressed"):
        return " · warm-up before compression"
    whole = told.get("float32_bytes")
    return " · compressed" + (f", {100 * told['sent_bytes'] / whole:.3g} % of float32 sent" if whole else "")


def _predicted_text(history: History, measured: float) -> str:
    """' (predicted 14.6 k, +69%)': how far the prediction lies above what was measured; '' where there is none."""
    if history.predicted is None:
        return ""
    now = float(history.predicted.tokens_per_second(history.lead.column("step")[-1:])[0])
    return f" (predicted {count_text(now)}, {error_text(now, measured)})"


def _silence(history: History, status: Status, now: float) -> str:
    """The progress of steps is the only honest watchdog: a rank that hangs in a collective still looks alive."""
    if status.state is not RunState.RUNNING or not history.latest:
        return ""
    usual = float(np.median(history.lead.column("seconds")[-RECENT_STEPS:]))
    silent = now - max([record.time for record in history.latest.values()] + [event.time for event in history.events])
    if silent < max(_SILENT_SECONDS, _SILENT_STEPS * usual):
        return ""
    return f"no step for {seconds_text(int(silent))}; they took {seconds_text(usual)} each"
