"""A step as a Chrome trace: one process a rank, one clock, nothing left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from telemetry_samples import make_folder, make_record, pipeline_records

from speedlab import cli
from speedlab.hardware import cpu_devices
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.telemetry.trace import write_trace
from speedlab.telemetry.writer import RecordWriter


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of 20 steps on two pipeline ranks, whose last step only rank 0 has finished."""
    folder = make_folder(tmp_path)
    for rank in range(2):
        with RecordWriter(folder, rank, stream_hz=10) as writer:
            for step in range(1, 21 - rank):
                writer.write(pipeline_records(step)[rank])
    with (folder.path / "records" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"step":20,"rank":1,"ti')
    return folder


def events_of(path: Path, kind: str) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_every_span_of_the_newest_whole_step_is_there_on_one_clock(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert write_trace(folder, path, devices=cpu_devices(2)) == 19
    records = pipeline_records(19)
    spans = events_of(path, "X")
    assert len(spans) == sum(len(record.timeline) for record in records.values())
    forward = [event for event in spans if event["name"] == "forward" and event["args"]["micro-batch"] == 0]
    assert [(event["pid"], event["tid"]) for event in forward] == [(0, 0), (1, 0)]
    assert [event["ts"] for event in forward] == pytest.approx([0, 10_000], abs=1)
    assert [event["dur"] for event in forward] == [10_000, 10_000]
    assert forward[1]["args"] == {"pipeline stage": 1, "micro-batch": 0}
    assert {event["name"] for event in spans if event["tid"] == 1} == {"wait", "reduce"}
    assert next(event for event in spans if event["name"] == "optimizer")["args"] == {}
    names = [event["args"]["name"] for event in events_of(path, "M") if event["name"] == "process_name"]
    assert names == [f"rank {rank} · {cpu_devices(2)[rank].name} · pipeline stage {rank}" for rank in range(2)]


def test_any_earlier_step_can_be_had(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert write_trace(folder, path, 1) == 1
    assert json.loads(path.read_text())["otherData"] == {"step": 1}


def test_a_step_that_was_computed_twice_is_that_of_the_second_time(folder: RunFolder, tmp_path: Path) -> None:
    for rank in range(2):
        with RecordWriter(folder, rank, stream_hz=10) as writer:
            writer.write(pipeline_records(5, micro_batches=2)[rank])
    write_trace(folder, tmp_path / "out.json", 5)
    forward = [event for event in events_of(tmp_path / "out.json", "X") if event["name"] == "forward"]
    assert len(forward) == 4
    assert write_trace(folder, tmp_path / "out.json") == 5


def test_where_there_is_no_timeline_it_is_said_why(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="sample: there is no timeline of step 20; a run records them while"):
        write_trace(folder, tmp_path / "out.json", 20)
    plain = make_folder(tmp_path, "plain")
    with RecordWriter(plain, 0, stream_hz=10) as writer:
        writer.write(make_record(1))
    with pytest.raises(RunFolderError, match="plain: there is no timeline of a step"):
        write_trace(plain, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_lines_that_are_no_records_are_passed_over(folder: RunFolder, tmp_path: Path) -> None:
    step = write_trace(folder, tmp_path / "t.json")
    with open(folder.path / "records" / "rank-0.jsonl", "a") as file:
        file.write('{"step": [9], "rank": 0}\n' + "[" * 50_000 + "\n")
    assert write_trace(folder, tmp_path / "t.json") == step


def test_the_terminal_writes_it_too(folder: RunFolder, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", str(folder.path), "--step", "3", "-o", "three.json"]) == 0
    assert capsys.readouterr().out == "three.json: step 3; open it in chrome://tracing or Perfetto\n"
    assert events_of(tmp_path / "three.json", "X")
    assert cli.main(["trace", str(folder.path), "--step", "77"]) == 2
    assert "there is no timeline of step 77" in capsys.readouterr().err
