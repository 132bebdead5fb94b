"""What a rank holds elsewhere than on its device, in records, ledgers, figures and tables."""

from __future__ import annotations

import html
import json
from typing import Any

import pytest
from telemetry_samples import make_folder, make_record

from speedlab.cluster.stage_table import stage_table
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures import figures
from speedlab.telemetry.figures.memory import places_figure
from speedlab.telemetry.figures.steps import anatomy_by_rank_figure, anatomy_figure
from speedlab.telemetry.history import History
from speedlab.telemetry.records import Ledger, StepRecord
from speedlab.telemetry.writer import RecordWriter

GIB = 2**30


def away(**changes: Any) -> Ledger:
    values: dict[str, Any] = {
        "parameters": GIB,
        "capacity_bytes": 16 * GIB,
        "host": {"communication_buffers": GIB // 4},
        "disk": {"master_weights": 2 * GIB, "optimizer_moments": 4 * GIB},
        "host_capacity_bytes": 8 * GIB,
        "disk_capacity_bytes": 60 * GIB,
    }
    return Ledger(**{**values, **changes})


def test_records_carry_places_and_those_of_before_have_none() -> None:
    record = make_record(1, ledger=away(), moved_bytes={"disk read": 10}, phases={"offload": 0.1})
    assert StepRecord.from_json(record.to_json()) == record
    old = json.loads(make_record(1).to_json())
    for name in ("host", "disk", "host_capacity_bytes", "disk_capacity_bytes"):
        del old["ledger"][name]
    del old["moved_bytes"]
    read = StepRecord.from_json(json.dumps(old))
    assert (read.ledger.host, read.ledger.disk, read.moved_bytes) == ({}, {}, {})
    assert list(read.ledger.by_place()) == ["device"]


def test_a_ledger_tells_what_is_where() -> None:
    ledger = away(disk={"optimizer_moments": 4, "master_weights": 2, "gradients": 0})
    assert list(ledger.by_place()) == ["device", "host", "disk"]
    assert list(ledger.by_place()["disk"].items()) == [("master_weights", 2), ("optimizer_moments", 4)]
    assert ledger.by_place()["device"]["parameters"] == GIB
    assert [ledger.capacity_of(place) for place in ("device", "host", "disk")] == [16 * GIB, 8 * GIB, 60 * GIB]
    assert ledger.anywhere("optimizer_moments") == 4
    assert ledger.anywhere("parameters") == GIB


@pytest.mark.parametrize(
    "changes", [{"ledger": {"host": {"gradients": "much"}}}, {"moved_bytes": {"disk read": "much"}}]
)
def test_a_line_with_something_else_than_numbers_is_passed_over(tmp_path, changes) -> None:
    folder = make_folder(tmp_path)
    good = make_record(1, ledger=away(), moved_bytes={"disk read": 5})
    bad = json.loads(make_record(2).to_json())
    bad = {**bad, **changes, "ledger": {**bad["ledger"], **changes.get("ledger", {})}}
    writer = RecordWriter(folder, 0, stream_hz=10)
    writer.write(good)
    writer.close()
    path = folder.path / "records" / "rank-0.jsonl"
    path.write_text(path.read_text() + json.dumps(bad) + "\n")
    feed = Feed(folder)
    feed.poll(files=True)
    feed.close()
    assert feed.records == {0: [good]}


def history(ledgers: list[Ledger], **changes: Any) -> History:
    return History.of({rank: [make_record(1, rank, ledger=each, **changes)] for rank, each in enumerate(ledgers)})


def test_places_are_drawn_only_where_something_lies_there() -> None:
    assert places_figure(history([Ledger(parameters=1)])) is None
    assert places_figure(History()) is None
    assert "places" not in figures(history([Ledger(parameters=1)]))
    assert list(figures(history([away()])))[:2] == ["memory", "places"]


def test_each_place_is_a_bar_of_its_capacity() -> None:
    figure = places_figure(history([away(), away(host={"communication_buffers": GIB})]))
    assert figure is not None
    assert figure["data"][0]["x"] == ["device, of 16.0 GiB", "host, of 8.0 GiB", "disk, of 60.0 GiB"]
    heights = {trace["name"]: trace["y"].tolist() for trace in figure["data"]}
    assert heights == {
        "parameters": [6.25, 0, 0],
        "master weights": [0, 0, pytest.approx(100 * 2 / 60)],
        "optimizer moments": [0, 0, pytest.approx(100 * 4 / 60)],
        "communication buffers": [0, 12.5, 0],
    }
    assert figure["layout"]["yaxis"]["range"] == [0, 25]
    (said,) = (note["text"] for note in figure["layout"]["annotations"])
    assert said == "device 1.0 GiB (rank 0) · host 1.0 GiB (rank 1) · disk 6.0 GiB (rank 0)"


def test_a_place_whose_capacity_nobody_knows_is_full() -> None:
    figure = places_figure(history([away(disk_capacity_bytes=0)]))
    assert figure is not None
    assert figure["data"][0]["x"][2] == "disk, capacity not known"
    assert sum(float(trace["y"][2]) for trace in figure["data"]) == pytest.approx(100)
    assert figure["layout"]["yaxis"]["range"][1] >= 100


def test_waiting_for_places_is_a_phase_only_where_there_was_some() -> None:
    without = history([Ledger()])
    assert "offload" not in [trace["name"] for trace in anatomy_figure(without)["data"]]
    waited = history([Ledger()], phases={"forward": 0.2, "offload": 0.1})
    for figure in (anatomy_figure(waited), anatomy_by_rank_figure(waited)):
        heights = {trace["name"]: float(trace["y"][-1]) for trace in figure["data"]}
        assert heights["offload"] == pytest.approx(100)
        assert heights["other"] == pytest.approx(200)


def test_the_table_of_stages_counts_states_wherever_they_lie(tmp_path) -> None:
    folder = make_folder(tmp_path)
    writer = RecordWriter(folder, 0, stream_hz=10)
    for step in (1, 2):
        writer.write(make_record(step, ledger=away()))
    writer.close()
    feed = Feed(folder)
    feed.poll(files=True)
    table = stage_table(feed)
    feed.close()
    assert table[0]["optimizer"] == 6 * GIB
    assert (table[0]["host_bytes"], table[0]["disk_bytes"]) == (GIB // 4, 6 * GIB)
    assert "on disk" in table.head()
    assert "6.0 GiB" in str(table)
    for shown in (str(table), html.unescape(table._repr_html_())):
        assert "on host: states that lie in the host's memory, and the buffers through which states on disk" in shown
        assert "on disk: states in files" in shown
