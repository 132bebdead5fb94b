"""Memory plots: ledgers by rank, model states by rank, and memory by place.

- `memory_figure` and `states_figure` stack a rank's categories in the ledger's order and draw the capacity and the
  prediction. `RankAxis` chooses the ranks on the x axis and their labels, with a gap between two hosts.
- `places_figure` draws device, host and disk as a share of their capacity, each for the rank that holds the most
  there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, ink_line, legend_alongside, note
from speedlab.display.formatting import byte_unit, bytes_text
from speedlab.hardware import Device
from speedlab.telemetry.history import History, total_bytes
from speedlab.telemetry.prediction import counted, error_text
from speedlab.telemetry.records import CATEGORIES, PLACES, Ledger, StepRecord

MOST_RANKS = 16
"""Above this number of ranks, plots show the minimum, the median and the maximum instead."""

_HOST_LETTERS = 24
"""Maximum letters of a host's name below its ranks; longer names would leave no room for the bars."""


@dataclass(frozen=True, kw_only=True)
class RankAxis:
    """The bars along the x axis, from left to right."""

    bars: tuple[int | None, ...]
    """The rank of each bar; None is a gap between two hosts."""
    names: tuple[str, ...]
    """Label of each bar, as markup. A gap has a blank label; all labels differ, because plotly merges equal ones."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that are drawn."""
        return [rank for rank in self.bars if rank is not None]

    def heights(self, of_rank: Callable[[int], float]) -> np.ndarray:
        """Return (bars,) float32 heights; 0 in a gap.

        Args:
            of_rank: Returns the height for a rank.
        """
        return np.array([0.0 if rank is None else of_rank(rank) for rank in self.bars], dtype=np.float32)

    def marker(self, category: str) -> dict[str, Any]:
        """Return the plotly marker of a category's bars; gaps get no outline.

        Args:
            category: One of CATEGORIES.
        """
        marker = bar_marker(category)
        if None in self.bars and marker["line"]["width"]:
            marker["line"]["width"] = [0 if rank is None else marker["line"]["width"] for rank in self.bars]
        return marker

    def set_on(self, layout: Figure, history: History) -> None:
        """Set the x axis of `layout` to these bars, and `meta` to the ranks that a page may request details of.

        Args:
            layout: A figure's layout; changed in place.
            history: The run's data.
        """
        # Break the line after the rank: otherwise plotly rotates the labels of four ranks in a narrow notebook.
        labels = [name.replace(" · ", "<br>", 1) for name in self.names]
        ticks = {"tickmode": "array", "tickvals": list(self.names), "ticktext": labels}
        layout["xaxis"] |= {"type": "category", "showgrid": False, **ticks}
        layout["meta"] = {"bars": [[rank, "device"] for rank in self.bars], "ranks": history.ranks}


def rank_axis(history: History, devices: Sequence[Device] = ()) -> RankAxis:
    """Return the axis of all ranks, or above MOST_RANKS that of the ranks with the least, median and most memory.

    Args:
        history: The run's data.
        devices: Devices by rank, for labels.
    """
    if len(history.ranks) > MOST_RANKS:
        ranks = _extremes(history)
        words = zip(("minimum", "median", "maximum"), ranks, strict=True)
        return RankAxis(bars=tuple(ranks), names=tuple(f"{word} (rank {rank})" for word, rank in words))
    bars: list[int | None] = []
    names: list[str] = []
    for rank in history.ranks:
        if bars and history.host_of(rank) != history.host_of(rank - 1):
            bars.append(None)
            names.append(" " * bars.count(None))
        bars.append(rank)
        names.append(_rank_name(history, rank, devices))
    return RankAxis(bars=tuple(bars), names=tuple(names))


def _extremes(history: History) -> list[int]:
    by_total = sorted(history.ranks, key=lambda rank: (total_bytes(history.latest[rank].ledger), rank))
    return [by_total[0], by_total[len(by_total) // 2], by_total[-1]]


def _rank_name(history: History, rank: int, devices: Sequence[Device]) -> str:
    name = f"{rank} · {escape(devices[rank].name)}" if rank < len(devices) else f"rank {rank}"
    host = history.host_of(rank)
    if len(host) > _HOST_LETTERS:  # Keep both ends: host names differ there.
        half = _HOST_LETTERS // 2
        host = f"{host[:half]}…{host[1 - half :]}"
    return f"{name}<br>{escape(host)}" if host else name


MODEL_STATES = ("parameters", "gradients", "master_weights", "optimizer_moments")
"""The categories in ZeRO's memory formula."""

_CAPACITY_IN_SIGHT = 0.25
_LINE_PIXELS = 15
_STATES_IN_SIGHT = 0.2


def memory_figure(history: History, *, devices: Sequence[Device] = ()) -> Figure:
    """Return each rank's ledger at its last step as stacked bars, with the capacity line and the prediction as an
    outline.

    Args:
        history: The run's data. Its prediction covers tensors; the error is shown for the rank that holds the most.
        devices: Devices by rank, for labels.
    """
    axis = rank_axis(history, devices)
    figure = _bars(history, "memory by rank", CATEGORIES, axis)
    _add_capacity(figure, history, axis, _unit(history)[1])
    if (predicted := history.predicted) is not None:
        held = {rank: counted(history.latest[rank].ledger) for rank in axis.ranks}
        reported = {rank: predicted.counted(rank) for rank in axis.ranks}
        _add_prediction(figure["layout"], axis, reported, held, _unit(history)[1])
    if outliers := _outliers(history):
        figure["layout"]["annotations"].append(note(outliers, y=1.02))
    return figure


def states_figure(history: History, *, devices: Sequence[Device] = ()) -> Figure:
    """Return only the model states of each rank, which a ZeRO stage partitions. Readable also if the process holds far
    more.

    Args:
        history: The run's data.
        devices: Devices by rank, for labels.
    """
    axis = rank_axis(history, devices)
    figure = _bars(history, "model states by rank", MODEL_STATES, axis)
    if (predicted := history.predicted) is not None:
        held = {rank: history.latest[rank].ledger.model_states for rank in axis.ranks}
        reported = {rank: predicted.model_states(rank) for rank in axis.ranks}
        _add_prediction(figure["layout"], axis, reported, held, _unit(history, MODEL_STATES)[1])
    if history.ranks:
        used = max(_total(record) for record in history.latest.values())
        figure["layout"]["annotations"].append(_above(f"of {bytes_text(used)} in use"))
    return figure


def states_are_small(history: History) -> bool:
    """Return whether the model states are less than a fifth of all memory, so that changes in them would hardly be
    visible.

    Args:
        history: The run's data.
    """
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
    legend_alongside(layout)
    axis.set_on(layout, history)
    if history.ranks:
        _set_range(layout, traces, _coarse(history.most_bytes(_extent(categories))) / size)
    return {"data": traces, "layout": layout}


def _unit(history: History, categories: Sequence[str] = CATEGORIES) -> tuple[str, int]:
    """Return (unit, bytes per unit) for these categories: that of the maximum ever held."""
    return byte_unit(history.most_bytes(_extent(categories)))


def _extent(categories: Sequence[str]) -> str:
    return "everything" if len(categories) == len(CATEGORIES) else "model_states"


def _coarse(count: int) -> int:
    """Round up in coarse steps, so that an axis that ends there seldom changes."""
    step = 2 ** max(0, count.bit_length() - 5)
    return (count // step + 1) * step


def _set_range(layout: Figure, traces: Sequence[Mapping[str, Any]], top: float) -> None:
    """Set the y axis from 0, or from a negative remainder, to `top`."""
    below = min(float(np.minimum(trace["y"], 0).min(initial=0)) for trace in traces)
    bottom = -_coarse(int(np.ceil(-below))) if below < 0 else 0
    # Set an own uirevision: otherwise plotly keeps the former range, as it does after a user has zoomed.
    layout["yaxis"] |= {"range": [bottom, top], "uirevision": f"{bottom} {top}"}


def _total(record: StepRecord) -> int:
    return total_bytes(record.ledger)


def _outliers(history: History) -> str:
    """Return a text with the ranks far from the median, if there are too many ranks to draw each."""
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
        # Leave 12 % above the capacity line for its label.
        _set_range(layout, figure["data"], max(*tops, *capacities) / size * 1.12)
    else:
        share = max(tops) / min(capacities)
        layout["annotations"].append(_above(f"↑ {text}, {share:.1%} used"))


def _add_prediction(
    layout: Figure, axis: RankAxis, predicted: Mapping[int, int], held: Mapping[int, int], size: int
) -> None:
    """Draw the prediction of each shown rank as an outline, and the error for the rank that holds the most."""
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
    """Return an annotation between the title and the bars. It starts at the left edge, so that it may be wider than the
    bars.
    """
    return {**note(text, y=1.0, yanchor="bottom"), "x": 0, "xanchor": "left"}


_PIXELS = 300
_TOPS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
"""Ends of the axis in percent, if all bars are below; otherwise the axis shows the capacity."""


def are_several(history: History) -> bool:
    """Return whether any rank holds states on the host or on disk.

    Args:
        history: The run's data.
    """
    ledgers = [record.ledger for record in history.latest.values()]
    return any(len(ledger.by_place()) > 1 for ledger in ledgers if ledger.host or ledger.disk)


def places_figure(history: History) -> Figure | None:
    """Return memory by place as a share of the capacity; None if everything is on the device.

    Args:
        history: The run's data.
    """
    if not are_several(history):
        return None
    ledgers = {rank: record.ledger for rank, record in history.latest.items()}
    used = [place for place in PLACES if any(place in ledger.by_place() for ledger in ledgers.values())]
    fullest = {place: max(ledgers, key=lambda rank: _held(ledgers[rank], place)) for place in used}
    names = [_place_name(place, ledgers[rank]) for place, rank in fullest.items()]
    traces: list[dict[str, Any]] = []
    for category in CATEGORIES:
        counts = [ledgers[rank].by_place().get(place, {}).get(category, 0) for place, rank in fullest.items()]
        if any(counts):
            shares = [
                100 * count / _whole(ledgers[r], p) for count, (p, r) in zip(counts, fullest.items(), strict=True)
            ]
            traces.append(
                {
                    "type": "bar",
                    "name": LABELS[category],
                    "meta": category,
                    "x": names,
                    "y": np.array(shares, dtype=np.float32),
                    "text": [bytes_text(count) for count in counts],
                    "textposition": "none",
                    "marker": bar_marker(category),
                    "hovertemplate": f"%{{x}}<br>{LABELS[category]} %{{text}}, %{{y:.2f}} %<extra></extra>",
                }
            )
    layout = base_layout("memory by place, the rank that holds most", "% of capacity")
    layout |= {"barmode": "relative", "bargap": 0.3, "hovermode": "closest"}
    legend_alongside(layout)
    layout["height"] = _PIXELS
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["meta"] = {"bars": [[rank, place] for place, rank in fullest.items()], "ranks": history.ranks}
    tops = [100 * _held(ledgers[rank], place) / _whole(ledgers[rank], place) for place, rank in fullest.items()]
    layout["yaxis"] |= {"range": [0, _top(max(tops))]}
    layout["shapes"].append(ink_line(-0.5, len(names) - 0.5, 100.0, "solid"))
    held = " · ".join(f"{place} {bytes_text(_held(ledgers[r], place))} (rank {r})" for place, r in fullest.items())
    layout["annotations"].append(note(held, y=1.0, yanchor="bottom"))
    return {"data": traces, "layout": layout}


def _held(ledger: Ledger, place: str) -> int:
    return sum(ledger.by_place().get(place, {}).values())


def _whole(ledger: Ledger, place: str) -> int:
    """Return the capacity of a place; if unknown, the bytes held, so that the bar is full."""
    return ledger.capacity_of(place) or _held(ledger, place) or 1


def _place_name(place: str, ledger: Ledger) -> str:
    capacity = ledger.capacity_of(place)
    return f"{place}, of {bytes_text(capacity)}" if capacity else f"{place}, capacity not known"


def _top(highest: float) -> float:
    """Return the end of the axis, in percent."""
    fitting = [top for top in _TOPS if highest <= top / 1.05]
    return fitting[0] if fitting else max(105.0, 1.05 * highest)
