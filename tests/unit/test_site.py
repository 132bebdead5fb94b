"""The documentation's site: every notebook and guide has its place in it, and docstrings become what Sphinx reads."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

import speedlab

ROOT = Path(__file__).parents[2]
SITE = ROOT / "notebooks/site"


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def restructured(text: str) -> str:
    return "\n".join(module_of("docstrings").restructured(text.splitlines())).rstrip()


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("What `a` is: *b*, c_.", "What ``a``\\  is: \\*b\\*, c\\_."),
        ("Steps:\n\n1. One,\n   and more.\n2. Two", "Steps:\n\n1. One, and more.\n2. Two"),
        ("Ways:\n- one\n- two", "Ways:\n\n- one\n- two"),
        (
            "Args:\n    a: first\n        and more.\n    b, c: second",
            "Args:\n\n- ``a``: first and more.\n- ``b, c``: second",
        ),
        ("    x = 1\n    y = `2`", "::\n\n        x = 1\n        y = `2`"),
        ("Formula:\n  a + b", "Formula:\n\n::\n\n      a + b"),
        ("`code` ends in `code`", "``code``\\  ends in ``code``"),
    ],
)
def test_a_docstring_becomes_what_sphinx_reads(plain: str, expected: str) -> None:
    assert restructured(plain) == expected


def test_every_notebook_has_its_place() -> None:
    index = (SITE / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^notebooks/(\S+)$", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    links = re.findall(r"\]\(([^)#]+)\)", index)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_what_is_made_smaller_for_the_site_stands_once_in_its_notebook() -> None:
    outputs = module_of("outputs")
    for stem, fewer in outputs.FEWER.items():
        text = "\n".join(cell.source for cell in nbformat.read(ROOT / f"notebooks/{stem}.ipynb", as_version=4).cells)
        assert {long: text.count(long) for long in fewer} == dict.fromkeys(fewer, 1)


def test_a_page_has_the_outputs_of_its_very_cells_and_says_where_they_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = module_of("outputs")
    monkeypatch.setattr(outputs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(outputs, "FEWER", {"short": {"STEPS = 50": "STEPS = 2"}})
    (tmp_path / "kept").mkdir()
    page = tmp_path / "short.ipynb"
    cells = [nbformat.v4.new_markdown_cell("# Short"), nbformat.v4.new_code_cell("STEPS = 50")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, page)

    def reported() -> tuple[str, list[object]]:
        _, note, code = nbformat.reads(outputs.shown(page), as_version=4).cells
        assert code.source == "STEPS = 50"
        return note.source, code.outputs

    assert "its outputs are not here" in reported()[0]
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}}
    cells[1].outputs = [
        kept
        for data in ({**widget, "image/svg+xml": "<svg/>", "text/plain": "a run"}, widget)
        if (kept := outputs.still(nbformat.v4.new_output("display_data", data))) is not None
    ]
    notebook.metadata[outputs.DIGEST] = outputs._digest(page)
    nbformat.write(notebook, tmp_path / "kept/short.ipynb")
    note, shown = reported()
    assert "with `STEPS = 2` in the place of `STEPS = 50`" in note
    assert [dict(each)["data"] for each in shown] == [{"image/svg+xml": "<svg/>", "text/plain": "a run"}]
    # Other numbers, or other cells: what was kept is not of them.
    monkeypatch.setattr(outputs, "FEWER", {"short": {"STEPS = 50": "STEPS = 3"}})
    assert not outputs.has_outputs(page)


def test_every_public_name_is_described() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (SITE / "api").glob("*.rst"))
    named = set(re.findall(r"^\.\. auto\w+:: speedlab\.(\w+)(?:\(.*\))?$", pages, re.MULTILINE))
    planner = {"plan"}  # Described where it lives.
    assert named | planner == set(speedlab.__all__) - {"__version__"}


def test_the_site_is_not_installed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert "notebooks/site" in build["targets"]["wheel"]["exclude"]
