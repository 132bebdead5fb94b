"""Several runs side by side: figures on the same axes, what differs, and what a page is sent of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from telemetry_samples import make_event, make_folder, make_record

import speedlab
from speedlab.cluster.known_runs import RUN_MIME, RunError, run_id
from speedlab.config import RunConfig
from speedlab.telemetry.figures.compare import (
    COLOURS,
    RunStanding,
    compared_figures,
    facts_table,
    look_at,
    reported,
    settings_table,
)
from speedlab.telemetry.figures.deltas import ComparedDrawing
from speedlab.telemetry.history import History
from speedlab.telemetry.records import Ledger, RunState
from speedlab.telemetry.run_folder import Status

PAYLOAD = "<img src=x onerror=alert(1)> 100 %{x}"
GIB = 2**30


def look(name: str, steps: int, *, state: RunState = RunState.RUNNING, **changes: Any) -> RunStanding:
    """A run of two ranks, of which the second holds more."""
    ledgers = [Ledger(parameters=GIB, activations=rank * GIB) for rank in range(2)]
    heldout = {steps: 7.0}
    records = {
        rank: [make_record(s, rank, ledger=ledger, heldout_loss=heldout.get(s)) for s in range(1, steps + 1)]
        for rank, ledger in enumerate(ledgers)
    }
    history = History.of(records, [make_event("checkpoint", 2, text=PAYLOAD)])
    return look_at(name, history, Status(state=state, step=steps, steps=100, rank_pids=(1, 2)), RunConfig(**changes))


def test_what_differs_is_listed_and_what_each_has_come_to() -> None:
    looks = [look("a", 5), look("b", 9, zero=3, seed=7), RunStanding(name="gone", problem="is gone")]
    settings = settings_table(looks)
    assert {row["name"]: row["values"] for row in settings} == {"seed": ["0", "7", ""], "zero.stage": ["2", "3", ""]}
    assert settings.head() == ["", "1 · a", "2 · b", "3 · gone"]
    assert settings.notes == (f"{len(looks[0].settings) - 2} other settings are the same",)
    assert settings_table([looks[0], looks[0]]).notes == (f"all {len(looks[0].settings)} settings are the same",)
    facts = {row["name"]: row["values"] for row in facts_table(looks)}
    assert facts["step"] == ["5 of 100", "9 of 100", ""]
    assert facts["held-out loss"] == ["7.0000", "7.0000", ""]
    assert facts["memory of the fullest rank"] == ["2.0 GiB", "2.0 GiB", ""]
    assert facts["tokens/s"] == ["8.19 k", "8.19 k", ""]
    runs = reported(looks)["runs"]
    assert [run["problem"] for run in runs] == ["", "", "is gone"]
    assert [tuple(run["colours"]) for run in runs] == list(COLOURS[:3])


def test_figures_share_axes_and_say_of_which_run_each_part_is() -> None:
    looks = [look(PAYLOAD, 5), look("b", 9), RunStanding(name="gone")]
    figures = compared_figures(looks)
    for figure in figures.values():
        go.Figure(figure)
        assert "<img" not in str(figure)
    loss = figures["loss"]
    assert [trace["legendgroup"] for trace in loss["data"]] == ["0", "1", "2"] * 2
    assert [len(trace["x"]) for trace in loss["data"]] == [5, 9, 0, 1, 1, 0]
    assert [shape["name"] for shape in loss["layout"]["shapes"]] == ["0", "1"]
    assert "%{x}" not in loss["data"][0]["hovertemplate"]
    held = {trace["name"]: trace["y"].tolist() for trace in figures["memory"]["data"]}
    assert held == {"parameters": [1, 1, 0], "activations": [1, 1, 0]}
    spent = {trace["name"]: trace["y"].tolist() for trace in figures["anatomy"]["data"]}
    assert spent == {"forward": [200, 200, 0], "backward": [300, 300, 0]}


def test_a_page_is_sent_what_is_new_and_ends_up_with_what_there_is() -> None:
    now = 0.0
    drawing = ComparedDrawing(clock=lambda: now)
    other = look("b", 4)
    first, buffers = drawing.next([look("a", 5), other]) or pytest.fail("nothing")
    assert (first["type"], first["seq"]) == ("Comparison", 1)
    page = _with_arrays(first["figures"], buffers)
    assert drawing.next([look("a", 5), other]) is None
    # One run has gone on: its curves grow, and nothing else is drawn.
    changes, buffers = drawing.next([longer := look("a", 7), other]) or pytest.fail("nothing")
    grown = {part["figure"]: (part["traces"], part["points"]) for part in changes["parts"] if part["part"] == "extend"}
    assert grown == {"throughput": ([0], [2])}
    # Its held-out loss has moved, so the loss is drawn anew; the bars wait for their second.
    assert [part["figure"] for part in changes["parts"] if part["part"] == "figure"] == ["loss"]
    assert [part["part"] for part in changes["parts"]].count("compared") == 1
    _take(page, changes, buffers)
    now = 1.0
    _take(page, *(drawing.next([longer, look("b", 6, state=RunState.FINISHED)]) or pytest.fail("nothing")))
    wanted = compared_figures([longer, look("b", 6, state=RunState.FINISHED)])
    assert _lists(page) == _lists(wanted)
    again, _ = drawing.keyframe([longer, other])
    assert (again["type"], again["seq"]) == ("Comparison", 4)


def test_runs_are_compared_in_python_by_name_and_show_themselves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, stage in (("a", 2), ("<b>", 3)):
        folder = make_folder(tmp_path / "runs", name.strip("<>"), zero=stage)
        folder.write_status(Status(state=RunState.FINISHED, step=2, steps=2))
        lines = [make_record(step).to_json() for step in (1, 2)]
        (folder.path / "records" / "rank-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
        folder.path.rename(folder.path.with_name(name))
    found = speedlab.compare("a", tmp_path / "runs" / "<b>")
    assert [row["name"] for row in found.settings] == ["zero.stage"]
    bundle = found._repr_mimebundle_()
    assert bundle[RUN_MIME]["runs"] == [run_id(tmp_path / "runs" / name) for name in ("a", "<b>")]
    assert "zero.stage" in bundle["text/plain"]
    assert "<b>" not in bundle["text/html"]
    assert "2 · &lt;b&gt;" in bundle["text/html"]
    assert "&lt;b&gt;" in bundle["image/svg+xml"]
    with pytest.raises(RunError, match="'a' is there twice"):
        speedlab.compare("a", "a")
    with pytest.raises(RunError, match="1 run; 2 to 8 are compared"):
        speedlab.compare("a")
    with pytest.raises(RunError, match="there is no run 'c'"):
        speedlab.compare("a", "c")


def _with_arrays(value: Any, buffers: list[bytes]) -> Any:
    """As a page has it: {"f32": n} is an array."""
    if isinstance(value, dict) and "f32" in value:
        return np.frombuffer(buffers[value["f32"]], np.float32)
    if isinstance(value, dict):
        return {key: _with_arrays(item, buffers) for key, item in value.items()}
    return [_with_arrays(item, buffers) for item in value] if isinstance(value, list) else copy.copy(value)


def _take(page: dict[str, Any], changes: dict[str, Any], buffers: list[bytes]) -> None:
    for part in changes["parts"]:
        if part["part"] == "figure":
            page[part["figure"]] = _with_arrays({"data": part["data"], "layout": part["layout"]}, buffers)
        elif part["part"] == "extend":
            values, at = np.frombuffer(buffers[part["buffer"]], np.float32), 0
            for trace, count in zip(part["traces"], part["points"], strict=True):
                for axis in "xy":
                    old = page[part["figure"]]["data"][trace][axis]
                    page[part["figure"]]["data"][trace][axis] = np.append(old, values[at : at + count])
                    at += count


def _lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return list(map(_lists, value)) if isinstance(value, list | tuple) else value
