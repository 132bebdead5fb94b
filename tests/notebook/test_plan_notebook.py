"""The notebook about the announcements runs as it stands, and its numbers are those of the planner."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks/02_planning_a_trillion_parameters.ipynb"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    """What each cell prints or shows, by the cell's id."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("plan"))}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    return {
        cell.id: "\n".join(out.get("text") or out.data["text/plain"] for out in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.outputs
    }


def test_the_table_of_zero_is_that_of_the_paper(texts: dict[str, str]) -> None:
    rows = {int(line.split()[0]): line.split()[1:] for line in texts["states"].splitlines()[1:] if line.strip()}
    # arXiv:1910.02054, table 1: 7.5B at 64 ranks, 1T at 1,024.
    assert [float(value) for value in rows[64][:3]] == pytest.approx([31.4, 16.6, 1.88], rel=0.01)
    assert [float(value) for value in rows[1024][6:]] == pytest.approx([4011, 2013, 15.6], rel=0.01)


def test_thirty_gigabytes_are_those_without_partitions(texts: dict[str, str]) -> None:
    assert "announced 30 GB; stage 0: 31.25 GB, stage 1: 10.74 GB" in texts["trillion"]


def test_gpt3_takes_about_as_long_as_the_paper_says(texts: dict[str, str]) -> None:
    found = re.search(r"140 TFLOP/s: ([\d.]+) days; planned: ([\d.]+) days", texts["gpt3"])
    assert found is not None
    assert float(found[1]) == pytest.approx(34, abs=0.5)
    assert float(found[2]) == pytest.approx(34, rel=0.25)


def test_a_search_finds_layouts_of_two_trillion(texts: dict[str, str]) -> None:
    assert re.search(r"pp \d+ × dp \d+ × tp \d+, ZeRO-\d", texts["two"])
    assert "2t: 2.0" in texts["two"]


def test_what_does_not_fit_and_what_does_say_so(texts: dict[str, str]) -> None:
    assert "does not fit" in texts["fit"]
    assert "cheapest changes that fit:" in texts["fit"]
    assert "fits: " in texts["own"]
    assert "published" in texts["published"] or "Rows with *" in texts["published"]
