"""A pipeline's timeline: which ranks, on which clock, how much of it is idle, and what is drawn."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from telemetry_samples import make_folder, make_record, pipeline_records

from speedlab.display.figure_style import PHASE_COLOURS, plain
from speedlab.hardware import cpu_devices
from speedlab.telemetry.figures import History, figures
from speedlab.telemetry.figures.overview import overview
from speedlab.telemetry.figures.pipeline import MOST_BARS, MOST_LANES, pipeline_figure
from speedlab.telemetry.records import Span
from speedlab.telemetry.report import write_report
from speedlab.telemetry.trace import PipelineTimeline, timeline_of
from speedlab.telemetry.writer import RecordWriter


def timeline(pp: int = 2, micro_batches: int = 4, step: int = 7) -> PipelineTimeline:
    found = timeline_of({rank: [record] for rank, record in pipeline_records(step, pp, micro_batches).items()})
    assert found is not None
    return found


def test_ranks_whose_clocks_began_at_different_times_stand_on_one() -> None:
    lanes = timeline().lanes
    assert [lane.rank for lane in lanes] == [0, 1]
    forward = [next(span for span in lane.spans if span.action == "F") for lane in lanes]
    assert [span.start for span in forward] == pytest.approx([0.0, 0.010])


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 1), (2, 4), (4, 8)])
def test_a_pipeline_without_friction_has_the_bubble_of_the_theory(pp: int, micro_batches: int) -> None:
    found = timeline(pp, micro_batches)
    assert found.bubble == pytest.approx((pp - 1) / (micro_batches + pp - 1))
    assert found.theory == pytest.approx(found.bubble)
    assert found.micro_batches == micro_batches


def test_waiting_counts_as_idle_and_the_optimizer_as_neither() -> None:
    records = pipeline_records(7, 2, 4)
    late = [span if span.action != "B" else span._replace(start=span.start + 0.1) for span in records[0].timeline]
    found = timeline_of({0: [replace(records[0], timeline=late)], 1: [records[1]]})
    assert found is not None
    assert found.bubble == pytest.approx(1 - 2 * 4 * 0.030 / (2 * (5 * 0.030 + 0.1)))


def test_the_schedule_is_read_from_what_the_ranks_did() -> None:
    records = pipeline_records(7, 2, 4)
    halves = [span._replace(action="W") if span.micro_batch == 3 else span for span in records[0].timeline]
    found = timeline_of({0: [replace(records[0], timeline=halves)], 1: [records[1]]})
    assert found is not None
    assert found.theory == pytest.approx(1 / 13)
    chunked = {
        rank: [replace(record, timeline=[*record.timeline, Span("F", rank + 2, 0, 0.2, 0.001)])]
        for rank, record in records.items()
    }
    found = timeline_of(chunked)
    assert found is not None
    assert found.lanes[1].stages == (1, 3)
    assert found.theory == pytest.approx(1 / 9)


def test_one_pipeline_of_several_is_drawn() -> None:
    first, second = pipeline_records(7), pipeline_records(7)
    records = {0: [first[0]], 1: [second[0]], 2: [first[1]], 3: [second[1]]}  # pp 2 × dp 2
    found = timeline_of(records)
    assert found is not None
    assert [lane.rank for lane in found.lanes] == [0, 2]


def test_the_newest_step_that_all_have_told_of_unless_one_is_asked_for() -> None:
    steps = [pipeline_records(step) for step in (1, 2, 3)]
    records = {0: [step[0] for step in steps], 1: [step[1] for step in steps[:2]]}
    assert timeline_of(records).step == 2  # type: ignore[union-attr] # there is one
    assert timeline_of(records, 1).step == 1  # type: ignore[union-attr] # there is one
    assert timeline_of(records, 3) is None
    assert timeline_of({}) is None
    assert timeline_of({0: [make_record(1)], 1: [make_record(1, 1)]}) is None


def test_every_span_is_a_bar_in_its_lane_with_its_phases_colour() -> None:
    figure = pipeline_figure(timeline(), devices=cpu_devices(2))
    by_name = {trace["name"]: trace for trace in figure["data"]}
    assert list(by_name) == ["forward", "backward", "wait", "reduce", "optimizer"]
    forward = by_name["forward"]
    assert forward["y"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert forward["base"] == pytest.approx(np.float32([0, 10, 20, 30, 10, 20, 30, 40]))
    assert forward["x"] == pytest.approx(np.full(8, 10, np.float32))
    assert forward["text"] == ["0", "1", "2", "3"] * 2
    assert forward["marker"]["color"] == PHASE_COLOURS["forward"]
    assert by_name["backward"]["marker"]["color"] == PHASE_COLOURS["backward"]
    assert by_name["wait"]["marker"]["color"] == PHASE_COLOURS["communication"]
    layout = figure["layout"]
    assert layout["title"]["text"] == "pipeline, step 7: bubble 20 % (theory 20 %), 4 micro-batches"
    assert layout["yaxis"]["ticktext"][1] == f"rank 1 · {cpu_devices(2)[1].name}<br>pipeline stage 1"
    json.dumps(plain(figure), allow_nan=False)


def test_a_big_pipeline_is_drawn_in_part_and_says_so() -> None:
    found = timeline(50, 100)
    figure = pipeline_figure(found)
    assert f"{MOST_LANES} of 50 ranks drawn" in figure["layout"]["title"]["text"]
    names = figure["layout"]["yaxis"]["ticktext"]
    assert (len(names), names[0][:6], names[-1][:7]) == (MOST_LANES, "rank 0", "rank 49")
    assert sum(len(trace["y"]) for trace in figure["data"]) <= MOST_BARS


def test_report_and_static_picture_show_it_below_the_others(tmp_path) -> None:
    records = {rank: [record] for rank, record in pipeline_records(7).items()}
    assert list(figures(History.of(records)))[-1] == "pipeline"
    assert "bubble" in overview(History.of(records), title="")[0]
    assert "bubble" not in overview(History.of({0: [make_record(1)]}), title="")[0]
    folder = make_folder(tmp_path)
    for rank, (record,) in records.items():
        with RecordWriter(folder, rank, stream_hz=10) as writer:
            writer.write(record)
    assert 'id="plot-pipeline"' in write_report(folder).read_text(encoding="utf-8")


def test_an_action_of_a_later_version_is_drawn_too() -> None:
    records = pipeline_records(7)
    more = [*records[0].timeline, Span("<b>", -1, -1, 0.0, 0.001)]
    found = timeline_of({0: [replace(records[0], timeline=more)], 1: [records[1]]})
    assert found is not None
    assert pipeline_figure(found)["data"][-1]["name"] == "&lt;b&gt;"
