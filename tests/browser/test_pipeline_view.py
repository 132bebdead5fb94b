"""A pipeline as a person sees it: lanes in the dashboard, another step's on pointing, a layout changed in the panel."""

from __future__ import annotations

import pytest
from lab_page import START, STOP, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

TRAIN = """\
import speedlab as sl
run = cluster.train(sl.RunConfig(
    name="pipeline", steps=100_000, zero=1, precision="float32", batch={"global_size": 8, "micro_size": 2},
    parallel={"pp": 2}, model={"layers": 4, "hidden": 64, "heads": 2, "ffn_hidden": 256},
    data={"max_bytes": 200_000, "sequence_length": 64}, eval={"every_steps": 0},
))"""


PAUSE, RESUME, END = "run.pause().wait(30)", "run.resume().wait(30)", "%speedlab stop --yes"


def title_of(dash) -> str:
    return dash.locator('[data-plot="pipeline"] .gtitle').text_content()


def points_at_third_bar(page, dash) -> bool:
    """Whether the timeline shows the step of the third bar soon after the pointer came to it: the last steps may still
    have been drawn meanwhile, and have moved the bars."""
    from playwright.sync_api import TimeoutError as NotWithin

    anatomy = dash.locator('[data-plot="anatomy"]')
    anatomy.scroll_into_view_if_needed()
    box = anatomy.locator(".barlayer .trace").nth(1).locator("path").nth(2).bounding_box()
    step = anatomy.evaluate("plot => plot.data[0].x[2]")
    if box is None:
        return False
    page.mouse.move(5, 5)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    try:
        page.wait_for_function(
            "step => document.querySelector('[data-plot=pipeline] .gtitle').textContent.includes(`step ${step}:`)",
            arg=step,
            timeout=5_000,
        )
    except NotWithin:
        return False
    return True


@pytest.mark.usefixtures("_engines_end")
def test_lanes_of_a_pipeline_and_a_layout_changed_in_the_panel(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    cells = [START, TRAIN, "%speedlab layout", "%speedlab panel", "%speedlab dash", PAUSE, RESUME, STOP, END]
    notebook = Notebook(page, lab, "pipeline.ipynb", cells)
    notebook.run(0)
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
    table = notebook.run(2)
    assert "pipeline: pp 2 × dp 1 × tp 1" in table.inner_text()
    assert table.locator("tr").count() == 3
    panel = notebook.run(3).locator(".speedlab-panel")
    dash = notebook.run(4).locator(".speedlab-dash")

    # Two lanes; forward and backward of four micro-batches in each; the bubble beside its theory.
    lanes = dash.locator('[data-plot="pipeline"]')
    lanes.locator(".bars .point").first.wait_for(state="attached")
    assert lanes.locator(".ytick").count() == 2
    drawn = lanes.evaluate(
        "plot => Object.fromEntries(plot.data.map("
        "trace => [trace.name, (trace.text ?? []).map((number, i) => [trace.y[i], number])]))"
    )
    every = {(lane, str(number)) for lane in (0, 1) for number in range(4)}
    assert {tuple(bar) for bar in drawn["forward"]} == {tuple(bar) for bar in drawn["backward"]} == every
    assert "(theory 20 %), 4 micro-batches" in title_of(dash)
    dash.get_by_role("button", name="Show the numbers").click()
    rows = dash.locator('figure[data-table="pipeline"] tbody tr')
    rows.first.wait_for()
    assert rows.count() == 2
    dash.get_by_role("button", name="Show the numbers").click()

    # It goes on by itself; pointing at a step of the anatomy holds that step's.
    first = title_of(dash)
    page.wait_for_function(
        "first => document.querySelector('[data-plot=pipeline] .gtitle').textContent !== first", arg=first
    )
    notebook.run(5)  # So that the bars stand still under the pointer.
    dash.locator(".sl-state", has_text="paused").wait_for()
    assert any(points_at_third_bar(page, dash) for _ in range(6))
    page.mouse.move(5, 5)
    notebook.run(6)

    # pp 2 -> tp 2 in the panel, live: the lanes go.
    panel.get_by_role("tab", name="Parallelism").click()
    panel.get_by_role("radiogroup", name="pp").get_by_text("1", exact=True).click()
    panel.get_by_role("radiogroup", name="tp").get_by_text("2", exact=True).click()
    panel.locator(".speedlab-changes", has_text="tp 1 → 2 (live) · pp 2 → 1 (live)").wait_for()
    panel.locator("button.speedlab-apply").click()
    panel.locator(".speedlab-message", has_text="pp 1 × dp 1 × tp 2").wait_for()
    dash.locator('[data-plot="loss"]').get_by_text("▼ pp 1 × dp 1 × tp 2").first.wait_for(state="attached")
    dash.locator(".sl-text").scroll_into_view_if_needed()  # Out of sight, it asks for nothing.
    lanes.wait_for(state="hidden")
    assert "the run is stopped" in notebook.run(7).inner_text()
    assert "stopped" in notebook.run(8).inner_text()
    assert broken == []
