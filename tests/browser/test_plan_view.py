"""Predictions as a person sees them: a plan in a cell, bars that follow a control, predicted beside measured."""

from __future__ import annotations

import pytest
from lab_page import START, STOP, Notebook, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

TRAIN = """\
import speedlab as sl
run = cluster.train(sl.RunConfig(
    name="planned", steps=100_000, zero=2, precision="float32", batch={"global_size": 8, "micro_size": 4},
    model={"layers": 4, "hidden": 64, "heads": 2, "ffn_hidden": 256},
    data={"max_bytes": 200_000, "sequence_length": 64}, eval={"every_steps": 0},
))"""
PLAN = '%speedlab plan gpt3-175b --machines "128x8 A100-80 nvlink3 ib-200x8" --tp 8 --pp 16 --zero 1 --global 1536'


@pytest.mark.usefixtures("_engines_end")
def test_a_plan_the_panels_prediction_and_predicted_beside_measured(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    cells = [START, PLAN + " --checkpointing block --tokens 300B", TRAIN, "%speedlab panel", "%speedlab dash"]
    notebook = Notebook(page, lab, "plan.ipynb", [*cells, STOP, "%speedlab stop --yes"])
    notebook.run(0)

    plan = notebook.run(1).locator(".speedlab-plan")
    assert "fits: " in plan.inner_text()
    assert "speed: limited by" in plan.inner_text()
    assert plan.locator("svg .speedlab-outline").count() >= 3
    picture(plan, "plan")

    assert "Error" not in "".join(notebook.run(2).all_inner_texts())
    panel = notebook.run(3).locator(".speedlab-panel")
    panel.locator(".speedlab-bars").first.wait_for()
    assert "tokens/s" in panel.locator(".speedlab-summary").inner_text()
    assert "speed: limited by" in panel.locator(".speedlab-states").inner_text()
    assert panel.locator('td[data-category="activations"]').count() == 4
    picture(panel, "panel")

    dash = notebook.run(4).locator(".speedlab-dash")
    memory = dash.locator('[data-plot="memory"]')
    memory.locator(".annotation-text", has_text="predicted").wait_for()
    assert "measured" in memory.locator(".annotation-text", has_text="predicted").text_content()
    dash.locator('[data-plot="throughput"] .legendtext', has_text="predicted").wait_for()
    page.wait_for_timeout(3000)
    picture(dash, "dash")
    notebook.run(5)
    notebook.run(6)
    assert broken == []
