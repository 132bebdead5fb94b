"""Read a run for all pages: one shared feed, which continues where the last read ended."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

import speedlab_server.schema as m
from speedlab.cluster.files.cluster_dir import ClusterState, known_clusters
from speedlab.hardware import Device
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.history import History, Series, bucket_last, bucket_mean, stride
from speedlab.telemetry.prediction import prediction_of
from speedlab.telemetry.records import CATEGORIES, PHASES, PLACES, RESTING, Event, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder, Status
from speedlab.telemetry.tables import SegmentError, tensors_in
from speedlab_server.errors import QuestionError, UnknownError

MOST_POINTS = 1000
MOST_EVENTS = 500
_MOST_DETAILS_BYTES = 2**14
_MOST_SERIES = 8
_FRESH_SECONDS = 0.05
"""Pages that ask within this time share one poll."""
_SPEED_STEPS = 20
_Drawn = TypeVar("_Drawn")
_LAST = ("step", "smoothed_loss", "learning_rate", "grad_norm")


class Reader:
    """A run for all pages. Safe to use from any thread; calls are serialised."""

    def __init__(self, id: str, folder: RunFolder) -> None:
        """Open a run.

        Args:
            id: Id of the run.
            folder: The run folder.
        """
        self.id, self.folder = id, folder
        self._feed = Feed(folder)
        self._series: dict[int, tuple[Series, int]] = {}
        """By rank: the series, and the generation of its steps."""
        self._history = History()
        self._replaced = 0
        self._known_events = self._drawn_version = self._drawn_others = -1
        self._devices: Sequence[Device] = ()
        self._lock = threading.RLock()
        self._looked = float("-inf")

    def close(self) -> None:
        """Close the feed."""
        self._feed.close()

    @property
    def ranks(self) -> list[int]:
        """Ranks with records."""
        return sorted(self._feed.records)

    @property
    def token(self) -> str:
        """Token of the cluster whose engines hold the run, or held it last."""
        return self._feed.status.token

    def look(self) -> int:
        """Take in what is new. Return a number that changes with each news."""
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_SECONDS:
                self._feed.poll(leading=True)
                self._looked = time.monotonic()
            return self._feed.version

    def summary(self, cluster: str = "") -> m.RunSummary:
        """Return the run's entry in the list.

        Args:
            cluster: Id of the cluster that holds the run.
        """
        with self._lock:
            lead = next((records for records in self._feed.records.values() if records), None)
            newest = list(lead[-_SPEED_STEPS:]) if lead is not None else []
            return summary_of(self.id, self.folder, self._feed.status, newest, cluster)

    def records(self, watch: m.Watch, rank: int | None = None) -> m.Records:
        """Return the step records that a page does not have.

        Args:
            watch: What the page has.
            rank: The rank; None for the lowest.

        Raises:
            UnknownError: The rank has no records.
        """
        with self._lock:
            rank = min(self._feed.records, default=0) if rank is None else rank
            if rank not in self._feed.records and (rank > 0 or self._feed.records):
                reported = ", ".join(map(str, self.ranks)) or "none yet"
                raise UnknownError(
                    f"rank {rank} of run {self.folder.name!r} has no records; ranks that have: {reported}"
                )
            series, generation = self._updated(rank)
            closed = self._feed.status.state in RESTING
            size = stride(series.length, max(1, min(watch.points, MOST_POINTS)))
            fits = (watch.generation, watch.stride) == (generation, size)
            ends = series.column("step")[size - 1 :: size]
            keep = int(np.searchsorted(ends, watch.after, side="right")) if fits else 0
            return m.Records(
                run=self.id,
                rank=rank,
                generation=generation,
                stride=size,
                keep=keep,
                columns=columns_of(series, size, closed=closed, first=keep),
                heldout=_thinned([(step, _number(loss)) for step, loss in series.heldout]),
            )

    def events(self, after: int) -> m.Events:
        """Return the events from number `after` on, oldest first, at most MOST_EVENTS.

        Args:
            after: Number of events that the page has.
        """
        with self._lock:
            known = self._feed.events
            keep = after if 0 <= after <= len(known) else 0
            chosen = [_reported(event) for event in known[keep : keep + MOST_EVENTS]]
            return m.Events(run=self.id, keep=keep, total=len(known), events=chosen)

    def memory(self) -> list[m.RankMemory]:
        """Return the memory of each present rank at its last step."""
        with self._lock:
            size = len(self._feed.status.rank_pids) or len(self._feed.records)
            held = {rank: records[-1] for rank, records in self._feed.records.items() if rank < size and records}
            return [_memory_of(record) for record in held.values()]

    def tensors(self, rank: int, category: str, place: str) -> m.Tensors:
        """Return the tensors in a segment of the memory bars.

        Args:
            rank: The rank.
            category: One of CATEGORIES.
            place: One of PLACES.

        Raises:
            QuestionError: There is no such segment.
        """
        with self._lock:
            newest = {rank: records[-1] for rank, records in self._feed.records.items() if records}
        try:
            reported = tensors_in(self.folder, newest, rank=rank, category=category, place=place)
        except SegmentError as error:
            raise QuestionError(str(error)) from None
        return msgspec.convert(reported, m.Tensors)

    def draw(self, draw: Callable[[History, int, Status, Sequence[Device]], _Drawn]) -> _Drawn:
        """Call `draw` with the data of all plots, under the lock, and return its result.

        Args:
            draw: Gets the history, the number of times that steps were replaced, the status and the devices.
        """
        with self._lock:
            feed = self._feed
            if len(feed.events) != self._known_events:  # Events contain starts and changes of shape.
                self._known_events = len(feed.events)
                self._devices = devices_of(feed.status.token)
                self._history.predicted = prediction_of(self.folder.config, feed.events, self._devices)
            if feed.version != self._drawn_version:
                leading, self._drawn_others = feed.others == self._drawn_others, feed.others
                self._drawn_version = feed.version
                self._replaced += self._history.update(feed.records, feed.events, leading=leading)
            return draw(self._history, self._replaced, feed.status, self._devices)

    def _updated(self, rank: int) -> tuple[Series, int]:
        series, generation = self._series.pop(rank, (Series(), 1))
        generation += series.update(self._feed.records.get(rank, ()))
        self._series[rank] = series, generation
        while len(self._series) > _MOST_SERIES:
            del self._series[next(iter(self._series))]
        return series, generation


def devices_of(token: str) -> Sequence[Device]:
    """Return the devices of the cluster with this token; () if it is not running.

    Args:
        token: Token of the cluster.
    """
    states = (state for _, state in known_clusters() if isinstance(state, ClusterState) and state.running)
    return next((state.devices for state in states if token and state.token == token), ())


def columns_of(series: Series, size: int, *, closed: bool, first: int = 0) -> dict[str, list[float | None]]:
    """Return buckets of steps: the last value of states, the mean of rates and times, the lowest and the highest loss.

    The extremes of the loss keep spikes visible.

    Args:
        series: The records of a rank.
        size: Steps per bucket.
        closed: Include the unfinished bucket at the end.
        first: Number of the first bucket.
    """
    columns: dict[str, np.ndarray] = {}
    for name in m.COLUMNS:
        if name in ("loss_low", "loss_high"):
            pick = np.fmin if name == "loss_low" else np.fmax  # fmin and fmax ignore NaN.
            columns[name] = _bucket(series.column("loss"), size, pick, closed=closed, first=first)
        else:
            values = series.smoothed if name == "smoothed_loss" else series.column(name)
            bucket = bucket_last if name in _LAST else bucket_mean
            columns[name] = bucket(values, size, closed=closed, first=first)
    return {name: list(map(_number, values.tolist())) for name, values in columns.items()}


def _bucket(values: np.ndarray, size: int, pick: np.ufunc, *, closed: bool, first: int) -> np.ndarray:
    whole = pick.reduce(values[: len(values) // size * size].reshape(-1, size)[first:], axis=1)
    rest = values[len(values) // size * size :]
    return np.append(whole, pick.reduce(rest)) if closed and len(rest) else whole


def summary_of(id: str, folder: RunFolder, status: Status, newest: Sequence[StepRecord], cluster: str) -> m.RunSummary:
    """Return a run's entry in the list.

    Args:
        id: Id of the run.
        folder: The run folder.
        status: The run's status.
        newest: The last records of one rank.
        cluster: Id of the cluster that holds the run.
    """
    last = newest[-1] if newest else None
    # After a restart from a checkpoint, the status is newer than the last record.
    back = last is not None and status.step < last.step and status.updated > last.time
    step = status.step if last is None or back else max(status.step, last.step)
    seconds = statistics.median(record.seconds for record in newest) if newest else 0.0
    left = (status.steps - step) * seconds if status.state is RunState.RUNNING and seconds > 0 else None
    return m.RunSummary(
        id=id,
        name=folder.name,
        state=status.state.value,
        step=step,
        steps=status.steps,
        loss=_number(last.loss) if last is not None else None,
        tokens_per_second=_number(last.tokens / seconds) if last is not None and seconds > 0 else None,
        seconds_left=_number(max(left, 0.0)) if left is not None else None,
        cluster=cluster,
        engines=len(status.rank_pids),
        updated=status.updated,
        text=status.text,
        problem=status.unread,
    )


def _number(value: float) -> float | None:
    """Round to seven digits, which is enough for plots; None for NaN and infinity."""
    return float(f"{value:.7g}") if value - value == 0 else None


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    every = -(-len(points) // MOST_POINTS)
    return points[::-1][::every][::-1] if every > 1 else points


def _reported(event: Event) -> m.RunEvent:
    details = event.details
    if (size := len(msgspec.json.encode(details))) > _MOST_DETAILS_BYTES:
        details = {"left_out": f"{size} bytes, which are in the run's events.jsonl"}
    return m.RunEvent(
        kind=event.kind, step=event.step, time=event.time, text=event.text, command=event.command, details=details
    )


def _memory_of(record: StepRecord) -> m.RankMemory:
    places, ledger = record.ledger.by_place(), record.ledger
    return m.RankMemory(
        rank=record.rank,
        step=record.step,
        held=[_in_order(places.get(place, {}).get(name, 0) for name in CATEGORIES) for place in PLACES],
        capacity=_in_order(ledger.capacity_of(place) for place in PLACES),
    )


def _in_order(values: Iterable[float]) -> list[int]:
    return [int(value) for value in values]


assert set(PHASES) < set(m.COLUMNS)
