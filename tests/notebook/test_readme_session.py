"""Cells of README and of the guides: a real kernel's shell, real engines, then a run that gets commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from markdown_blocks import README, ROOT, blocks_of
from speedlab_notebook import load_ipython_extension, unload_ipython_extension
from traitlets.config import Config

from speedlab.cluster import Run
from speedlab.telemetry.records import RunState

FIRST_RUN = ROOT / "speedlab/guides/tutorials/first-run.md"
OWN_MODEL = ROOT / "speedlab/guides/how-to/own-model-and-data.md"
SLOW_NETWORKS = ROOT / "speedlab/guides/how-to/slow-networks.md"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.kernel = object()  # As in a notebook: displays can be updated.
    shell.display_pub = CapturingDisplayPublisher()
    load_ipython_extension(shell)
    try:
        yield shell
    finally:
        shell.run_cell("%speedlab stop --yes")
        unload_ipython_extension(shell)
        InteractiveShell.clear_instance()


def python_of(page: Path) -> list[str]:
    """Return the page's blocks of Python for a notebook: those with a magic or a cluster."""
    blocks = [block.code for block in blocks_of(page) if block.language == "python"]
    return [code for code in blocks if "%speedlab" in code or "cluster" in code]


def test_the_first_screen_of_readme(shell: InteractiveShell) -> None:
    start, train = python_of(README)
    for cell in (start, train):
        shell.run_cell(cell).raise_error()
    run: Run = shell.user_ns["run"]
    run.stop().wait(60)
    assert [event.details["after"]["zero"] for event in run.events if event.kind == "reshaped"] == [3]


def test_the_first_run(shell: InteractiveShell) -> None:
    start, steer = python_of(FIRST_RUN)
    (train_own,) = python_of(OWN_MODEL)
    (emulate,) = python_of(SLOW_NETWORKS)
    for cell in (start, steer, "%speedlab dash  # of the run that was just started"):
        shell.run_cell(cell).raise_error()
    run: Run = shell.user_ns["run"]
    reshaped = [event.details["after"] for event in run.events if event.kind == "reshaped"]
    assert [after["zero"] for after in reshaped] == [3, 1]
    assert (reshaped[1]["pp"], reshaped[1]["dp"], reshaped[1]["tp"]) == (2, 1, 2)
    assert (run.folder.path / "checkpoints/before-lunch/manifest.json").is_file()
    assert run.placement()
    run.stop().wait(60)

    shell.run_cell(train_own).raise_error()
    own: Run = shell.user_ns["run"]
    assert own.wait(120) is RunState.FINISHED
    assert own.step == 20
    assert own.records()[-1].loss < own.records()[0].loss

    shell.run_cell("%speedlab stop --yes").raise_error()
    shell.run_cell(emulate).raise_error()
    assert "pretended" in repr(shell.user_ns["cluster"])
