"""The panel's tabs as they open and close, and what a person does with its fields as a whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ipywidgets.widgets.widget as ipywidgets_widget
import panel_fakes
import pytest
from comm import get_comm_manager
from panel_fakes import DEVICE, Fakes, html, note, put, train
from speedlab_notebook.panel.fields import SECTIONS
from speedlab_notebook.panel.panel import Panel
from speedlab_notebook.panel.prediction import predict
from speedlab_notebook.panel.presets import presets
from speedlab_notebook.panel.search import deepspeed_names
from speedlab_notebook.panel.search_presets_export import FORMATS

from speedlab.config import RunConfig

cluster, opened, panel = panel_fakes.cluster, panel_fakes.opened, panel_fakes.panel

MOST_AT_FIRST = 130
"""Models of a panel that has just opened; each costs a message, and memory on the page. All fields at once were 965."""


def alive() -> tuple[int, int]:
    """Widgets and comms of this process."""
    return len(ipywidgets_widget._instances), len(get_comm_manager().comms)


def go_to_tab(panel: Panel, title: str) -> None:
    tabs = panel._view.form.tabs
    tabs.selected_index = [text.rstrip(" •▲") for text in tabs.titles].index(title)


def test_tabs_are_made_when_they_open_and_close_leaves_nothing(cluster: Fakes) -> None:
    before = alive()
    panel = Panel(cluster)  # pyright: ignore[reportArgumentType]  # a fake
    at_first = len(ipywidgets_widget._instances) - before[0]
    assert at_first <= MOST_AT_FIRST
    pages = panel._view.form.tabs.children
    assert [bool(page.children) for page in pages] == [True] + [False] * 7
    for title in (*SECTIONS, "Presets", "Export"):
        go_to_tab(panel, title)
    assert all(page.children for page in pages)
    put(panel, "parallel.pp", 2)  # Unfolds what a pipeline has.
    panel.edits.search.box.value = "stage"
    assert len(ipywidgets_widget._instances) - before[0] > 2 * at_first
    panel.close()
    assert alive() == before


def test_fields_in_a_row_that_do_nothing_are_folded_until_they_do_or_are_asked_for(panel: Panel) -> None:
    def shown() -> set[str]:
        page = panel._view.form.tabs.children[1].children
        return {path for path, field in panel.fields.items() if path.startswith("outer.") and field.control in page}

    go_to_tab(panel, "Parallelism")
    assert shown() == set()
    texts = [getattr(row, "value", "") for row in panel._view.form.tabs.children[1].children]
    assert any("meet every, outer lr, outer momentum, nesterov and 5 more: how islands meet" in str(t) for t in texts)
    put(panel, "parallel.islands", 2)
    assert {"outer.every_steps", "outer.lr", "outer.momentum"} <= shown()
    put(panel, "parallel.islands", 1)
    assert shown() == set()
    panel.edits.go_to("outer.fragments")
    assert shown() == {path for path in panel.fields if path.startswith("outer.")}


# What a change came to


def test_a_change_tells_memory_speed_and_placement_before_and_after(panel: Panel) -> None:
    held = [state.total for state in panel.states]
    put(panel, "zero.stage", 3)
    reported = re.fullmatch(
        r"a rank holds ([\d.]+) MiB → ([\d.]+) MiB \((-[\d.]+)%\) · .* tokens/s \(.*%\) · "
        r"parameters: whole on every rank → 1/4 a rank",
        panel.effect_text,
    )
    assert reported is not None, panel.effect_text
    mib = 2**20
    assert [float(reported[1]), float(reported[2])] == pytest.approx([held[2] / mib, held[3] / mib], rel=0.01)
    assert float(reported[3]) == pytest.approx(100 * (held[3] / held[2] - 1), abs=0.06)
    assert "<b>stage 2 → 3</b>" in html(panel, "effect")
    put(panel, "name", "other")
    assert panel.effect_text == "memory, speed and placement stay as they are"
    put(panel, "parallel.pp", 2)
    assert "layout pp 1 × dp 4 × tp 1 → pp 2 × dp 2 × tp 1" in panel.effect_text
    put(panel, "offload.optimizer", "disk")
    assert "optimizer moments: 1/2 a rank → 1/2 a rank, disk" in panel.effect_text
    put(panel, "model.heads", 5)
    assert panel.effect_text == "it cannot run like that; Undo takes the change back"
    put(panel, "model.dropout", 2)  # Its rule does not say what it is about, and its tab may be closed.
    assert "dropout: Input should be less than 1 (got 2.0)" in panel.summary_text


def test_each_difference_to_the_run_is_marked_live_or_restart_beside_its_field(panel: Panel) -> None:
    train(panel)
    put(panel, "zero.stage", 3)
    put(panel, "steps", 4000)
    put(panel, "offload.optimizer", "disk")
    assert note(panel, "zero.stage").startswith("the run has 2 · live, under 1 s ")
    assert note(panel, "steps").startswith("the run has 200 · needs a restart ")
    assert note(panel, "offload.optimizer").startswith("the run has none · live ")
    assert [str(change) for change in panel.changes] == [
        "stage 2 → 3 (live, under 1 s)",
        "offload optimizer none → disk (live)",
        "steps 200 → 4,000 (needs a restart)",
    ]
    assert [title for title in panel._view.form.tabs.titles if "•" in title] == ["ZeRO & memory •", "Run •"]
    panel.buttons["reset"].click()
    assert (panel.changes, panel.fields["steps"].mark) == ([], "")
    panel.buttons["undo"].click()
    assert len(panel.changes) == 3


# Undo


def test_changes_are_taken_back_one_by_one_or_all_and_done_again(panel: Panel) -> None:
    def said() -> tuple[Any, ...]:
        return tuple(panel.fields[path].get() for path in ("zero.stage", "model.preset", "model.layers", "steps"))

    def can() -> list[bool]:
        return [not panel.buttons[word].disabled for word in ("undo", "redo", "undo all")]

    assert can() == [False, False, False]
    put(panel, "zero.stage", 3)
    put(panel, "model.preset", "gpt2")  # One change, of all that belongs to it.
    put(panel, "steps", 9)
    assert said() == (3, "gpt2", 12, 9)
    assert panel.buttons["undo"].tooltip == "Take back: steps 200 → 9"
    panel.buttons["undo"].click()
    panel.buttons["undo"].click()
    assert said() == (3, "gpt-tiny", 6, 200)
    assert can() == [True, True, True]
    panel.edits.redo(2)
    assert said() == (3, "gpt2", 12, 9)
    panel.edits.undo(2)
    put(panel, "zero.stage", 1)  # A new way: what was taken back is gone.
    assert can() == [True, False, True]
    panel.buttons["undo all"].click()
    assert panel.config == RunConfig()
    assert can() == [False, True, False]
    panel._view.keys._handle_custom_msg({"do": "redo"}, [])  # Ctrl+Shift+Z on the page.
    assert said() == (3, "gpt-tiny", 6, 200)


# Search


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("stage", "zero.stage"),
        ("micro-batch", "batch.micro_size"),
        ("train_micro_batch_size_per_gpu", "batch.micro_size"),
        ("nvme_path", "offload.folder"),
        ("reduce bucket", "zero.bucket_bytes"),
        ("lion", "optimizer.name"),
        ("held-out", "data.heldout_share"),
        ("global gradient norm", "clip_norm"),
    ],
)
def test_a_field_is_found_by_name_word_or_deepspeeds_name(panel: Panel, text: str, first: str) -> None:
    panel.edits.search.box.value = text
    assert panel.edits.search.found[0] == first
    sent: list[Any] = []
    panel._view.keys.send = sent.append
    panel.edits.search.results.children[0].click()
    title = next(name for name, parts in SECTIONS.items() if first.partition(".")[0] in parts)
    assert panel._view.form.open_tab == title
    assert panel.fields[first].control in panel._view.form.tabs.children[list(SECTIONS).index(title)].children
    assert sent == [{"do": "focus", "name": f"speedlab-{first.replace('.', '-').replace('_', '-')}"}]
    assert panel.edits.search.box.value == ""


def test_what_is_nowhere_finds_nothing_and_every_name_of_deepspeeds_leads_to_a_field(panel: Panel) -> None:
    panel.edits.search.box.value = "no such thing"
    assert panel.edits.search.found == []
    named = {path: name for path, name in deepspeed_names().items() if path in panel.fields}
    assert len(named) > 35
    for path, name in named.items():
        panel.edits.search.box.value = name
        assert path in panel.edits.search.found, name


# Presets


def test_presets_are_what_the_planner_says_and_can_be_taken_and_taken_back(panel: Panel) -> None:
    put(panel, "data.sequence_length", 128)
    go_to_tab(panel, "Presets")
    rows = panel._view.presets.children
    reported = dict(zip((button.description for button in rows[::2]), rows[1::2], strict=True))
    assert list(reported)[:3] == ["Plain copies", "ZeRO-2", "Least memory"]
    by_name = {button.description: button for button in rows[::2]}
    by_name["Three dimensions"].click()
    assert panel.config is not None
    assert panel.prediction is not None
    assert panel.batch_text.endswith("× dp 1")
    assert panel.config.data.sequence_length == 128
    assert panel.batch_text.startswith("global batch 32 = ")  # What is trained stays.
    assert f"{panel.states[1].total / 2**20:.3g} MiB a rank" in reported["Three dimensions"].value
    panel.buttons["undo"].click()
    assert panel.config == RunConfig(data={"sequence_length": 128})


def test_presets_fit_these_devices_or_say_why_not() -> None:
    for engines in (1, 3, 4):
        found = presets(RunConfig(model="gpt2-medium", batch={"micro_size": 1}), [DEVICE] * engines)
        for preset in found:
            if preset.config is None:
                assert re.match("does not fit: |not here: ", preset.result), preset
            else:
                assert predict(preset.config, [DEVICE] * engines).plan.fits, preset
        assert found[0].config is None  # 5 GiB of states on 4 GiB.
        assert next(preset for preset in found if preset.name == "Largest model").config is not None


# Export


def test_what_is_exported_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    model = {"preset": "gpt2", "layers": 3, "attention": {"kind": "block_sparse", "window": 64}}
    config = RunConfig(name="mine", model=model, parallel={"pp": 2, "cut": (1, 2)}, optimizer="sgd", clip_norm=None)
    for one in (config, RunConfig()):
        for name, (ending, text_of) in FORMATS.items():
            path = tmp_path / f"config{ending}"
            path.write_text(text_of(one))
            if name == "Python":
                space: dict[str, Any] = {}
                exec(text_of(one), space)
                assert space["config"] == one
            elif name == "DeepSpeed JSON":
                assert RunConfig.from_deepspeed(path).to_deepspeed() == one.to_deepspeed()
            else:
                assert RunConfig.load(path) == one, name


def test_a_file_is_written_and_none_is_written_over(
    panel: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(panel, "steps", 77)
    go_to_tab(panel, "Export")
    export = panel.edits.export_tab
    assert export.file.value == "config.yaml"
    export.write.click()
    assert panel.message_text == "written: config.yaml"
    assert RunConfig.load("config.yaml").steps == 77
    put(panel, "steps", 78)
    assert "steps: 78" in export.text.value
    export.write.click()
    assert panel.message_text == "config.yaml is there already, and stays as it is; give another name"
    assert RunConfig.load("config.yaml").steps == 77
    export.format.value = "Python"
    assert (export.file.value, "steps=78" in export.text.value) == ("config.py", True)
    put(panel, "model.heads", 5)
    assert (export.text.value, export.write.disabled) == ("", True)
