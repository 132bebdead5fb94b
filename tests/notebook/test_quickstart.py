"""`speedlab demo` as a wheel has it, in an empty folder: real kernel, real engines, every cell; only fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import nbformat
import pytest
from hatchling.builders.wheel import WheelBuilder

from speedlab.display.documentation import QUICKSTART, notebook_file
from speedlab.display.formatting import bytes_text
from speedlab.planner.formulas import model_states, parameter_count
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import RunState

ROOT = Path(__file__).parents[2]
STEPS = 3


def run_demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`speedlab demo` in `folder`, with a place for clusters of its own."""
    own = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    return subprocess.run(
        [sys.executable, "-c", "import sys; from speedlab.cli import main; sys.exit(main())", "demo", *arguments],
        cwd=folder,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def cluster_files(folder: Path) -> list[Path]:
    return list((folder / "ipython").rglob("cluster.json"))


@pytest.fixture(scope="module")
def source() -> str:
    """The notebook with few steps and few engines, as JSON text."""
    text = (ROOT / "notebooks/01_quickstart.ipynb").read_text(encoding="utf-8")
    for long, short in (
        (r"STEPS_PER_STAGE = \d+", f"STEPS_PER_STAGE = {STEPS}"),
        ("%speedlab start", r"\g<0> --engines 2"),
    ):
        text, count = re.subn(long, short, text)
        assert count == 1
    return text


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """What a wheel of this checkout puts into site-packages."""
    place = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(place), versions=["standard"])
    ZipFile(wheel).extractall(place / "site")
    return place / "site"


@pytest.fixture(scope="module")
def demo(tmp_path_factory, installed, source):
    """(folder, finished process) of one demo of the wheel, after an earlier run of the same name was left there."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "runs/quickstart").mkdir(parents=True)
    (folder / "runs/quickstart/mine.txt").write_text("keep me")
    notebook = installed / "speedlab/notebooks/01_quickstart.ipynb"
    assert notebook.read_bytes() == (ROOT / "notebooks/01_quickstart.ipynb").read_bytes()
    notebook.write_text(source, encoding="utf-8")
    done = run_demo(folder, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def test_the_table_has_every_stage_measured_beside_the_formula(demo) -> None:
    folder, done = demo
    feed = Feed(folder / "runs/quickstart")
    feed.poll(files=True)
    feed.close()
    ranks, started = len(feed.records), feed.events[0].details
    lines = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+[0-3]  ", line)]
    assert [line[0] for line in lines] == ["0", "1", "2", "3"]
    for stage, line in enumerate(lines):
        states = model_states(
            parameter_count(feed.folder.config.model),
            dp=ranks,
            stage=stage,
            dtype=started["dtype"],
            optimizer=feed.folder.config.optimizer,
        )
        optimizer = states.optimizer_moments + states.master_weights
        for expected in (states.parameters, states.gradients, optimizer):
            assert f"({bytes_text(expected)})" in " ".join(line)


def test_every_stage_trained_its_steps_on_all_ranks(demo) -> None:
    folder, _ = demo
    feed = Feed(folder / "runs/quickstart")
    feed.poll(files=True)
    feed.close()
    assert feed.status.state is RunState.FINISHED
    assert sorted(feed.records) == list(range(len(feed.records)))
    for records in feed.records.values():
        assert [record.step for record in records] == list(range(1, 4 * STEPS + 1))
        stages = [record.zero_stage for record in records]
        assert stages == sorted(stages)
        assert set(stages) == {0, 1, 2, 3}
    assert [event.details["after"]["zero"] for event in feed.events if event.kind == "reshaped"] == [1, 2, 3]


def test_losses_sample_and_report_are_told(demo) -> None:
    folder, done = demo
    losses = re.search(r"held-out loss: ([\d.]+) at the start, ([\d.]+) after (\d+) steps", done.stdout)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    assert int(losses[3]) == 4 * STEPS
    assert "\nsample:\n    def __init__(self" in done.stdout
    assert "report: runs/quickstart/report.html" in done.stdout
    assert "def __init__" not in (folder / "runs/quickstart/config.json").read_text()
    page = (folder / "runs/quickstart/report.html").read_text(encoding="utf-8")
    assert "quickstart" in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', page)


def test_the_earlier_run_is_kept_and_nothing_is_left_running(demo) -> None:
    folder, done = demo
    assert "the earlier run is now runs/quickstart-before-1" in done.stdout
    assert (folder / "runs/quickstart-before-1/mine.txt").read_text() == "keep me"
    assert cluster_files(folder) == []


def test_a_checkout_has_the_notebook_too() -> None:
    assert notebook_file(QUICKSTART) == ROOT / "notebooks/01_quickstart.ipynb"


def test_a_cell_that_fails_is_named_and_engines_are_ended(tmp_path) -> None:
    sources = ["import speedlab\ncluster = speedlab.Cluster(1, device='cpu')", "raise OSError('no more')"]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    done = run_demo(tmp_path, "notebook.ipynb")
    assert done.returncode == 1
    assert re.search(r"speedlab demo: cell \d+ failed", done.stderr)
    assert "stopping engines" in done.stdout
    assert "OSError: no more" in done.stderr
    assert cluster_files(tmp_path) == []
