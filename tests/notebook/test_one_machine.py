"""The notebook about one machine: what it plans is planned here, that its cells are sound is looked at; nightly all of
it runs, with a real engine, and its own assertions hold."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from speedlab_notebook.commands import parse
from speedlab_notebook.static_picture import PLOTLY_MIME

from speedlab.cluster.home import running_clusters

NOTEBOOK = Path(__file__).parents[2] / "notebooks/03_one_machine.ipynb"
CELLS = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"}
SET_BY_MAGICS = {"cluster", "get_ipython"}
PLANNED = ("load", "largest-one", "largest")
"""Cells that need no engine."""


def executed(folder: Path, *cells: str, timeout: int = 200) -> dict[str, list[nbformat.NotebookNode]]:
    """What these cells give, all of them when none is named, by their ids."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if cells:
        notebook.cells = [cell for cell in notebook.cells if cell.id in cells]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text(outputs: list[nbformat.NotebookNode]) -> str:
    return "\n".join(out.get("text") or out.data["text/plain"] for out in outputs)


def figures(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    return [out.data[PLOTLY_MIME] for out in outputs if PLOTLY_MIME in out.get("data", {})]


def test_every_cell_compiles_and_uses_names_that_an_earlier_one_has_made() -> None:
    known = {*dir(builtins), *SET_BY_MAGICS}
    for cell, source in CELLS.items():
        tree = ast.parse(TransformerManager().transform_cell(source))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        known |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        known |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        known |= {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.arguments):
                known |= {each.arg for each in (node.vararg, node.kwarg) if each is not None}
            if isinstance(node, ast.ImportFrom):
                module = __import__(str(node.module), fromlist=["*"])
                assert all(hasattr(module, each.name) for each in node.names), f"{cell}: {ast.unparse(node)}"
                known |= {each.asname or each.name for each in node.names}
        assert {node.id for node in names} <= known, f"{cell}: { ({node.id for node in names} - known) } is not known"


def test_its_magics_exist() -> None:
    lines = [line for source in CELLS.values() for line in re.findall(r"^%speedlab (.*)$", source, re.MULTILINE)]
    assert len(lines) >= 3
    assert all(parse(line)[0] is not None for line in lines)


def test_the_largest_models_are_the_planners_and_stand_beside_what_was_announced(tmp_path: Path) -> None:
    outputs = executed(tmp_path, *PLANNED)
    planned, announced = figures(outputs["largest"])[0]["data"]
    sizes = dict(zip(planned["y"], planned["x"], strict=True))
    told = dict(zip(announced["y"], announced["x"], strict=True))
    assert sorted(told.values()) == [1.4e9, 13e9, 40e9, 70e9, 1e12]
    assert all(sizes[name] > told[name] for name in told)
    assert sizes["V100, optimizer on the host"] == pytest.approx(13e9, rel=0.1)
    assert sizes["H200, 4 bytes"] > 30e9 > 3 * sizes["H200"]
    table = text(outputs["largest"])
    for name in sizes:
        assert f"{name}  " in table
    assert re.search(r"gpt, hidden [\d]+: 13.6 G parameters", text(outputs["largest-one"]))


@pytest.mark.nightly
def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    outputs = executed(tmp_path)
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
