"""The ranks along an axis of bars: which are drawn, what they are called, and a gap between two hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from speedlab.display.figure_style import Figure, bar_marker
from speedlab.hardware import Device
from speedlab.telemetry.series import History, total_bytes

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
        names.append(_name(history, rank, devices))
    return RankAxis(bars=tuple(bars), names=tuple(names))


def _extremes(history: History) -> list[int]:
    by_total = sorted(history.ranks, key=lambda rank: (total_bytes(history.latest[rank].ledger), rank))
    return [by_total[0], by_total[len(by_total) // 2], by_total[-1]]


def _name(history: History, rank: int, devices: Sequence[Device]) -> str:
    name = f"{rank} · {escape(devices[rank].name)}" if rank < len(devices) else f"rank {rank}"
    host = history.host_of(rank)
    if len(host) > _HOST_LETTERS:  # Hosts differ in their first letters, or in their last.
        half = _HOST_LETTERS // 2
        host = f"{host[:half]}…{host[1 - half :]}"
    return f"{name}<br>{escape(host)}" if host else name
