"""The dashboard of a run in which every text is hostile: drawn, its tensors listed by keys alone, in both themes."""

from __future__ import annotations

import pytest
from hostile import PAYLOADS, make_hostile
from lab_page import Notebook, picture, serious_problems, use_dark_theme

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

SHOW = """\
from speedlab_notebook.dashboard.widget import show
show("runs/hostile");"""
FIGURES = ("memory", "loss", "throughput", "anatomy", "gradient", "kernels", "communication")
OUTSIDE = """dash => {
    const all = dash.getBoundingClientRect();
    const wide = [...dash.querySelectorAll('.sl-head, .sl-note, .sl-plot, .sl-plot .plotly, .sl-tensors')];
    return wide.filter(each => each.getBoundingClientRect().right > all.right).map(each => each.className);
}"""
"""Parts that reach beyond the dashboard's right edge."""
HEIGHTS = "bars => bars.map(bar => bar.getBoundingClientRect().height)"


def focused(page) -> str:
    return page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName")


def test_a_hostile_run_is_drawn_and_its_tensors_are_listed_by_keys_in_both_themes(page, lab) -> None:
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    make_hostile(lab.folder / "runs", "hostile", PAYLOADS)
    dash = Notebook(page, lab, "tensors.ipynb", [SHOW]).run(0).locator(".speedlab-dash")
    for name in FIGURES:
        dash.locator(f'[data-plot="{name}"] .main-svg').first.wait_for()
    assert dash.locator(".sl-title-name").inner_text() == "hostile"

    button, panel = dash.get_by_role("button", name="List the tensors"), dash.locator(".sl-tensors")
    button.focus()
    page.keyboard.press("Enter")
    panel.locator("tbody tr").first.wait_for()
    assert focused(page) == "SELECT"
    assert panel.locator("tbody th").all_text_contents() == list(PAYLOADS)
    assert panel.locator("td").all_text_contents()[:3] == ["32 B", PAYLOADS[0], "parameter"]
    # However long a text is, bars and lanes have room, and nothing is wider than the dashboard.
    assert dash.evaluate(OUTSIDE) == []
    assert dash.locator(".sl-note").bounding_box()["height"] < 150
    assert max(dash.locator('[data-plot="memory"] .bars path').evaluate_all(HEIGHTS)) > 50
    assert max(dash.locator('[data-plot="anatomy"] .bars path').evaluate_all(HEIGHTS)) > 50
    picture(dash, "hostile-light")
    assert serious_problems(page, ".speedlab-dash") == []
    use_dark_theme(page)
    dash.and_(page.locator('[data-theme="dark"]')).wait_for()
    picture(dash, "hostile-dark")
    assert serious_problems(page, ".speedlab-dash") == []

    panel.get_by_label("holds").focus()
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
