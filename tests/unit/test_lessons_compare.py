"""Runs beside each other, and a run whose states move: tables and figures hold what the records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from telemetry_samples import make_event, make_folder, make_record

from speedlab.display.figure_style import PAPER_GRID, Figure, on_paper
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures.lessons import (
    compare_bytes,
    compare_lines,
    compare_losses,
    compare_memory,
    moves_figure,
    runs_table,
)
from speedlab.telemetry.records import Event, Ledger, StepRecord
from speedlab.telemetry.writer import RecordWriter

MIB = 2**20
HERE = Ledger(parameters=4 * MIB, gradients=4 * MIB, optimizer_moments=8 * MIB, activations=100 * MIB)
AWAY = Ledger(
    parameters=4 * MIB,
    communication_buffers=MIB,
    activations=100 * MIB,
    host={"communication_buffers": 2 * MIB},
    disk={"gradients": 4 * MIB, "optimizer_moments": 8 * MIB},
)


def feed(parent: Path, name: str, records: list[StepRecord], events: list[Event] | None = None) -> Feed:
    folder = make_folder(parent, name)
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        for event in [make_event("started", details={"parameters": MIB}), *(events or [])]:
            writer.event(event)
        for record in records:
            writer.write(record)
    found = Feed(folder)
    found.poll(files=True)
    return found


def steps(ledger: Ledger, **changes: Any) -> list[StepRecord]:
    return [make_record(step, ledger=ledger, seconds=step / 10, **changes) for step in (1, 2, 3, 4)]


def drawn(figure: Figure) -> Figure:
    """plotly takes it as it is."""
    go.Figure(figure)
    return figure


def test_a_table_has_places_bytes_a_parameter_and_warm_steps(tmp_path: Path) -> None:
    feeds = {"here": feed(tmp_path, "a", steps(HERE)), "away": feed(tmp_path, "b", steps(AWAY, heldout_loss=2.5))}
    here, away = table = runs_table(feeds)
    assert (here["device"], here["host"], here["disk"]) == (16 * MIB, 0, 0)
    assert (away["device"], away["host"], away["disk"]) == (5 * MIB, 2 * MIB, 12 * MIB)
    assert here["bytes_a_parameter"] == away["bytes_a_parameter"] == 16  # Buffers are no states.
    assert here["step_seconds"] == pytest.approx(0.35)
    assert table.head() == ["", *(f"on {at}" for at in ("device", "host", "disk")), *table.head()[4:]]
    assert [cells[-1] for cells in table.cells()] == ["–", "2.5000"]
    assert "on host" not in runs_table({"here": feeds["here"]}).head()


def test_bars_of_several_runs_hold_what_each_place_holds(tmp_path: Path) -> None:
    feeds = {"here": feed(tmp_path, "a", steps(HERE)), "away": feed(tmp_path, "b", steps(AWAY))}
    *bars, totals = drawn(compare_memory(feeds))["data"]
    runs, places = bars[0]["x"]
    assert list(zip(runs, places, strict=True)) == [(r, p) for r in feeds for p in ("device", "host", "disk")]
    assert [sum(column) for column in zip(*(bar["y"] for bar in bars), strict=True)] == [16, 0, 0, 5, 2, 12]
    assert totals["text"] == ["16.0 MiB", "", "", "5.0 MiB", "2.0 MiB", "12.0 MiB"]
    assert "activations" not in {bar["name"] for bar in bars}


def test_bars_of_bytes_a_parameter_count_states_wherever_they_lie(tmp_path: Path) -> None:
    feeds = {"here": feed(tmp_path, "a", steps(HERE)), "away": feed(tmp_path, "b", steps(AWAY))}
    *bars, totals = drawn(compare_bytes(feeds))["data"]
    assert {bar["name"]: list(bar["y"]) for bar in bars} == {
        "parameters": [4, 4],
        "gradients": [4, 4],
        "optimizer moments": [8, 8],
    }
    assert totals["text"] == ["<b>16.00</b>"] * 2


def test_equal_curves_are_all_seen(tmp_path: Path) -> None:
    feeds = {name: feed(tmp_path, name, steps(HERE, heldout_loss=3.0)) for name in "abc"}
    figure = drawn(compare_losses(feeds))
    curves = [trace for trace in figure["data"] if trace["mode"] == "lines"]
    widths = [trace["line"]["width"] for trace in curves]
    assert [trace["name"] for trace in curves] == list("abc")
    assert widths == sorted(set(widths), reverse=True)
    assert len({trace["line"]["color"] for trace in curves}) == 3
    assert "held-out" in figure["layout"]["title"]["text"]


def test_a_run_without_steps_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'empty' has no step yet"):
        runs_table({"new": feed(tmp_path, "empty", [])})


def test_lanes_show_where_states_lay_at_each_step(tmp_path: Path) -> None:
    moved = [make_record(step, ledger=AWAY if step > 2 else HERE) for step in (1, 2, 3, 4)]
    figure = drawn(moves_figure(feed(tmp_path, "moves", moved, [make_event("reshaped", step=2)])))
    layout, lanes = figure["layout"], {"y": [0.0] * 4, "y2": [0.0] * 4, "y3": [0.0] * 4}
    for trace in figure["data"]:
        lanes[trace["yaxis"]] = [a + b for a, b in zip(lanes[trace["yaxis"]], trace["y"], strict=True)]
    assert lanes == {"y": [16, 16, 5, 5], "y2": [0, 0, 2, 2], "y3": [0, 0, 12, 12]}
    assert [layout[axis]["title"]["text"] for axis in ("yaxis", "yaxis2", "yaxis3")] == [
        f"{place}, MiB" for place in ("device", "host", "disk")
    ]
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(2.5, 2.5)]
    shown = [trace["name"] for trace in figure["data"] if trace["showlegend"]]
    assert len(shown) == len(set(shown)) == 4
    still = drawn(moves_figure(feed(tmp_path, "still", steps(HERE))))
    assert "yaxis2" not in still["layout"]


def test_on_paper_every_axis_has_a_grid(tmp_path: Path) -> None:
    figure = moves_figure(feed(tmp_path, "a", steps(AWAY)))
    paper = drawn(on_paper(figure))["layout"]
    assert {paper[axis]["gridcolor"] for axis in ("xaxis", "yaxis", "yaxis3")} == {PAPER_GRID}
    assert paper["paper_bgcolor"] == "white"
    assert "gridcolor" not in figure["layout"]["xaxis"]  # What was given stays as it was.


def test_lines_of_one_name_have_its_points_and_places_have_their_numbers() -> None:
    curves = {"dense": [(1024, 0.1), (4096, 1.6)], "sparse": [(1024, 0.1), (4096, 0.4)]}
    figure = drawn(compare_lines(curves, title="a step", across="tokens", unit="s", log=True))
    assert [trace["name"] for trace in figure["data"]] == ["dense", "sparse"]
    assert [list(trace["x"]) for trace in figure["data"]] == [[1024, 4096]] * 2
    assert list(figure["data"][0]["y"]) == pytest.approx([0.1, 1.6])
    assert figure["data"][0]["line"]["width"] > figure["data"][1]["line"]["width"]
    assert figure["layout"]["xaxis"]["ticktext"] == ["1,024", "4,096"]
    assert {figure["layout"][axis]["type"] for axis in ("xaxis", "yaxis")} == {"log"}
    plain = drawn(compare_lines(curves, title="a step", across="tokens", unit="s"))
    assert "type" not in plain["layout"]["yaxis"]
