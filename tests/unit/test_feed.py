"""Feed: every record once and in order, from files that are written, cut short, damaged or replaced meanwhile."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from telemetry_samples import eventually, make_event, make_folder, make_record

from speedlab.telemetry import record_store
from speedlab.telemetry.feed import Feed, bars_seconds
from speedlab.telemetry.figures import header
from speedlab.telemetry.history import History
from speedlab.telemetry.record_store import NEWEST, RankRecords
from speedlab.telemetry.records import RECORDS, RunState, Span
from speedlab.telemetry.run_folder import Status
from speedlab.telemetry.writer import RecordWriter


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def append(folder, rank: int, data: bytes) -> None:
    with open(folder.path / "records" / f"rank-{rank}.jsonl", "ab") as file:
        file.write(data)


def line(step: int, rank: int = 0) -> bytes:
    return make_record(step, rank).to_json().encode() + b"\n"


def steps(feed: Feed, rank: int = 0) -> list[int]:
    return [record.step for record in feed.records.get(rank, [])]


def test_history_of_a_run_that_is_over_comes_with_the_first_poll(folder):
    with RecordWriter(folder, 0, stream_hz=10) as first, RecordWriter(folder, 1, stream_hz=10) as second:
        for step in range(1, 301):
            first.write(make_record(step))
            second.write(make_record(step, rank=1))
        first.event(make_event("finished", 300))
    folder.write_status(Status(state=RunState.FINISHED, step=300, steps=300))
    feed = Feed(folder.path)
    assert feed.poll() is True
    assert steps(feed, 0) == steps(feed, 1) == list(range(1, 301))
    assert feed.records[1][0] == make_record(1, rank=1)
    assert feed.events == [make_event("finished", 300)]
    assert feed.status.state is RunState.FINISHED
    assert feed.last == make_record(300)
    assert feed.poll() is False
    feed.close()


def test_a_cut_line_waits_for_its_end(folder):
    feed = Feed(folder)
    append(folder, 0, line(1) + line(2)[:30])
    feed.poll()
    assert steps(feed) == [1]
    assert feed.poll() is False
    append(folder, 0, line(2)[30:] + line(3))
    assert feed.poll() is True
    assert steps(feed) == [1, 2, 3]
    assert feed.damaged_lines == 0


def test_a_cut_line_that_the_next_writer_removed_is_never_seen(folder):
    append(folder, 0, line(1) + line(2)[:40])
    feed = Feed(folder)
    feed.poll()
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        writer.write(make_record(2))
        eventually(lambda: feed.poll() and steps(feed) == [1, 2])
    assert feed.damaged_lines == 0
    feed.close()


ONE_LINE = "its records and events have 1 line that cannot be read and are passed over"


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"{}\n",
        b"[1, 2]\n",
        b"\xff\xfe\n",
        b"[" * 50_000 + b"\n",
        json.dumps({**json.loads(line(9)), "tokens": float("nan")}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "step": 10**30}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "traced": 2}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "timeline": [["F", 10**400, 0, 0.0, 1.0]]}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "loss": "<script>"}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "phases": {"forward": "<b>"}}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "ledger": {"parameters": None}}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "ledger": {"parameters": 3.7}}).encode() + b"\n",
        json.dumps({**json.loads(line(9)), "step": True}).encode() + b"\n",
        line(9, rank=5),
        b"x" * (3 * 2**20) + b"\n",
    ],
)
def test_a_damaged_line_is_counted_and_the_next_ones_are_read(folder, bad):
    append(folder, 0, line(1) + bad + line(2))
    feed = Feed(folder)
    feed.poll()
    feed.poll()
    assert steps(feed) == [1, 2]
    assert feed.damaged_lines == 1
    assert feed.status.reported == ONE_LINE
    assert "rank 0" in feed.problem


def test_what_a_later_version_tells_besides_is_passed_over(folder):
    written = json.loads(line(1))
    written |= {"unknown": 1, "ledger": {**written["ledger"], "unknown": 1}}
    append(folder, 0, json.dumps(written).encode() + b"\n")
    event = {**json.loads(make_event("paused", 3).to_json()), "unknown": 1}
    (folder.path / "events.jsonl").write_text(json.dumps(event) + "\n")
    feed = Feed(folder)
    feed.poll()
    assert list(feed.records[0]) == [make_record(1)]
    assert feed.events == [make_event("paused", 3)]
    assert feed.damaged_lines == 0


def lines_read(monkeypatch) -> list[bytes]:
    """Those of which a record is made from now on."""
    read: list[bytes] = []
    decode = RECORDS.decode
    counted = SimpleNamespace(decode=lambda text: (read.append(text), decode(text))[1])
    monkeypatch.setattr(record_store, "RECORDS", counted)
    return read


def test_of_a_rank_the_newest_records_are_read_and_the_others_when_somebody_asks(folder, monkeypatch):
    append(folder, 5, b"".join(line(step, 5) for step in range(1, 501)))
    read = lines_read(monkeypatch)
    feed = Feed(folder)
    feed.poll()
    assert read == []
    records = feed.records[5]
    assert records
    assert [record.step for record in records[-NEWEST:]] == list(range(501 - NEWEST, 501))
    append(folder, 5, line(501, 5))
    feed.poll(files=True)
    assert records[-1].step == 501
    assert len(read) == NEWEST + 1
    assert [record.step for record in records] == list(range(1, 502))
    assert len(read) == NEWEST + 1 + 501
    assert records[250] == make_record(251, 5)
    append(folder, 5, line(502, 5))
    feed.poll(files=True)
    assert len(records) == 502
    assert len(read) == NEWEST + 1 + 501 + 1


def test_who_draws_the_leading_ranks_steps_looks_at_others_less_often(folder, monkeypatch):
    for rank in range(3):
        append(folder, rank, line(1, rank))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    feed, history = Feed(folder), History()

    def newest(status: Status | None = None, *, leading: bool = True) -> list[int]:
        if status is not None:
            folder.write_status(status)
        feed.poll(leading=leading)
        history.update(feed.records, feed.events)
        assert {rank: records[-1] for rank, records in feed.records.items()} == history.latest
        return [record.step for record in history.latest.values()]

    assert newest(Status(state=RunState.RUNNING, step=1)) == [1, 1, 1]
    for rank in range(3):
        append(folder, rank, line(2, rank))
    now += 0.1
    assert newest(Status(state=RunState.RUNNING, step=2)) == [2, 1, 1]  # The status has nothing but another step.
    now += 1.01 * bars_seconds(3)  # Sums of floats are rounded.
    assert newest() == [2, 2, 2]
    for rank in range(3):
        append(folder, rank, line(3, rank))
    assert newest(Status(state=RunState.PAUSED, step=2)) == [3, 3, 3]
    append(folder, 2, line(4, 2))
    assert newest(leading=False) == [3, 3, 4]
    append(folder, 3, line(4, 3))
    later = time.time_ns() + 10**9  # The clock of files is coarse: the folder might not seem to have changed.
    os.utime(folder.path / "records", ns=(later, later))
    assert newest() == [3, 3, 4]
    now += 1.01 * bars_seconds(3)  # Sums of floats are rounded.
    assert newest() == [3, 3, 4, 4]
    fresh = History()
    fresh.update({}, [make_event("started", 0)], leading=True)  # Events come before the first record.
    assert (len(fresh.events), fresh.latest) == (1, {})


def test_who_asks_for_the_last_record_alone_has_one_line_read(folder, monkeypatch):
    append(folder, 1, b"".join(line(step, 1) for step in range(1, 41)))
    feed = Feed(folder)
    feed.poll()
    read = lines_read(monkeypatch)
    records = feed.records[1]
    assert (bool(records), records[-1].step, records[-1].step, len(read)) == (True, 40, 40, 1)
    append(folder, 1, line(41, 1) + b"{}\n")
    feed.poll(files=True)
    assert records[-1].step == 41  # The last line is none: the one before it speaks.
    assert [record.step for record in records[-3:]] == [39, 40, 41]
    assert records.damaged_lines == 1


@pytest.mark.parametrize("asked", [False, True])
def test_records_are_those_that_count_however_they_came_and_whenever_somebody_asks(folder, asked):
    """Steps that go on, go back to a checkpoint, lines that are damaged, a file that begins again."""
    random_numbers = random.Random(1)
    feed, model, step = Feed(folder), [], 0
    for turn in range(400):
        step = max(1, step - random_numbers.randrange(40)) if random_numbers.random() < 0.05 else step + 1
        if random_numbers.random() < 0.005:
            (folder.path / "records" / "rank-0.jsonl").write_bytes(b"")
            feed.poll(files=True)
            model = []
        if random_numbers.random() < 0.05:
            append(folder, 0, b"{}\n")
        append(folder, 0, line(step))
        model = [known for known in model if known < step] + [step]
        feed.poll(files=True)
        if 0 not in feed.records:
            eventually(lambda: feed.poll() or 0 in feed.records)
        newest = feed.records[0][-3:]
        if asked or turn > 300:
            assert steps(feed) == model
        # Of what is damaged or was computed again, the last lines may hold less than so many records.
        assert [record.step for record in newest] == model[-len(newest) :]
        assert feed.records[0][-1].step == model[-1]


def test_damaged_events_and_status_are_reported_and_the_last_good_status_stays(folder):
    feed = Feed(folder)
    feed.poll()
    good = make_event("paused", 3).to_json().encode()
    (folder.path / "events.jsonl").write_bytes(b'{"kind": 1, "step": 2, "time": 3}\n' + good + b"\n")
    folder.write_status(Status(state=RunState.STARTING, text="its engines come back"))
    feed.poll()
    (folder.path / "status.json").write_text("{}")
    feed.poll()
    assert [event.kind for event in feed.events] == ["paused"]
    assert feed.damaged_lines == 1
    assert feed.status.state is RunState.STARTING
    assert not feed.poll()
    assert "status.json" in feed.problem
    why = "is not the status of a run: '' is not a valid RunState; its state is the one that was read before"
    assert feed.status.text == "its engines come back"
    assert feed.status.unread.endswith(f"{why} · {ONE_LINE}")
    note = header(History.of(feed.records, feed.events), name="a", status=feed.status).note
    assert note == f"its engines come back · {folder.path / 'status.json'}: {why} · {ONE_LINE}"
    folder.write_status(replace(feed.status, state=RunState.PAUSED, step=3, text=""))
    assert "unread" not in (folder.path / "status.json").read_text()
    assert feed.poll()
    assert (feed.status.state, feed.status.reported) == (RunState.PAUSED, ONE_LINE)


def test_what_cannot_be_read_is_named(folder):
    (folder.path / "events.jsonl").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        Feed(folder).poll()
    assert caught.value.filename == str(folder.path / "events.jsonl")


def test_a_file_replaced_by_a_shorter_one_is_read_anew(folder):
    append(folder, 0, line(1) + line(2) + line(3))
    feed = Feed(folder)
    feed.poll()
    (folder.path / "records" / "rank-0.jsonl").write_bytes(line(7))
    eventually(lambda: feed.poll() or steps(feed) == [7])
    assert steps(feed) == [7]


def test_an_interrupt_in_the_middle_of_a_poll_loses_nothing(folder, monkeypatch):
    append(folder, 0, line(1) + line(2))
    feed = Feed(folder)
    feed.poll()
    append(folder, 0, line(3))
    monkeypatch.setattr(RankRecords, "_add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        feed.poll()
    monkeypatch.undo()
    feed.poll()
    assert steps(feed) == [1, 2, 3]


def test_lines_that_grow_at_any_pace_arrive_once_and_in_order(folder):
    random_bytes = random.Random(0)
    data = b"".join(line(step) for step in range(1, 200))
    feed = Feed(folder)
    position = 0
    while position < len(data):
        size = random_bytes.choice([1, 10, 500, 3000])
        append(folder, 0, data[position : position + size])
        position += size
        feed.poll()
    assert steps(feed) == list(range(1, 200))


def test_new_ranks_and_status_changes_are_noticed(folder):
    feed = Feed(folder)
    feed.poll()
    append(folder, 3, line(1, rank=3))
    eventually(lambda: feed.poll() or 3 in feed.records)
    append(folder, 0, line(1))
    eventually(lambda: feed.poll() or 0 in feed.records)
    assert list(feed.records) == [0, 3]
    version = feed.version
    folder.write_status(Status(state=RunState.PAUSED, step=1, command=2))
    assert feed.poll() is True
    assert feed.version == version + 1
    assert (feed.status.state, feed.status.command) == (RunState.PAUSED, 2)


def test_timelines_stay_for_the_newest_steps_and_huge_ones_come_from_the_file(folder):
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        feed = Feed(folder)
        feed.poll()
        for step in range(1, 301):
            writer.write(make_record(step, timeline=[Span("F", 0, 0, 0.0, 0.1)]))
        writer.write(make_record(301, timeline=[Span("F", 0, i, float(i), 0.1) for i in range(5000)]))
        eventually(lambda: feed.poll() and feed.records.get(0) and feed.records[0][-1].step == 301)
    kept = [record.step for record in feed.records[0] if record.timeline]
    assert kept == list(range(301 - 256 + 1, 302))
    assert len(feed.records[0][-1].timeline) == 5000
    feed.close()


def test_polling_for_nothing_asks_for_sizes_and_opens_no_file(folder, monkeypatch):
    for rank in range(4):
        append(folder, rank, line(1, rank))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)  # Once a second it looks for new files.
    feed = Feed(folder)
    for _ in range(2):  # The second one reads the status again, as behind every look for new files.
        feed.poll()
    asked: list[str] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: (asked.append(str(path)), stat(path, **options))[1])
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("a file was opened"))
    for _ in range(100):
        assert not feed.poll()
    monkeypatch.undo()
    # Two folders, the status, the events, and the records of each rank.
    assert len(asked) <= 100 * (2 + 2 + 4)
    feed.close()


def test_a_thread_that_polls_while_the_process_ends_finds_its_socket(folder):
    code = f"""
import atexit, threading, time

def look():
    before = len(polls)
    time.sleep(0.2)
    print(thread.is_alive(), len(polls) > before)

atexit.register(look)  # The first of all, so it is called last.
from speedlab.telemetry.feed import Feed, bars_seconds
feed, polls = Feed({str(folder.path)!r}), []

def work():
    while True:
        polls.append(feed.poll())
        time.sleep(0.001)

thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


@pytest.mark.parametrize("looks", [False, True])
def test_the_number_of_records_is_right_whoever_has_asked_before(folder, looks):
    feed = Feed(folder)
    for step in range(1, 2 * NEWEST + 6):
        append(folder, 0, line(step))
        feed.poll(files=True)
        if looks and 0 in feed.records:
            assert feed.records[0][-1].step == step
        if step > NEWEST - 2:
            eventually(lambda: feed.poll() or 0 in feed.records)
            assert len(feed.records[0]) == step


def test_a_number_beyond_all_floats_is_damage_and_no_more(folder):
    append(folder, 0, line(1))
    feed = Feed(folder)
    feed.poll()
    assert len(feed.records[0]) == 1
    append(folder, 0, json.dumps({**json.loads(line(2)), "flops": 10**400}).encode() + b"\n" + line(3))
    feed.poll(files=True)
    assert steps(feed) == [1, 3]
    assert feed.damaged_lines == 1
