"""The notebooks that teach: their own assertions hold, and what they show is what their texts say. One of them runs
here, with few steps and ranks; nightly all of them run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_cells import Outputs, executed, figures, own_folders, text

from speedlab.cluster.files.cluster_dir import running_clusters

ZERO, DIMENSIONS, OWN = "06_zero_seen.ipynb", "07_three_dimensions.ipynb", "08_bring_your_own_model.ipynb"
FEWER = {"--engines 4": "--engines 2", '"global_size": 4': '"global_size": 2', "STEPS = 12": "STEPS = 3"}


def numbers(row: str) -> list[float]:
    return [float(number.replace(",", "")) for number in row.split()]


def check_zero(outputs: Outputs, *, ranks: int) -> None:
    """Both tables of the first lesson: bytes a parameter by stage, and what travels."""
    rows = re.findall(r"^ +([0-3]  .*)$", text(outputs["memory"]), re.MULTILINE)
    a_parameter = [numbers(row)[-1] for row in rows]
    assert a_parameter == pytest.approx([16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks], abs=0.01)
    sent = re.findall(r"stage ([0-3]): ([\d.]+) Ψ", text(outputs["sent"]))
    assert [(int(stage), float(times)) for stage, times in sent[:3]] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert 2.5 < float(sent[3][1]) < 3
    assert text(outputs["placement"]).splitlines()[3].count("partitioned") == 4
    assert len(figures(outputs["buffers"])) == 2
    assert running_clusters() == []


@pytest.mark.timeout(120)
def test_zero_is_seen_with_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    check_zero(executed(ZERO, tmp_path, smaller=FEWER), ranks=2)


@pytest.mark.nightly
def test_zero_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    check_zero(executed(ZERO, tmp_path), ranks=4)


@pytest.mark.nightly
def test_three_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    outputs = executed(DIMENSIONS, tmp_path)
    bubbles = re.findall(r"m = +(\d+): bubble ([\d.]+)%, theory ([\d.]+)%", text(outputs["bubble"]))
    assert [(int(m), float(theory)) for m, _, theory in bubbles] == [
        (1, 50.0),
        (2, 33.3),
        (4, 20.0),
        (8, 11.1),
        (16, 5.9),
    ]
    sent = {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"^ *(.+?): +([\d,]+) bytes", text(outputs["volume"]), re.MULTILINE)
    }
    assert sent["data"] == sent["data, 2 T"] < sent["data, 2 L"]
    assert sent["pipeline"] == sent["pipeline, 2 L"] < sent["pipeline, 2 T"]
    assert sent["tensor"] < min(sent["tensor, 2 L"], sent["tensor, 2 T"])
    assert len(re.findall(r"^after step \d+, in ", text(outputs["reshape"]), re.MULTILINE)) == 4
    assert "fastest: gpt3-175b" in text(outputs["search"])
    assert running_clusters() == []


@pytest.mark.nightly
def test_bring_your_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)
    outputs = executed(OWN, tmp_path)
    reported = "\n".join(map(text, outputs.values()))
    alike = re.findall(r"^(\w+)\.py: 20 steps, .*largest difference (\S+) of the loss", reported, re.MULTILINE)
    assert [name for name, _ in alike] == ["plain_after", "hf_after", "hf_tp", "hf_pp", "deepspeed_after"]
    assert max(float(difference) for _, difference in alike) < 1e-4
    assert "+import speedlab" in text(outputs["deepspeed-after"])
    assert "at stages [0, 3]" in text(outputs["run-change"])
    assert running_clusters() == []
