"""Whole journeys beside the main job: in Notebook 7, with two notebooks on one cluster, and by keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from lab_page import START, STOP, TRAIN, Notebook, goes_on, picture, serious_problems

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

LOSE = """\
import os, signal
run.resume()
run.wait_until(run.step + 1, timeout=60)
os.kill(run.folder.read_status().rank_pids[1], signal.SIGKILL)
run.wait(60)"""
LIVE = """%%ranks --live
import os, sys
from IPython.display import SVG, display
print("a batch of", tuple(batch[0].shape), "on rank", os.environ["RANK"])
print("look here", file=sys.stderr)
display(SVG('<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="40" height="20"/></svg>'))
assert os.environ["RANK"] == "0", "only here"
"""
LIVE_OUTPUT = ".jp-RenderedHTMLCommon:has(.speedlab-ranks-note)"
BLOCK = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)"


@pytest.mark.usefixtures("_engines_end")
def test_in_notebook_7_a_run_is_trained_reshaped_and_seen_while_a_cell_blocks_and_after_a_restart(
    page: Any, lab: Any
) -> None:
    broken: list[str] = []
    # Notebook 7.6 has an error of its own while it loads.
    page.on("pageerror", lambda error: broken.append(str(error)) if "speedlab" in error.stack else None)
    reshape = "run.reshape(zero=3).wait(60)\nprint('stage 3')"
    again = "%load_ext speedlab\n%speedlab attach\nrun.stop().wait(60)\nprint('the run is', run.state)"
    cells = [START, TRAIN.replace("NAME", "seven"), "%speedlab dash", BLOCK, reshape, again]
    notebook = Notebook(page, lab, "seven.ipynb", cells, seven=True)
    assert "2 engines" in notebook.run(0).inner_text()
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
    dash = notebook.run(2).locator(".speedlab-dash")
    dash.locator('[data-plot="memory"] .bars').first.wait_for(state="attached")

    cell = notebook.start(3)
    cell.locator(".jp-InputPrompt", has_text="[*]:").wait_for()
    goes_on(page, dash)
    assert cell.locator(".jp-InputPrompt", has_text="[*]:").count() == 1
    (lab.folder / "go").touch()
    cell.locator(".jp-InputPrompt", has_text="[4]:").wait_for()
    assert "stage 3" in notebook.run(4).inner_text()
    dash.locator(".sl-text", has_text="ZeRO stage 3").wait_for()
    notebook.saved_output("application/vnd.speedlab.run+json")

    page.reload()
    notebook.wait_until_idle()
    goes_on(page, dash)
    notebook.restart_kernel()
    goes_on(page, dash)
    assert "the run is stopped" in notebook.run(5, count=1).inner_text()
    dash.locator(".sl-state", has_text="■ stopped").wait_for()
    assert broken == []


@pytest.mark.usefixtures("_engines_end")
def test_two_notebooks_share_a_run_its_interrupt_and_the_loss_of_an_engine(page: Any, lab: Any, browser: Any) -> None:
    train = TRAIN.replace("NAME", "shared").replace("eval=", "checkpoint={'every_steps': 1_000_000}, eval=")
    own = [START, train, "%speedlab dash", "run.resume()", "cluster.restart(1)\nrun.resume()", STOP]
    others = [
        "%load_ext speedlab\n%speedlab attach",
        "run.pause().wait(60)\nrun.save('by-hand').wait(60)",
        "run.wait()",
        LOSE,
    ]
    first = Notebook(page, lab, "first.ipynb", own)
    first.run(0)
    assert "Error" not in "".join(first.run(1).all_inner_texts())
    dash = first.run(2).locator(".speedlab-dash")
    goes_on(page, dash)

    context = browser.new_context(viewport={"width": 1500, "height": 1700})
    with context:
        other_page = context.new_page()
        other_page.set_default_timeout(60_000)
        second = Notebook(other_page, lab, "second.ipynb", others)
        seen = second.run(0).locator(".speedlab-dash")
        goes_on(other_page, seen)

        # What one notebook asks, both see.
        second.run(1)
        dash.locator(".sl-state", has_text="paused").wait_for()
        first.run(3)
        goes_on(other_page, seen)

        # An interrupt of the cell that waits interrupts the run, for both.
        second.interrupt(second.start(2))
        dash.locator(".sl-state", has_text="paused").wait_for()

        # An engine is killed: both are told who, and the one that did nothing brings it back.
        lost = second.run(3)
        lost.get_by_text("rank 1").first.wait_for()
        dash.locator(".sl-state", has_text="failed").wait_for()
    back = first.run(4)
    assert "Error" not in back.inner_text()
    goes_on(page, dash)
    assert "the run is stopped" in first.run(5).inner_text()


def by_keys(page: Any, name: str, *, key: str = "Tab") -> None:
    """Go on by `key` until what has the focus is called `name`."""
    reported = """(() => {
        const at = document.activeElement;
        return at.getAttribute('aria-label') || at.labels?.[0]?.innerText || at.innerText || '';
    })()"""
    seen = []
    for _ in range(40):
        seen.append(page.evaluate(reported).strip())
        if seen[-1].startswith(name):
            return
        page.keyboard.press(key)
    raise AssertionError(f"no {name!r} on the way of {key}: {seen}")


def command(page: Any, text: str) -> None:
    """From the palette, by keys."""
    page.keyboard.press("Control+Shift+c")
    page.locator(".lm-CommandPalette-input").wait_for()
    page.keyboard.type(text)
    page.locator(".lm-CommandPalette-item.lm-mod-active", has_text=text).wait_for()  # It lists as fast as it can.
    page.keyboard.press("Enter")


def open_panel(page: Any) -> None:
    """From the status bar: the palette gives the focus back to the notebook, whatever its command did with it."""
    page.locator(".sl-status").get_by_text("by-keys ·").wait_for()
    by_keys(page, "by-keys ·")
    page.keyboard.press("Enter")
    page.locator(".sl-panel-widget :focus").wait_for()


@pytest.mark.usefixtures("_engines_end")
def test_by_keyboard_alone_a_run_is_trained_paused_reshaped_and_stopped_in_both_themes(page: Any, lab: Any) -> None:
    notebook = Notebook(page, lab, "keys.ipynb", [START, TRAIN.replace("NAME", "by-keys"), LIVE])
    notebook.run(0)
    assert "Error" not in "".join(notebook.run(1).all_inner_texts())
    said = notebook.run(2).locator(LIVE_OUTPUT)
    said.get_by_text("rank 1 failed after step").wait_for()
    said.get_by_text("traceback of rank 1").click()
    assert "speedlab/" not in said.inner_text()  # Its own frames are nobody's business.
    picture(said, "live-cell-light")
    assert serious_problems(page, LIVE_OUTPUT) == []
    page.keyboard.press("Escape")
    panel = page.locator(".sl-panel-widget")
    item = panel.locator(".sl-item", has=page.locator(".sl-name").get_by_text("by-keys", exact=True))

    open_panel(page)
    item.wait_for()
    by_keys(page, "by-keys\n")
    page.keyboard.press("Enter")
    panel.locator('.sl-row[aria-expanded="true"]', has_text="tokens/s").wait_for()
    by_keys(page, "Pause")
    page.keyboard.press("Enter")
    item.locator(".sl-note", has_text="paused").wait_for()
    by_keys(page, "ZeRO stage")
    page.keyboard.press("ArrowDown")
    by_keys(page, "Change")
    page.keyboard.press("Enter")
    item.locator(".sl-note", has_text="3").wait_for()
    picture(page, "keys-light")

    command(page, "Use Theme: JupyterLab Dark")
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")
    picture(said, "live-cell-dark")
    assert serious_problems(page, LIVE_OUTPUT) == []
    open_panel(page)
    item.wait_for()
    by_keys(page, "by-keys\n")
    by_keys(page, "Resume")
    page.keyboard.press("Enter")
    panel.get_by_role("button", name="Pause", exact=True).wait_for()
    by_keys(page, "Stop")
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog").get_by_text("Stop by-keys?").wait_for()
    page.locator(".jp-Dialog :focus").wait_for()
    picture(page, "keys-dark")
    by_keys(page, "Stop")
    page.keyboard.press("Enter")
    item.locator(".sl-note", has_text="stopped").wait_for()
