"""Cells between two steps, in a run's folder: sealed, bounded, checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.live_cells import LiveCells
from speedlab.cluster.sealed import write_sealed
from speedlab.telemetry.folder import RunFolderError
from speedlab.telemetry.live import Said, cell_path, take_said, write_said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "live").mkdir()
    return tmp_path


def test_a_cell_that_somebody_else_wrote_is_not_run(folder: Path) -> None:
    path = cell_path(folder, "one")
    write_sealed(path, b"1 + 1")
    assert path.stat().st_mode & 0o777 == 0o600
    sealed = path.read_bytes()
    assert LiveCells().take(path) == "1 + 1"
    assert not path.exists()
    path.write_bytes(sealed + b"; import os")
    with pytest.raises(ClusterError, match=r"not written by you .* Run the cell again"):
        LiveCells().take(path)


def test_what_ranks_said_is_taken_once(folder: Path) -> None:
    said = Said([["stream", {"name": "stdout", "text": "hello"}]], None, None)
    write_said(folder, "one", [None, said])
    assert take_said(folder, "one") == {1: said}
    with pytest.raises(RunFolderError, match="cannot be read"):
        take_said(folder, "one")


def test_answers_that_nobody_takes_do_not_fill_the_folder(folder: Path) -> None:
    for number in range(18):
        write_said(folder, f"cell{number}", [None])
        os.utime(cell_path(folder, f"cell{number}").with_suffix(".json"), (number, number))
    assert {path.stem for path in (folder / "live").iterdir()} == {f"cell{number}" for number in range(2, 18)}


@pytest.mark.parametrize(
    "found", [3, [3], [[[], None]], [[[["stream", 1]], None, None]], [[[], 3, None]], [[[], None, 3]]]
)
def test_an_answer_that_is_damaged_is_named(folder: Path, found: Any) -> None:
    cell_path(folder, "one").with_suffix(".json").write_text(json.dumps(found))
    with pytest.raises(RunFolderError, match=r"one\.json: what ranks said in the cell cannot be read"):
        take_said(folder, "one")
