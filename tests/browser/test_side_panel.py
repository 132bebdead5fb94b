"""JupyterLab's side panel in a real JupyterLab, without any kernel: runs are folders that this file writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from hostile import PAYLOADS, make_runs
from lab_page import Notebook, serious_problems
from speedlab_server.run_registry import run_id
from telemetry_samples import make_event, make_folder, make_record
from test_shutdown import WaitingSupervisor, served

from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab.telemetry.records import Ledger, RunState
from speedlab.telemetry.run_folder import Status, find_runs

pytestmark = pytest.mark.browser

OURS = (".sl-panel-widget", ".sl-status", ".sl-output-widget")
HOSTILE = '<img src=x onerror="window.harmed=1"><h1>name'
FOREIGN = "img, script, iframe, a, video, audio, marquee, form, style, link, object, embed, details, h1, b, body"
PANEL_TAB = '.jp-SideBar li[data-id="speedlab-panel"]'


def make_run(runs: Path, name: str, state: RunState, *, steps: int = 40, text: str = "", **changes: Any) -> Path:
    folder = make_folder(runs, name, **changes)
    ledger = Ledger(
        parameters=2**30,
        gradients=2**29,
        optimizer_moments=2**31,
        other_framework=2**20,
        reported_bytes=2**32,
        capacity_bytes=2**33,
    )
    for rank in range(2):
        lines = [make_record(step, rank, ledger=ledger).to_json() for step in range(1, steps + 1)]
        (folder.path / "records" / f"rank-{rank}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder.path / "events.jsonl").write_text(f"{make_event('started').to_json()}\n")
    folder.write_status(Status(state=state, step=steps, steps=100, rank_pids=(1, 2), text=text))
    return folder.path


@pytest.fixture(scope="module")
def runs(lab: Any) -> Path:
    """One that is on, and, as folders of past days, one that failed, one damaged, and one with a hostile name."""
    folder = lab.folder / "runs"
    make_run(folder, "quickstart", RunState.RUNNING)
    make_run(folder, "too-large", RunState.FAILED, text=f"rank 2: out of memory {HOSTILE}", zero=3)
    (make_run(folder, "damaged", RunState.FINISHED) / "config.json").write_text('{"zero": {"stage": 9}}')
    make_run(folder, "renamed", RunState.STOPPED).rename(folder / HOSTILE)
    make_runs(folder / "corpus")
    return folder


def open_panel(page: Any, lab: Any, *, theme: str = "Light") -> Any:
    """The page with the panel in sight, and its websocket."""
    settings = lab.folder.parent / "config/lab/user-settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
    settings.write_text(json.dumps({"theme": f"JupyterLab {theme}"}))
    # The status bar may be the first to want something.
    with page.expect_websocket(lambda socket: socket.url.endswith("/speedlab/api/live")) as socket:
        page.goto(f"{lab.url}/lab?token={lab.token}&reset")
        # JupyterLab gives its launcher the focus some time after the page is there: keys before that go astray.
        page.wait_for_function("document.activeElement.closest('.jp-Launcher') !== null")
        page.locator(PANEL_TAB).click()
    page.locator(".sl-row").first.wait_for()
    page.locator(f'body[data-jp-theme-light="{str(theme == "Light").lower()}"]').wait_for(state="attached")
    return socket.value


def row(page: Any, name: str) -> Any:
    return page.locator(".sl-row", has=page.locator(".sl-name").get_by_text(name, exact=True))


def is_remembered(request: Any) -> bool:
    return request.method == "PUT" and "quick" in str(json.loads(request.post_data)["data"].get("speedlab:panel"))


def has_kept(request: Any, key: str, value: Any) -> bool:
    return request.method == "PUT" and json.loads(request.post_data)["data"].get(key) == value


def names(page: Any) -> list[str]:
    return sorted(page.locator(".sl-row .sl-name").all_inner_texts())


def names_in_order(page: Any) -> list[str]:
    return page.locator(".sl-row .sl-name").all_text_contents()


@pytest.fixture
def own_settings(lab: Any) -> Iterator[Path]:
    file = lab.folder.parent / "config/lab/user-settings/speedlab/plugin.jupyterlab-settings"
    file.parent.mkdir(exist_ok=True)
    yield file
    file.unlink()


@pytest.mark.usefixtures("runs")
def test_settings_that_do_not_fit_are_told_in_place(page: Any, lab: Any, own_settings: Path) -> None:
    own_settings.write_text(json.dumps({"side": "top", "outputLines": "many", "foldOutput": False}))
    open_panel(page, lab)
    reported = page.locator(".sl-panel-widget").get_by_text("Settings of SpeedLab: ").inner_text()
    assert 'side is "top", which is not left or right; left is used' in reported
    assert 'outputLines is "many", which is not a number from 100 to 20000; 2000 is used' in reported
    assert "foldOutput" not in reported
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Settings Editor").first.click()
    page.locator(".jp-PluginList-entry", has_text="SpeedLab").first.click()
    lines = page.locator('.jp-SettingsPanel input[id$="outputLines"]')
    with page.expect_response(lambda response: response.request.method == "PUT" and "speedlab" in response.url):
        lines.fill("1500")
    own_settings.write_text(own_settings.read_text().replace('"top"', '"left"'))
    open_panel(page, lab)
    assert '"outputLines": 1500' in own_settings.read_text(), "a number, as the field's"
    assert page.get_by_text("Settings of SpeedLab: ").count() == 0


def test_runs_are_found_looked_at_and_remembered_without_a_kernel(page: Any, lab: Any, runs: Path) -> None:
    socket = open_panel(page, lab)
    assert names(page) == sorted(["quickstart", "too-large", "damaged", HOSTILE])
    assert "zero.stage" in page.locator(".sl-item", has=row(page, "damaged")).locator(".sl-problem").inner_text()
    page.locator(".sl-status").get_by_text("quickstart · 40/100").wait_for()

    # Hidden, only the status of the run that is on is read, for the status bar; in sight again, the lists, too.
    status = {"id": run_id(runs / "quickstart"), "parts": ["status"], "points": 1}
    only_status = json.dumps({"runs": [status], "lists": False}, separators=(",", ":"))[1:]
    with socket.expect_event("framesent", lambda frame: only_status in frame):
        page.locator(PANEL_TAB).click()
    with socket.expect_event("framesent", lambda frame: '"lists":true' in frame):
        page.locator(PANEL_TAB).click()

    # By keyboard alone: from the search to the rows, to the next one, and open.
    page.get_by_label("Search runs").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    chosen = page.locator(".sl-item", has=row(page, "quickstart"))
    chosen.locator('.sl-row[aria-expanded="true"]').wait_for()
    chosen.get_by_label("loss 7.").wait_for()
    bar = chosen.locator(".sl-bar").first
    bar.wait_for()
    assert bar.get_attribute("aria-label") == (
        "rank 0, device: 3.5 GiB of 8.0 GiB; parameters 1.0 GiB, gradients 512 MiB, optimizer moments 2.0 GiB, "
        "other framework memory 1.0 MiB"
    )
    pause = chosen.get_by_role("button", name="Pause")
    assert pause.get_attribute("aria-disabled") == "true"
    assert "no cluster that runs here holds it" in pause.get_attribute("title")

    # JupyterLab keeps what is remembered with its workspace, a moment later.
    with page.expect_response(lambda answer: "/api/workspaces" in answer.url and is_remembered(answer.request)):
        page.get_by_label("Search runs").fill("quick")
    page.wait_for_function("document.querySelectorAll('.sl-row').length === 1")
    page.goto(f"{lab.url}/lab?token={lab.token}")
    page.locator(".sl-progress").wait_for()
    assert names(page) == ["quickstart"]
    assert page.get_by_label("Search runs").input_value() == "quick"
    assert row(page, "quickstart").get_attribute("aria-expanded") == "true"

    assert page.locator(".jp-Notebook").count() == 0
    assert page.evaluate("window.harmed") is None


def test_texts_from_anywhere_are_texts(page: Any, lab: Any, runs: Path) -> None:
    folders = sorted(folder.name for folder in find_runs(runs / "corpus"))
    (lab.folder / "runs").rename(lab.folder / "away")
    (lab.folder / "away/corpus").rename(lab.folder / "runs")
    try:
        open_panel(page, lab)
        page.wait_for_function(f"document.querySelectorAll('.sl-row').length === {len(folders)}")
        assert sorted(page.locator(".sl-row .sl-name").all_text_contents()) == folders
        # The widest text there is neither moves what is beside it nor runs out of the panel.
        assert (
            page.evaluate(
                "(panel => panel.scrollWidth - panel.clientWidth)(document.querySelector('.sl-panel-widget'))"
            )
            == 0
        )
        for number in range(0, len(PAYLOADS), 6):
            chosen = row(page, f"hostile-{number:02d}")
            chosen.click()
            reported = page.locator(".sl-item", has=chosen).locator(".sl-told").text_content()
            assert reported == "\n".join(PAYLOADS[number : number + 6])
        assert page.locator(".sl-panel-widget").locator(FOREIGN).count() == 0
        assert page.evaluate("window.speedlabPwned") is None
    finally:
        (lab.folder / "runs").rename(lab.folder / "away/corpus")
        (lab.folder / "away").rename(lab.folder / "runs")


def test_three_runs_are_compared_by_keyboard_alone_and_again_in_a_notebook(page: Any, lab: Any, runs: Path) -> None:
    open_panel(page, lab, theme="Dark")
    page.locator(".sl-row").nth(3).wait_for()
    # From the search to the rows; beside each its tick; the cross of a run that is damaged cannot be set.
    page.get_by_label("Search runs").focus()
    page.keyboard.press("Tab")
    for name in ("quickstart", "too-large", HOSTILE):
        for key in ("Home", *["ArrowDown"] * names_in_order(page).index(name), "Tab", "Space", "Shift+Tab"):
            page.keyboard.press(key)
    assert page.get_by_role("checkbox", name="Compare damaged").is_disabled()
    page.get_by_text("3 runs ticked").wait_for()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    view = page.locator(".speedlab-dash")
    drawn = view.locator('[data-plot="loss"] .scatterlayer .js-line[d]')
    view.locator('[data-table="settings"]').get_by_text("zero.stage").wait_for()
    page.wait_for_function("document.querySelectorAll('[data-plot=\"loss\"] .js-line[d]').length === 3")
    ticked = ["quickstart", "too-large", HOSTILE]
    assert view.locator(".sl-chip-name").all_text_contents() == [f"{n} · {each}" for n, each in enumerate(ticked, 1)]
    assert view.get_attribute("data-theme") == "dark"
    row_of_stages = view.locator('[data-table="settings"] tbody tr')
    assert row_of_stages.all_inner_texts() == ["zero.stage\t2\t3\t2"]

    # Hidden, its curve and its bar go, and its button and its column stay.
    view.locator(".sl-chip").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('[data-plot=\"loss\"] .js-line[d]').length === 2")
    assert view.locator(".sl-chip").first.get_attribute("aria-pressed") == "false"
    assert row_of_stages.locator("td").count() == 3
    view.get_by_role("button", name="Show all 3").press("Enter")
    page.wait_for_function("document.querySelectorAll('[data-plot=\"loss\"] .js-line[d]').length === 3")
    assert view.locator(".sl-chip").first.evaluate("it => it === document.activeElement")

    # What a person hides stays hidden when the page is loaded anew.
    kept = f"speedlab:hidden:{','.join(run_id(runs / name) for name in ticked)}"
    with page.expect_response(lambda answer: "/api/workspaces" in answer.url and has_kept(answer.request, kept, [1])):
        view.locator(".sl-chip").nth(1).press("Enter")
    page.goto(f"{lab.url}/lab?token={lab.token}")
    page.wait_for_function("document.querySelectorAll('[data-plot=\"loss\"] .js-line[d]').length === 2")
    assert [chip.get_attribute("aria-pressed") for chip in view.locator(".sl-chip").all()] == ["true", "false", "true"]

    # What is new of the run that is on comes by itself; nobody has started a kernel.
    assert page.locator(".jp-Notebook").count() == 0
    before = view.locator('[data-table="facts"]').inner_text()
    for rank in range(2):
        with (runs / "quickstart" / "records" / f"rank-{rank}.jsonl").open("a") as file:
            file.write(f"{make_record(41, rank).to_json()}\n")
    view.locator('[data-table="facts"]').get_by_text("41 of 100").wait_for()
    assert "41 of 100" not in before
    assert page.locator(".speedlab-dash").locator(FOREIGN).count() == 0
    assert serious_problems(page, ".speedlab-dash", ".sl-panel-widget") == []

    notebook = Notebook(page, lab, "compare.ipynb", ["%load_ext speedlab\n%speedlab dash quickstart too-large"])
    output = notebook.run(0)
    page.wait_for_function("document.querySelectorAll('[data-plot=\"loss\"] .js-line[d]').length === 2")
    assert output.locator(".sl-chip-name").all_text_contents() == ["1 · quickstart", "2 · too-large"]
    kept = notebook.saved_output("image/svg+xml")
    assert "zero.stage" in str(kept["text/html"])
    assert drawn.count() == 2
    assert page.evaluate("window.harmed") is None


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_nothing_of_ours_is_a_serious_problem_for_who_cannot_see_or_use_a_mouse(
    page: Any, lab: Any, runs: Path, theme: str
) -> None:
    open_panel(page, lab, theme=theme)
    row(page, "too-large").click()
    page.locator(".sl-item", has=row(page, "too-large")).get_by_role("button", name="Output").click()
    page.locator(".sl-output .sl-problem").wait_for()
    row(page, "quickstart").click()
    page.locator(".sl-item", has=row(page, "quickstart")).locator(".sl-bar").first.wait_for()
    page.mouse.move(0, 0)
    assert serious_problems(page, *OURS) == []


def test_a_place_in_a_queue_is_shown_and_given_up(page: Any, lab: Any, runs: Path, monkeypatch: Any) -> None:
    """Through a real server and the supervisors' protocol; the supervisor itself is made up."""
    monkeypatch.setenv("IPYTHONDIR", lab.environment["IPYTHONDIR"])
    home = ClusterDir("slurm-81")
    home.create("a token")
    server = served(home, supervisor := WaitingSupervisor())
    try:
        open_panel(page, lab)
        waits = page.locator(".sl-item", has=row(page, "slurm-81"))
        waits.get_by_text("job 81 is queued, 3rd of 7 in a100 (Priority)").wait_for()
        page.get_by_role("button", name="Start a cluster").click()
        new = page.get_by_role("group", name="A new cluster")
        new.get_by_role("button", name="Start", exact=True).and_(page.locator(":not([aria-disabled])")).wait_for()
        new.get_by_label("Name").fill("slurm-81")
        page.keyboard.press("Enter")
        new.get_by_text("it is being started; cancel that instead").wait_for()
        assert serious_problems(page, *OURS) == []
        page.keyboard.press("Escape")

        waits.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Keep waiting").click()
        assert not supervisor.cancelled.is_set()
        waits.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Give up").click()
        waits.wait_for(state="detached")
        assert (supervisor.cancelled.is_set(), home.path.exists()) == (True, False)
    finally:
        server.close()
