"""What queries see, as a person sees it: in a plan, below the panel's fields, and of a configuration in a cell."""

from __future__ import annotations

import os

import pytest
from lab_page import Notebook, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

CONFIG = """\
import speedlab as sl
sparse = {"kind": "block_sparse", "pattern": "longformer", "window": 512}
config = sl.RunConfig(
    model={"layers": 12, "hidden": 256, "heads": 8, "context": 16384, "attention": sparse},
    data={"sequence_length": 16384}, batch={"micro_size": 1},
)
config.save("sparse.yaml")
config.attention_view()"""


def test_what_queries_see_is_drawn_in_cells_plans_and_the_panel(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    notebook = Notebook(page, lab, "seen.ipynb", [CONFIG, "%load_ext speedlab\n%speedlab plan sparse.yaml", PANEL])
    cell = notebook.run(0).locator(".speedlab-attention")
    assert "16,384 tokens in 256 blocks of 64" in cell.inner_text()
    picture(cell, "seen-cell")

    plan = notebook.run(1).locator(".speedlab-plan")
    assert "of a whole step's FLOP" in plan.locator(".speedlab-attention").inner_text()
    assert plan.locator(".speedlab-attention svg path").count() < 12
    picture(plan, "seen-plan")

    panel = notebook.run(2).locator(".speedlab-panel")
    seen = panel.locator(".speedlab-seen")
    seen.locator("svg").wait_for(state="attached")
    seen.scroll_into_view_if_needed()
    assert "longest path between two tokens" in seen.inner_text()
    row = seen.locator("rect").last
    assert "queries 16,128 to 16,383" in row.locator("title").text_content()
    picture(panel, "seen-panel")
    panel.get_by_role("tab", name="Export").click()
    text = panel.locator("textarea")
    text.wait_for()
    assert text.evaluate("text => text.scrollWidth > text.clientWidth")  # Its lines are long, and scroll inside it,
    beyond = "panel => panel.getBoundingClientRect().right - panel.closest('.jp-Cell').getBoundingClientRect().right"
    assert panel.evaluate(beyond) <= 0  # and the panel stays as wide as its cell.
    panel.get_by_role("tab", name="Model & data").click()
    page.set_viewport_size({"width": 900, "height": 1700})
    page.wait_for_function("document.querySelector('.speedlab-panel').clientWidth < 500")
    assert panel.evaluate("panel => panel.scrollWidth - panel.clientWidth") <= 0
    assert panel.evaluate(beyond) <= 0
    page.set_viewport_size({"width": 1500, "height": 1700})
    if os.environ.get("SPEEDLAB_PICTURES"):
        page.get_by_text("Settings", exact=True).first.click()
        page.get_by_text("Theme", exact=True).first.hover()
        page.get_by_text("JupyterLab Dark", exact=True).first.click()
        page.wait_for_timeout(2500)
        seen.scroll_into_view_if_needed()
        picture(panel, "seen-panel-dark")
        picture(plan, "seen-plan-dark")
    assert broken == []


PANEL = """\
from speedlab_notebook.panel.panel import Panel
shown = Panel()
for path, value in {"model.context": 16384, "data.sequence_length": 16384, "model.attention.kind": "block_sparse",
                    "model.attention.window": 512, "model.attention.pattern": "longformer"}.items():
    shown.fields[path].control.value = value
shown"""
