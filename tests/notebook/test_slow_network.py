"""The notebook about slow networks: all of it runs with few steps, and nightly as it stands, where what it says of its
figures holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_cells import executed, figures, own_folders, text

from speedlab.cluster.files.cluster_dir import running_clusters

NOTEBOOK = "04_slow_network.ipynb"
SMALLER = {
    "STEPS, WARM_UP = 40, 8": "STEPS, WARM_UP = 6, 2",
    "LAYOUT_STEPS = 6": "LAYOUT_STEPS = 2",
    '"layers": 4, "hidden": 128,': '"layers": 2, "hidden": 64,',
}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def sent_bytes(reported: str) -> dict[str, float]:
    """What a rank sends in a step, by name, as the cells print it."""
    lines = re.findall(r"^ *(.+?): .+? a step, a rank sends ([\d.]+) (\w+)$", reported, re.MULTILINE)
    return {name: float(count) * _UNITS[unit] for name, count, unit in lines}


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, list]:
    own_folders(tmp_path, monkeypatch)
    return executed(NOTEBOOK, tmp_path, smaller=SMALLER if request.param else None, timeout=600)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "outputs", [True, pytest.param(False, marks=pytest.mark.nightly)], indirect=True, ids=["few steps", "as it stands"]
)
def test_what_it_says_of_its_figures_holds(outputs: dict[str, list]) -> None:
    assert "2 engines on cpu 0, cpu 1, over a pretended link of 100 Mbit/s 1 ms" in text(outputs["start"])
    sent = sent_bytes(text(outputs["ways"]))
    assert list(sent) == ["plain ZeRO-0", "1-bit Adam"]
    assert 20 < sent["plain ZeRO-0"] / sent["1-bit Adam"] < 33
    pictures = figures(outputs["pictures"])
    titles = [str(picture["layout"]["title"]["text"]) for picture in pictures]
    assert all(title.endswith("pretended link of 100 Mbit/s 1 ms") for title in titles)
    assert len(titles) == 2
    layouts = sent_bytes(text(outputs["layouts"]))
    assert list(layouts) == ["data parallelism", "tensor parallelism", "a pipeline"]
    assert layouts["a pipeline"] < layouts["data parallelism"] < layouts["tensor parallelism"]
    advice = text(outputs["pays"])
    assert advice.count("times as fast as adamw's here") == 3
    assert "compression costs more than it saves; take adamw" in advice.splitlines()[-1]
    assert running_clusters() == []
