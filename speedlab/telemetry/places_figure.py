"""Memory by place: device, host and disk as a bar each, as a share of what there is. Drawn where something lies on the
host or on disk; of each place the rank that holds most there."""

from __future__ import annotations

from typing import Any

import numpy as np

from speedlab.display.figure_style import LABELS, Figure, bar_marker, base_layout, ink_line, legend_beside, note
from speedlab.display.formatting import bytes_text
from speedlab.telemetry.records import CATEGORIES, PLACES, Ledger
from speedlab.telemetry.series import History

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
    names = [_name(place, ledgers[rank]) for place, rank in fullest.items()]
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


def _name(place: str, ledger: Ledger) -> str:
    capacity = ledger.capacity_of(place)
    return f"{place}, of {bytes_text(capacity)}" if capacity else f"{place}, capacity not known"


def _top(highest: float) -> float:
    """Where the axis ends, percent."""
    fitting = [top for top in _TOPS if highest <= top / 1.05]
    return fitting[0] if fitting else max(105.0, 1.05 * highest)
