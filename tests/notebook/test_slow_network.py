"""The notebook about slow networks: all of it runs with few steps, and nightly as it stands, where what it says of its
figures holds."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from speedlab_notebook.static_picture import PLOTLY_MIME

from speedlab.cluster.home import running_clusters

NOTEBOOK = Path(__file__).parents[2] / "notebooks/04_slow_network.ipynb"
SMALLER = {
    "STEPS, WARM_UP = 40, 8": "STEPS, WARM_UP = 6, 2",
    "LAYOUT_STEPS = 6": "LAYOUT_STEPS = 2",
    '"layers": 4, "hidden": 128,': '"layers": 2, "hidden": 64,',
}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def executed(folder: Path, *, smaller: bool = False, timeout: int = 200) -> dict[str, list]:
    """What all cells give, by their ids."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for long, short in SMALLER.items() if smaller else ():
        (cell,) = (cell for cell in notebook.cells if long in cell.source)
        cell.source = cell.source.replace(long, short)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text(outputs: list[nbformat.NotebookNode]) -> str:
    return "\n".join(out.get("text") or out.data["text/plain"] for out in outputs)


def figures(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    return [out.data[PLOTLY_MIME] for out in outputs if PLOTLY_MIME in out.get("data", {})]


def sent_bytes(told: str) -> dict[str, float]:
    """What a rank sends in a step, by name, as the cells print it."""
    lines = re.findall(r"^ *(.+?): .+? a step, a rank sends ([\d.]+) (\w+)$", told, re.MULTILINE)
    return {name: float(count) * _UNITS[unit] for name, count, unit in lines}


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, list]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return executed(tmp_path, smaller=request.param, timeout=600)


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
