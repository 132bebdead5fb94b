"""The notebook about long inputs: what it plans stands beside what was announced, all of it runs with few and short
steps, and nightly as it stands, where what it says of its figures holds."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from notebook_cells import FOLDER, executed, figures, own_folders, text

from speedlab.cluster.files.cluster_dir import running_clusters

NOTEBOOK = "05_long_inputs.ipynb"
PLANNED = ("load", "sees", "paper", "faster")
"""Cells that need no engine."""
SMALLER = {
    "LENGTHS = (1024, 2048, 4096, 8192)": "LENGTHS = (512, 1024)",
    "TASK_LENGTH, WINDOW, MOST_STEPS = 1024, 64, 300": "TASK_LENGTH, WINDOW, MOST_STEPS = 128, 32, 3",
    "TEXT_STEPS = 60": "TEXT_STEPS = 4",
}


def accuracies(reported: str) -> dict[str, dict[float, float]]:
    """By name and depth, as the cell prints them."""
    lines = re.findall(r"^ *(dense|sparse, with summaries|the window alone): (.+)$", reported, re.MULTILINE)
    return {name: {float(at): float(n) for n, at in re.findall(r"(\d+) % at ([\d.]+)", rest)} for name, rest in lines}


def test_lengths_that_fit_stand_beside_those_that_were_announced(tmp_path: Path) -> None:
    outputs = executed(NOTEBOOK, tmp_path, cells=PLANNED)
    reported = re.compile(r"^ *(.+?): +([\d,]+) Ki tokens, a step .+?(?:; announced (\d+) Ki)?$", re.MULTILINE)
    lines = reported.findall(text(outputs["paper"]))
    fits = {name: int(length.replace(",", "")) for name, length, _ in lines}
    announced = {name: int(length) for name, _, length in lines if length}
    assert list(announced.values()) == [2, 12, 32]
    assert all(fits[name] >= length for name, length in announced.items())
    # What the text says: without kept probabilities dense and sparse end at about the same length, cp 8 goes further.
    assert fits["A100, dense, checkpointing"] == pytest.approx(fits["A100, sparse, checkpointing"], rel=0.07)
    assert fits["A100, dense, checkpointing"] > 10 * fits["A100, plain, checkpointing"]
    assert fits["8 A100, dense, cp 8, checkpointing"] >= 8 * fits["A100, dense, checkpointing"]
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+) times as fast", text(outputs["faster"]))]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 6.3 > ratios[0] > 1
    assert "announced: up to 6.3 times (BERT-base)" in text(outputs["faster"])
    assert "65,536 tokens: the last one sees" in text(outputs["sees"])


@pytest.mark.timeout(240)
def test_all_of_it_runs_with_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    all_cells = nbformat.read(FOLDER / NOTEBOOK, as_version=4).cells
    cells = [cell.id for cell in all_cells if cell.id not in ("paper", "faster")]
    outputs = executed(NOTEBOOK, tmp_path, cells=cells, smaller=SMALLER)
    assert len(figures(outputs["grows"])) == 2
    held = re.findall(r"^ *(.+?): ([\d.]+) MiB of activations a rank", text(outputs["cut"]), re.MULTILINE)
    sizes = {name: float(size) for name, size in held}
    assert list(sizes) == ["uncut", "cp 2, a ring", "cp 2, heads"]
    assert sizes["cp 2, heads"] < 0.7 * sizes["uncut"]
    found = accuracies(text(outputs["lost"]))
    assert list(found) == ["dense", "sparse, with summaries", "the window alone"]
    assert all(list(right) == [0, 0.2, 0.4, 0.6, 0.8, 0.9, 1] for right in found.values())
    assert "2 by summaries; the model has 3" in text(outputs["reach"])
    assert re.search(r"held-out loss: dense [\d.]+, sparse [\d.]+, [+-][\d.]+%", text(outputs["text"]))
    assert running_clusters() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_as_it_stands_its_figures_are_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    outputs = executed(NOTEBOOK, tmp_path, timeout=600)
    _, memory = figures(outputs["grows"])
    held = {trace["name"]: trace["y"] for trace in memory["data"]}
    for name, values in held.items():
        assert values[-1] / values[0] == pytest.approx(8, rel=0.1), name
    found = accuracies(text(outputs["lost"]))
    assert min(found["dense"].values()) >= 90
    assert min(found["sparse, with summaries"].values()) >= 80
    assert max(found["the window alone"][depth] for depth in (0, 0.2, 0.4, 0.6, 0.8)) <= 30
    (worse,) = re.findall(r"held-out loss: .*, ([+-][\d.]+)%", text(outputs["text"]))
    assert abs(float(worse)) < 2
    assert running_clusters() == []
