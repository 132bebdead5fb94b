"""A notebook on a JupyterLab page, as the browser tests drive it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

START = """\
%load_ext speedlab
%speedlab start --engines 2
import os
polite = cluster.submit(os.nice, 10).result(60)"""
"""Training takes what pages, kernels and the tests beside leave: it would keep every core busy all the time."""
TRAIN = """\
import speedlab as sl
run = cluster.train(sl.RunConfig(
    name="NAME", steps=100_000, zero=2, precision="float32", batch={"micro_size": 2},
    model={"layers": 2, "hidden": 64, "heads": 2, "ffn_hidden": 256},
    data={"max_bytes": 200_000, "sequence_length": 64}, eval={"every_steps": 0},
))"""
STOP = "run.stop().wait(60)\nprint('the run is', run.state)"
AXE = Path(__file__).parents[2] / "extension/lab/node_modules/axe-core/axe.min.js"
_SERIOUS = """async included => {
    const found = await axe.run({include: included.map(each => [each])}, {resultTypes: ['violations']});
    return found.violations.filter(each => ['serious', 'critical'].includes(each.impact))
        .map(each => `${each.id}: ${each.nodes.map(node => node.html + ' ' + node.failureSummary).join('; ')}`);
}"""
_TRIES = 4
_LOST_SECONDS = 8.0
"""Until a cell shows that it runs, or was interrupted, at the latest."""


class Notebook:
    """A notebook on the page, whose cells are run one after another; `seven`: in Notebook 7 instead of JupyterLab."""

    def __init__(self, page: Any, lab: Any, name: str, cells: list[str], *, seven: bool = False) -> None:
        self.page, self._seven = page, seven
        self.path = lab.folder / name
        code = [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
            for i, cell in enumerate(cells)
        ]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        self.path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        question = page.locator(".jp-Dialog", has_text="Select Kernel")
        # A busy server may take so long to name its kernels that Notebook 7 asks which it shall be.
        page.add_locator_handler(question, lambda: question.locator("button.jp-mod-accept").click())
        page.goto(lab.page_of(name, seven=seven))
        page.locator(".jp-Notebook-cell").first.wait_for()
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        if self._seven:
            idle = self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first
            idle.wait_for(state="attached", timeout=90_000)
        else:  # The toolbar says idle too early.
            self.page.get_by_text("| Idle").first.wait_for(timeout=90_000)

    def run(self, number: int, *, count: int | None = None) -> Any:
        """Run cell `number`, counted from 0, and wait until it is done; returns its outputs.

        `count`: the kernel's count of cells that it then shows; left out, each cell was run once in order.
        """
        cell = self.start(number)
        done = cell.locator(".jp-InputPrompt", has_text=f"[{count or number + 1}]:")
        untouched = cell.locator(".jp-InputPrompt", has_text="[ ]:")
        done.or_(untouched).wait_for(timeout=120_000)
        if untouched.count():  # A kernel drops what comes while the cell before is ending in an error.
            self.start(number)
            done.wait_for(timeout=120_000)
        return cell.locator(".jp-Cell-outputArea")

    def restart_kernel(self) -> None:
        """By the menu, and its question answered; then the kernel is idle."""
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.locator(".lm-Menu-itemLabel", has_text="Restart Kernel…").first.click()
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        self.wait_until_idle()

    def start(self, number: int) -> Any:
        """Run cell `number` and do not wait for it; returns the cell."""
        cell = self.page.locator(".jp-Notebook-cell").nth(number)
        untouched = cell.locator(".jp-InputPrompt", has_text="[ ]:")
        for _ in range(_TRIES):  # Just behind a page's load a key can be lost, whatever its kernel is said to be.
            cell.locator(".jp-InputArea-editor").click()
            self.page.keyboard.press("Shift+Enter")
            deadline = time.monotonic() + _LOST_SECONDS
            while untouched.count() and time.monotonic() < deadline:
                self.page.wait_for_timeout(50)
            if not untouched.count():
                return cell
        raise AssertionError(f"cell {number} does not begin")

    def interrupt(self, cell: Any) -> None:
        """By keys, until this cell, which runs, shows it: a kernel that has not begun with a cell hears nothing."""
        cell.locator(".jp-InputPrompt", has_text="[*]:").wait_for()
        interrupted = cell.get_by_text("KeyboardInterrupt").first
        for _ in range(_TRIES):
            self.page.keyboard.press("Escape")
            self.page.keyboard.press("i")
            self.page.keyboard.press("i")
            deadline = time.monotonic() + _LOST_SECONDS
            while not interrupted.is_visible() and time.monotonic() < deadline:
                self.page.wait_for_timeout(50)
            if interrupted.is_visible():
                return
        raise AssertionError("the cell is not interrupted")

    def saved_output(self, mime_type: str, text: str = "") -> dict[str, Any]:
        """Save until an output of this MIME type with `text` in it is in the file, at most ten times; returns the
        output's data."""
        outputs: list[Any] = []
        for _ in range(10):
            self.page.keyboard.press("Escape")
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(1000)
            try:
                cells = json.loads(self.path.read_text())["cells"]
            except json.JSONDecodeError:  # The server empties the file and writes it anew; a busy one is seen at it.
                continue
            outputs = [output for cell in cells for output in cell["outputs"]]
            found = [
                output["data"]
                for output in outputs
                if text in str(output.get("data", {}).get(mime_type, "")) and mime_type in output.get("data", {})
            ]
            if found:
                return found[-1]
        raise AssertionError(
            f"no {mime_type} in the saved notebook; there are {[list(o.get('data', o)) for o in outputs]}"
        )


def step_of(dash: Any) -> int:
    """The step that its header line tells, once it tells one: a view that was made anew begins without. Its text
    content, since JupyterLab may not have laid it out, and text that is not rendered has no inner text."""
    text = dash.locator(".sl-text", has_text="step ").text_content()
    return int(text.split("step ")[1].split("/")[0].replace(",", ""))


def goes_on(page: Any, dash: Any) -> None:
    """Steps are taken, and the header line tells them, once it is in sight: hidden, a dashboard asks for nothing."""
    dash.locator(".sl-text", has_text="step ").wait_for()
    dash.locator(".sl-text").scroll_into_view_if_needed()
    first, deadline = step_of(dash), time.monotonic() + 60
    while step_of(dash) <= first:  # Asked anew each time: an output may be drawn anew meanwhile.
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def use_dark_theme(page: Any) -> None:
    """By JupyterLab's menu."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
    page.locator(".lm-Menu-itemLabel").get_by_text("JupyterLab Dark", exact=True).click()
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")


def serious_problems(page: Any, *parts: str) -> list[str]:
    """What axe-core finds in these parts of the page, by selector: its serious and critical rules alone."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed; .ci/pages.sh installs it")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return page.evaluate(_SERIOUS, list(parts))


def picture(part: Any, name: str) -> None:
    """For people who look at what they made: SPEEDLAB_PICTURES names a folder."""
    if folder := os.environ.get("SPEEDLAB_PICTURES"):
        part.screenshot(path=str(Path(folder) / f"{name}.png"))
