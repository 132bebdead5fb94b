"""The plots over steps: loss, gradient norm, throughput, compressed exchange, anatomy of a step, and memory
over a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import numpy as np

from speedlab.display.figure_style import (
    ACCENT,
    COLOURS,
    INK,
    PHASE_COLOURS,
    Figure,
    base_layout,
    curve,
    float32,
    legend_alongside,
    second_axis,
)
from speedlab.display.formatting import byte_unit
from speedlab.hardware import Device
from speedlab.telemetry.figures.markers import over_steps
from speedlab.telemetry.figures.memory import rank_axis
from speedlab.telemetry.history import (
    BARS,
    POINTS,
    SMOOTHING,
    History,
    bucket_extremes,
    bucket_last,
    bucket_mean,
    stride,
)
from speedlab.telemetry.records import StepRecord

GRADIENT = COLOURS["gradients"]

RECENT_STEPS = 20
"""Number of steps over which present values are averaged."""


@dataclass(frozen=True)
class HistoryRange:
    """The part of a history that a curve shows.

    Attributes:
        size: Steps per bucket.
        first: Number of the first bucket.
        closed: Also draw the unfinished bucket at the end, as for a finished run.
        smoothing: Weight of the past in smoothed curves, one of SMOOTHINGS.
    """

    size: int
    first: int = 0
    closed: bool = True
    smoothing: float = SMOOTHING


def cut_for(history: History, limit: int, *, closed: bool = True) -> HistoryRange:
    """Return the range with the whole history in at most `limit` buckets.

    Args:
        history: The run's data.
        limit: Maximum number of buckets.
        closed: Also draw the unfinished bucket at the end.
    """
    return HistoryRange(stride(history.lead.length, limit), 0, closed)


def loss_values(history: History, cut: HistoryRange) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of the loss figure's traces: raw, smoothed, learning rate. Held-out losses are separate.

    Args:
        history: The run's data.
        cut: The range.
    """
    raw, smoothed = _raw_and_smoothed(history, cut, "loss")
    rates = bucket_last(history.lead.column("learning_rate"), cut.size, closed=cut.closed, first=cut.first)
    return [raw, smoothed, float32(smoothed[0], rates)]


def _raw_and_smoothed(history: History, cut: HistoryRange, column: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of a column of the lowest rank: the extremes of each bucket, and the last smoothed value."""
    lead = history.lead
    kept = {"closed": cut.closed, "first": cut.first}
    steps = bucket_last(lead.column("step"), cut.size, **kept)
    return [
        float32(*bucket_extremes(lead.column("step"), lead.column(column), cut.size, **kept)),
        float32(steps, bucket_last(lead.smoothed_by(cut.smoothing, column), cut.size, **kept)),
    ]


def loss_figure(history: History, cut: HistoryRange | None = None) -> Figure:
    """Return the loss, raw (faint) and smoothed (strong), held-out loss, learning rate on the second axis, and event
    marks.

    Args:
        history: The run's data.
        cut: The range; None for the whole history.
    """
    raw, smoothed, rate = loss_values(history, cut or cut_for(history, POINTS // 2))
    heldout = history.heldout[:: stride(len(history.heldout), POINTS // 2)]
    points = float32([step for step, _ in heldout], [loss for _, loss in heldout])
    data = [
        curve("loss", raw, "%{y:.4f}", color=ACCENT, width=1, opacity=0.5),
        curve("loss, smoothed", smoothed, "%{y:.4f}", color=ACCENT, width=2.5),
        curve("learning rate", rate, "%{y:.3g}", color=INK, width=1.2, dash="dot", second=True),
        {
            **curve("held-out loss", points, "%{y:.4f}", color=INK, width=1.5),
            "mode": "lines+markers",
            "marker": {"size": 7, "symbol": "diamond-open", "color": INK},
        },
    ]
    layout = base_layout("loss", "loss")
    layout["yaxis2"] = second_axis("learning rate", ".1e") | {"rangemode": "tozero"}
    over_steps(layout, history.events)
    return {"data": data, "layout": layout}


def gradient_values(history: History, cut: HistoryRange) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of the gradient figure's traces: raw, smoothed.

    Args:
        history: The run's data.
        cut: The range.
    """
    return _raw_and_smoothed(history, cut, "grad_norm")


def gradient_figure(history: History, cut: HistoryRange | None = None) -> Figure:
    """Return the norm of the whole gradient before clipping, raw (faint) and smoothed (strong), on a logarithmic axis.

    Args:
        history: The run's data.
        cut: The range; None for the whole history.
    """
    raw, smoothed = gradient_values(history, cut or cut_for(history, POINTS // 2))
    data = [
        curve("gradient norm", raw, "%{y:.4g}", color=GRADIENT, width=1, opacity=0.6),
        curve("gradient norm, smoothed", smoothed, "%{y:.4g}", color=GRADIENT, width=2.5),
    ]
    layout = base_layout("gradient norm", "norm")
    layout["yaxis"] |= {"type": "log", "tickformat": "~g", "nticks": 3}  # More ticks overlap.
    over_steps(layout, history.events)
    return {"data": data, "layout": layout}


def heldout_values(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, held-out losses), float32.

    Args:
        history: The run's data.
    """
    return float32([step for step, _ in history.heldout], [loss for _, loss in history.heldout])


def throughput_values(history: History, cut: HistoryRange) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of the throughput figure's traces: tokens/s and, if known, the prediction and the percent of peak.

    Args:
        history: The run's data.
        cut: The range.
    """
    lead = history.lead
    kept = {"closed": cut.closed, "first": cut.first}
    steps = bucket_last(lead.column("step"), cut.size, **kept)
    values = [float32(steps, bucket_mean(lead.column("tokens_per_second"), cut.size, **kept))]
    if history.predicted is not None:
        values.append(float32(steps, history.predicted.tokens_per_second(steps)))
    share = history.share_of_peak(bucket_mean(lead.column("flops_per_second"), cut.size, **kept))
    return values if share is None else [*values, float32(steps, share * 100)]


def throughput_figure(history: History, cut: HistoryRange | None = None) -> Figure:
    """Return the tokens per second of the whole run and, if known, the prediction and the share of the measured peak.

    Args:
        history: The run's data.
        cut: The range; None for the whole history.
    """
    values = throughput_values(history, cut or cut_for(history, POINTS))
    data = [curve("tokens/s", values[0], "%{y:,.0f} tokens/s", color=ACCENT, width=2)]
    layout = base_layout("throughput", "tokens/s")
    layout["yaxis"] |= {"rangemode": "tozero", "tickformat": "~s"}
    if history.predicted is not None:
        hover = f"%{{y:,.0f}} tokens/s {history.predicted.note}".rstrip()
        data.append(curve("predicted", values[1], hover, color=INK, width=1.5, dash="dash"))
    if len(values) > len(data):
        data.append(curve("share of peak", values[-1], "%{y:.1f} %", color=INK, width=1.2, dash="dot", second=True))
        layout["yaxis2"] = second_axis("% of peak", "~g") | {"range": [0, 100]}
    over_steps(layout, history.events)
    return {"data": data, "layout": layout}


def exchange_values(history: History, cut: HistoryRange) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of the exchange figure's traces: percent of float32's bytes, angle in degrees, error norm.

    Args:
        history: The run's data.
        cut: The range.
    """
    lead = history.lead
    kept = {"closed": cut.closed, "first": cut.first}
    steps = bucket_last(lead.column("step"), cut.size, **kept)
    columns = {name: bucket_last(lead.column(name), cut.size, **kept) for name in ("sent_share", "angle", "error_norm")}
    return [float32(steps, 100 * columns["sent_share"]), *(float32(steps, columns[n]) for n in ("angle", "error_norm"))]


def exchange_figure(history: History, cut: HistoryRange | None = None) -> Figure:
    """Return the figure of a compressing optimizer or of islands.

    It shows the sent bytes in percent of float32's, the angle between the actual update and the one without
    compression (if measured), and the norm of the error feedback.

    Args:
        history: The run's data.
        cut: The range; None for the whole history.
    """
    sent, angle, error = exchange_values(history, cut or cut_for(history, POINTS))
    data = [
        curve("bytes sent", sent, "%{y:.3g} % of float32", color=ACCENT, width=2),
        curve("angle", angle, "%{y:.3g}° off what was compressed", color=INK, width=1.5, dash="dash"),
        curve("error norm", error, "%{y:.3g}", color=INK, width=1.2, dash="dot", second=True),
    ]
    layout = base_layout(f"compressed exchange, rank {history.lead_rank}", "% of float32, degrees")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["yaxis2"] = second_axis("norm of the error feedback", "~g") | {"rangemode": "tozero"}
    over_steps(layout, history.events)
    return {"data": data, "layout": layout}


def anatomy_values(history: History, cut: HistoryRange) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (x, y) of each phase and of the rest, in milliseconds, of the lowest rank.

    Args:
        history: The run's data.
        cut: The range.
    """
    lead = history.lead
    kept = {"closed": cut.closed, "first": cut.first}
    steps = bucket_last(lead.column("step"), cut.size, **kept)
    phases = [bucket_mean(lead.column(phase), cut.size, **kept) for phase in history.phases]
    rest = bucket_mean(lead.column("seconds"), cut.size, **kept) - sum(phases)
    return [float32(steps, 1000 * values) for values in (*phases, np.maximum(rest, 0.0))]


def anatomy_figure(history: History, cut: HistoryRange | None = None) -> Figure:
    """Return the time of a step by phase, stacked, over the steps of the lowest rank.

    Args:
        history: The run's data.
        cut: The range; None for the whole history.
    """
    cut = cut or cut_for(history, BARS)
    data = [
        {**_phase_bar(phase), "x": x, "y": y, "width": cut.size}
        for phase, (x, y) in zip((*history.phases, "other"), anatomy_values(history, cut), strict=True)
    ]
    layout = base_layout(f"anatomy of a step, rank {history.lead_rank}", "ms")
    layout |= {"barmode": "stack", "bargap": 0.08}
    legend_alongside(layout)
    over_steps(layout, history.events)
    return {"data": data, "layout": layout}


def anatomy_by_rank_figure(history: History, *, devices: Sequence[Device] = ()) -> Figure:
    """Return the time of a step by phase for each rank, mean of its last steps: it shows which ranks wait.

    Args:
        history: The run's data.
        devices: Devices by rank, for labels.
    """
    axis = rank_axis(history, devices)
    recent = {rank: history.records[rank][-RECENT_STEPS:] for rank in axis.ranks}
    means = {rank: _mean_phases(history.phases, found) for rank, found in recent.items()}
    data = [
        {**_phase_bar(phase), "x": list(axis.names), "y": axis.heights(lambda rank, i=i: 1000 * means[rank][i])}
        for i, phase in enumerate((*history.phases, "other"))
    ]
    layout = base_layout(f"anatomy of a step, mean of the last {RECENT_STEPS}", "ms")
    layout |= {"barmode": "stack", "bargap": 0.3, "hovermode": "x unified"}
    legend_alongside(layout)
    axis.set_on(layout, history)
    return {"data": data, "layout": layout}


def _mean_phases(phases: Sequence[str], records: Sequence[StepRecord]) -> list[float]:
    """Return the seconds of each phase, and of the rest of a step."""
    each = [record.phases for record in records]
    means = [fmean([times.get(phase, 0.0) for times in each]) for phase in phases]
    return [*means, max(0.0, fmean([record.seconds for record in records]) - sum(means))]


def _phase_bar(phase: str) -> dict[str, Any]:
    name = {"communication": "exposed communication", "offload": "waiting for host or disk"}.get(phase, phase)
    return {
        "type": "bar",
        "name": phase,
        "marker": {"color": PHASE_COLOURS[phase], "line": {"width": 0}},
        "hovertemplate": f"{name} %{{y:.2f}} ms<extra></extra>",
    }


def step_memory_figure(history: History) -> Figure | None:
    """Return the memory over the newest marked step of the lowest rank; None if there is none.

    A line connects all marks. Each mark has the colour of the phase that ended there.

    Args:
        history: The run's data.
    """
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
