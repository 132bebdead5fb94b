"""Notebooks in the repository: valid, without outputs, and with nothing of the machine they were written on; what their
code and their texts name is there."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from messages import faults
from speedlab_notebook.magics.commands import parse

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SET_BY_MAGICS = {"cluster", "run", "get_ipython", "display"}
WRITTEN = re.compile(r"%%writefile (?:\S+)\.py\n")
"""How a cell begins that writes a script."""
OURS = ("speedlab", "cuda_ops")


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["01_quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_running_it_leaves(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), f"strip the outputs of cell {cell.id}"
        assert set(cell.metadata) <= {"tags"}, f"cell {cell.id} keeps {set(cell.metadata)}"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_code_cell_is_introduced(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert sum(cell.cell_type == "markdown" for cell in cells) >= 5


def code_of(path: Path) -> dict[str, str]:
    """Python of each code cell, by the cell's id."""
    transform = TransformerManager().transform_cell
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return {cell.id: WRITTEN.sub("", cell.source) if is_script(cell) else transform(cell.source) for cell in cells}


def is_script(cell: nbformat.NotebookNode) -> bool:
    return WRITTEN.match(cell.source) is not None


def imported(node: ast.ImportFrom) -> set[str]:
    """Names that an import binds. Those of ours have to exist."""
    module = str(node.module)
    if module.partition(".")[0].startswith(OURS):
        found = __import__(module, fromlist=["*"])
        assert all(hasattr(found, each.name) for each in node.names), ast.unparse(node)
    return {each.asname or each.name for each in node.names}


def bound(tree: ast.AST) -> set[str]:
    """Names that code binds anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.arg():
                found.add(node.arg)
            case ast.ExceptHandler(name=str()):
                found.add(node.name)
            case ast.Import():
                found |= {each.asname or each.name.partition(".")[0] for each in node.names}
            case ast.ImportFrom():
                found |= imported(node)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_compiles_and_uses_names_that_an_earlier_one_has_made(path: Path) -> None:
    kept = {*dir(builtins), *SET_BY_MAGICS}
    scripts = {cell.id for cell in nbformat.read(path, as_version=4).cells if is_script(cell)}
    for cell, source in code_of(path).items():
        tree = ast.parse(source)
        known = (set(dir(builtins)) | {"__file__"} if cell in scripts else kept) | bound(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used <= known, f"{cell}: {used - known} is not known"
        if cell not in scripts:
            kept = known


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_magics_exist(path: Path) -> None:
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    lines = [line for source in sources for line in re.findall(r"^%speedlab (.*)$", source, re.MULTILINE)]
    assert all(parse(line)[0] is not None for line in lines)
    assert any("%load_ext speedlab" in source for source in sources)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_its_texts_name_exists(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    spans = [span for source in cells for span in re.findall(r"`([^`\n]+)`", source)]
    assert {span: problems for span in spans if (problems := faults(span))} == {}
    links = [link for source in cells for link in re.findall(r"\]\(([^)#]+)\)", source)]
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
