"""The largest models beside announced ones: bars and rows say what the planner found."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from speedlab.planner.largest_model_figure import largest_figure, largest_table
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.plan import Found
from speedlab.planner.request import PlanRequest
from speedlab.planner.search import Candidate


@pytest.fixture(scope="module")
def found() -> dict[str, Candidate]:
    asked = {"alone": {}, "away": {"offload_optimizer": "disk", "disk_bytes": "400GB"}}
    answers = {
        name: PlanRequest(machines="1 V100-32", largest=True, **words).answer([]) for name, words in asked.items()
    }
    assert all(isinstance(answer, Found) for answer in answers.values())
    return {name: answer.candidates[0] for name, answer in answers.items()}  # type: ignore[union-attr]  # see above


def test_rows_say_what_fits_where_and_what_was_announced(found: dict[str, Candidate]) -> None:
    alone, away = table = largest_table(found, {"alone": 1.4e9})
    assert alone["planned"] == shape_parameters(found["alone"].setup.shape) < away["planned"]
    assert (alone["announced"], away["announced"]) == (1.4e9, None)
    assert (alone["full"], alone["host"], alone["disk"]) == ("device", None, None)
    assert away["disk"].capacity_bytes == 400 * 10**9
    assert [cells[2] for cells in table.cells()] == ["1.4 G", "–"]
    assert len(table.head()) == len(table.cells()[0])


def test_bars_are_the_rows_and_announced_ones_stand_below_planned_ones(found: dict[str, Candidate]) -> None:
    figure = largest_figure(found, {"alone": 1.4e9})
    go.Figure(figure)
    planned, announced = figure["data"]
    assert dict(zip(planned["y"], planned["x"], strict=True)) == {
        name: shape_parameters(candidate.setup.shape) for name, candidate in found.items()
    }
    assert (announced["y"], announced["x"]) == (["alone"], [1.4e9])
    alongside, single = planned["offset"]
    assert announced["offset"][0] + announced["width"] < alongside
    assert single == -planned["width"] / 2
    assert figure["layout"]["yaxis"]["categoryarray"] == ["away", "alone"]  # From below.
