"""The debugger's prompt below a cell on ranks, as a person sees it; interrupted, and with its kernel restarted."""

from __future__ import annotations

from typing import Any

import pytest
from lab_page import START, Notebook, picture

pytestmark = [pytest.mark.browser, pytest.mark.nightly, pytest.mark.timeout(420)]

STOPS = """\
%%ranks
import os, torch, torch.distributed as dist, speedlab.comm
speedlab.comm.join()
total = torch.full((1,), float(os.environ["RANK"]) + 1)
breakpoint()
dist.all_reduce(total)
total.item()"""
AFTER = """\
from speedlab.cluster import Cluster
cluster = Cluster.attach()
[state.state for state in cluster.status()], cluster.execute("6 * 7").result(60)"""


@pytest.mark.usefixtures("_engines_end")
def test_a_plain_cell_asks_for_the_debuggers_commands_below_it(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    notebook = Notebook(page, lab, "bugs.ipynb", [START, STOPS, STOPS, STOPS, AFTER])
    notebook.run(0)

    def asked() -> Any:
        """The prompt, once there is one that was not answered: the last one may still be there."""
        found = page.locator(".jp-Stdin-input:not([data-answered])")
        found.wait_for()
        assert "(Pdb)" in page.locator(".jp-Stdin-prompt").last.inner_text()
        return found

    def says(*commands: str) -> None:
        for command in commands:
            prompt = asked().element_handle()
            prompt.fill(command)
            prompt.evaluate("each => each.dataset.answered = '1'")
            prompt.press("Enter")

    cell = notebook.start(1)
    asked()
    says("p total.item() * 10")
    asked()
    picture(cell, "debugger-prompt")
    says("w", "c", "p total.item() * 10", "c")
    cell.locator(".jp-InputPrompt", has_text="[2]:").wait_for()
    output = cell.locator(".jp-Cell-outputArea")
    assert {"10.0", "20.0", "3.0"} <= set(output.inner_text().split())
    picture(cell, "debugger-done")

    cell = notebook.start(2)
    asked().evaluate("each => each.dataset.answered = '1'")  # JupyterLab leaves it on the page.
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text="Interrupt Kernel").first.click()
    says("c")  # The other rank's turn.
    cell.locator(".jp-InputPrompt", has_text="[3]:").wait_for()
    assert "BdbQuit" in cell.locator(".jp-Cell-outputArea").inner_text()
    picture(cell, "debugger-interrupted")

    notebook.start(3)
    asked()
    notebook.restart_kernel()
    output = notebook.run(4, count=1)
    assert "['42', '42']" in output.inner_text()
    assert broken == []
