"""Memory by rank: the ledgers as stacked bars, in the ledger's order, with the capacity line.

The ranks along an axis of bars: which are drawn, what they are called, and a gap between two hosts.

Memory by place: device, host and disk as a bar each, as a share of what there is. Drawn where something lies on the
host or on disk; of each place the rank that holds most there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, ink_line, legend_beside, note
from speedlab.display.formatting import byte_unit, bytes_text
from speedlab.hardware import Device
from speedlab.telemetry.history import History, total_bytes
from speedlab.telemetry.prediction import counted, error_text
from speedlab.telemetry.records import CATEGORIES, PLACES, Ledger, StepRecord

MOST_RANKS = 16
"""Beyond this many ranks, minimum, median and maximum are drawn instead."""

_HOST_LETTERS = 24
"""Of a host's name below its ranks: a longer one would leave no room for the bars."""


@dataclass(frozen=True, kw_only=True)
class RankAxis:
    """Bars from left to right."""

    bars: tuple[int | None, ...]
    """The rank of each; None is a gap between two hosts."""
    names: tuple[str, ...]
    """Of each bar, as markup; a gap's is blank, and no two are equal."""

    @property
    def ranks(self) -> list[int]:
        """Those that are drawn."""
        return [rank for rank in self.bars if rank is not None]

    def heights(self, of_rank: Callable[[int], float]) -> np.ndarray:
        """(bars,) float32; 0 in a gap."""
        return np.array([0.0 if rank is None else of_rank(rank) for rank in self.bars], dtype=np.float32)

    def marker(self, category: str) -> dict[str, Any]:
        """Of bars of a category of the ledger: in a gap there is not even an outline."""
        marker = bar_marker(category)
        if None in self.bars and marker["line"]["width"]:
            marker["line"]["width"] = [0 if rank is None else marker["line"]["width"] for rank in self.bars]
        return marker

    def set_on(self, layout: Figure, history: History) -> None:
        """Make the x axis one of these bars. `meta` tells a page whose they are, and of which ranks it may ask."""
        # Rank above device: beside each other, the labels of four ranks already stand aslant in a narrow notebook.
        labels = [name.replace(" · ", "<br>", 1) for name in self.names]
        ticks = {"tickmode": "array", "tickvals": list(self.names), "ticktext": labels}
        layout["xaxis"] |= {"type": "category", "showgrid": False, **ticks}
        layout["meta"] = {"bars": [[rank, "device"] for rank in self.bars], "ranks": history.ranks}


def rank_axis(history: History, devices: Sequence[Device] = ()) -> RankAxis:
    """Of all ranks, or of very many the three with the least, the median and the most memory."""
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
    if len(host) > _HOST_LETTERS:  # Hosts differ in their first letters, or in their last.
        half = _HOST_LETTERS // 2
        host = f"{host[:half]}…{host[1 - half :]}"
    return f"{name}<br>{escape(host)}" if host else name


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


_PIXELS = 300
_TOPS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
"""Percent at which the axis may end where all bars are below; else it shows the capacity."""


def are_several(history: History) -> bool:
    """Whether anything lies elsewhere than on the device."""
    ledgers = [record.ledger for record in history.latest.values()]
    return any(len(ledger.by_place()) > 1 for ledger in ledgers if ledger.host or ledger.disk)


def places_figure(history: History) -> Figure | None:
    """None where everything lies on the device."""
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
    legend_beside(layout)
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
    """What the place can hold; where nobody knows, what is held, so that the bar is full."""
    return ledger.capacity_of(place) or _held(ledger, place) or 1


def _place_name(place: str, ledger: Ledger) -> str:
    capacity = ledger.capacity_of(place)
    return f"{place}, of {bytes_text(capacity)}" if capacity else f"{place}, capacity not known"


def _top(highest: float) -> float:
    """Where the axis ends, percent."""
    fitting = [top for top in _TOPS if highest <= top / 1.05]
    return fitting[0] if fitting else max(105.0, 1.05 * highest)
