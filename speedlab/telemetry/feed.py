"""Feed: what a dashboard or a script reads of a run, live or long after."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

from speedlab.telemetry.folder import RunFolder, RunFolderError, Status
from speedlab.telemetry.records import Event, Ledger, StepRecord
from speedlab.telemetry.stream import LINE_LIMIT_BYTES, Message, Subscriber

_STREAM_FRESH_SECONDS = 2.0
_SWEEP_SECONDS = 0.5
_LOOK_AROUND_SECONDS = 1.0
_TIMELINES = 256
"""Steps whose timelines are kept in memory; those of earlier ones are in the files."""


class Feed:
    """Every record and event of a run, each once and in the order of the files, from its first step on.

    1. The stream brings the newest lines with their place in the file.
    2. A line that starts where this feed has read to is taken as it is; one that starts later shows a gap, which is
       read from the file; an earlier one is known.
    3. The files themselves are looked at in every poll while the stream is silent, and twice a second otherwise.

    `records` and `events` only grow (new lists when a file was replaced by a shorter one, or a poll was interrupted);
    timelines are kept for the newest steps only. `version` counts the polls that found something, for several readers
    of one feed. `damaged_lines` counts lines that are no records, `problem` is the last thing that could not be read.
    Any thread may poll.
    """

    def __init__(self, folder: RunFolder | str | os.PathLike[str]) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.records: dict[int, list[StepRecord]] = {}
        self.events: list[Event] = []
        self.status = Status()
        self.version = 0
        self.damaged_lines = 0
        self.problem = ""
        self._lock = threading.RLock()
        self._tails: dict[int, _Tail] = {}
        self._event_tail = _Tail(self.folder.path / "events.jsonl")
        self._status_path = str(self.folder.path / "status.json")
        self._status_seen: tuple[int, int, int] | None = None
        self._directories = [str(self.folder.path / name) for name in ("records", "stream")]
        self._directories_seen: list[int] = []
        self._subscriber: Subscriber | None = Subscriber(self.folder.path / "stream")
        self._last_message = self._last_sweep = self._last_look = float("-inf")

    def poll(self, *, files: bool = False) -> bool:
        """Take in what is new; True when there was something. Takes some 30 µs when there is not; never waits.

        `files` looks into the files whatever the stream says: after a run has ended, everything is there.
        """
        with self._lock:
            try:
                news = self._poll(time.monotonic(), files)
            except BaseException:
                # An interrupt may have come between reading lines and keeping them: read everything again next time.
                self._tails, self.records, self.events = {}, {}, []
                self._event_tail = _Tail(self.folder.path / "events.jsonl")
                self._last_look = float("-inf")
                raise
            self.version += news
            return news

    def _poll(self, now: float, files: bool) -> bool:
        # The status first: the events it counts are in their file by then, and are read below.
        news = self._read_status()
        files |= news  # A change of status ends something: whatever led to it has been written.
        news |= self._look_around(now)
        news |= self._drain_stream(now)
        news |= self._read_events()
        quiet = now - self._last_message > _STREAM_FRESH_SECONDS
        if files or quiet or now - self._last_sweep > _SWEEP_SECONDS:
            self._last_sweep = now
            for rank in self._tails:
                news |= self._read_records(rank)
        return news

    def close(self) -> None:
        """Leave the stream; records and events stay, and poll() goes on from the files."""
        with self._lock:
            if self._subscriber is not None:
                self._subscriber.close()
                self._subscriber = None

    @property
    def last(self) -> StepRecord | None:
        """The newest record of the lowest rank."""
        for _, records in sorted(self.records.items()):
            if records:
                return records[-1]
        return None

    def _read_status(self) -> bool:
        try:
            found = os.stat(self._status_path)
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if seen == self._status_seen:
                return False
            status = self.folder.read_status()
        except (OSError, RunFolderError) as error:
            self.problem = str(error)
            return False
        self._status_seen = seen
        changed, self.status = status != self.status, status
        return changed

    def _look_around(self, now: float) -> bool:
        """Find new ranks and new addresses: when a directory has changed, and once a second (clocks are coarse)."""
        modified = [_modified(path) for path in self._directories]
        if modified == self._directories_seen and now - self._last_look < _LOOK_AROUND_SECONDS:
            return False
        self._directories_seen, self._last_look = modified, now
        self._status_seen = None
        news = False
        records = self._directories[0]
        for name in os.listdir(records) if modified[0] else []:
            if (match := re.fullmatch(r"rank-(\d{1,6})\.jsonl", name)) and int(match[1]) not in self._tails:
                news |= self._add_rank(int(match[1]))
        if self._subscriber is not None:
            self._subscriber.refresh()
        return news

    def _add_rank(self, rank: int) -> bool:
        self._tails[rank] = _Tail(self.folder.path / "records" / f"rank-{rank}.jsonl")
        self.records[rank] = []
        self.records = dict(sorted(self.records.items()))
        return self._read_records(rank)

    def _drain_stream(self, now: float) -> bool:
        news = False
        for message in self._subscriber.receive() if self._subscriber is not None else ():
            self._last_message = now
            news |= self._take(message)
        return news

    def _take(self, message: Message) -> bool:
        tail = self._event_tail if message.kind == b"e" else self._tails.get(message.rank)
        if tail is None or message.start < tail.position:
            return False
        if message.start > tail.position or not message.line.endswith(b"\n"):
            return self._read_events() if message.kind == b"e" else self._read_records(message.rank)
        tail.position += len(message.line)
        if message.kind == b"e":
            return self._add_event(message.line)
        return self._add_record(message.rank, message.line)

    def _read_events(self) -> bool:
        lines = self._event_tail.read()
        if self._event_tail.restarted:
            self.events = []
        return sum(self._add_event(line) for line in lines) > 0

    def _read_records(self, rank: int) -> bool:
        tail = self._tails[rank]
        lines = tail.read()
        if tail.restarted:
            self.records[rank] = []
        return sum(self._add_record(rank, line) for line in lines) > 0

    def _add_record(self, rank: int, line: bytes) -> bool:
        try:
            record = StepRecord.from_json(line)
            _check_record(record, rank)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._damaged(f"records of rank {rank}", error)
            return False
        records = self.records[rank]
        while records and records[-1].step >= record.step:
            records.pop()  # The run went back to a checkpoint: the steps behind it are computed again.
        records.append(record)
        if len(records) > _TIMELINES and records[-_TIMELINES - 1].timeline:
            records[-_TIMELINES - 1] = replace(records[-_TIMELINES - 1], timeline=[])
        return True

    def _add_event(self, line: bytes) -> bool:
        try:
            event = Event.from_json(line)
            _check_event(event)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._damaged("events", error)
            return False
        self.events.append(event)
        return True

    def _damaged(self, where: str, error: Exception) -> None:
        self.damaged_lines += 1
        self.problem = f"{where}: a line is damaged: {str(error)[:200]}"

    def __repr__(self) -> str:
        count = sum(map(len, self.records.values()))
        return f"Feed({self.folder.name!r}: {count} records of {len(self.records)} ranks, {len(self.events)} events)"


class _Tail:
    """Reads the complete lines of a growing file; what stands behind the last newline is left for the next time."""

    _BUDGET_BYTES = 64 * LINE_LIMIT_BYTES

    def __init__(self, path: Path) -> None:
        self.position = 0
        """Where the first line that was not read starts, bytes."""
        self.restarted = False
        """Whether the last read began at the start again, because the file had become shorter."""
        self._path = str(path)
        self._size_seen = 0
        self._in_long_line = False

    def read(self) -> list[bytes]:
        """Lines that were completed since the last call; of a huge file, at most 64 MiB at once."""
        self.restarted = False
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        if size == self._size_seen or size == self.position:
            return []
        if size < self.position:
            self.position, self.restarted = 0, True
        self._size_seen = size
        lines: list[bytes] = []
        stop = self.position + self._BUDGET_BYTES
        with open(self._path, "rb") as file:
            file.seek(self.position)
            while self.position < stop:
                if not (data := file.read(LINE_LIMIT_BYTES)):
                    break
                end = data.rfind(b"\n") + 1
                if end == 0 and len(data) < LINE_LIMIT_BYTES:
                    break
                lines += self._split(data, end or len(data))
                file.seek(self.position)
            else:
                self._size_seen = -1  # There is more: do not take this size as read.
        return lines

    def _split(self, data: bytes, end: int) -> list[bytes]:
        """The lines of `data[:end]`. A line beyond the limit is passed over; an empty one stands for it."""
        self.position += end
        if data[end - 1 : end] != b"\n":
            self._in_long_line = True
            return []
        lines = data[: end - 1].split(b"\n")
        if self._in_long_line:
            lines[0], self._in_long_line = b"", False
        return lines


_NUMBER_FIELDS = tuple(
    f.name
    for f in fields(StepRecord)
    if f.name not in ("phases", "sent_bytes", "moved_bytes", "kernels", "ledger", "heldout_loss", "traced", "timeline")
)
_NUMBERS = (int, float)


def _check_record(record: StepRecord, rank: int) -> None:
    """Whether a record from a file is what it should be: what is drawn and formatted later must be numbers."""
    values = record.__dict__
    for name in _NUMBER_FIELDS:
        if type(values[name]) not in _NUMBERS:
            raise TypeError(f"{name} is {values[name]!r}, not a number")
    if record.rank != rank or type(record.step) is not int:
        raise ValueError(f"step {record.step!r} of rank {record.rank!r} in the file of rank {rank}")
    if record.heldout_loss is not None and type(record.heldout_loss) not in _NUMBERS:
        raise TypeError(f"heldout_loss is {record.heldout_loss!r}, not a number")
    moved = (record.phases, record.sent_bytes, record.moved_bytes)
    numbers = [value for each in moved for value in each.values()] + _ledger_values(record.ledger)
    for use in record.kernels.values():
        numbers += use.values()
    for span in record.timeline:
        numbers += span[1:]
        if not isinstance(span.action, str):
            raise TypeError(f"timeline holds the action {span.action!r}, not a text")
    if any(type(value) not in _NUMBERS for value in numbers):
        raise TypeError("phases, sent_bytes, moved_bytes, kernels, ledger or timeline hold something else than numbers")


def _check_event(event: Event) -> None:
    right = isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.details, dict)
    if not right or type(event.step) is not int or type(event.time) not in _NUMBERS:
        raise TypeError(f"event {event.kind!r} at step {event.step!r} has fields of the wrong kind")
    if event.command is not None and type(event.command) is not int:
        raise TypeError(f"command is {event.command!r}, not a number")


def _ledger_values(ledger: Ledger) -> list[int]:
    own = [value for name, value in ledger.__dict__.items() if name not in ("host", "disk")]
    return [*own, *ledger.host.values(), *ledger.disk.values()]


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
