"""What a page that compares runs is sent: at first everything, then what is new of each run's curves.

    {"type": "Comparison", "seq": n, "figures": {name: figure}, "compared": {…}}
    {"type": "Changes", "seq": n, "parts": [...]}           as of one run (telemetry/drawing.py), with one part more:

    {"part": "compared", "runs": […], "facts": […], "settings": […], "note": …}

What comes next is the difference between what the page has and what it should have: a curve that only became longer is
extended, anything else that differs is drawn anew. Bars come at most once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from speedlab.display.figure_style import Figure
from speedlab.telemetry.compared import OVER_STEPS, Look, compared_figures, told
from speedlab.telemetry.drawing import Message, append_figure, extension, pack

_BARS_SECONDS = 1.0


class ComparedDrawing:
    """What one page has been sent of a comparison. Pure: no thread, no comm."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seq = 0
        self._clock = clock
        self._figures: dict[str, Figure] | None = None
        self._told: dict[str, Any] = {}
        self._bars_sent = float("-inf")

    def next(self, looks: Sequence[Look]) -> Message | None:
        """What comes next; None when nothing has changed."""
        if self._figures is None:
            return self.keyframe(looks)
        parts: list[dict[str, Any]] = []
        buffers: list[bytes] = []
        figures = compared_figures(looks)
        bars = self._clock() - self._bars_sent >= _BARS_SECONDS
        for name, figure in figures.items():
            if name in OVER_STEPS or bars:
                _append_changes(name, self._figures[name], figure, parts, buffers)
                self._figures[name] = figure
        if bars:
            self._bars_sent = self._clock()
        if (now := told(looks)) != self._told:
            self._told = now
            parts.append({"part": "compared", **now})
        if not parts:
            return None
        self.seq += 1
        return {"type": "Changes", "seq": self.seq, "parts": parts}, buffers

    def keyframe(self, looks: Sequence[Look]) -> Message:
        """Everything as it is now."""
        self._figures, self._told, self._bars_sent = compared_figures(looks), told(looks), self._clock()
        buffers: list[bytes] = []
        figures = {name: pack(figure, buffers) for name, figure in self._figures.items()}
        self.seq += 1
        return {"type": "Comparison", "seq": self.seq, "figures": figures, "compared": self._told}, buffers


def _append_changes(
    name: str, before: Figure, after: Figure, parts: list[dict[str, Any]], buffers: list[bytes]
) -> None:
    grown = _grown(before, after)
    if grown is None:
        append_figure(name, after, parts, buffers)
    elif grown:
        parts.append(extension(name, list(grown), list(grown.values()), buffers))


def _grown(before: Figure, after: Figure) -> dict[int, tuple[np.ndarray, np.ndarray]] | None:
    """By the number of a curve, the points that it has more than before; None where something else differs."""
    if len(before["data"]) != len(after["data"]) or before["layout"] != after["layout"]:
        return None
    found = {}
    for number, (old, new) in enumerate(zip(before["data"], after["data"], strict=True)):
        length = len(old["y"])
        if _bare(old) != _bare(new) or not all(_same(old[axis], new[axis][:length]) for axis in "xy"):
            return None
        if len(new["y"]) > length:
            found[number] = new["x"][length:], new["y"][length:]
    return found


def _bare(trace: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in trace.items() if key not in ("x", "y")}


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray):
        return np.array_equal(old, new, equal_nan=True)
    return old == new
