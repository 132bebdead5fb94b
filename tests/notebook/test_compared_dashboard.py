"""Runs side by side in a notebook, without a browser: what is displayed, what a widget is sent, what stays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from speedlab_notebook.dashboard.static_picture import WIDGET_MIME
from speedlab_notebook.dashboard.widget import Dashboard, show_comparison
from telemetry_samples import eventually, make_folder, make_record

import speedlab
from speedlab.cluster.known_runs import RUN_MIME, run_id
from speedlab.telemetry.figures.deltas import SERVED
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, Status


def write(folder: RunFolder, *steps: int, state: RunState = RunState.RUNNING) -> None:
    with open(folder.path / "records" / "rank-0.jsonl", "a") as file:
        file.writelines(make_record(step).to_json() + "\n" for step in steps)
    folder.write_status(Status(state=state, step=steps[-1], steps=9, rank_pids=(1,)))


@pytest.fixture
def two(tmp_path: Path, monkeypatch) -> tuple[list[RunFolder], list[Any]]:
    """Two runs, of which the first is over, and what IPython was asked to display."""
    found = [make_folder(tmp_path, "a"), make_folder(tmp_path, "b", zero=3)]
    write(found[0], 1, 2, state=RunState.FINISHED)
    write(found[1], 1)
    shown: list[Any] = []
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    monkeypatch.setattr("IPython.display.update_display", lambda data, **_: shown.append(data))
    return found, shown


def test_one_output_is_live_and_keeps_a_picture_when_all_have_come_to_rest(two, monkeypatch) -> None:
    (_, running), shown = two
    monkeypatch.setenv(SERVED, "")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Dashboard, "send", lambda self, content, buffers=None: sent.append(content))
    view = show_comparison(speedlab.compare(*(folder.path for folder in two[0])))
    try:
        (first,) = shown
        ids = [run_id(folder.path) for folder in two[0]]
        assert first[RUN_MIME] == {"version": 1, "runs": ids, "names": ["a", "b"]}
        assert first[WIDGET_MIME]["model_id"] == view.model_id
        assert (view.compares, view.keyframe["message"]["type"]) == (True, "Comparison")
        assert [row["name"] for row in view.keyframe["message"]["compared"]["settings"]] == ["zero.stage"]
        write(running, 2, 3)
        eventually(lambda: "extend" in [part["part"] for message in sent for part in message["parts"]])
        assert len(shown) == 1
        write(running, 4, state=RunState.STOPPED)
        eventually(lambda: len(shown) == 2)
        kept = shown[1]
        assert (kept[RUN_MIME], kept[WIDGET_MIME]) == (first[RUN_MIME], first[WIDGET_MIME])
        assert "4 of 9" in kept["text/plain"]
        assert kept["image/svg+xml"].startswith("<svg ")
        assert "<td>zero.stage</td><td>2</td><td>3</td>" in kept["text/html"]
        # A page that has missed something is given everything.
        view._on_message(view, {"type": "Draw", "view": "v", "watching": True, "keyframe": True}, [])
        assert view.keyframe["message"]["compared"]["facts"][0]["values"] == ["2 of 9", "4 of 9"]
        assert view._trouble == ""
    finally:
        view.close()
    assert not view.running


def test_a_served_kernel_reads_no_record_until_a_widget_speaks(two, monkeypatch) -> None:
    monkeypatch.setenv(SERVED, "1")
    comparison = speedlab.compare(*(folder.path for folder in two[0]))
    view = show_comparison(comparison)
    try:
        assert (view.keyframe, view.watched) == ({}, False)
        version = comparison.version
        write(two[0][1], 2)
        assert comparison.version == version
    finally:
        view.close()
