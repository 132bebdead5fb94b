"""The notebook about one machine: what it plans is planned here; nightly all of it runs, with a real engine, and its
own assertions hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_cells import executed, figures, own_folders, text

from speedlab.cluster.files.cluster_dir import running_clusters

NOTEBOOK = "03_one_machine.ipynb"
PLANNED = ("load", "largest-one", "largest")
"""Cells that need no engine."""


def test_the_largest_models_are_the_planners_and_stand_beside_what_was_announced(tmp_path: Path) -> None:
    outputs = executed(NOTEBOOK, tmp_path, cells=PLANNED)
    planned, announced = figures(outputs["largest"])[0]["data"]
    sizes = dict(zip(planned["y"], planned["x"], strict=True))
    reported = dict(zip(announced["y"], announced["x"], strict=True))
    assert sorted(reported.values()) == [1.4e9, 13e9, 40e9, 70e9, 1e12]
    assert all(sizes[name] > reported[name] for name in reported)
    assert sizes["V100, optimizer on the host"] == pytest.approx(13e9, rel=0.1)
    assert sizes["H200, 4 bytes"] > 30e9 > 3 * sizes["H200"]
    table = text(outputs["largest"])
    for name in sizes:
        assert f"{name}  " in table
    assert re.search(r"gpt, hidden [\d]+: 13.6 G parameters", text(outputs["largest-one"]))


@pytest.mark.nightly
def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    outputs = executed(NOTEBOOK, tmp_path)
    losses = re.findall(r"^ *(0x\S+)  (.+)$", text(outputs["same"]), re.MULTILINE)
    assert len(losses) == 4
    assert len({loss for loss, _ in losses}) == 1
    assert text(outputs["memory"]).count("16.00") == 4  # Bytes a parameter, wherever they are.
    assert len(re.findall(r"^after step \d+, in \d+ ms: ", text(outputs["live"]), re.MULTILINE)) == 3
    kept = re.findall(r"^ *(.+?)  .* (\d+\.\d\d)  +\d", text(outputs["bytes"]), re.MULTILINE)
    assert [float(count) for _, count in kept] == pytest.approx([16, 16, 10, 6, 4, 4], abs=0.1)
    drawn = [cell for cell, found in outputs.items() if figures(found)]
    assert {"same", "memory", "live-start", "live", "bytes", "largest"} <= set(drawn)
    assert running_clusters() == []
