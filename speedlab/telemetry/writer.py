"""Write a rank's records: first to the run folder, then to the stream, and for rank 0 also to a TensorBoard file.

The TensorBoard file needs the package tensorboard, but neither TensorFlow nor torch.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

from speedlab.telemetry.records import CATEGORIES, Event, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.telemetry.stream import LINE_LIMIT_BYTES, Publisher, StreamMessage

_INTERVAL_SECONDS = 0.1
_FLUSH_SECONDS = 2.0


def installed() -> bool:
    """Return whether tensorboard is installed, without importing it."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardFile:
    """One event file: loss, learning rate, gradient norm, tokens/s and memory by category of rank 0.

    tensorboard computes checksums in Python, which takes 0.1 ms per step. Fast steps are therefore sampled at 10 Hz.
    Steps with a held-out loss are always written. The file is flushed every 2 s, at events and at the end.

    Args:
        directory: Folder of the event file.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - generated
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(mode=0o700, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._Event, self._Summary = Event, Summary
        # Use the record framing alone: tensorboard's EventFileWriter imports TensorFlow if that is installed.
        self._file = RecordWriter(open(directory / name, "xb"))  # noqa: SIM115 - closed in close(), lives as long as the run
        self._file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._due = self._flush_due = 0.0

    def add(self, record: StepRecord) -> None:
        """Write a record's scalars, unless the last ones were written less than 0.1 s ago.

        Args:
            record: The record.
        """
        now = time.monotonic()
        if now < self._due and record.heldout_loss is None:
            return
        self._due = now + _INTERVAL_SECONDS
        summary = self._Summary()
        for tag, value in _scalars(record).items():
            summary.value.add(tag=tag, simple_value=value)
        self._file.write(self._Event(wall_time=record.time, step=record.step, summary=summary).SerializeToString())
        if now >= self._flush_due:
            self._flush_due = now + _FLUSH_SECONDS
            self._file.flush()

    def flush(self) -> None:
        """Write buffered scalars to the disk."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _scalars(record: StepRecord) -> dict[str, float]:
    """Return tag -> value; the tags contain the units."""
    scalars = {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/grad_norm": record.grad_norm,
        "speed/tokens_per_second": record.tokens_per_second,
    }
    if record.heldout_loss is not None:
        scalars["train/heldout_loss"] = record.heldout_loss
    for category in CATEGORIES:
        scalars[f"memory_gib/{category}"] = getattr(record.ledger, category) / 2**30
    for place, held in record.ledger.by_place().items():
        if place != "device":
            scalars[f"memory_gib/on_{place}"] = sum(held.values()) / 2**30
    return scalars


_STREAMED_BYTES = 64 * 1024
"""Maximum length of a streamed line. A reader easily takes ten of these per second from each rank."""


class RecordWriter:
    """Writes the records of one rank. Rank 0 also writes the run's events and the TensorBoard file.

    1. A line goes to the file in one unbuffered write, so that a killed rank loses nothing that it wrote.
    2. After that, the line is offered to the stream, at most `stream_hz` times a second (events always). The writer
       never waits for a client.

    For a command, first write its event, then the status that counts the command as done.

    Args:
        folder: The run folder.
        rank: The rank.
        stream_hz: Maximum rate of streamed records, per second.
    """

    def __init__(self, folder: RunFolder | str | os.PathLike[str], rank: int, *, stream_hz: float) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.rank = rank
        with ExitStack() as opened:  # Closes the opened ones if a later one fails.
            path, keep = self.folder.path, opened.enter_context
            self._records = keep(closing(_LineFile(path / "records" / f"rank-{rank}.jsonl")))
            self._events = keep(closing(_LineFile(path / "events.jsonl"))) if rank == 0 else None
            self._stream = keep(closing(Publisher(path / "stream", rank, hz=stream_hz)))
            self._tensorboard = self._open_tensorboard()
            if self._tensorboard is not None:
                keep(closing(self._tensorboard))
            self._close = opened.pop_all().close

    def write(self, record: StepRecord) -> None:
        """Append one step record. A record with a very long timeline is not streamed.

        Args:
            record: The record.

        Raises:
            RunFolderError: The disk cannot take the line.
        """
        line = record.to_json().encode() + b"\n"
        start = self._records.append(line)
        if len(line) <= _STREAMED_BYTES:
            self._stream.offer(StreamMessage(b"r", self.rank, start, line))
        if self._tensorboard is not None:
            self._tensorboard.add(record)

    def event(self, event: Event) -> None:
        """Append one event. Only rank 0 calls this, for all ranks.

        Args:
            event: The event.

        Raises:
            RunFolderError: The disk cannot take the line.
        """
        assert self._events is not None, f"rank {self.rank} wrote an event; rank 0 speaks for all"
        line = event.to_json().encode() + b"\n"
        start = self._events.append(line)
        self._stream.send(StreamMessage(b"e", self.rank, start, line))
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """End the stream and close the files. Further calls do nothing."""
        self._close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_tensorboard(self) -> TensorBoardFile | None:
        if self.rank != 0 or not self.folder.config.telemetry.tensorboard:
            return None

        return TensorBoardFile(self.folder.path / "tensorboard") if installed() else None


def note(folder: RunFolder, event: Event) -> None:
    """Append an event from another process than the ranks, such as the kernel.

    Call this only while no rank advances the run, because rank 0 assumes that it is the only writer.

    Args:
        folder: The run folder.
        event: The event.
    """
    file = _LineFile(folder.path / "events.jsonl")
    try:
        file.append(event.to_json().encode() + b"\n")
    finally:
        file.close()


class _LineFile:
    """A file to which lines are appended. Opening removes a line that a crash has cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end = _cut_unfinished_line(self._descriptor)

    def append(self, line: bytes) -> int:
        """Write a line and return the byte offset at which it starts."""
        if len(line) > LINE_LIMIT_BYTES:
            raise RunFolderError(f"{self._path}: a line of {len(line)} bytes; readers take at most {LINE_LIMIT_BYTES}")
        start = self._end
        try:
            written = os.write(self._descriptor, line)
            # A write may be short.
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            # Keep whole lines only: remove the part that the full disk took.
            os.ftruncate(self._descriptor, start)
            raise RunFolderError(
                f"{self._path}: cannot be written: {error.strerror}; free disk space, then resume"
            ) from error
        self._end = start + len(line)
        return start

    def close(self) -> None:
        os.close(self._descriptor)


def _cut_unfinished_line(descriptor: int) -> int:
    """Truncate the file after its last newline and return the new size."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return end
