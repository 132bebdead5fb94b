"""A run as it is read for all pages together: one feed, read where it was left off."""

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
"""Pages that ask at the same moment are answered from one look."""
_SPEED_STEPS = 20
_Drawn = TypeVar("_Drawn")
_LAST = ("step", "smoothed_loss", "learning_rate", "grad_norm")


class Reader:
    """Any thread may ask; one at a time is answered."""

    def __init__(self, id: str, folder: RunFolder) -> None:
        """Raises RunFolderError for a folder that cannot be read."""
        self.id, self.folder = id, folder
        self._feed = Feed(folder)
        self._series: dict[int, tuple[Series, int]] = {}
        """By rank, with the generation of its steps."""
        self._history = History()
        self._replaced = 0
        self._known_events = self._drawn_version = self._drawn_others = -1
        self._devices: Sequence[Device] = ()
        self._lock = threading.RLock()
        self._looked = float("-inf")

    def close(self) -> None:
        self._feed.close()

    @property
    def ranks(self) -> list[int]:
        return sorted(self._feed.records)

    @property
    def token(self) -> str:
        """Of the cluster whose engines hold it, or have held it."""
        return self._feed.status.token

    def look(self) -> int:
        """Take in what is new; a number that changes when there was something."""
        with self._lock:
            if time.monotonic() - self._looked > _FRESH_SECONDS:
                self._feed.poll(leading=True)
                self._looked = time.monotonic()
            return self._feed.version

    def summary(self, cluster: str = "") -> m.RunSummary:
        """`cluster`: id of the one that holds it."""
        with self._lock:
            lead = next((records for records in self._feed.records.values() if records), None)
            newest = list(lead[-_SPEED_STEPS:]) if lead is not None else []
            return summary_of(self.id, self.folder, self._feed.status, newest, cluster)

    def records(self, watch: m.Watch, rank: int | None = None) -> m.Records:
        """Of `rank`, or the lowest. Raises UnknownError for one without records."""
        with self._lock:
            rank = min(self._feed.records, default=0) if rank is None else rank
            if rank not in self._feed.records and (rank > 0 or self._feed.records):
                told = ", ".join(map(str, self.ranks)) or "none yet"
                raise UnknownError(f"rank {rank} of run {self.folder.name!r} has no records; ranks that have: {told}")
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
        """Those from number `after` on, at most MOST_EVENTS of them, the oldest first."""
        with self._lock:
            known = self._feed.events
            keep = after if 0 <= after <= len(known) else 0
            chosen = [_told(event) for event in known[keep : keep + MOST_EVENTS]]
            return m.Events(run=self.id, keep=keep, total=len(known), events=chosen)

    def memory(self) -> list[m.RankMemory]:
        """Of each rank that the run has now, at its last step."""
        with self._lock:
            size = len(self._feed.status.rank_pids) or len(self._feed.records)
            held = {rank: records[-1] for rank, records in self._feed.records.items() if rank < size and records}
            return [_memory_of(record) for record in held.values()]

    def tensors(self, rank: int, category: str, place: str) -> m.Tensors:
        """What is in a segment of the memory bars. Raises QuestionError for one that is none."""
        with self._lock:
            newest = {rank: records[-1] for rank, records in self._feed.records.items() if records}
        try:
            told = tensors_in(self.folder, newest, rank=rank, category=category, place=place)
        except SegmentError as error:
            raise QuestionError(str(error)) from None
        return msgspec.convert(told, m.Tensors)

    def draw(self, draw: Callable[[History, int, Status, Sequence[Device]], _Drawn]) -> _Drawn:
        """What `draw` makes of (everything plots are drawn from, how often steps were replaced, status, devices), with
        nobody changing it meanwhile."""
        with self._lock:
            feed = self._feed
            if len(feed.events) != self._known_events:  # They tell of a start and of changes of shape.
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
    """Of the cluster with this token; () where it runs no more."""
    states = (state for _, state in known_clusters() if isinstance(state, ClusterState) and state.running)
    return next((state.devices for state in states if token and state.token == token), ())


def columns_of(series: Series, size: int, *, closed: bool, first: int = 0) -> dict[str, list[float | None]]:
    """Buckets of `size` steps from number `first` on: the last value of what stands, the mean of what is a rate or a
    time, the lowest and the highest loss, so that a spike is never averaged away."""
    columns: dict[str, np.ndarray] = {}
    for name in m.COLUMNS:
        if name in ("loss_low", "loss_high"):
            pick = np.fmin if name == "loss_low" else np.fmax  # They pass over what is no number.
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
    """`newest`: the last records of one rank."""
    last = newest[-1] if newest else None
    # A run that went back to a checkpoint has a status that is newer than its last record.
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
    """To seven digits, which no eye tells from more; None for what is no number."""
    return float(f"{value:.7g}") if value - value == 0 else None


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    every = -(-len(points) // MOST_POINTS)
    return points[::-1][::every][::-1] if every > 1 else points


def _told(event: Event) -> m.RunEvent:
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
