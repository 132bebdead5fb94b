"""Step records as columns: what every plot is drawn from. Appending is incremental, drawing is bounded.

A plot shows at most about 400 points a curve. Records are therefore drawn in buckets of `stride` steps, a power of two
that doubles as the run grows; between two doublings a plot only ever gets new points at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from speedlab.telemetry.prediction import RunPrediction
from speedlab.telemetry.records import CATEGORIES, PHASES, Event, Ledger, MemoryMark, StepRecord
from speedlab.telemetry.run_shape import layout_in

POINTS = 400
"""Most points of one curve on screen."""

BARS = 80
"""Most bars of a stacked plot over steps."""

SMOOTHING = 0.9
"""Share of the past in a smoothed curve, per step (bias-corrected, so that the first steps are not pulled to zero)."""

SMOOTHINGS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Shares that a person may choose from; about the last 1 / (1 - share) steps count."""

_AT_ONCE = 512
"""Records that are made at a time."""

_Numbers = TypeVar("_Numbers", float, np.ndarray)

_COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "tokens_per_second",
    "flops_per_second",
    "seconds",
    "sent_share",
    "error_norm",
    "angle",
    "grad_norm",
    *PHASES,
)
_ROWS = {name: row for row, name in enumerate(_COLUMNS)}


def total_bytes(ledger: Ledger) -> int:
    """All categories together."""
    return sum(_IN_ORDER(ledger))


_IN_ORDER = attrgetter(*CATEGORIES)


MOST: dict[str, Callable[[Ledger], int]] = {
    "model_states": lambda ledger: ledger.model_states,
    "everything": total_bytes,
}
"""What a rank holds at most over the steps."""


class _Smoothing:
    """A column smoothed by one share of the past, as far as somebody has asked for it."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._known = 0
        self._rows = np.empty((3, 256))
        """Sum of values, sum of their weights, and the first by the second, by step."""

    def of(self, values: np.ndarray) -> np.ndarray:
        """(length,) of (length,) values; what is no finite number leaves the curve as it was. Takes as long as there
        are values that nobody has asked for yet."""
        known, length = self._known, len(values)
        if known < length:
            while length > self._rows.shape[1]:
                self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
            total, weight = self._rows[:2, known - 1].tolist() if known else (0.0, 0.0)
            rows = []
            for value in values[known:].tolist():
                if value - value == 0:
                    total = total * self._share + value * (1 - self._share)
                    weight = weight * self._share + (1 - self._share)
                rows.append((total, weight, total / weight if weight > 0 else np.nan))
            if len(rows) == 1:  # A step more: no array has to be made.
                self._rows[0, known], self._rows[1, known], self._rows[2, known] = rows[0]
            else:
                self._rows[:, known:length] = np.array(rows).T
            self._known = length
        return self._rows[2, :length]

    def cut(self, length: int) -> None:
        """Later values were replaced."""
        self._known = min(self._known, length)


class Series:
    """The records of one rank as float64 columns by name, plus its held-out losses."""

    def __init__(self) -> None:
        self._data = np.empty((len(_COLUMNS), 256))
        self._smoothings: dict[tuple[str, float], _Smoothing] = {}
        self._seen = 0
        self._newest = 0.0
        """When the last of those records was made."""
        self.length = 0
        self.heldout: list[tuple[int, float]] = []
        """Another list when points of it were replaced; else it only grows."""
        self.most_bytes: dict[str, int] = dict.fromkeys(MOST, 0)
        """The most this rank has held at any step: of model states, and of all categories together."""
        self.marked: tuple[int, list[MemoryMark]] = 0, []
        """The newest step whose memory was marked over its time, and its marks."""
        self.waited_for_places = False
        """Whether any step has waited for the host's memory or the disk."""
        self.exchanges = False
        """Whether something else than gradients travels: the optimizer sums them itself, or islands meet."""

    def column(self, name: str) -> np.ndarray:
        """(length,) values of a column; times in seconds."""
        return self._data[_ROWS[name], : self.length]

    @property
    def smoothed(self) -> np.ndarray:
        """(length,) smoothed loss."""
        return self.smoothed_by(SMOOTHING)

    def smoothed_by(self, share: float, name: str = "loss") -> np.ndarray:
        """(length,) a column smoothed by one of SMOOTHINGS; what was smoothed before is kept."""
        if (smoothing := self._smoothings.get((name, share))) is None:
            smoothing = self._smoothings[name, share] = _Smoothing(share)
        return smoothing.of(self.column(name))

    def _cut(self, length: int) -> None:
        self.length = length
        for smoothing in self._smoothings.values():
            smoothing.cut(length)

    def update(self, records: Sequence[StepRecord]) -> bool:
        """Take in what is new in `records`. True when earlier steps were replaced: a plot must be drawn anew."""
        # A run that went back to a checkpoint may have come further than before since the last look. It may do so in
        # the middle of this one: only slices are asked for.
        last = records[max(0, self._seen - 1) : self._seen]
        rewritten = self._seen > 0 and (not last or last[0].time != self._newest)
        if rewritten:
            self._seen = 0
            self._cut(0)
            self.heldout = []
        while fresh := records[self._seen : self._seen + _AT_ONCE]:
            for record in fresh:
                rewritten |= self._append(record)
            self._newest = fresh[-1].time
            self._seen += len(fresh)
        return rewritten

    def _append(self, record: StepRecord) -> bool:
        rewritten = False
        if self.length and record.step <= self._data[0, self.length - 1]:
            # A run that went back to a checkpoint: the abandoned steps make way for the ones that count.
            self._cut(int(np.searchsorted(self.column("step"), record.step)))
            self.heldout = [point for point in self.heldout if point[0] < record.step]
            rewritten = True
        if self.length == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
        self._data[:, self.length] = (
            record.step,
            record.loss,
            record.learning_rate,
            record.tokens_per_second,
            record.flops / record.seconds if record.seconds > 0 else 0.0,
            record.seconds,
            *self._exchange(record.exchange),
            record.grad_norm,
            *(record.phases.get(phase, 0.0) for phase in PHASES),
        )
        self.length += 1
        if record.memory:
            self.marked = record.step, record.memory
        self.waited_for_places |= record.phases.get("offload", 0.0) > 0
        for name, held in MOST.items():
            self.most_bytes[name] = max(self.most_bytes[name], held(record.ledger))
        if record.heldout_loss is not None:
            self.heldout.append((record.step, record.heldout_loss))
        return rewritten

    def _exchange(self, told: Mapping[str, float]) -> tuple[float, float, float]:
        """Bytes as a share of float32's, the error's norm, and the angle that was last looked at."""
        self.exchanges |= bool(told)
        share = told["sent_bytes"] / told["float32_bytes"] if told.get("float32_bytes") else 1.0
        angle = self.column("angle")[-1] if self.length else np.nan
        return share, told.get("error_norm", 0.0), told.get("angle", angle)


class History:
    """Everything the plots of a run are drawn from: a Series of the lowest rank, which speaks for the run where ranks
    agree (loss, tokens, learning rate), the newest record of each rank, and the events. `records` are those it was last
    updated from; of other ranks than the lowest, only the newest are asked for."""

    def __init__(self) -> None:
        self.lead_rank = 0
        self.lead = Series()
        self.latest: dict[int, StepRecord] = {}
        self.records: Mapping[int, Sequence[StepRecord]] = {}
        self.events: list[Event] = []
        self._events_of: tuple[Sequence[Event], int] = ((), 0)
        """Those they were taken from, and how many these were: they only grow, or are others."""
        self._size: int | None = None
        self._started_of: tuple[list[Event] | None, Mapping[str, Any]] = None, {}
        """The events, and what was found in them."""
        self._heldout: list[tuple[int, float]] = []
        self._heldout_of: tuple[list[Event], list[tuple[int, float]], int] = [], [], 0
        """The events, and the points of the lowest rank and their number, which those were made of."""
        self._most_bytes = dict.fromkeys(MOST, 0)
        self._waited_for_places = False
        self._taken: dict[int, tuple[Sequence[StepRecord], int | None]] = {}
        """By rank the records it was updated from, and how often these had changed by then."""
        self.others_news = 0
        """Counts up when something has come of other ranks than the lowest."""
        self.predicted: RunPrediction | None = None
        """What the planner said, where somebody asked it."""

    @classmethod
    def of(cls, records: Mapping[int, Sequence[StepRecord]], events: Sequence[Event] = ()) -> History:
        history = cls()
        history.update(records, events)
        return history

    def update(
        self, records: Mapping[int, Sequence[StepRecord]], events: Sequence[Event], *, leading: bool = False
    ) -> bool:
        """Take in what is new; `leading`: of other ranks than the lowest that is nothing. True when earlier steps of
        the leading rank were replaced."""
        self.records = records
        lowest = {self.lead_rank: records[self.lead_rank]} if self.lead_rank in records else {}
        new = self._new(lowest if leading else records)
        self.latest |= {rank: entries[-1] for rank, entries in sorted(new.items()) if entries}
        lead = min(self.latest, default=0)
        self.others_news += any(rank != lead for rank in new)
        if lead != self.lead_rank:
            self.lead_rank, self.lead = lead, Series()
        rewritten = self.lead.update(records.get(lead, ()))
        for record in [self.latest[rank] for rank in new if rank in self.latest and rank != lead]:
            self._waited_for_places |= record.phases.get("offload", 0.0) > 0
            for name, held in MOST.items():
                self._most_bytes[name] = max(self._most_bytes[name], held(record.ledger))
        if self._events_of[0] is not events or self._events_of[1] != len(events):
            self.events = list(events)
            self._events_of = events, len(self.events)  # Another thread may have read one more meanwhile.
            self._size = _world_size(self.events)
        if self._size is not None and any(rank >= self._size for rank in self.latest):
            # What ranks that have left held last is held no more.
            self.latest = {rank: record for rank, record in self.latest.items() if rank < self._size}
        return rewritten

    def _new(self, records: Mapping[int, Sequence[StepRecord]]) -> dict[int, Sequence[StepRecord]]:
        """Those of `records` in which something may have changed; what cannot tell may have."""
        found = {}
        for rank, entries in records.items():
            changes = getattr(entries, "changes", None)
            known, count = self._taken.get(rank, (None, None))
            if known is not entries or changes is None or changes != count:
                self._taken[rank], found[rank] = (entries, changes), entries
        return found

    def most_bytes(self, name: str) -> int:
        """The most any rank has held of 'model_states' or 'everything', of what was seen: plots keep this height, so
        that one sees bars shrink."""
        return max(self._most_bytes[name], self.lead.most_bytes[name])

    @property
    def phases(self) -> list[str]:
        """Phases of a step that are drawn: waiting for host and disk only where there was any."""
        waited = self._waited_for_places or self.lead.waited_for_places
        return [phase for phase in PHASES if waited or phase != "offload"]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.latest)

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """(step, held-out loss), in order; the evaluation before the first step is told by an event."""
        events, points, number = self._heldout_of
        if events is not self.events or points is not self.lead.heldout or number != len(points):
            early = [
                (event.step, float(event.details["heldout_loss"]))
                for event in self.events
                if event.kind == "evaluated" and isinstance(event.details.get("heldout_loss"), int | float)
            ]
            self._heldout = sorted(dict([*early, *self.lead.heldout]).items())
            self._heldout_of = self.events, self.lead.heldout, len(self.lead.heldout)
        return self._heldout

    @property
    def _started(self) -> Mapping[str, Any]:
        """What the newest event tells that says what the run is made of; empty before there is one."""
        if self._started_of[0] is not self.events:
            found = next((event.details for event in reversed(self.events) if event.kind == "started"), {})
            self._started_of = self.events, found
        return self._started_of[1]

    @property
    def pretended_link(self) -> str:
        """'1 Gbit/s 1 ms', where its engines pretend one between them; else ''."""
        return str(self._started.get("pretended_link", {}).get("text", ""))

    def host_of(self, rank: int) -> str:
        """The name of a rank's host, where the run is on several; else ''."""
        hosts = self._started.get("hosts")
        return str(hosts[rank]) if isinstance(hosts, list) and 0 <= rank < len(hosts) else ""

    def share_of_peak(self, flops_per_second: _Numbers) -> _Numbers | None:
        """What one rank computes as a share (0 to 1) of what a large matmul reaches on it; None where not measured."""
        peak = self._started.get("peak_flops")  # summed over the ranks
        if not isinstance(peak, int | float) or not peak > 0 or not self.latest:
            return None
        return flops_per_second * len(self.latest) / peak


def _world_size(events: Sequence[Event]) -> int | None:
    """How many ranks the newest change of layout has left; None when there was none."""
    for event in reversed(events):
        after = event.details.get("after")
        layout = layout_in(after) if event.kind == "reshaped" and isinstance(after, dict) else None
        if layout is not None:
            return layout.world_size
    return None


def stride(length: int, limit: int) -> int:
    """Steps in one bucket: the least power of two with which `length` steps make at most `limit` buckets."""
    size = 1
    while length > size * limit:
        size *= 2
    return size


def bucket_last(values: np.ndarray, size: int, *, closed: bool, first: int = 0) -> np.ndarray:
    """The last value of each bucket from number `first` on; an unfinished one at the end counts when `closed`."""
    whole = values[: len(values) // size * size].reshape(-1, size)[first:, -1]
    rest = values[len(values) // size * size :]
    return np.append(whole, rest[-1]) if closed and len(rest) else whole


def bucket_mean(values: np.ndarray, size: int, *, closed: bool, first: int = 0) -> np.ndarray:
    """Like `bucket_last`, with the mean of each bucket."""
    whole = values[: len(values) // size * size].reshape(-1, size)[first:].mean(axis=1)
    rest = values[len(values) // size * size :]
    return np.append(whole, rest.mean()) if closed and len(rest) else whole


def bucket_extremes(
    x: np.ndarray, y: np.ndarray, size: int, *, closed: bool, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) with each bucket's lowest and highest point in their order, so that a spike is never averaged away."""
    if size == 1:
        return x[first:], y[first:]
    start, end = first * size, len(y) // size * size
    picks = [_extremes(y[start:end].reshape(-1, size)) + start]
    if closed and len(rest := y[max(start, end) :]):
        picks.append(_extremes(rest.reshape(1, -1)) + end)
    chosen = np.concatenate(picks)
    return x[chosen], y[chosen]


def _extremes(rows: np.ndarray) -> np.ndarray:
    """Places in `rows.ravel()` of each row's lowest and highest value, in their order; one where they are the same."""
    unknown = np.isnan(rows)
    lowest = np.where(unknown, np.inf, rows).argmin(axis=1)
    highest = np.where(unknown, -np.inf, rows).argmax(axis=1)
    both = np.sort(np.stack([lowest, highest], axis=1), axis=1)
    wanted = np.stack([np.ones(len(rows), dtype=bool), lowest != highest], axis=1)
    return (both + rows.shape[1] * np.arange(len(rows))[:, None])[wanted]
