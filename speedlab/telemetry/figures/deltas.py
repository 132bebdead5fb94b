"""Messages that keep a dashboard up to date: a keyframe with all figures, then small changes.

A message is plain data and a list of float32 buffers. The data refers to a buffer by its number: {"f32": 3} is an
array. A websocket sends both as one binary frame (speedlab_server/figure_socket.py); a widget sends a message with
buffers. `speedlab_server.schema` has the messages as types.

    {"type": "Keyframe", "seq": n, "figures": {name: figure}, "head": …, "states": …}
    {"type": "Changes", "seq": n, "parts": [...]}

    {"part": "extend", "figure": name, "traces": [i, …], "points": [n, …]}   per trace: n x values, then n y values
    {"part": "bars", "figure": name, "notes": [text, …]}                     heights of all traces, one after another
    {"part": "figure", "figure": name, "data": [...], "layout": {...}}       replaces the figure
    {"part": "marks", "shapes": [...], "annotations": [...]}                 events on every step axis
    {"part": "head", "text": …, "state": …, "mark": …, "note": …}            the header line

`seq` counts up by one. A page that misses a number waits for the next keyframe. `states` of a keyframe says whether to
show only the model states at first (None before the first record).

How often parts are sent:

- bars: at most three times a second, for many ranks every two seconds; memory bars only if a ledger has changed;
- costs of kernels and collectives: every two seconds;
- the pipeline's timeline, a "figure" part: at most once a second, of the newest step or of the step that a user
  selected.

A page that compares runs gets the same parts and one more:

    {"type": "Comparison", "seq": n, "figures": {name: figure}, "compared": {…}}
    {"type": "Changes", "seq": n, "parts": [...]}

    {"part": "compared", "runs": […], "facts": […], "settings": […], "note": …}

Its changes are the difference between two drawings: a curve that became longer is extended, any other difference
replaces the figure. Bars are sent at most once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from speedlab.display.figure_style import Figure
from speedlab.hardware import Device
from speedlab.telemetry.feed import bars_seconds
from speedlab.telemetry.figures import anatomy_by_rank_figure, header
from speedlab.telemetry.figures.compare import OVER_STEPS, RunStanding, compared_figures, reported
from speedlab.telemetry.figures.costs import cost_figures
from speedlab.telemetry.figures.markers import event_marks
from speedlab.telemetry.figures.memory import are_several, memory_figure, places_figure, states_are_small, states_figure
from speedlab.telemetry.figures.pipeline import pipeline_figure
from speedlab.telemetry.figures.steps import (
    HistoryRange,
    anatomy_figure,
    anatomy_values,
    exchange_figure,
    exchange_values,
    gradient_figure,
    gradient_values,
    heldout_values,
    loss_figure,
    loss_values,
    throughput_figure,
    throughput_values,
)
from speedlab.telemetry.history import BARS, MOST, POINTS, SMOOTHING, SMOOTHINGS, History, stride
from speedlab.telemetry.records import RESTING, StepRecord
from speedlab.telemetry.run_folder import Status
from speedlab.telemetry.trace import is_one_stage, timeline_of

SERVED = "SPEEDLAB_SERVED"
"""Environment variable that a Jupyter server with our extension sets for its kernels: their pages get runs from the
server.
"""

_HELDOUT_TRACE = 3
_MOST_HELDOUT = POINTS // 2
_PIPELINE_SECONDS = 1.0
_COSTS_SECONDS = 2.0
"""Seldom, because costs are means over the last steps."""

Message = tuple[dict[str, Any], list[bytes]]
"""Plain data, and the buffers that it refers to."""

_Points = list[tuple[np.ndarray, np.ndarray]]

_BARS: dict[str, Callable[..., Figure]] = {
    "memory": memory_figure,
    "states": states_figure,
    "ranks": anatomy_by_rank_figure,
}
_OF_MEMORY = frozenset({"memory", "states", "places"})
"""Bars that depend only on ledgers."""
_CURVES: dict[str, tuple[int, Callable[..., Figure], Callable[[History, HistoryRange], _Points]]] = {
    "loss": (POINTS // 2, loss_figure, loss_values),
    "gradient": (POINTS // 2, gradient_figure, gradient_values),
    "throughput": (POINTS, throughput_figure, throughput_values),
    "anatomy": (BARS, anatomy_figure, anatomy_values),
    "exchange": (POINTS, exchange_figure, exchange_values),
}
"""Figures over steps: maximum number of buckets, the function for the whole figure, and the one for the values of its
first traces from a cut on. 'exchange' is shown only if steps send other data than gradients.
"""


_SMOOTHED = frozenset({"loss", "gradient"})


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What the page has of a figure over steps."""

    size: int
    """Steps per bucket."""
    traces: int
    buckets: int
    """Finished buckets."""
    length: int
    """Steps in the history when the figure was last sent."""
    open_end: bool
    """Whether the figure ends with an unfinished bucket. It must be replaced before the finished bucket is added."""


class Drawing:
    """What one dashboard has received of a History, and the next message for it. Pure: no thread, no comm.

    Args:
        history: The run's data; the owner updates it.
        name: The run's name, for the header.
        devices: Devices by rank, for labels.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(
        self,
        history: History,
        *,
        name: str,
        devices: Sequence[Device] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.history = history
        self.seq = 0
        self.devices = devices
        self._name = name
        self._clock = clock
        self._curves: dict[str, _Drawn] = {}
        self._heldout = 0
        self._events = 0
        self._frames: dict[str, bytes] = {}
        self._latest: dict[int, StepRecord] = {}
        self._memory: tuple[object, ...] = ()
        """What the memory bars were drawn from."""
        self._bars_sent = float("-inf")
        self._others_sent = -1
        """`History.others_news` when the bars were last sent."""
        self._head: dict[str, str] = {}
        self._smoothing = SMOOTHING
        self._costs: tuple[dict[str, bytes], float] = ({}, float("-inf"))
        """The cost figures that were sent last, as JSON, and when."""
        self._costs_of: StepRecord | None = None
        """The newest record at that time."""
        self._a_cost_is_gone = False
        self.pipeline_step: int | None = None
        """The step whose timeline is shown; None for the newest."""
        self._pipeline: tuple[int | None, float] = (None, float("-inf"))
        """Step of the timeline that was sent last, and the time of the last search."""
        self._rested: bool | None = None
        """Whether the run was at rest in the last keyframe or tick; None before the first."""
        self._had_records = False

    def smooth(self, share: float | None) -> bool:
        """Set the smoothing of the curves.

        Args:
            share: Weight of the past; rounded to the nearest of SMOOTHINGS. None for the default.

        Returns:
            True if the smoothing has changed.
        """
        wanted = SMOOTHING if share is None else min(SMOOTHINGS, key=lambda each: abs(each - share))
        if wanted == self._smoothing:
            return False
        self._smoothing = wanted
        for name in _SMOOTHED & self._curves.keys():
            del self._curves[name]  # The next tick sends them again.
        return True

    def next(self, status: Status, *, rewritten: bool = False) -> Message | None:
        """Return the next message; None if nothing has changed.

        It is a keyframe in these cases: at first; with the first records, which decide the layout of the page; if a
        figure has disappeared (for example, the pipeline after a change of shape); if the run comes to rest.

        Args:
            status: The run's status.
            rewritten: Earlier steps were replaced.
        """
        rests = status.state in RESTING
        copied_layout = bool(self.history.latest) and (not self._had_records or self._a_figure_is_gone())
        if self._rested is None or (rests and not self._rested) or copied_layout:
            return self.keyframe(status)
        self._rested = rests
        return self.tick(status, rewritten=rewritten)

    def keyframe(self, status: Status) -> Message:
        """Return a keyframe with all figures. If the run is at rest, curves include unfinished buckets.

        Args:
            status: The run's status.
        """
        self._rested = closed = status.state in RESTING
        self._had_records = bool(self.history.latest)
        specs = self._bar_specs()
        specs |= {name: self._curve_spec(name, closed=closed) for name in self._shown}
        self._pipeline = None, float("-inf")
        specs |= self._new_costs(anyway=True)
        specs |= {"pipeline": spec} if (spec := self._new_pipeline(anyway=True)) is not None else {}
        self._events, self._heldout = len(self.history.events), len(self.history.heldout)
        self._head = self._header(status)
        buffers: list[bytes] = []
        figures = {name: pack(spec, buffers) for name, spec in specs.items()}
        states = states_are_small(self.history) if self.history.latest else None
        self.seq += 1
        frame = {"type": "Keyframe", "seq": self.seq, "figures": figures, "head": self._head, "states": states}
        return frame, buffers

    def tick(self, status: Status, *, rewritten: bool = False) -> Message | None:
        """Return the changes since the last keyframe or tick; None if nothing has changed.

        Args:
            status: The run's status.
            rewritten: Earlier steps were replaced.
        """
        parts: list[dict[str, Any]] = []
        buffers: list[bytes] = []
        for name in self._shown:
            self._tick_curve(name, parts, buffers, rewritten=rewritten)
        self._tick_bars(parts, buffers)
        self._tick_heldout(parts, buffers)
        for name, spec in self._new_costs().items():
            append_figure(name, spec, parts, buffers)
        if (spec := self._new_pipeline()) is not None:
            append_figure("pipeline", spec, parts, buffers)
        if len(self.history.events) != self._events:
            self._events = len(self.history.events)
            parts.append({"part": "marks", **event_marks(self.history.events)})
        if (head := self._header(status)) != self._head:
            self._head = head
            parts.append({"part": "head", **head})
        if not parts:
            return None
        self.seq += 1
        return {"type": "Changes", "seq": self.seq, "parts": parts}, buffers

    def _a_figure_is_gone(self) -> bool:
        """Return whether the page shows a figure that the run no longer has: the pipeline, the places, or a cost."""
        if self._a_cost_is_gone:
            return True
        now, (step, when) = self._clock(), self._pipeline
        if step is not None and now - when >= _PIPELINE_SECONDS and is_one_stage(self.history.records):
            return True
        return "places" in self._frames and self._bars_are_due and not are_several(self.history)

    @property
    def _bars_are_due(self) -> bool:
        """Whether to draw the bars now.

        All ranks are drawn together. Bars are due once the other ranks have news, which a feed with `leading` reads as
        often as bars are drawn. With news of the lowest rank alone they are due half as often.
        """
        ranks, waited = len(self.history.latest), self._clock() - self._bars_sent
        if ranks == 1:
            return waited >= bars_seconds(ranks)
        return waited >= bars_seconds(ranks) * (0.75 if self.history.others_news != self._others_sent else 2)

    @property
    def _shown(self) -> list[str]:
        """Names of `_CURVES` that are shown."""
        return [name for name in _CURVES if name != "exchange" or self.history.lead.exchanges]

    def _tick_curve(self, name: str, parts: list[dict[str, Any]], buffers: list[bytes], *, rewritten: bool) -> None:
        limit, _, values_of = _CURVES[name]
        if (drawn := self._curves.get(name)) is None:
            append_figure(name, self._curve_spec(name, closed=False), parts, buffers)
            return
        length = self.history.lead.length
        done, same = length // drawn.size, drawn.size == stride(length, limit)
        ended = drawn.open_end and length > drawn.length
        if not rewritten and same and not ended and done == drawn.buckets:
            return  # The usual case in a long run: the next bucket is not full.
        values = values_of(self.history, HistoryRange(drawn.size, drawn.buckets, False, self._smoothing))
        if rewritten or not same or ended or len(values) != drawn.traces:
            append_figure(name, self._curve_spec(name, closed=False), parts, buffers)
        elif done > drawn.buckets:
            self._curves[name] = replace(drawn, buckets=done, length=length)
            parts.append(extension(name, list(range(len(values))), values, buffers))

    def _tick_heldout(self, parts: list[dict[str, Any]], buffers: list[bytes]) -> None:
        if len(self.history.heldout) == self._heldout:
            return
        x, y = heldout_values(self.history)
        # Above the limit, the whole figure shows only some of the points.
        if len(x) < self._heldout or len(x) > _MOST_HELDOUT:
            append_figure("loss", self._curve_spec("loss", closed=False), parts, buffers)
        elif not any(part["part"] == "figure" and part["figure"] == "loss" for part in parts):
            points = [(x[self._heldout :], y[self._heldout :])]
            parts.append(extension("loss", [_HELDOUT_TRACE], points, buffers))
        self._heldout = len(x)

    def _tick_bars(self, parts: list[dict[str, Any]], buffers: list[bytes]) -> None:
        if not self._bars_are_due or self.history.latest == self._latest:
            return
        self._bars_sent, self._others_sent = self._clock(), self.history.others_news
        self._latest = dict(self.history.latest)
        before, self._memory = self._memory, self._memory_now()
        for name, spec in self._bar_figures(but=_OF_MEMORY if before == self._memory else frozenset()).items():
            frame, sent = _frame(spec), self._frames.get(name)
            if frame != sent:
                self._frames[name] = frame
                append_figure(name, spec, parts, buffers)
            else:
                parts.append(_bars(name, spec, buffers))

    def _new_costs(self, *, anyway: bool = False) -> dict[str, Figure]:
        """Return the cost figures that have changed; none if it is too early."""
        sent, when = self._costs
        newest = self.history.latest.get(self.history.lead_rank)
        if not anyway and (self._clock() - when < _COSTS_SECONDS or newest is self._costs_of):
            return {}
        self._costs_of = newest
        specs = cost_figures(self.history)
        self._a_cost_is_gone = not anyway and bool(sent.keys() - specs.keys())
        found = {name: msgspec.json.encode(spec, enc_hook=np.ndarray.tobytes) for name, spec in specs.items()}
        self._costs = found, self._clock()
        return {name: spec for name, spec in specs.items() if anyway or found[name] != sent.get(name)}

    def _new_pipeline(self, *, anyway: bool = False) -> Figure | None:
        """Return the timeline to send; None if there is none, nothing new, or it is too early."""
        sent, when = self._pipeline
        soon = self.pipeline_step is None and self._clock() - when < _PIPELINE_SECONDS
        if not anyway and (soon or (self.pipeline_step is not None and self.pipeline_step == sent)):
            return None
        self._pipeline = sent, self._clock()
        lead = self.history.latest.get(self.history.lead_rank)
        if sent is None and not anyway and (lead is None or not lead.timeline):
            return None  # In a pipeline each rank has a timeline: do not read the other ranks.
        timeline = timeline_of(self.history.records, self.pipeline_step)
        if timeline is None or (timeline.step == sent and not anyway):
            return None
        self._pipeline = timeline.step, self._clock()
        return pipeline_figure(timeline, devices=self.devices)

    def _bar_specs(self) -> dict[str, Figure]:
        self._latest, self._memory = dict(self.history.latest), self._memory_now()
        specs = self._bar_figures()
        self._frames = {name: _frame(spec) for name, spec in specs.items()}
        return specs

    def _bar_figures(self, *, but: frozenset[str] = frozenset()) -> dict[str, Figure]:
        """Return the bar figures. 'places' only if states are not on the device; a keyframe removes it from
        the page.
        """
        drawn = {name: figure_of for name, figure_of in _BARS.items() if name not in but}
        specs = {name: figure_of(self.history, devices=self.devices) for name, figure_of in drawn.items()}
        by_place = None if "places" in but else places_figure(self.history)
        return specs if by_place is None else {**specs, "places": by_place}

    def _memory_now(self) -> tuple[object, ...]:
        """Return everything that memory bars depend on. Events are included because they contain the hosts."""
        history = self.history
        ledgers = {rank: record.ledger for rank, record in history.latest.items()}
        most = [history.most_bytes(name) for name in MOST]
        return ledgers, most, history.events, history.predicted, list(self.devices)

    def _curve_spec(self, name: str, *, closed: bool) -> Figure:
        limit, figure_of, values_of = _CURVES[name]
        length = self.history.lead.length
        cut = HistoryRange(stride(length, limit), 0, closed, self._smoothing)
        self._curves[name] = _Drawn(
            size=cut.size,
            # Count traces: values of no bucket.
            traces=len(values_of(self.history, replace(cut, first=length // cut.size))),
            buckets=length // cut.size,
            length=length,
            open_end=closed and length % cut.size != 0,
        )
        return figure_of(self.history, cut)

    def _header(self, status: Status) -> dict[str, str]:
        return dict(vars(header(self.history, name=self._name, status=status, now=self._clock())))


def append_figure(name: str, spec: Figure, parts: list[dict[str, Any]], buffers: list[bytes]) -> None:
    """Append a part that replaces a figure.

    Args:
        name: The figure's name.
        spec: The figure.
        parts: Parts of the message; extended in place.
        buffers: Buffers of the message; extended in place.
    """
    parts.append({"part": "figure", "figure": name, **pack(spec, buffers)})


def extension(name: str, traces: list[int], values: _Points, buffers: list[bytes]) -> dict[str, Any]:
    """Return a part that appends points to curves.

    Args:
        name: The figure's name.
        traces: Numbers of the traces.
        values: (x, y) of each trace, float32.
        buffers: Buffers of the message; extended in place.
    """
    buffers.append(b"".join(x.tobytes() + y.tobytes() for x, y in values))
    return {
        "part": "extend",
        "figure": name,
        "traces": traces,
        "points": [len(x) for x, _ in values],
        "buffer": len(buffers) - 1,
    }


def _frame(spec: Figure) -> bytes:
    """Return a figure without the bars' heights and the notes' texts: while this is unchanged, only those are sent."""
    bare = [{key: value for key, value in trace.items() if key != "y"} for trace in spec["data"]]
    notes = [{**note, "text": ""} for note in spec["layout"]["annotations"]]
    return msgspec.json.encode([bare, {**spec["layout"], "annotations": notes}])


def _bars(name: str, spec: Figure, buffers: list[bytes]) -> dict[str, Any]:
    buffers.append(b"".join(trace["y"].tobytes() for trace in spec["data"]))
    notes = [note["text"] for note in spec["layout"]["annotations"]]
    return {"part": "bars", "figure": name, "notes": notes, "buffer": len(buffers) - 1}


def pack(value: Any, buffers: list[bytes]) -> Any:
    """Return `value` with each array replaced by {"f32": its number in `buffers`}.

    Args:
        value: Plain data with numpy arrays.
        buffers: Buffers of the message; the arrays are appended as float32.
    """
    if isinstance(value, np.ndarray):
        buffers.append(np.ascontiguousarray(value, dtype=np.float32).tobytes())
        return {"f32": len(buffers) - 1}
    if isinstance(value, dict):
        return {key: pack(item, buffers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item, buffers) for item in value]
    return value


_BARS_SECONDS = 1.0


class ComparedDrawing:
    """What one page has received of a comparison of runs. Pure: no thread, no comm.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seq = 0
        self._clock = clock
        self._figures: dict[str, Figure] | None = None
        self._reported: dict[str, Any] = {}
        self._bars_sent = float("-inf")

    def next(self, looks: Sequence[RunStanding]) -> Message | None:
        """Return the next message; None if nothing has changed.

        Args:
            looks: The present state of each run.
        """
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
        if (now := reported(looks)) != self._reported:
            self._reported = now
            parts.append({"part": "compared", **now})
        if not parts:
            return None
        self.seq += 1
        return {"type": "Changes", "seq": self.seq, "parts": parts}, buffers

    def keyframe(self, looks: Sequence[RunStanding]) -> Message:
        """Return a message with all figures.

        Args:
            looks: The present state of each run.
        """
        self._figures, self._reported, self._bars_sent = compared_figures(looks), reported(looks), self._clock()
        buffers: list[bytes] = []
        figures = {name: pack(figure, buffers) for name, figure in self._figures.items()}
        self.seq += 1
        return {"type": "Comparison", "seq": self.seq, "figures": figures, "compared": self._reported}, buffers


def _append_changes(
    name: str, before: Figure, after: Figure, parts: list[dict[str, Any]], buffers: list[bytes]
) -> None:
    grown = _grown(before, after)
    if grown is None:
        append_figure(name, after, parts, buffers)
    elif grown:
        parts.append(extension(name, list(grown), list(grown.values()), buffers))


def _grown(before: Figure, after: Figure) -> dict[int, tuple[np.ndarray, np.ndarray]] | None:
    """Return the new points by number of the curve; None if anything else differs."""
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
