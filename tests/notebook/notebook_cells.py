"""What the tests of notebooks share: running their cells, and reading what these give."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from speedlab_notebook.dashboard.static_picture import PLOTLY_MIME

FOLDER = Path(__file__).parents[2] / "notebooks"

Outputs = dict[str, list[nbformat.NotebookNode]]
"""By the id of the cell."""


def executed(
    name: str,
    folder: Path,
    *,
    cells: Collection[str] = (),
    smaller: Mapping[str, str] | None = None,
    timeout: int = 200,
) -> Outputs:
    """What these cells of a notebook give, all of them when none is named, run in `folder`.

    `smaller`: texts of the code, each of which stands once, and what stands there instead. `timeout`: seconds a cell.
    """
    notebook = nbformat.read(FOLDER / name, as_version=4)
    if cells:
        notebook.cells = [cell for cell in notebook.cells if cell.id in cells]
    for long, short in (smaller or {}).items():
        (cell,) = (cell for cell in notebook.cells if long in cell.source)
        cell.source = cell.source.replace(long, short)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text(outputs: list[nbformat.NotebookNode]) -> str:
    return "\n".join(out.get("text") or out.data["text/plain"] for out in outputs)


def figures(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """As plotly has them."""
    return [out.data[PLOTLY_MIME] for out in outputs if PLOTLY_MIME in out.get("data", {})]


def own_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of their own for the clusters of a notebook."""
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
