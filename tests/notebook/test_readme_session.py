"""The first notebook of README, cell by cell: a real kernel's shell, real engines, then a run that is steered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from markdown_blocks import README, blocks_of
from speedlab_notebook import load_ipython_extension, unload_ipython_extension
from traitlets.config import Config

from speedlab.cluster import Run
from speedlab.telemetry.records import RunState


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


def test_the_first_notebook(shell: InteractiveShell) -> None:
    python = [block.code for block in blocks_of(README) if block.language == "python"]
    start, steer, train_own = (code for code in python if "%speedlab" in code or "cluster.train" in code)
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
