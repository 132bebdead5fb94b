"""Bars of what kernels and collectives cost, and memory over the time of a step."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from telemetry_samples import make_record

from speedlab.telemetry.figures import History, plain
from speedlab.telemetry.figures.costs import MOST_LANES, cost_figures
from speedlab.telemetry.figures.deltas import Drawing
from speedlab.telemetry.records import MemoryMark, RunState, StepRecord
from speedlab.telemetry.run_folder import Status

sys.path.append(str(Path(__file__).parents[1] / "browser"))
from hostile import PAYLOADS

MIB = 2**20
RUNNING = Status(state=RunState.RUNNING, steps=9, rank_pids=(1,))


def costs(*steps: dict[str, Any], **every: Any) -> dict[str, Any]:
    return cost_figures(History.of({0: [make_record(i, **{**every, **step}) for i, step in enumerate(steps, 1)]}))


def lanes(figure: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Trace → lane → value."""
    names = figure["layout"]["yaxis"]["ticktext"]
    return {
        trace["name"]: {names[int(lane)]: value for lane, value in zip(trace["y"], trace["x"].tolist(), strict=True)}
        for trace in figure["data"]
    }


def test_kernels_by_time_are_means_and_of_many_the_rest_is_summed() -> None:
    use = {"calls": 2.0, "bytes": 4.0 * MIB, "seconds": 0.004}
    kernels = costs({"kernels": {"adamw": use, "cheap": {**use, "seconds": 0.001}}}, {"kernels": {"adamw": use}})[
        "kernels"
    ]
    assert lanes(kernels) == {"time": {"adamw": pytest.approx(4.0), "cheap": pytest.approx(0.5)}}
    assert kernels["data"][0]["text"][0] == "adamw: 4 ms, 2 calls, 4.0 MiB read and written, 1000 MiB/s"
    go.Figure(plain(kernels))

    many = {f"k{i:02}": {**use, "seconds": 2.0**-i} for i in range(MOST_LANES + 5)}
    found = lanes(costs({"kernels": many})["kernels"])["time"]
    assert list(found) == [f"k{i:02}" for i in range(MOST_LANES)] + ["others"]
    assert found["others"] == pytest.approx(1000 * sum(2.0**-i for i in range(MOST_LANES, MOST_LANES + 5)))


def test_communication_by_collective_and_link_also_of_records_that_tell_no_link() -> None:
    through = {"all_gather": {"shared memory": 3 * MIB, "gloo": MIB}, "all_reduce": {"gloo": 2 * MIB}}
    sent = {name: sum(links.values()) for name, links in through.items()}
    reported = costs({"sent_bytes": sent, "sent_through": through, "moved_bytes": {"disk read": MIB}})["communication"]
    assert reported["layout"]["xaxis"]["title"]["text"] == "MiB"
    by_link = {link: {lane: value for lane, value in found.items() if value} for link, found in lanes(reported).items()}
    assert by_link == {
        "gloo": {"all_gather": 1.0, "all_reduce": 2.0},
        "own places": {"disk read": 1.0},
        "shared memory": {"all_gather": 3.0},
    }
    assert lanes(costs({"sent_bytes": {"all_gather": MIB}})["communication"]) == {"link unknown": {"all_gather": 1.0}}
    assert costs({"sent_bytes": {}}) == {}


def test_memory_over_the_time_of_the_newest_step_that_was_marked() -> None:
    marks = [MemoryMark("start", 0.0, MIB), MemoryMark("forward", 0.010, 3 * MIB), MemoryMark("backward", 0.030, MIB)]
    figure = costs({"memory": marks}, {}, sent_bytes={})["step_memory"]
    assert figure["layout"]["title"]["text"] == "memory at the ends of phases, step 1, rank 0"
    line, start, forward, _ = figure["data"]
    assert line["x"].tolist() == pytest.approx([0.0, 10.0, 30.0])
    assert line["y"].tolist() == [1.0, 3.0, 1.0]
    assert (start["name"], forward["name"], forward["y"].tolist()) == ("start", "forward", [3.0])
    go.Figure(plain(figure))
    assert StepRecord.from_json(make_record(1, memory=marks).to_json()).memory == marks
    assert StepRecord.from_json(make_record(1, memory=marks, loss=math.nan).to_json()).memory == marks
    assert costs({"memory": marks[:1]}, sent_bytes={}) == {}, "one moment is no course"


def test_a_page_gets_costs_every_other_second_and_loses_those_that_nobody_pays_for() -> None:
    now, records = [0.0], {0: [make_record(1)]}
    history = History.of(records)
    drawing = Drawing(history, name="costs", clock=lambda: now[0])

    def parts(step: int, **changes: Any) -> list[str]:
        records[0].append(make_record(step, **changes))
        history.update(records, [])
        message = drawing.next(RUNNING)
        assert message is not None
        if message[0]["type"] == "Keyframe":
            return ["Keyframe", *message[0]["figures"]]
        return [part["figure"] for part in message[0]["parts"] if part["part"] == "figure"]

    assert "communication" in parts(2)
    assert parts(3, sent_bytes={"all_gather": 4096}) == []
    now[0] = 2.1
    assert parts(4, sent_bytes={"all_gather": 4096}) == ["communication"]
    records[0].clear()
    for step in range(5, 30):
        records[0].append(make_record(step, sent_bytes={}))
    now[0] = 4.2
    parts(30, sent_bytes={})
    reported = parts(31, sent_bytes={})
    assert reported[0] == "Keyframe"
    assert "communication" not in reported


def test_nothing_that_is_hostile_becomes_markup() -> None:
    texts = dict.fromkeys(PAYLOADS)
    use = {"calls": 1.0, "bytes": 100.0, "seconds": 0.001}
    for some in (PAYLOADS[i : i + 8] for i in range(0, len(texts), 8)):
        through = {text: {text: 100} for text in some}
        marks = [MemoryMark(text, i / 100, 100) for i, text in enumerate(some)]
        drawn = costs(
            {"kernels": dict.fromkeys(some, use), "sent_through": through, "moved_bytes": {}, "memory": marks}
        )
        assert set(drawn) == {"step_memory", "kernels", "communication"}
        for figure in drawn.values():
            for text in _texts(plain(figure)):
                assert "<" not in re.sub(r"<(br|/?b|/?extra)>", "", text)
            assert all(len(name) < 250 for name in figure["layout"]["yaxis"].get("ticktext", ()))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _texts(item)]
