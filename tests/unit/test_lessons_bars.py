"""Stacked bars of bytes, by name: what is drawn is what was given, and outlines are what was predicted."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from speedlab.display.figure_style import COLOURS
from speedlab.telemetry.figures.lessons import compare_bars

MIB = 2**20
STAGES = {"0": {"parameters": 2 * MIB, "gradients": 2 * MIB}, "3": {"parameters": MIB, "communication_buffers": MIB}}


def test_parts_are_stacked_in_their_colours_with_the_sum_above() -> None:
    figure = compare_bars(STAGES, title="states")
    go.Figure(figure)
    assert {trace["name"]: trace["y"].tolist() for trace in figure["data"]} == {
        "parameters": [2, 1],
        "gradients": [2, 0],
        "communication buffers": [0, 1],
    }
    assert [trace["marker"]["color"] for trace in figure["data"]] == [
        COLOURS[name] for name in ("parameters", "gradients", "communication_buffers")
    ]
    assert [(each["x"], each["text"]) for each in figure["layout"]["annotations"]] == [(0, "4.0 MiB"), (1, "2.0 MiB")]
    assert figure["layout"]["shapes"] == []


def test_what_was_predicted_is_an_outline_of_its_height() -> None:
    figure = compare_bars(STAGES, title="states", predicted={"3": 8 * MIB})
    (outline,) = figure["layout"]["shapes"]
    assert (outline["y0"], outline["y1"], outline["name"]) == (0, 8, "ink")
    assert (outline["x0"] + outline["x1"]) / 2 == 1
    assert figure["layout"]["yaxis"]["range"][1] > 8
    assert figure["layout"]["annotations"][1]["y"] == pytest.approx(8)


def test_other_parts_have_colours_of_their_own_and_names_are_text() -> None:
    sent = {"<b>": {"all_gather": 3, "<i>": 1}, "none": {}}
    figure = compare_bars(sent, title="sent")
    colours = [trace["marker"]["color"] for trace in figure["data"]]
    assert len(set(colours)) == 2
    assert not set(colours) & set(COLOURS.values())
    assert [trace["name"] for trace in figure["data"]] == ["all_gather", "&lt;i&gt;"]
    assert [each["text"] for each in figure["layout"]["annotations"]] == ["4 B", "0 B"]
