"""The tensors in a segment of memory, listed by keys alone, in a run whose names are hostile."""

from __future__ import annotations

import pytest
from hostile import PAYLOADS, make_runs
from lab_page import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

SHOW = """\
from speedlab_notebook.dashboard import show
show("runs/hostile-00");"""


def focused(page) -> str:
    return page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName")


def test_tensors_are_listed_by_keys_and_their_names_are_text(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    make_runs(lab.folder / "runs")
    dash = Notebook(page, lab, "tensors.ipynb", [SHOW]).run(0).locator(".speedlab-dash")
    dash.locator('[data-plot="kernels"] .main-svg').first.wait_for()
    button, panel = dash.get_by_role("button", name="List the tensors"), dash.locator(".sl-tensors")
    button.focus()
    page.keyboard.press("Enter")
    panel.locator("tbody tr").first.wait_for()
    assert focused(page) == "SELECT"
    assert panel.locator("tbody th").all_text_contents() == list(PAYLOADS[:6])
    assert panel.locator("td").all_text_contents()[:3] == ["32 B", PAYLOADS[0], "parameter"]
    page.keyboard.press("ArrowDown")
    panel.get_by_role("status").get_by_text("gradients of rank 0").wait_for()
    page.keyboard.press("Escape")
    panel.wait_for(state="hidden")
    assert focused(page).startswith("List the tensors")
    assert button.get_attribute("aria-pressed") == "false"
    slider = dash.locator("input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "20 steps"
    assert page.evaluate("window.speedlabPwned") is None
    assert dash.locator("img, script, iframe, object").count() == 0
    assert broken == []
