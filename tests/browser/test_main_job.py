"""The main job as a person does it: engines, a run, the stage moved in the panel, numbers read from the page."""

from __future__ import annotations

from typing import Any

import pytest
from lab_page import START, STOP, TRAIN, Notebook, goes_on, picture, step_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]


def numbers(dash: Any, figure: str) -> dict[str, list[float]]:
    """A table of the dashboard: the first cell of each row -> its numbers."""
    rows = dash.locator(f'figure[data-table="{figure}"] tbody tr').all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    return {name: [float(value.replace(",", "")) for value in values if value] for name, *values in cells}


def heights(dash: Any) -> list[float]:
    """Heights on the screen, in pixels, of the bars at the bottom of the memory plot: parameters."""
    bars = dash.locator('[data-plot="memory"] .bars').first.locator("path").all()
    return [box["height"] for bar in bars if (box := bar.bounding_box())]


@pytest.mark.usefixtures("_engines_end")
def test_a_person_trains_and_moves_the_stage_of_the_live_run(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    cells = [
        START,
        TRAIN.replace("NAME", "quickstart"),
        "%speedlab panel",
        "%speedlab dash",
        "print('the run is', run.wait())",
        STOP,
        "%speedlab stop --yes",
    ]
    notebook = Notebook(page, lab, "quickstart.ipynb", cells)

    started = notebook.run(0)
    assert "2 engines" in started.inner_text()
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
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
    assert " tokens/s (predicted " in dash.locator(".sl-text").inner_text()
    assert "ZeRO stage 2 · 2 engines" in dash.locator(".sl-text").inner_text()

    # Model states alone: the process holds far more.
    dash.locator('button[aria-pressed="true"]', has_text="model states").wait_for()
    page.wait_for_function(
        "(bars => bars.length === 2 && bars.every(bar => bar.getBoundingClientRect().height > 20))"
        "([...(document.querySelector('[data-plot=memory] .bars')?.querySelectorAll('path') ?? [])])"
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

    # Stage 2 -> 3 in the panel, live, while a cell waits for the run.
    waiting = notebook.start(4)
    panel.get_by_role("tab", name="ZeRO & memory").click()
    panel.get_by_role("radiogroup", name="stage").get_by_text("3", exact=True).click()
    panel.locator(".speedlab-changes", has_text="live").wait_for()
    panel.locator("button.speedlab-apply").click()
    dash.locator(".sl-text", has_text="ZeRO stage 3").wait_for()
    dash.get_by_role("button", name="Show the numbers").click()
    page.wait_for_function(
        "most => { const cells = [...document.querySelectorAll('figure[data-table=memory] tbody tr:first-child td')];"
        " return cells.length && cells.every(cell => parseFloat(cell.textContent) < most); }",
        arg=0.75 * before["parameters"][0],
    )
    after = numbers(dash, "memory")
    assert after["parameters"] == pytest.approx([value / 2 for value in before["parameters"]], rel=0.02)
    assert after["optimizer moments"] == pytest.approx(before["optimizer moments"], rel=0.02)
    dash.get_by_role("button", name="Show the numbers").click()

    # The same scale, so the bars are half as high.
    page.wait_for_function(
        "most => [...document.querySelector('[data-plot=memory] .bars').querySelectorAll('path')]"
        ".every(bar => bar.getBoundingClientRect().height < most)",
        arg=0.75 * high[0],
    )
    assert heights(dash) == pytest.approx([height / 2 for height in high], rel=0.05)
    assert dash.locator('[data-plot="loss"]').get_by_text("▼ 2→3").count() == 1

    # The end: a picture and a table stay in the saved notebook.
    panel.locator("button.speedlab-pause").click()
    waiting.locator(".jp-InputPrompt", has_text="[5]:").wait_for()
    assert "the run is paused" in waiting.inner_text()
    assert "the run is stopped" in notebook.run(5).inner_text()
    dash.locator(".sl-state", has_text="■ stopped").wait_for()
    kept = notebook.saved_output("text/html", "■ stopped")
    assert "".join(kept["image/svg+xml"]).startswith("<svg")
    assert "■ stopped" in "".join(kept["text/plain"])
    assert "<table><caption>model states by rank</caption>" in "".join(kept["text/html"])
    assert "stopped" in notebook.run(6).inner_text()
    assert broken == []


@pytest.mark.usefixtures("_engines_end")
def test_the_dashboard_goes_on_while_a_cell_blocks_after_a_reload_and_after_a_restart_of_the_kernel(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    block = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)"
    cells = [START, TRAIN.replace("NAME", "going-on"), "%speedlab dash", block, "run.dashboard()"]
    notebook = Notebook(page, lab, "going_on.ipynb", [*cells, "%load_ext speedlab\n%speedlab attach", STOP])
    notebook.run(0)
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
    dash = notebook.run(2).locator(".speedlab-dash")
    dash.locator('[data-plot="loss"] .scatterlayer .trace').first.wait_for(state="attached")

    # A cell blocks the kernel; the page asks the server.
    cell = notebook.start(3)
    cell.locator(".jp-InputPrompt", has_text="[*]:").wait_for()
    goes_on(page, dash)
    assert cell.locator(".jp-InputPrompt", has_text="[*]:").count() == 1
    (lab.folder / "go").touch()
    cell.locator(".jp-InputPrompt", has_text="[4]:").wait_for()
    notebook.saved_output("application/vnd.speedlab.run+json")

    page.reload()
    notebook.wait_until_idle()
    dash.locator('[data-plot="loss"] .scatterlayer .trace').first.wait_for(state="attached")
    goes_on(page, dash)
    # From the first step on, not only from where this page came in.
    first, last = dash.locator('[data-plot="loss"]').evaluate("plot => [plot.data[0].x[0], plot.data[0].x.at(-1)]")
    assert 1 <= first < last / 5

    # The same as a widget, at once, where the server draws nothing: it has no extension, and knows of no run.
    ways = "**/speedlab/api/runs/*"
    page.route(ways, lambda route: route.fulfill(status=404))
    widget = notebook.run(4).locator(".speedlab-dash")
    widget.locator('[data-plot="loss"] .scatterlayer .trace').first.wait_for(state="attached")
    goes_on(page, widget)
    page.unroute(ways)

    notebook.restart_kernel()
    goes_on(page, dash)
    widget.get_by_text("was restarted. Run the cell again.").wait_for()
    outputs = notebook.run(5, count=1)
    assert "'going-on'" in outputs.inner_text()
    goes_on(page, outputs.locator(".speedlab-dash"))
    assert outputs.locator(".speedlab-panel").count() == 1
    assert "the run is stopped" in notebook.run(6, count=2).inner_text()
    assert broken == []


@pytest.mark.nightly
@pytest.mark.usefixtures("_engines_end")
def test_the_proof_button_shows_a_result_and_names_what_fails_on_a_rank(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    fault = """
def fail(self, batch):
    import os
    if os.environ["RANK"] == "1":
        raise RuntimeError("a fault of this test")
def break_trial():
    from speedlab.engine.proof import Prover
    Prover._pass = fail
cluster.submit(break_trial).result(60)
"""
    cells = [START, TRAIN.replace("NAME", "proved"), "%speedlab panel", STOP, fault, "%speedlab stop --yes"]
    notebook = Notebook(page, lab, "proof.ipynb", cells)
    notebook.run(0)
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
    panel = notebook.run(2).locator(".speedlab-panel")
    button, message = panel.locator("button.speedlab-prove"), panel.locator(".speedlab-message")
    proof = panel.locator(".speedlab-proof-of-run")
    proof.get_by_text("proof of the first batch: 8 ok").wait_for()

    # While it trains: the message says what is asked for, the result is open, and the next update is added to it.
    button.click()
    message.get_by_text("proof made at step").wait_for()
    proof.get_by_text("proof of the batch of step").wait_for()
    proof.get_by_text("all 14 trainable tensors with a gradient moved in update").wait_for()
    picture(panel, "proof-while-it-trains")

    # After the end a fault on one rank is an error with the rank's name, and the panel can be used again.
    assert "the run is stopped" in notebook.run(3).inner_text()
    assert "Error" not in notebook.run(4).inner_text()
    button.click()
    message.get_by_role("alert").get_by_text("rank 1: RuntimeError: a fault of this test").wait_for()
    proof.get_by_text("the trial failed: rank 1: RuntimeError: a fault of this test").first.wait_for()
    picture(panel, "proof-that-fails")

    # Without engines the button gives the reason.
    assert "stopped" in notebook.run(5).inner_text()
    button.click()
    message.get_by_role("alert").get_by_text("has no engines here and cannot prove").wait_for()
    panel.locator('button.speedlab-prove:disabled[title*="engines of the run have ended"]').wait_for()
    picture(panel, "proof-without-engines")
    assert broken == []
