"""Step records as columns, the data of every plot. Appending is incremental, and the number of drawn points is bounded.

A plot shows at most about 400 points per curve. Records are grouped in buckets of `stride` steps. `stride` is a power
of two that doubles as the run grows; between two doublings a plot only gets new points at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from speedlab.telemetry.current_config import layout_in
from speedlab.telemetry.prediction import RunPrediction
from speedlab.telemetry.records import CATEGORIES, PHASES, Event, Ledger, MemoryMark, StepRecord

POINTS = 400
"""Maximum number of points of one curve on screen."""

BARS = 80
"""Maximum number of bars of a stacked plot over steps."""

SMOOTHING = 0.9
"""Weight of the past in a smoothed curve, per step. Bias-corrected, so that the first steps are not pulled to zero."""

SMOOTHINGS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""Weights that a user may choose. About the last 1 / (1 - weight) steps count."""

_AT_ONCE = 512
"""Number of records that are created at a time."""

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
    """Return the sum of all categories of a ledger, in bytes.

    Args:
        ledger: The ledger of a rank.
    """
    return sum(_IN_ORDER(ledger))


_IN_ORDER = attrgetter(*CATEGORIES)


MOST: dict[str, Callable[[Ledger], int]] = {
    "model_states": lambda ledger: ledger.model_states,
    "everything": total_bytes,
}
"""Sums of a ledger (bytes) whose maximum over the steps is kept per rank."""


class _Smoothing:
    """A column smoothed with one weight of the past, computed only as far as it was requested."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._known = 0
        self._rows = np.empty((3, 256))
        """By step: the weighted sum of values, the sum of weights, and their quotient."""

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return (length,) smoothed values for (length,) values.

        A value that is not finite leaves the curve unchanged. The cost is proportional to the values not computed
        before.
        """
        known, length = self._known, len(values)
        if known < length:
            while length > self._rows.shape[1]:
                self._rows = np.concatenate([self._rows, np.empty_like(self._rows)], axis=1)
            total, weight = self._rows[:2, known - 1].tolist() if known else (0.0, 0.0)
            rows = []
            for value in values[known:].tolist():
                # True for finite values only: inf - inf and nan - nan are NaN.
                if value - value == 0:
                    total = total * self._share + value * (1 - self._share)
                    weight = weight * self._share + (1 - self._share)
                rows.append((total, weight, total / weight if weight > 0 else np.nan))
            if len(rows) == 1:  # One new step, the usual case: create no array.
                self._rows[0, known], self._rows[1, known], self._rows[2, known] = rows[0]
            else:
                self._rows[:, known:length] = np.array(rows).T
            self._known = length
        return self._rows[2, :length]

    def cut(self, length: int) -> None:
        """Forget the values from `length` on, because they were replaced."""
        self._known = min(self._known, length)


class Series:
    """The records of one rank as float64 columns by name, and its held-out losses."""

    def __init__(self) -> None:
        self._data = np.empty((len(_COLUMNS), 256))
        self._smoothings: dict[tuple[str, float], _Smoothing] = {}
        self._seen = 0
        self._newest = 0.0
        """Time of the last record taken in."""
        self.length = 0
        self.heldout: list[tuple[int, float]] = []
        """Replaced by a new list when earlier points change; otherwise it only grows."""
        self.most_bytes: dict[str, int] = dict.fromkeys(MOST, 0)
        """Maximum over the steps, in bytes: model states, and all categories together."""
        self.marked: tuple[int, list[MemoryMark]] = 0, []
        """The newest step with marks of its memory over time, and these marks."""
        self.waited_for_places = False
        """Whether any step has waited for the host's memory or the disk."""
        self.exchanges = False
        """Whether a step has sent other data than float32 gradients: a compressing optimizer, ZeRO++ or islands."""

    def column(self, name: str) -> np.ndarray:
        """Return the (length,) values of a column; times in seconds.

        Args:
            name: One of _COLUMNS.
        """
        return self._data[_ROWS[name], : self.length]

    @property
    def smoothed(self) -> np.ndarray:
        """(length,) loss, smoothed with SMOOTHING."""
        return self.smoothed_by(SMOOTHING)

    def smoothed_by(self, share: float, name: str = "loss") -> np.ndarray:
        """Return a (length,) smoothed column. Results are cached and extended.

        Args:
            share: Weight of the past, one of SMOOTHINGS.
            name: The column.
        """
        if (smoothing := self._smoothings.get((name, share))) is None:
            smoothing = self._smoothings[name, share] = _Smoothing(share)
        return smoothing.of(self.column(name))

    def _cut(self, length: int) -> None:
        self.length = length
        for smoothing in self._smoothings.values():
            smoothing.cut(length)

    def update(self, records: Sequence[StepRecord]) -> bool:
        """Append the new records.

        Args:
            records: All records of the rank, in order.

        Returns:
            True if earlier steps were replaced, so that a plot must be redrawn.
        """
        # A run that restarted from a checkpoint may have passed its earlier step since the last call. A restart may
        # also happen during this call, in another thread: read slices only, because slices never raise IndexError.
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
            # The run restarted from a checkpoint: drop the abandoned steps.
            self._cut(int(np.searchsorted(self.column("step"), record.step)))
            self.heldout = [point for point in self.heldout if point[0] < record.step]
            rewritten = True
        # Double the capacity, so that an append takes constant time on average.
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

    def _exchange(self, reported: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the sent bytes as a share of float32's, the error norm, and the angle that was measured last."""
        self.exchanges |= bool(reported)
        share = reported["sent_bytes"] / reported["float32_bytes"] if reported.get("float32_bytes") else 1.0
        angle = self.column("angle")[-1] if self.length else np.nan
        return share, reported.get("error_norm", 0.0), reported.get("angle", angle)


class History:
    """The data of all plots of a run: a Series of the lowest rank, the newest record of each rank, and the events.

    The lowest rank stands for the run in values that all ranks agree on (loss, tokens, learning rate). `records` are
    those of the last update. From other ranks, only the newest record is read, because reading all would load whole
    files.
    """

    def __init__(self) -> None:
        self.lead_rank = 0
        self.lead = Series()
        self.latest: dict[int, StepRecord] = {}
        self.records: Mapping[int, Sequence[StepRecord]] = {}
        self.events: list[Event] = []
        self._events_of: tuple[Sequence[Event], int] = ((), 0)
        """The sequence the events were copied from and its length then. The sequence only grows, or is replaced."""
        self._size: int | None = None
        self._started_of: tuple[list[Event] | None, Mapping[str, Any]] = None, {}
        """Cache key (the events) and the details of the newest 'started' event."""
        self._heldout: list[tuple[int, float]] = []
        self._heldout_of: tuple[list[Event], list[tuple[int, float]], int] = [], [], 0
        """Cache key of `_heldout`: the events, the points of the lowest rank, and their number."""
        self._most_bytes = dict.fromkeys(MOST, 0)
        self._waited_for_places = False
        self._taken: dict[int, tuple[Sequence[StepRecord], int | None]] = {}
        """By rank: the records last read, and their count of changes then."""
        self.others_news = 0
        """Counts up when ranks other than the lowest have new records."""
        self.predicted: RunPrediction | None = None
        """The planner's prediction, if it was requested."""

    @classmethod
    def of(cls, records: Mapping[int, Sequence[StepRecord]], events: Sequence[Event] = ()) -> History:
        """Build a history from records and events.

        Args:
            records: Records by rank.
            events: Events of the run, oldest first.
        """
        history = cls()
        history.update(records, events)
        return history

    def update(
        self, records: Mapping[int, Sequence[StepRecord]], events: Sequence[Event], *, leading: bool = False
    ) -> bool:
        """Take in new records and events.

        Args:
            records: Records by rank.
            events: Events of the run, oldest first.
            leading: Ignore ranks other than the lowest in this call.

        Returns:
            True if earlier steps of the lowest rank were replaced.
        """
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
            self._events_of = events, len(self.events)  # Count the copy: another thread may append now.
            self._size = _world_size(self.events)
        if self._size is not None and any(rank >= self._size for rank in self.latest):
            # Drop ranks that have left the run: their memory is free.
            self.latest = {rank: record for rank, record in self.latest.items() if rank < self._size}
        return rewritten

    def _new(self, records: Mapping[int, Sequence[StepRecord]]) -> dict[int, Sequence[StepRecord]]:
        """Return the records that may have changed. Records without a `changes` counter always count as changed."""
        found = {}
        for rank, entries in records.items():
            changes = getattr(entries, "changes", None)
            known, count = self._taken.get(rank, (None, None))
            if known is not entries or changes is None or changes != count:
                self._taken[rank], found[rank] = (entries, changes), entries
        return found

    def most_bytes(self, name: str) -> int:
        """Return the maximum bytes that any rank has held. Plots keep this height, so that a user sees bars shrink.

        Args:
            name: 'model_states' or 'everything'.
        """
        return max(self._most_bytes[name], self.lead.most_bytes[name])

    @property
    def phases(self) -> list[str]:
        """Phases of a step that plots show. 'offload' only if a rank has waited for the host's memory or the disk."""
        waited = self._waited_for_places or self.lead.waited_for_places
        return [phase for phase in PHASES if waited or phase != "offload"]

    @property
    def ranks(self) -> list[int]:
        """Ranks with a record, in ascending order."""
        return sorted(self.latest)

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """(step, held-out loss) in order. The evaluation before the first step is taken from an event."""
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
        """Details of the newest 'started' event, which describes the run; empty if there is none yet."""
        if self._started_of[0] is not self.events:
            found = next((event.details for event in reversed(self.events) if event.kind == "started"), {})
            self._started_of = self.events, found
        return self._started_of[1]

    @property
    def pretended_link(self) -> str:
        """The simulated link between the engines, like '1 Gbit/s 1 ms'; '' if there is none."""
        return str(self._started.get("pretended_link", {}).get("text", ""))

    def host_of(self, rank: int) -> str:
        """Return the name of the host of `rank`; '' if the run uses one host.

        Args:
            rank: The rank.
        """
        hosts = self._started.get("hosts")
        return str(hosts[rank]) if isinstance(hosts, list) and 0 <= rank < len(hosts) else ""

    def share_of_peak(self, flops_per_second: _Numbers) -> _Numbers | None:
        """Return the throughput of one rank as a share (0 to 1) of a large matmul's on it; None if that was not
        measured.

        Args:
            flops_per_second: One number or an array.
        """
        peak = self._started.get("peak_flops")  # summed over the ranks
        if not isinstance(peak, int | float) or not peak > 0 or not self.latest:
            return None
        return flops_per_second * len(self.latest) / peak


def _world_size(events: Sequence[Event]) -> int | None:
    """Return the world size after the newest change of layout; None if there was no change."""
    for event in reversed(events):
        after = event.details.get("after")
        layout = layout_in(after) if event.kind == "reshaped" and isinstance(after, dict) else None
        if layout is not None:
            return layout.world_size
    return None


def stride(length: int, limit: int) -> int:
    """Return the steps per bucket: the smallest power of two that gives at most `limit` buckets.

    Args:
        length: Number of steps.
        limit: Maximum number of buckets.
    """
    size = 1
    while length > size * limit:
        size *= 2
    return size


def bucket_last(values: np.ndarray, size: int, *, closed: bool, first: int = 0) -> np.ndarray:
    """Return the last value of each bucket.

    Args:
        values: (length,) values.
        size: Steps per bucket.
        closed: Also include an unfinished bucket at the end.
        first: Number of the first bucket to return.
    """
    whole = values[: len(values) // size * size].reshape(-1, size)[first:, -1]
    rest = values[len(values) // size * size :]
    return np.append(whole, rest[-1]) if closed and len(rest) else whole


def bucket_mean(values: np.ndarray, size: int, *, closed: bool, first: int = 0) -> np.ndarray:
    """Return the mean of each bucket.

    Args:
        values: (length,) values.
        size: Steps per bucket.
        closed: Also include an unfinished bucket at the end.
        first: Number of the first bucket to return.
    """
    whole = values[: len(values) // size * size].reshape(-1, size)[first:].mean(axis=1)
    rest = values[len(values) // size * size :]
    return np.append(whole, rest.mean()) if closed and len(rest) else whole


def bucket_extremes(
    x: np.ndarray, y: np.ndarray, size: int, *, closed: bool, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest point of each bucket in their order, so that spikes stay visible.

    Args:
        x: (length,) positions.
        y: (length,) values; NaN counts as missing.
        size: Steps per bucket.
        closed: Also include an unfinished bucket at the end.
        first: Number of the first bucket to return.

    Returns:
        (x, y) of the chosen points: two per bucket, or one if all values are equal.
    """
    if size == 1:
        return x[first:], y[first:]
    start, end = first * size, len(y) // size * size
    picks = [_extremes(y[start:end].reshape(-1, size)) + start]
    if closed and len(rest := y[max(start, end) :]):
        picks.append(_extremes(rest.reshape(1, -1)) + end)
    chosen = np.concatenate(picks)
    return x[chosen], y[chosen]


def _extremes(rows: np.ndarray) -> np.ndarray:
    """Return the indices in `rows.ravel()` of each row's lowest and highest value, in order; one index if both
    coincide.
    """
    unknown = np.isnan(rows)
    # argmin would return a NaN: replace it by infinity.
    lowest = np.where(unknown, np.inf, rows).argmin(axis=1)
    highest = np.where(unknown, -np.inf, rows).argmax(axis=1)
    both = np.sort(np.stack([lowest, highest], axis=1), axis=1)
    wanted = np.stack([np.ones(len(rows), dtype=bool), lowest != highest], axis=1)
    return (both + rows.shape[1] * np.arange(len(rows))[:, None])[wanted]
