"""The step records of one rank: parsed lazily, kept in columns, validated.

- `Columns` keeps some 400 bytes per record instead of about 5,000 bytes as Python objects. The numbers of a record are
  a row of float64. The record's `_Shape` gives their order: the names of its phases, collectives, kernels and places.
  A run has few shapes.
- `RankRecords` is the sequence that readers use. It parses a record file only as far as a caller needs.
- `record_of` parses and checks one line.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec

from speedlab.telemetry.file_tail import Tail
from speedlab.telemetry.records import RECORDS, Ledger, MemoryMark, Span, StepRecord

TIMELINES = 256
"""Number of steps whose timelines, and whose memory marks, stay in memory. The files hold those of earlier steps."""

_WHOLE = ("step", "zero_stage", "tokens")
_REAL = ("time", "loss", "learning_rate", "grad_norm", "loss_scale", "flops", "seconds", "began")
_LEDGER = tuple(name for name in Ledger.__dataclass_fields__ if name not in ("host", "disk"))


class _Shape(NamedTuple):
    """The names in a record, in the order of its row."""

    heldout: bool
    traced: bool
    phases: tuple[str, ...]
    sent_bytes: tuple[str, ...]
    moved_bytes: tuple[str, ...]
    exchange: tuple[str, ...]
    host: tuple[str, ...]
    disk: tuple[str, ...]
    sent_through: tuple[tuple[str, tuple[str, ...]], ...]
    kernels: tuple[tuple[str, tuple[str, ...]], ...]


class Columns:
    """Records of one rank in the order of their steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._values, self._starts = array("d"), array("q")
        self._steps, self._kinds = array("q"), array("i")
        self._shapes: dict[_Shape, int] = {}
        self._by_kind: list[_Shape] = []
        self._timelines: dict[int, list[Span]] = {}
        self._memory: dict[int, list[MemoryMark]] = {}
        self.heldout: list[tuple[int, float]] = []
        """(step, held-out loss), in order."""

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, record: StepRecord) -> None:
        """Append a record. Drop records of this step and later ones: the run restarted from a checkpoint.

        Args:
            record: The record.
        """
        row = array("d", _row_of(record))  # Convert first: a value that is no float64 raises before any change.
        self._cut(record.step)
        if (kind := self._shapes.get(shape := _shape_of(record))) is None:
            kind = self._shapes[shape] = len(self._by_kind)
            self._by_kind.append(shape)
        self._starts.append(len(self._values))
        self._values.extend(row)
        self._kinds.append(kind)
        self._steps.append(record.step)
        if record.heldout_loss is not None:
            self.heldout.append((record.step, record.heldout_loss))
        if record.timeline:
            _keep(self._timelines, record.step, record.timeline)
        if record.memory:
            _keep(self._memory, record.step, record.memory)

    def __getitem__(self, index: int) -> StepRecord:
        """Return a new StepRecord with the values at `index` (0 or more)."""
        shape, step = self._by_kind[self._kinds[index]], self._steps[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._values)
        numbers = iter(self._values[self._starts[index] : stop])
        values: dict[str, Any] = {name: int(next(numbers)) for name in _WHOLE}
        values |= zip(_REAL, numbers)  # noqa: B905 - zip reads the names first, so it takes no extra number.
        if shape.heldout:
            values["heldout_loss"] = next(numbers)
        ledger: dict[str, Any] = {name: int(next(numbers)) for name in _LEDGER}
        ledger |= {place: _whole(getattr(shape, place), numbers) for place in ("host", "disk")}
        return StepRecord(
            **values,
            rank=self._rank,
            traced=shape.traced,
            phases=dict(zip(shape.phases, numbers)),  # noqa: B905
            sent_bytes=_whole(shape.sent_bytes, numbers),
            moved_bytes=_whole(shape.moved_bytes, numbers),
            exchange=dict(zip(shape.exchange, numbers)),  # noqa: B905
            sent_through={name: _whole(links, numbers) for name, links in shape.sent_through},
            kernels={name: dict(zip(uses, numbers)) for name, uses in shape.kernels},  # noqa: B905
            ledger=Ledger(**ledger),
            timeline=self._timelines.get(step, []),
            memory=self._memory.get(step, []),
        )

    def place_of(self, step: int) -> int:
        """Return the index of the first record of `step` or of a later step.

        Args:
            step: The step.
        """
        return bisect_left(self._steps, step)

    def _cut(self, step: int) -> None:
        if not self._steps or self._steps[-1] < step:
            return
        first = self.place_of(step)
        del self._values[self._starts[first] :]
        for column in (self._starts, self._steps, self._kinds):
            del column[first:]
        self.heldout = [point for point in self.heldout if point[0] < step]
        self._timelines = {known: spans for known, spans in self._timelines.items() if known < step}
        self._memory = {known: marks for known, marks in self._memory.items() if known < step}


def _keep(found: dict[int, Any], step: int, value: Any) -> None:
    found[step] = value
    if len(found) > TIMELINES:
        # Dicts keep their order: this is the oldest step.
        del found[next(iter(found))]


def _shape_of(record: StepRecord) -> _Shape:
    return _Shape(
        record.heldout_loss is not None,
        record.traced,
        tuple(record.phases),
        tuple(record.sent_bytes),
        tuple(record.moved_bytes),
        tuple(record.exchange),
        tuple(record.ledger.host),
        tuple(record.ledger.disk),
        _names_of(record.sent_through),
        _names_of(record.kernels),
    )


def _row_of(record: StepRecord) -> chain[float]:
    values, ledger = record.__dict__, record.ledger
    return chain(
        [values[name] for name in _WHOLE],
        [values[name] for name in _REAL],
        () if record.heldout_loss is None else (record.heldout_loss,),
        [ledger.__dict__[name] for name in _LEDGER],
        ledger.host.values(),
        ledger.disk.values(),
        record.phases.values(),
        record.sent_bytes.values(),
        record.moved_bytes.values(),
        record.exchange.values(),
        *(links.values() for links in record.sent_through.values()),
        *(use.values() for use in record.kernels.values()),
    )


def _names_of(costs: Mapping[str, Mapping[str, float]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(parts)) for name, parts in costs.items()) if costs else ()


def _whole(names: tuple[str, ...], numbers: Any) -> dict[str, int]:
    return {name: int(number) for name, number in zip(names, islice(numbers, len(names)), strict=True)}


NEWEST = 32
"""Number of the newest records that are available without reading the whole file."""


def last_recorded(folder: Path, rank: int) -> int | None:
    """Return the last step that a rank has recorded; None if there is none.

    Args:
        folder: The run folder.
        rank: The rank.
    """
    record = last_record(folder, rank)
    return record.step if record is not None else None


def last_record(folder: Path, rank: int) -> StepRecord | None:
    """Return the last record of a rank; None if there is none.

    Args:
        folder: The run folder.
        rank: The rank.
    """
    tail = Tail(folder / "records" / f"rank-{rank}.jsonl")
    tail.skip(1)
    for line in reversed(tail.read()):
        with contextlib.suppress(*NO_RECORD):
            return record_of(line, rank)
    return None


class RankRecords(Sequence[StepRecord]):
    """The records of one rank in the order of their steps; the sequence grows while the run does.

    1. At first, only the end of the file is read: the newest records (`records[-1]`, `records[-20:]`).
    2. Access to other records, or `len`, reads the whole file once into columns.
    3. Access to the last record alone parses one line, however many lines are new.

    A restart from a checkpoint removes the steps after the checkpoint. Safe to use from any thread.
    """

    def __init__(self, path: Path, rank: int, lock: threading.RLock, damaged: Callable[[str], None]) -> None:
        """Open the record file of a rank and skip to its newest records.

        Args:
            path: The record file.
            rank: The rank.
            lock: Lock of the feed.
            damaged: Called with a message for each damaged line.
        """
        self.rank = rank
        self.damaged_lines = 0
        self.changes = 0
        """Counts up with each line taken in, so that readers notice news."""
        self._path, self._lock, self._tell = path, lock, damaged
        self._tail = Tail(path)
        self._columns: Columns | None = None
        self._newest: deque[StepRecord] = deque(maxlen=NEWEST)
        self._lines: deque[bytes] = deque(maxlen=NEWEST)
        """Lines after `_newest` that are not parsed yet."""
        self._last: tuple[bytes, StepRecord] | None = None
        """The last of these lines with its record, if it was parsed alone."""
        self._tail.skip(NEWEST)
        self._earlier = self._tail.position > 0
        """Whether the file has records before those in `_newest` and `_lines`."""

    @property
    def position(self) -> int:
        """Byte offset in the file of the first unread line."""
        return self._tail.position

    def read(self) -> bool:
        """Take in new lines of the file. Return True if there may be new records."""
        lines = self._tail.read()
        if self._tail.restarted:
            self._columns, self.damaged_lines = None if self._columns is None else Columns(self.rank), 0
            self._forget_newest()
            self._earlier = False
            self.changes += 1
        return self._add(lines)

    def take(self, line: bytes) -> bool:
        """Take in a line that starts at `position`. Return True if the line may be a record.

        Args:
            line: The line, with its line end.
        """
        self._tail.position += len(line)
        return self._add([line])

    @property
    def heldout_loss(self) -> float | None:
        """The newest held-out loss; None if there was no evaluation."""
        with self._lock:
            points = self._all().heldout
            return points[-1][1] if points else None

    # ---- as a sequence -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._lock:
            newest = self._at_hand() if self._columns is None else ()  # May set `_earlier`.
            return len(self._all() if self._columns is not None or self._earlier else newest)

    def __bool__(self) -> bool:
        with self._lock:
            if self._read_last() is not None:
                return True
            if self._columns is None and (self._at_hand() or not self._earlier):
                return bool(self._at_hand())
            return bool(self._all())

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        with self._lock:
            if index == -1 and (last := self._read_last()) is not None:
                return last
            if self._columns is None:
                newest, first = self._at_hand(), index.start if isinstance(index, slice) else index
                if not self._earlier or (isinstance(first, int) and -len(newest) <= first < 0):
                    return list(newest)[index] if isinstance(index, slice) else newest[index]
            columns = self._all()
            if isinstance(index, slice):
                return [self._at(columns, place) for place in range(*index.indices(len(columns)))]
            if not -len(columns) <= index < len(columns):
                raise IndexError(f"record {index} of rank {self.rank}, which has {len(columns)}")
            return self._at(columns, index % len(columns))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, RankRecords | list | tuple) else NotImplemented

    __hash__ = None  # As a list's. # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        count = "not read yet" if self._columns is None else f"{len(self._columns):,}"
        return f"<records of rank {self.rank}: {count}>"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _all(self) -> Columns:
        with self._lock:
            if self._columns is None:
                self._at_hand()  # Keep the newest as objects: columns would create them again on each access.
                self.damaged_lines, columns = 0, Columns(self.rank)
                for line in self._tail.before():
                    self._append(columns, line)
                self._columns = columns  # Assign at the end: an interrupt keeps the old state.
            return self._columns

    def _at(self, columns: Columns, place: int) -> StepRecord:
        """Return the record at `place`. Keep the newest as objects, because they are read again and again."""
        following = place - len(columns)
        return self._newest[following] if -following <= len(self._newest) else columns[place]

    def _read_last(self) -> StepRecord | None:
        """Return the last record without parsing others; None if its line is damaged or there is none."""
        if not self._lines:
            return self._newest[-1] if self._newest else None
        line = self._lines[-1]
        if self._last is None or self._last[0] is not line:
            try:
                self._last = line, record_of(line, self.rank)
            except NO_RECORD:
                return None
        return self._last[1]

    def _at_hand(self) -> deque[StepRecord]:
        """Parse the pending lines and return the newest records, without reading the whole file."""
        newest = self._newest
        while self._lines:
            record = self._parse(self._lines[0])
            if record is not None:
                self._keep(record)
            self._lines.popleft()  # Remove the line after its record is kept: an interrupt loses none.
        return newest

    def _keep(self, record: StepRecord) -> None:
        """Append a record to the newest ones; drop those of its step and later steps."""
        newest = self._newest
        while newest and newest[-1].step >= record.step:
            newest.pop()
        self._earlier |= len(newest) == NEWEST
        newest.append(record)

    def _forget_newest(self) -> None:
        self._newest.clear()
        self._lines.clear()
        self._last = None

    def _add(self, lines: Sequence[bytes]) -> bool:
        """Take in the lines that follow. Return True if they may hold a record."""
        self.changes += len(lines)
        if (columns := self._columns) is not None:
            return sum(self._append(columns, line) for line in lines) > 0
        if len(self._lines) + len(lines) > NEWEST:
            self._earlier = True
            self._newest.clear()  # A gap follows: they no longer adjoin the new lines.
        self._lines.extend(lines)
        return bool(lines)

    def _append(self, columns: Columns, line: bytes) -> bool:
        record = self._parse(line)
        if record is not None:
            columns.append(record)
            if columns is self._columns:
                self._keep(record)
        return record is not None

    def _parse(self, line: bytes) -> StepRecord | None:
        if self._last is not None and self._last[0] is line:
            return self._last[1]
        try:
            return record_of(line, self.rank)
        except NO_RECORD as error:
            self.damaged_lines += 1
            self._tell(f"records of rank {self.rank}: a line is damaged: {str(error)[:200]}")
            return None


NO_RECORD = (ValueError, TypeError, AttributeError, RecursionError, OverflowError)
"""Exceptions that a damaged line raises."""


def record_of(line: bytes, rank: int) -> StepRecord:
    """Parse and check one line of a record file.

    Args:
        line: The line.
        rank: The rank whose file holds the line.

    Raises:
        Exception: One of NO_RECORD, if the line is no valid record of this rank.
    """
    try:
        record = RECORDS.decode(line)
    except msgspec.MsgspecError:
        # For example a NaN, which msgspec refuses. json does not check types, so check them here.
        record = StepRecord.from_json(line)
        _check_kinds(record)
    _check_counts(record, rank)
    return record


_OTHER_FIELDS = {"phases", "sent_bytes", "sent_through", "moved_bytes", "exchange", "kernels", "ledger"}
_OTHER_FIELDS |= {"heldout_loss", "traced", "timeline", "memory"}
_NUMBER_FIELDS = tuple(f.name for f in fields(StepRecord) if f.name not in _OTHER_FIELDS)
_NUMBERS = {int, float}
_LARGEST = 2**53
"""Whole numbers up to this value are exact in float64."""


def _check_kinds(record: StepRecord) -> None:
    """Raise TypeError unless all fields have their types: plots and formatting need numbers."""
    values = record.__dict__
    for name in _NUMBER_FIELDS:
        if type(values[name]) not in _NUMBERS:
            raise TypeError(f"{name} is {values[name]!r}, not a number")
    if any(type(count) is not int for count in _counts(record)):
        raise TypeError("steps, tokens or bytes are no whole numbers")
    if record.heldout_loss is not None and type(record.heldout_loss) not in _NUMBERS:
        raise TypeError(f"heldout_loss is {record.heldout_loss!r}, not a number")
    if type(record.traced) is not bool:
        raise TypeError(f"traced is {record.traced!r}, not true or false")
    numbers: list[float] = [value for use in record.kernels.values() for value in use.values()]
    numbers += [*record.phases.values(), *record.exchange.values()]
    for span in record.timeline:
        numbers += span[3:]
        if not isinstance(span.action, str):
            raise TypeError(f"timeline holds the action {span.action!r}, not a text")
    for mark in record.memory:
        numbers.append(mark.seconds)
        if not isinstance(mark.phase, str):
            raise TypeError(f"memory holds the phase {mark.phase!r}, not a text")
    if not {*map(type, numbers)} <= _NUMBERS:
        fields_of_numbers = (
            "phases, sent_bytes, sent_through, moved_bytes, exchange, kernels, ledger, timeline or memory"
        )
        raise TypeError(f"{fields_of_numbers} hold something else than numbers")
    array("d", [*numbers, *(values[name] for name in _NUMBER_FIELDS)])  # OverflowError beyond float64


def _check_counts(record: StepRecord, rank: int) -> None:
    """Raise ValueError unless the record is of this rank and its counts are plausible."""
    if record.rank != rank:
        raise ValueError(f"step {record.step!r} of rank {record.rank!r} in the file of rank {rank}")
    if not sum(map(abs, _counts(record))) < _LARGEST:  # `not <` also refuses NaN.
        raise ValueError("steps, tokens or bytes are no whole numbers that anybody could have counted")


_LEDGER_COUNTS = attrgetter(*(f.name for f in fields(Ledger) if f.name not in ("host", "disk")))


def _counts(record: StepRecord) -> list[int]:
    ledger = record.ledger
    counts = [record.step, record.zero_stage, record.tokens, *_LEDGER_COUNTS(ledger)]
    counts += [*ledger.host.values(), *ledger.disk.values()]
    counts += [*record.sent_bytes.values(), *record.moved_bytes.values()]
    counts += [count for links in record.sent_through.values() for count in links.values()]
    counts += [number for span in record.timeline for number in (span.stage, span.micro_batch)]
    return counts + [mark.bytes for mark in record.memory]
