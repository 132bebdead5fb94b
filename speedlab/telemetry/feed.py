"""Read the records, events and status of a run, live or after its end."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace
from operator import attrgetter

from speedlab.telemetry.file_tail import Tail
from speedlab.telemetry.record_store import RankRecords
from speedlab.telemetry.records import Event, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError, Status
from speedlab.telemetry.stream import StreamMessage, Subscriber

_STREAM_FRESH_SECONDS = 2.0
_SWEEP_SECONDS = 0.5
_LOOK_AROUND_SECONDS = 1.0
_FEW_RANKS = 16
_FEW_SECONDS, _MANY_SECONDS = 0.3, 2.0


def bars_seconds(ranks: int) -> float:
    """Return how often (seconds) plots of every rank are updated.

    Less often for many ranks: reading all records costs ten times a normal poll, and the plot then shows only the
    minimum, the median and the maximum.

    Args:
        ranks: Number of ranks.
    """
    return _FEW_SECONDS if ranks <= _FEW_RANKS else _MANY_SECONDS


class Feed:
    """All records and events of a run, each once and in the order of the files.

    1. The stream delivers the newest lines with their offset in the file.
    2. If a line starts at the current read position, the feed takes it from the stream. If it starts later, lines were
       missed, and the feed reads them from the file. If it starts earlier, the line is known.
    3. Each poll also reads the files while the stream is silent; otherwise twice a second.
    4. The feed reads the end of a rank's file, and the rest only when a caller needs more than the newest records.
    5. With `poll(leading=True)` it receives only the lowest rank's stream. It reads other ranks' files, and looks for
       new ranks, as often as plots draw their bars.

    Safe to use from any thread.

    Attributes:
        records: Records by rank.
        events: Only grow. A new list replaces them if the file became shorter or a poll was interrupted.
        version: Number of polls that found news, for several readers of one feed.
        problem: The last read error. While the status cannot be read, `status` keeps the old one with `unread` set.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder | str | os.PathLike[str]) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.records: dict[int, RankRecords] = {}
        self.events: list[Event] = []
        self._status = Status()
        self.version = 0
        self.others = 0
        """Counts up when ranks other than the lowest may have news."""
        self.problem = ""
        self._lock = threading.RLock()
        self._damaged_events = 0
        self._event_tail = Tail(self.folder.path / "events.jsonl")
        self._status_path = str(self.folder.path / "status.json")
        self._status_seen: tuple[int, int, int] | None = None
        self._directories = [str(self.folder.path / name) for name in ("records", "stream")]
        self._directories_seen: list[int] = []
        self._subscriber: Subscriber | None = Subscriber(self.folder.path / "stream")
        self._last_message = self._last_sweep = self._last_look = self._last_others = float("-inf")

    def poll(self, *, files: bool = False, leading: bool = False) -> bool:
        """Take in what is new. Takes some 30 µs if there is nothing; never waits.

        Args:
            files: Also read the files, whatever the stream delivers: after the end of a run, this finds everything.
            leading: Read ranks other than the lowest less often, for callers that draw ten times a second.

        Returns:
            True if there was news.
        """
        with self._lock:
            try:
                news = self._poll(time.monotonic(), files, leading)
            except BaseException:
                # An interrupt may have lost lines that were read but not kept: read everything again next time.
                self.records, self.events, self._damaged_events = {}, [], 0
                self.others += 1
                self._event_tail = Tail(self.folder.path / "events.jsonl")
                self._last_look = float("-inf")
                raise
            self.version += news
            return news

    def _poll(self, now: float, files: bool, leading: bool) -> bool:
        # Read the status first: its events are already in their file, so the code below finds them.
        before, news = self._status, self._read_status()
        # After a change of state, all records before it are in the files: read them. A new step alone is no such
        # change.
        files |= news and replace(self._status, step=before.step, updated=before.updated) != before
        others = files or not leading or now - self._last_others >= bars_seconds(len(self.records))
        if others or not self.records:
            news |= self._look_around(now)
        news |= self._drain_stream(now, leading)
        news |= self._read_events()
        quiet = now - self._last_message > _STREAM_FRESH_SECONDS
        if files or quiet or now - self._last_sweep > _SWEEP_SECONDS or (others and leading):
            self._last_sweep = now
            self._last_others = now if others else self._last_others
            self.others += others
            for records in list(self.records.values())[: None if others else 1]:
                news |= records.read()
        return news

    def close(self) -> None:
        """Leave the stream. Records and events stay, and `poll` continues with the files."""
        with self._lock:
            if self._subscriber is not None:
                self._subscriber.close()
                self._subscriber = None

    @property
    def status(self) -> Status:
        """The status of the run. Its `unread` also reports damaged lines."""
        if not (lines := self.damaged_lines):
            return self._status
        what = "1 line" if lines == 1 else f"{lines:,} lines"
        damaged = f"its records and events have {what} that cannot be read and are passed over"
        return replace(self._status, unread=" · ".join(filter(None, (self._status.unread, damaged))))

    @property
    def damaged_lines(self) -> int:
        """Number of damaged lines among those that were parsed."""
        return self._damaged_events + sum(map(_DAMAGED_LINES, self.records.values()))

    @property
    def last(self) -> StepRecord | None:
        """The newest record of the lowest rank."""
        for records in self.records.values():
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
            # Without a stamp, the next poll reads the status again.
            seen, status = None, replace(self._status, unread=f"{error}; its state is the one that was read before")
        self._status_seen = seen
        changed, self._status = status != self._status, status
        return changed

    def _look_around(self, now: float) -> bool:
        """Find new ranks and stream addresses if a directory has changed, and once a second because timestamps are
        coarse.
        """
        modified = [_modified(path) for path in self._directories]
        if modified == self._directories_seen and now - self._last_look < _LOOK_AROUND_SECONDS:
            return False
        self._directories_seen, self._last_look = modified, now
        self._status_seen = None
        news = False
        records = self._directories[0]
        for name in os.listdir(records) if modified[0] else []:
            if (match := re.fullmatch(r"rank-(\d{1,6})\.jsonl", name)) and int(match[1]) not in self.records:
                news |= self._add_rank(int(match[1]))
        if self._subscriber is not None:
            self._subscriber.refresh()
        return news

    def _add_rank(self, rank: int) -> bool:
        path = self.folder.path / "records" / f"rank-{rank}.jsonl"
        found = RankRecords(path, rank, self._lock, self._say_damaged)
        self.records = dict(sorted({**self.records, rank: found}.items()))
        self.others += 1
        return found.read()

    def _drain_stream(self, now: float, leading: bool) -> bool:
        news = False
        if self._subscriber is None:
            return news
        self._subscriber.hear(min(self.records, default=0) if leading else None)
        for message in self._subscriber.receive():
            self._last_message = now
            news |= self._take(message)
        return news

    def _take(self, message: StreamMessage) -> bool:
        source = self._event_tail if message.kind == b"e" else self.records.get(message.rank)
        # The rank is not known yet, or the line was already read from the file.
        if source is None or message.start < source.position:
            return False
        gap = message.start > source.position or not message.line.endswith(b"\n")
        if isinstance(source, RankRecords):
            self.others += message.rank != min(self.records)
            return source.read() if gap else source.take(message.line)
        if gap:
            return self._read_events()
        source.position += len(message.line)
        return self._add_event(message.line)

    def _read_events(self) -> bool:
        lines = self._event_tail.read()
        if self._event_tail.restarted:
            self.events, self._damaged_events = [], 0
        return sum(self._add_event(line) for line in lines) > 0

    def _add_event(self, line: bytes) -> bool:
        try:
            event = Event.from_json(line)
        except (ValueError, TypeError, RecursionError) as error:
            self._damaged_events += 1
            self._say_damaged(f"events: a line is damaged: {str(error)[:200]}")
            return False
        self.events.append(event)
        return True

    def _say_damaged(self, problem: str) -> None:
        self.problem = problem

    def __repr__(self) -> str:
        return f"Feed({self.folder.name!r}: {len(self.records)} ranks, {len(self.events)} events)"


_DAMAGED_LINES = attrgetter("damaged_lines")


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0
