"""RecordWriter: whole lines in the files whatever happens, and TensorBoard's file beside them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from telemetry_samples import make_event, make_folder, make_record

from speedlab.telemetry.records import MOST_SPANS, Event, Span, StepRecord
from speedlab.telemetry.run_folder import RunFolderError
from speedlab.telemetry.writer import RecordWriter, _LineFile


def lines_of(path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_records_and_events_are_lines_that_read_back_at_once(tmp_path):
    folder = make_folder(tmp_path)
    records = [make_record(1, rank=1), make_record(2, rank=1, heldout_loss=6.5, loss=float("nan"))]
    with RecordWriter(folder, 1, stream_hz=10) as other, RecordWriter(folder.path, 0, stream_hz=10) as first:
        for record in records:
            other.write(record)
        first.event(make_event("reshaped", 2, command=4, details={"zero": 3}))
        # Read before close: nothing is held in a buffer that a crash would lose.
        lines = lines_of(folder.path / "records" / "rank-1.jsonl")
        events = [Event.from_json(line) for line in lines_of(folder.path / "events.jsonl")]
    assert StepRecord.from_json(lines[0]) == records[0]
    assert StepRecord.from_json(lines[1]).heldout_loss == 6.5
    assert events == [make_event("reshaped", 2, command=4, details={"zero": 3})]
    assert stat.S_IMODE((folder.path / "records" / "rank-1.jsonl").stat().st_mode) == 0o600


def test_a_timeline_is_written_to_the_microsecond_and_of_very_many_spans_the_longest(tmp_path):
    spans = [Span("F", 0, i, i / 3, (1 + i % 7) / 3e3) for i in range(MOST_SPANS + 5000)]
    folder = make_folder(tmp_path)
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        writer.write(make_record(1, timeline=spans[:2], began=12.5))
        writer.write(make_record(2, timeline=spans))
        small, huge = map(StepRecord.from_json, lines_of(folder.path / "records" / "rank-0.jsonl"))
    assert small.timeline == [Span("F", 0, 0, 0.0, 0.000333), Span("F", 0, 1, 0.333333, 0.000667)]
    assert small.began == 12.5
    assert len(huge.timeline) == MOST_SPANS
    assert [span.start for span in huge.timeline] == sorted(span.start for span in huge.timeline)
    dropped = {span.micro_batch for span in spans} - {span.micro_batch for span in huge.timeline}
    assert max(spans[i].seconds for i in dropped) <= min(span.seconds for span in huge.timeline) + 1e-6


def test_only_rank_0_writes_events(tmp_path):
    with RecordWriter(make_folder(tmp_path), 1, stream_hz=10) as writer, pytest.raises(AssertionError, match="rank 1"):
        writer.event(make_event("paused"))


@pytest.mark.parametrize("cut", [1, 100, 70_000])
def test_a_line_that_a_crash_cut_short_is_removed_before_the_next(tmp_path, cut):
    folder = make_folder(tmp_path)
    path = folder.path / "records" / "rank-0.jsonl"
    whole = make_record(1).to_json().encode() + b"\n"
    path.write_bytes(whole + b"x" * cut)
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        assert path.read_bytes() == whole
        writer.write(make_record(2))
    assert [StepRecord.from_json(line).step for line in lines_of(path)] == [1, 2]


def test_a_file_that_is_one_cut_line_becomes_empty(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 200_000)
    _LineFile(path).close()
    assert path.read_bytes() == b""


def test_a_full_disk_leaves_whole_lines_and_says_what_to_do(tmp_path, monkeypatch):
    file = _LineFile(tmp_path / "lines")
    file.append(b"first\n")
    real_write, calls = os.write, []

    def nearly_full(descriptor, data):
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(RunFolderError, match="No space left on device; free disk space"):
        file.append(b"second\n")
    monkeypatch.undo()
    assert (tmp_path / "lines").read_bytes() == b"first\n"
    assert file.append(b"third\n") == len(b"first\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"first\nthird\n"


def test_a_line_longer_than_readers_take_is_refused(tmp_path):
    with RecordWriter(make_folder(tmp_path), 0, stream_hz=10) as writer, pytest.raises(RunFolderError, match="at most"):
        writer.event(make_event("warning", text="x" * 2**20))


def test_a_record_costs_one_write_and_no_wait_for_the_disk(tmp_path, monkeypatch):
    with RecordWriter(make_folder(tmp_path), 0, stream_hz=10) as writer:
        writes: list[int] = []
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: (writes.append(len(data)), write(file, data))[1])
        for name in ("fsync", "fdatasync", "open", "replace"):
            monkeypatch.setattr(os, name, lambda *_, name=name: pytest.fail(f"os.{name} was called"))
        for step in range(500):
            writer.write(make_record(step))
        assert len(writes) == 500
        monkeypatch.undo()


def test_tensorboard_gets_the_scalars_of_rank_0_without_tensorflow_or_torch(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder = make_folder(tmp_path, telemetry={"tensorboard": True})
    with RecordWriter(folder, 0, stream_hz=10) as first, RecordWriter(folder, 1, stream_hz=10) as second:
        first.write(make_record(1))
        first.write(make_record(2))  # Within 0.1 s of the first: sampled away.
        first.write(make_record(3, heldout_loss=6.25))
        second.write(make_record(1, rank=1))
    (path,) = (folder.path / "tensorboard").iterdir()
    events = list(EventFileLoader(str(path)).Load())
    scalars = {
        (event.step, value.tag): value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
        for event in events
        for value in event.summary.value
    }
    assert {step for step, _ in scalars} == {1, 3}
    assert scalars[1, "train/loss"] == pytest.approx(7.99)
    assert scalars[3, "train/heldout_loss"] == 6.25
    assert scalars[1, "speed/tokens_per_second"] == 8192
    assert scalars[1, "memory_gib/optimizer_moments"] == pytest.approx(200 / 2**30)


def test_closing_twice_is_harmless_and_takes_the_address_away(tmp_path):
    folder = make_folder(tmp_path)
    writer = RecordWriter(folder, 0, stream_hz=10)
    assert (folder.path / "stream" / "rank-0.json").exists()
    writer.close()
    writer.close()
    assert os.listdir(folder.path / "stream") == []


OPENED_ON_A_FULL_DISK = """
import errno, gc, os, sys, threading
from speedlab.telemetry import stream
from speedlab.telemetry.writer import RecordWriter

def full(*args, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

write, stream.write_atomically = stream.write_atomically, full
seen = []
for _ in range(4):
    try:
        RecordWriter(sys.argv[1], 0, stream_hz=10)
        sys.exit("it could be opened")
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    gc.collect()
    seen.append((os.listdir("/proc/self/fd"), threading.active_count()))
assert seen[1:] == seen[:1] * 3, seen
stream.write_atomically = write
RecordWriter(sys.argv[1], 0, stream_hz=10).close()
"""


def test_a_writer_that_cannot_be_opened_leaves_nothing_behind(tmp_path):
    """A full disk: every attempt to resume opens one anew. In a process of its own, where nobody else opens files."""
    command = [sys.executable, "-c", OPENED_ON_A_FULL_DISK, str(make_folder(tmp_path).path)]
    reported = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert reported.returncode == 0, reported.stderr
