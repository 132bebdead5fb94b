"""Memory by rank: the ledgers as stacked bars, in the ledger's order, with the capacity line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, base_layout, ink_line, legend_beside, note
from speedlab.display.formatting import byte_unit, bytes_text
from speedlab.hardware import Device
from speedlab.telemetry.prediction import counted, error_text
from speedlab.telemetry.rank_axis import MOST_RANKS, RankAxis, rank_axis
from speedlab.telemetry.records import CATEGORIES, StepRecord
from speedlab.telemetry.series import History, total_bytes

MODEL_STATES = ("parameters", "gradients", "master_weights", "optimizer_moments")
"""Categories that ZeRO's formula speaks of."""

_CAPACITY_IN_SIGHT = 0.25
_LINE_PIXELS = 15
_STATES_IN_SIGHT = 0.2


def memory_figure(history: History, *, devices: Sequence[Device] = ()) -> Figure:
    """Ledger of each rank at its last step as stacked bars, with the capacity line. What was predicted of tensors is an
    outline, with its error on the rank that holds most."""
    axis = rank_axis(history, devices)
    figure = _bars(history, "memory by rank", CATEGORIES, axis)
    _add_capacity(figure, history, axis, _unit(history)[1])
    if (predicted := history.predicted) is not None:
        held = {rank: counted(history.latest[rank].ledger) for rank in axis.ranks}
        told = {rank: predicted.counted(rank) for rank in axis.ranks}
        _add_prediction(figure["layout"], axis, told, held, _unit(history)[1])
    if outliers := _outliers(history):
        figure["layout"]["annotations"].append(note(outliers, y=1.02))
    return figure


def states_figure(history: History, *, devices: Sequence[Device] = ()) -> Figure:
    """Only the model states of each rank: what a ZeRO stage partitions, also where the process holds far more."""
    axis = rank_axis(history, devices)
    figure = _bars(history, "model states by rank", MODEL_STATES, axis)
    if (predicted := history.predicted) is not None:
        held = {rank: history.latest[rank].ledger.model_states for rank in axis.ranks}
        told = {rank: predicted.model_states(rank) for rank in axis.ranks}
        _add_prediction(figure["layout"], axis, told, held, _unit(history, MODEL_STATES)[1])
    if history.ranks:
        used = max(_total(record) for record in history.latest.values())
        figure["layout"]["annotations"].append(_above(f"of {bytes_text(used)} in use"))
    return figure


def states_are_small(history: History) -> bool:
    """Whether the model states are so small a part that one would not see them change among all memory."""
    states = sum(record.ledger.model_states for record in history.latest.values())
    return states < _STATES_IN_SIGHT * sum(_total(record) for record in history.latest.values())


def _bars(history: History, title: str, categories: Sequence[str], axis: RankAxis) -> Figure:
    unit, size = _unit(history, categories)
    ledgers = {rank: history.latest[rank].ledger for rank in axis.ranks}
    traces = [
        {
            "type": "bar",
            "name": LABELS[category],
            "meta": category,
            "x": list(axis.names),
            "y": axis.heights(lambda rank, category=category: getattr(ledgers[rank], category) / size),
            "marker": axis.marker(category),
            "hovertemplate": f"%{{x}}<br>{LABELS[category]} %{{y:.5~r}} {unit}<extra></extra>",
        }
        for category in categories
    ]
    layout = base_layout(title, unit)
    layout |= {"barmode": "relative", "bargap": 0.3, "hovermode": "closest"}
    legend_beside(layout)
    axis.set_on(layout, history)
    if history.ranks:
        _set_range(layout, traces, _coarse(history.most_bytes(_extent(categories))) / size)
    return {"data": traces, "layout": layout}


def _unit(history: History, categories: Sequence[str] = CATEGORIES) -> tuple[str, int]:
    """(unit, bytes in it) in which these categories are drawn: that of the most that was ever held."""
    return byte_unit(history.most_bytes(_extent(categories)))


def _extent(categories: Sequence[str]) -> str:
    return "everything" if len(categories) == len(CATEGORIES) else "model_states"


def _coarse(count: int) -> int:
    """A little more than `count`, in coarse steps, so that an axis that ends there seldom changes."""
    step = 2 ** max(0, count.bit_length() - 5)
    return (count // step + 1) * step


def _set_range(layout: Figure, traces: Sequence[Mapping[str, Any]], top: float) -> None:
    """An axis from 0, or from below it where a remainder is negative, to `top`."""
    below = min(float(np.minimum(trace["y"], 0).min(initial=0)) for trace in traces)
    bottom = -_coarse(int(np.ceil(-below))) if below < 0 else 0
    # Its own revision: else the page would keep the range that it had before, as it does for what a person has zoomed.
    layout["yaxis"] |= {"range": [bottom, top], "uirevision": f"{bottom} {top}"}


def _total(record: StepRecord) -> int:
    return total_bytes(record.ledger)


def _outliers(history: History) -> str:
    """Ranks far from the median, named, when there are too many ranks to draw each."""
    if len(history.ranks) <= MOST_RANKS:
        return ""
    totals = {rank: _total(history.latest[rank]) for rank in history.ranks}
    middle = float(np.median(list(totals.values())))
    usual = float(np.median([abs(total - middle) for total in totals.values()]))
    limit = max(5 * usual, 0.02 * middle)
    far = [(rank, total / middle - 1) for rank, total in totals.items() if middle and abs(total - middle) > limit]
    far.sort(key=lambda entry: -abs(entry[1]))
    return "outliers: " + ", ".join(f"rank {rank} ({share:+.0%})" for rank, share in far[:6]) if far else ""


def _in_sight(tops: list[int], capacities: list[int]) -> bool:
    return bool(tops) and min(capacities) > 0 and max(tops) >= _CAPACITY_IN_SIGHT * min(capacities)


def _add_capacity(figure: Figure, history: History, axis: RankAxis, size: int) -> None:
    layout = figure["layout"]
    tops = [_total(history.latest[rank]) for rank in axis.ranks]
    capacities = [history.latest[rank].ledger.capacity_bytes for rank in axis.ranks]
    if not tops or min(capacities) <= 0:
        return
    text = f"capacity {bytes_text(min(capacities))}"
    if _in_sight(tops, capacities):
        for i, rank in enumerate(axis.bars):
            if rank is not None:
                capacity = history.latest[rank].ledger.capacity_bytes
                layout["shapes"].append(ink_line(i - 0.5, i + 0.5, capacity / size, "solid"))
        layout["annotations"].append(note(text, y=min(capacities) / size, yref="y", yanchor="bottom"))
        _set_range(layout, figure["data"], max(*tops, *capacities) / size * 1.12)
    else:
        share = max(tops) / min(capacities)
        layout["annotations"].append(_above(f"↑ {text}, {share:.1%} used"))


def _add_prediction(
    layout: Figure, axis: RankAxis, predicted: Mapping[int, int], held: Mapping[int, int], size: int
) -> None:
    """Outlines of what was predicted for each rank that is drawn, and the error where most is held."""
    if not any(predicted.values()):
        return
    for i, rank in enumerate(axis.bars):
        if rank is not None:
            outline = {**ink_line(i - 0.4, i + 0.4, predicted[rank] / size, "solid"), "type": "rect", "y0": 0}
            layout["shapes"].append(outline)
    most = max(held, key=lambda rank: held[rank])
    text = f"□ predicted {bytes_text(predicted[most])}"
    if error := error_text(predicted[most], held[most]):
        text += f", {error} ({bytes_text(held[most])})"
    layout["annotations"].append({**_above(text), "yshift": _LINE_PIXELS})
    layout["margin"] |= {"t": layout["margin"]["t"] + _LINE_PIXELS}


def _above(text: str) -> dict[str, Any]:
    """A line between the title and the bars, from their left edge on: it may be wider than they are."""
    return {**note(text, y=1.0, yanchor="bottom"), "x": 0, "xanchor": "left"}
