"""The main job as a person does it: engines, a run, the stage moved in the panel, numbers read from the page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

START = "%load_ext speedlab\n%speedlab start --engines 2"
TRAIN = """\
import speedlab as sl
run = cluster.train(sl.RunConfig(
    name="quickstart", steps=100_000, zero=2, precision="float32", batch={"micro_size": 2},
    model={"layers": 2, "hidden": 64, "heads": 2, "ffn_hidden": 256},
    data={"max_bytes": 200_000, "sequence_length": 64}, eval={"every_steps": 0},
))"""
STOP = "run.stop().wait(60)\nprint('the run is', run.state)"
STOP_ENGINES = """
from speedlab.cluster import Cluster, ClusterError
try:
    Cluster.attach().stop()
except ClusterError as error:
    print(error)
"""


class Notebook:
    """A notebook on the page, whose cells are run one after another."""

    def __init__(self, page: Any, lab: Any, name: str, cells: list[str]) -> None:
        self.page = page
        self.path = lab.folder / name
        code = [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
            for i, cell in enumerate(cells)
        ]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        self.path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        page.goto(lab.page_of(name))
        page.locator(".jp-Notebook-cell").first.wait_for()
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        # The toolbar says idle too early.
        self.page.get_by_text("| Idle").first.wait_for(timeout=90_000)

    def run(self, number: int) -> Any:
        """Run cell `number`, counted from 0 and each once in order, and wait until it is done; returns its outputs."""
        cell = self.page.locator(".jp-Notebook-cell").nth(number)
        cell.locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Shift+Enter")
        cell.locator(".jp-InputPrompt", has_text=f"[{number + 1}]:").wait_for(timeout=120_000)
        return cell.locator(".jp-Cell-outputArea")

    def saved_outputs(self) -> list[dict[str, Any]]:
        """Save, and read the outputs of all cells from the file."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        self.page.locator(".jp-mod-current.jp-mod-dirty").wait_for(state="detached")
        return [output for cell in json.loads(self.path.read_text())["cells"] for output in cell["outputs"]]


@pytest.fixture
def _engines_end(lab) -> Iterator[None]:
    """Whatever the test did, its engines are ended."""
    yield
    subprocess.run([sys.executable, "-c", STOP_ENGINES], env=lab.environment, cwd=lab.folder, timeout=90, check=True)


def numbers(dash: Any, figure: str) -> dict[str, list[float]]:
    """A table of the dashboard: the first cell of each row -> its numbers."""
    rows = dash.locator(f'figure[data-table="{figure}"] tbody tr').all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    return {name: [float(value.replace(",", "")) for value in values if value] for name, *values in cells}


def heights(dash: Any) -> list[float]:
    """Heights on the screen, in pixels, of the bars at the bottom of the memory plot: parameters."""
    bars = dash.locator('[data-plot="memory"] .bars').first.locator("path").all()
    return [box["height"] for bar in bars if (box := bar.bounding_box())]


def step_of(dash: Any) -> int:
    return int(dash.locator(".sl-text").inner_text().split("step ")[1].split("/")[0].replace(",", ""))


@pytest.mark.usefixtures("_engines_end")
def test_a_person_trains_and_moves_the_stage_of_the_live_run(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    cells = [START, TRAIN, "%speedlab panel", "%speedlab dash", STOP, "%speedlab stop --yes"]
    notebook = Notebook(page, lab, "quickstart.ipynb", cells)

    started = notebook.run(0)
    assert "2 engines" in started.inner_text()
    notebook.run(1)
    panel = notebook.run(2).locator(".speedlab-panel")
    dash = notebook.run(3).locator(".speedlab-dash")
    dash.locator('[data-plot="memory"] .bars').first.wait_for(state="attached")
    dash.locator(".sl-state", has_text="● running").wait_for()

    # The dashboard moves by itself: steps go on, with tokens/s and loss in the header line.
    first = step_of(dash)
    page.wait_for_function(
        "first => +document.querySelector('.sl-text').textContent"
        ".match(/step ([\\d,]+)/)[1].replaceAll(',', '') > first",
        arg=first,
    )
    assert "tokens/s · " in dash.locator(".sl-text").inner_text()
    assert "ZeRO stage 2 · 2 engines" in dash.locator(".sl-text").inner_text()

    # Model states alone: the process holds far more.
    dash.locator('button[aria-pressed="true"]', has_text="model states").wait_for()
    page.wait_for_function(
        "document.querySelector('[data-plot=memory] .bars path')?.getBoundingClientRect().height > 20"
    )
    high = heights(dash)
    assert len(high) == 2
    dash.get_by_role("button", name="Show the numbers").click()
    dash.locator('figure[data-table="memory"]').wait_for()
    before = numbers(dash, "memory")
    assert list(before) == ["parameters", "gradients", "master weights", "optimizer moments", "sum"]
    assert before["sum"] == pytest.approx(
        [sum(values) for values in zip(*list(before.values())[:4], strict=True)], rel=1e-3
    )
    dash.get_by_role("button", name="Show the numbers").click()

    # Stage 2 -> 3 in the panel, live.
    panel.get_by_role("tab", name="ZeRO & memory").click()
    panel.locator(".speedlab-zero-stage button", has_text="3").click()
    panel.locator(".speedlab-changes", has_text="live").wait_for()
    panel.locator("button.speedlab-apply").click()
    dash.locator(".sl-text", has_text="ZeRO stage 3").wait_for()
    dash.get_by_role("button", name="Show the numbers").click()
    page.wait_for_function(
        "most => { const cell = document.querySelector('figure[data-table=memory] tbody td');"
        " return cell && parseFloat(cell.textContent) < most; }",
        arg=0.75 * before["parameters"][0],
    )
    after = numbers(dash, "memory")
    assert after["parameters"] == pytest.approx([value / 2 for value in before["parameters"]], rel=0.02)
    assert after["optimizer moments"] == pytest.approx(before["optimizer moments"], rel=0.02)
    dash.get_by_role("button", name="Show the numbers").click()

    # The same scale, so the bars are half as high.
    page.wait_for_function(
        "most => document.querySelector('[data-plot=memory] .bars path').getBoundingClientRect().height < most",
        arg=0.75 * high[0],
    )
    assert heights(dash) == pytest.approx([height / 2 for height in high], rel=0.05)
    assert dash.locator('[data-plot="loss"]').get_by_text("▼ 2→3").count() == 1

    # The end: a figure and a picture stay in the saved notebook.
    assert "the run is stopped" in notebook.run(4).inner_text()
    dash.locator(".sl-state", has_text="■ stopped").wait_for()
    kept: dict[str, Any] = {}
    for _ in range(40):
        kept = next((o["data"] for o in notebook.saved_outputs() if "image/png" in o.get("data", {})), {})
        if kept:
            break
        page.wait_for_timeout(250)
    assert kept["application/vnd.plotly.v1+json"]["data"]
    assert len(kept["image/png"]) > 10_000
    assert "stopped" in notebook.run(5).inner_text()
    assert broken == []
