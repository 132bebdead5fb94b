"""The panel's form and predictions, with a cluster without processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import panel_fakes
import pytest
from cluster_helpers import wait_for
from panel_fakes import DEVICE, Fakes, html, note, offered, put
from speedlab_notebook.panel.controls import Choice
from speedlab_notebook.panel.fields import SECTIONS
from speedlab_notebook.panel.panel import Panel

from speedlab.config import ConfigError, RunConfig
from speedlab.layout import Layout
from speedlab.network import LinkRate
from speedlab.planner import model_states, parameter_count, rank_parameters, stage_blocks
from speedlab.planner.hardware import local

cluster, opened, panel = panel_fakes.cluster, panel_fakes.opened, panel_fakes.panel


# The form


def test_every_field_of_a_run_is_in_one_tab_with_its_description(panel: Panel) -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted(RunConfig.model_fields)
    for path, field in panel.fields.items():
        *parts, name = path.split(".")
        owner: Any = RunConfig
        for part in parts:
            owner = owner.part_of(part)
        assert field.description == owner.model_fields[name].description
        reported = field.control.meaning if isinstance(field.control, Choice) else field.control.tooltip
        assert reported == field.description
        assert note(panel, path), path


def test_a_fresh_panel_says_the_default_configuration(panel: Panel) -> None:
    assert panel.config == RunConfig()
    assert panel.problems == []
    assert panel.batch_text == "global batch 32 = micro-batch 8 × accumulation 1 × dp 4"
    assert panel.batch_text in panel.summary_text
    assert offered(panel) == {"train"}
    assert panel.status_text == "no run yet"


def test_any_configuration_survives_the_form(cluster: Fakes, panel: Panel) -> None:
    config = RunConfig(
        name="other",
        seed=2**62 + 1,
        model={"preset": "gpt2", "layers": 3, "tied": False},
        data={"source": ("a b", "c,d"), "tokenizer": "bytes", "heldout_share": 0.25},
        parallel={"dp": 4, "pp": 3, "tp": 5, "schedule": "interleaved", "chunks": 3, "cut": (1, 2), "sequence": True},
        zero=3,
        precision="bfloat16",
        optimizer={"name": "sgd", "betas": (0.8, 0.99), "eps": 1e-12},
        schedule={"kind": "constant"},
        batch={"global_size": 64, "accumulation": 2},
        activation={"checkpointing": "block"},
        clip_norm=None,
        compile=True,
    )
    panel._view.form.load(config)
    assert RunConfig(**panel._view.form.values()) == config


def test_a_preset_brings_its_shape(panel: Panel) -> None:
    put(panel, "model.preset", "gpt2")
    assert panel.config is not None
    assert panel.config.model == RunConfig(model="gpt2").model
    assert panel.fields["model.layers"].control.value == 12


def test_a_choice_follows_its_page_and_can_grey_single_options() -> None:
    choice = Choice("stage", [0, 2], 0, meaning="which", layout=widgets.Layout())
    assert (choice.options, choice.index) == (["0", "2"], 0)
    choice.index = 1  # A click.
    assert choice.value == 2
    choice.offer([0, 1, 2], {0: "not here"})
    assert (choice.value, choice.index, choice.offered) == (2, 2, {0: False, 1: True, 2: True})
    assert choice.reasons == ["not here", "", ""]
    choice.value = 1
    assert choice.index == 1
    choice.offer([0, 1, 2], {})
    assert all(choice.offered.values())


# What is refused or greyed, and why


@pytest.mark.parametrize(
    ("path", "value", "alongside", "words"),
    [
        ("model.heads", 5, "model.heads", "hidden 192 does not divide by heads 5; heads 4 would work"),
        ("data.sequence_length", 512, "data.sequence_length", "512 is longer than model.context 256"),
        ("data.vocab_size", 5000, "data.vocab_size", "data.vocab_size 5000 is larger than model.vocab_size 4096"),
        ("batch.global_size", "30", "batch.global_size", "no whole solution; a global batch of 28 would work"),
        ("batch.micro_size", "many", "batch.micro_size", "(got 'many')"),
        ("parallel.dp", "3", "parallel.dp", "pp 1 × dp 3 × tp 1 = 3 ranks, but there are 4 engines; dp 4 would fit"),
        ("optimizer.lr", 0.0, "optimizer.lr", "greater than 0 (got 0.0)"),
        ("name", "a/b", "name", "'a/b' cannot name a folder"),
        ("data.source", "", "data.source", "no source is named"),
    ],
)
def test_what_cannot_run_is_told_beside_its_control(
    panel: Panel, path: str, value: Any, alongside: str, words: str
) -> None:
    before = panel.fields[path].control.value
    put(panel, path, value)
    assert words in note(panel, alongside).replace("&#x27;", "'")
    assert "speedlab-problem" in panel.fields[alongside].note.value
    assert words in panel.summary_text
    assert [where for where, _ in panel.problems] == [alongside]
    assert "train" not in offered(panel)
    marked = [title for title in panel._view.form.tabs.titles if title.endswith(" ▲")]
    assert [alongside.partition(".")[0] in SECTIONS[title.removesuffix(" ▲")] for title in marked] == [True]
    put(panel, path, before)
    assert panel.problems == []
    assert list(panel._view.form.tabs.titles) == [*SECTIONS, "Presets", "Export"]
    assert "train" in offered(panel)


def test_what_is_greyed_says_why(panel: Panel) -> None:
    for path, reason in {
        "parallel.dp": "follows from the engines: dp 4 = 4 engines / (pp 1 × tp 1)",
        "parallel.chunks": "only a pipeline has it, and pp is 1",
        "parallel.cut": "only a pipeline has it, and pp is 1",
        "parallel.sequence": "the tp ranks share out the tokens, and tp is 1",
        "optimizer.momentum": "only sgd uses it; the optimizer is adamw",
        "precision.initial_loss_scale": "only float16 scales the loss; dtype is auto",
        "model.attention.both_ways": "for encoders given from Python; the built-in GPT is causal",
        "activation.partition_inputs": "what is cut are inputs of blocks that are computed again; checkpointing has "
        "them",
    }.items():
        assert panel.fields[path].control.disabled, path
        assert note(panel, path) == reason
    put(panel, "optimizer.name", "sgd")
    assert not panel.fields["optimizer.momentum"].control.disabled
    assert (
        note(panel, "optimizer.betas")
        == "only adamw, lamb, onebit_adam, onebit_lamb, zero_one_adam and lion use it; the optimizer is sgd"
    )
    put(panel, "data.tokenizer", "bytes")
    assert panel.fields["data.vocab_size"].control.disabled
    put(panel, "activation.checkpointing", "block")
    assert note(panel, "activation.partition_inputs") == "inputs of blocks stay whole, as tp is 1"
    put(panel, "parallel.tp", 2)
    assert not panel.fields["activation.partition_inputs"].control.disabled
    put(panel, "activation.partition_inputs", True)
    assert note(panel, "activation.partition_inputs").endswith(" · inputs of blocks cut over tp 2")
    put(panel, "parallel.sequence", True)
    reported = "inputs of blocks are cut by sequence parallelism already"
    assert note(panel, "activation.partition_inputs").endswith(reported)
    put(panel, "activation.checkpointing", "none")
    assert "activation.partition_inputs true needs activation.checkpointing" in panel.summary_text


def buttons_of(panel: Panel, path: str) -> dict[str, bool]:
    """The options of a choice, and whether each is offered."""
    return {str(option): offered for option, offered in panel.fields[path].control.offered.items()}


def test_only_layouts_that_exist_are_offered(panel: Panel) -> None:
    assert buttons_of(panel, "parallel.tp") == {"1": True, "2": True, "4": False}
    assert "greyed: tp 4: 6 heads do not divide by 4; 1, 2, 3 and 6 do" in note(panel, "parallel.tp")
    assert buttons_of(panel, "parallel.pp") == {"1": True, "2": True, "4": True}
    put(panel, "parallel.tp", 2)
    assert buttons_of(panel, "parallel.pp") == {"1": True, "2": True, "4": False}
    assert "pp 4 × tp 2 = 8" in note(panel, "parallel.pp")
    put(panel, "parallel.pp", 2)
    assert note(panel, "parallel.dp") == "follows from the engines: dp 1 = 4 engines / (pp 2 × tp 2)"
    assert "pp 2 × dp 1 × tp 2" in panel.summary_text
    assert panel.problems == []
    put(panel, "model.heads", 3)
    assert [path for path, _ in panel.problems] == ["parallel.tp"]
    assert "3 heads do not divide by 2; 1 and 3 do" in note(panel, "parallel.tp")
    assert "train" not in offered(panel)


def test_what_queries_see_is_drawn_below_the_fields_of_attention(panel: Panel) -> None:
    seen = panel._view.form.attention
    assert seen.value == ""
    put(panel, "model.attention.kind", "block_sparse")
    assert seen.value.count("<svg") == 1
    assert "256 tokens in 4 blocks of 64: 90 % of dense causal attention" in seen.value
    assert "longest path between two tokens: 3 layers; the model&#x27;s 6 are enough" in seen.value
    put(panel, "model.attention.window", 16)
    assert "17 layers; after the model&#x27;s 6 the last token depends on 91 of 256 tokens" in seen.value
    put(panel, "model.attention.kind", "dense")
    assert seen.value == ""


def test_a_length_that_cp_does_not_divide_is_refused_or_padded(panel: Panel) -> None:
    assert note(panel, "parallel.cp_pad") == "what cp does not divide is padded, and cp is 1"
    put(panel, "parallel.cp", 2)
    put(panel, "data.sequence_length", 255)
    ((path, text),) = panel.problems
    assert path in ("parallel.cp", "parallel.dp")
    assert "254 or 256 would, or set parallel.cp_pad to true, which pads them to 256" in text
    put(panel, "parallel.cp_pad", True)
    assert panel.problems == []
    assert "sequences of 255 padded to 256, 0.39% of what is computed" in note(panel, "parallel.cp_pad")


def test_a_pipeline_tells_its_bubble_and_its_micro_batches(panel: Panel) -> None:
    assert all(not offered for offered in buttons_of(panel, "parallel.schedule").values())
    put(panel, "parallel.pp", 4)
    assert "bubble 75 % by theory, with 1 micro-batch" in panel.summary_text
    assert "fewer than its 4 ranks, so that some always wait" in note(panel, "batch.accumulation")
    put(panel, "batch.accumulation", "8")
    assert "bubble 27 % by theory, with 8 micro-batches" in note(panel, "parallel.schedule")
    assert buttons_of(panel, "parallel.schedule") == {
        "gpipe": True,
        "1f1b": True,
        "interleaved": False,
        "zero-bubble": False,
    }
    assert "pp 4 × 2 stages a rank = 8 pipeline stages, but the model has 6 blocks" in note(panel, "parallel.schedule")
    put(panel, "parallel.pp", 2)
    put(panel, "parallel.schedule", "interleaved")
    assert "bubble 6 % by theory, with 8 micro-batches" in panel.summary_text
    assert not panel.fields["parallel.chunks"].control.disabled


def test_the_newest_two_of_the_batch_count(panel: Panel) -> None:
    put(panel, "batch.global_size", "32")
    put(panel, "batch.micro_size", "4")
    assert panel.batch_text == "global batch 32 = micro-batch 4 × accumulation 2 × dp 4"
    put(panel, "batch.accumulation", "4")
    assert panel.batch_text == "global batch 32 = micro-batch 2 × accumulation 4 × dp 4"
    put(panel, "batch.micro_size", "8")
    assert panel.batch_text == "global batch 32 = micro-batch 8 × accumulation 1 × dp 4"


def test_float16_is_greyed_on_cpus_and_offered_on_gpus(
    panel: Panel, cluster: Fakes, opened: Callable[..., Panel], tmp_path: Path
) -> None:
    def buttons(of: Panel) -> dict[str, bool]:
        return {option: not offered for option, offered in of.fields["precision.dtype"].control.offered.items()}

    assert buttons(panel) == {"auto": False, "float32": False, "bfloat16": False, "float16": True}
    assert "CPUs do not multiply float16 fast" in note(panel, "precision.dtype")
    assert "here: float32" in note(panel, "precision.dtype")
    gpu = replace(DEVICE, kind="cuda", fast_dtype="bfloat16")
    on_gpus = opened(Fakes(tmp_path, [gpu] * 2))
    assert not any(buttons(on_gpus).values())
    assert "here: bfloat16" in note(on_gpus, "precision.dtype")
    put(on_gpus, "precision.dtype", "float16")
    assert not on_gpus.fields["precision.initial_loss_scale"].control.disabled


def test_a_pretended_link_slows_what_is_predicted_and_is_named(panel: Panel, cluster: Fakes) -> None:
    def seconds() -> float:
        panel.refresh()
        assert panel.prediction is not None
        return panel.prediction.plan.time.step_seconds

    usual = seconds()
    assert "pretended" not in panel.summary_text
    cluster.link = LinkRate.parse("100 Mbit/s 1 ms")
    assert seconds() > 2 * usual
    assert "(over a pretended link of 100 Mbit/s 1 ms)" in panel.summary_text


def test_text_from_anywhere_is_escaped(panel: Panel, cluster: Fakes) -> None:
    put(panel, "name", "<img src=x onerror=alert(1)>")
    everything = "".join(html(panel, name) for name in ("summary", "status", "states", "message"))
    assert "<img" not in everything + panel.fields["name"].note.value
    assert "cpu <0>" not in everything
    put(panel, "name", "")
    assert "cpu &lt;0&gt;" in html(panel, "summary")
    cluster.refusal = ConfigError("data.source: <b>x</b> cannot be read")
    panel.buttons["train"].click()
    wait_for(lambda: panel.message_text and "train" in offered(panel))
    assert "&lt;b&gt;x&lt;/b&gt;" in html(panel, "message")
    assert "<b>x" not in html(panel, "message")


# Predictions


def test_predictions_are_the_formulas_at_every_stage(panel: Panel) -> None:
    count = parameter_count(RunConfig().model)
    page = html(panel, "states")
    cells = dict(re.findall(r'data-stage="(\d)" data-category="total">([\d.,]+)<', page))
    for stage, memory in enumerate(panel.states):
        expected = model_states(count, dp=4, stage=stage, dtype="float32")
        # The formula leaves out the padding of single flats.
        assert memory.model_states == pytest.approx(expected.total, rel=1e-3)
        assert memory.optimizer_moments == pytest.approx(expected.optimizer_moments, rel=1e-3)
        assert float(cells[str(stage)]) == pytest.approx(memory.total / 2**20, rel=0.01)
    # Float32 needs no masters: three states, activations, an outline each; buffers from stage 2 on.
    assert page.count("<rect") == 4 * (3 + 1 + 1) + 2
    assert "stage 2: gradients and optimizer states in 1/dp" in page


def test_predictions_follow_the_layout_rank_by_rank(panel: Panel) -> None:
    put(panel, "parallel.pp", 2)
    put(panel, "parallel.tp", 2)
    model, layout = RunConfig().model, Layout(pp=2, tp=2)
    held = rank_parameters(model, layout, stage_blocks(model, 2))
    assert len(set(held)) == 2  # The last pipeline stage has the norm too.
    assert panel.prediction is not None
    for stage, predicted in enumerate(panel.prediction.by_stage):
        by_rank = [model_states(count, dp=1, stage=stage, dtype="float32").total for count in held]
        assert [memory.model_states for memory in predicted] == pytest.approx(by_rank, rel=1e-3)
        assert panel.states[stage].total == max(memory.total for memory in predicted)
    page = html(panel, "states")
    assert page.count("speedlab-rank") == 2
    assert ">0–1</text>" in page
    assert ">2–3</text>" in page


def test_in_a_pipeline_a_rank_also_holds_its_gradients_whole_and_it_is_said(panel: Panel) -> None:
    assert "holds its own sums whole" not in html(panel, "states")
    put(panel, "parallel.pp", 2)
    assert "holds its own sums whole" in html(panel, "states")
    assert panel.states[3].gradients == pytest.approx(panel.states[0].gradients / 2, rel=1e-3)
    put(panel, "zero.stage", 1)
    assert "holds its own sums whole" not in html(panel, "states")


def test_heights_of_bars_are_the_bytes(panel: Panel) -> None:
    bars = re.findall(r'class="speedlab-bar[^"]*" data-stage="(\d)">(.*?)</g>', html(panel, "states"))
    heights = {}
    for stage, bar in bars:
        parts = [float(h) for h in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="46" height="([\d.]+)" fill', bar)]
        outline = float(re.findall(r'speedlab-outline.*?height="([\d.]+)"', bar)[0])
        assert sum(parts) == pytest.approx(outline, abs=0.3)
        heights[int(stage)] = outline
    for stage, state in enumerate(panel.states):
        assert heights[stage] / heights[0] == pytest.approx(state.total / panel.states[0].total, abs=0.01)


def test_moving_the_stage_moves_the_chosen_bar_and_the_sentence(panel: Panel) -> None:
    for stage, words in enumerate(("everything whole", "optimizer states in", "gradients and", "parameters, grad")):
        put(panel, "zero.stage", stage)
        page = html(panel, "states")
        assert re.findall(r'speedlab-bar speedlab-chosen" data-stage="(\d)"', page) == [str(stage)]
        assert f"stage {stage}: {words}" in page
        assert panel.config is not None
        assert panel.config.zero.stage == stage


def test_accumulated_gradients_of_a_16_bit_dtype_are_float32(panel: Panel) -> None:
    put(panel, "precision.dtype", "bfloat16")
    once = panel.states[0].gradients
    put(panel, "batch.accumulation", "2")
    assert panel.states[0].gradients == 2 * once
    assert panel.states[0].gradients == pytest.approx(4 * parameter_count(RunConfig().model), rel=1e-3)
    put(panel, "precision.dtype", "float32")
    assert panel.states[0].gradients == pytest.approx(4 * parameter_count(RunConfig().model), rel=1e-3)


def test_what_fits_and_what_does_not(panel: Panel) -> None:
    assert "fits, 2.8 GiB free of 4.0 GiB" in panel.summary_text
    assert "far above" in html(panel, "states")
    put(panel, "model.preset", "gpt2-medium")
    put(panel, "batch.micro_size", "1")
    put(panel, "zero.stage", 0)
    assert re.search(r"does not fit: stage 0 needs [\d.]+ GiB on a rank, and a device has 4.0 GiB", panel.summary_text)
    assert "speedlab-capacity" in html(panel, "states")
    assert "train" not in offered(panel)
    put(panel, "zero.stage", 3)
    assert "train" in offered(panel)


def test_what_does_not_fit_is_told_the_cheapest_changes_that_do(panel: Panel) -> None:
    put(panel, "model.preset", "gpt2-medium")
    put(panel, "batch.micro_size", "1")
    put(panel, "zero.stage", 0)
    assert "looking for changes that fit" in panel.summary_text
    wait_for(lambda: "cheapest changes that fit: " in panel.summary_text, 30)
    assert "ZeRO stage 0 → 3" in panel.summary_text
    put(panel, "zero.stage", 3)  # The advice is true: it fits now.
    assert "does not fit" not in panel.summary_text
    assert "cheapest" not in panel.summary_text


def test_the_speed_says_what_limits_it_and_that_nobody_measured_this_machine(panel: Panel) -> None:
    assert re.search(r"about [\d.]+ (k )?tokens/s \(not yet calibrated\)", panel.summary_text)
    assert "speed: limited by " in html(panel, "states")
    assert panel.prediction is not None
    before = panel.prediction.plan.time.tokens_per_second
    put(panel, "model.layers", 12)
    assert panel.prediction.plan.time.tokens_per_second < before / 1.5


def test_less_free_than_needed_is_told_before_it_hurts(tmp_path: Path, opened: Callable[..., Panel]) -> None:
    panel = opened(Fakes(tmp_path, [DEVICE, replace(DEVICE, free_bytes=2**20)]))
    assert re.search(r"tight: stage 2 needs [\d.]+ MiB, and 1.0 MiB of 4.0 GiB is free now", panel.summary_text)


# Places


def test_places_are_offered_where_they_can_be(panel: Panel) -> None:
    assert "parameters lie away at stage 3 only; the stage is 2" in note(panel, "offload.parameters")
    assert "nothing is on disk" in note(panel, "offload.folder")
    put(panel, "zero.stage", 3)
    assert "offload the optimizer first" in note(panel, "offload.parameters")
    put(panel, "offload.optimizer", "host")
    assert "here host and device are the same memory" in note(panel, "offload.optimizer")
    put(panel, "offload.parameters", "host")
    assert panel.config is not None
    assert (panel.config.offload.optimizer, panel.config.offload.parameters) == ("host", "host")
    put(panel, "zero.stage", 2)
    assert panel.config is None
    assert "needs zero.stage 3, and it is 2" in panel.summary_text
    assert offered(panel) == set()


def test_onebit_adam_is_offered_where_gradients_are_whole(panel: Panel) -> None:
    only = "only onebit_adam, onebit_lamb and zero_one_adam use it; the optimizer is adamw"
    assert only in note(panel, "optimizer.freeze_step")
    put(panel, "zero.stage", 1)
    put(panel, "optimizer.name", "onebit_adam")
    assert panel.config is not None
    assert panel.config.optimizer.name == "onebit_adam"
    assert "only onebit_adam" not in note(panel, "optimizer.freeze_step")
    assert "only onebit_adam" not in note(panel, "optimizer.betas")
    assert "adamw" in note(panel, "optimizer.name"), "what the plan advises on these links"
    put(panel, "optimizer.freeze_step", "20")
    assert "freeze step says when" in note(panel, "optimizer.steady")
    put(panel, "optimizer.freeze_step", "2000")
    assert "optimizer.freeze_step 2000 is no earlier than the run's last step" in panel.summary_text
    put(panel, "optimizer.freeze_step", "20")
    put(panel, "optimizer.name", "zero_one_adam")
    assert panel.config is None
    assert "zero.stage 1 partitions what they change; set zero.stage to 0" in panel.summary_text
    put(panel, "zero.stage", 0)
    assert panel.config is not None
    assert "only onebit_adam and onebit_lamb use it" in note(panel, "optimizer.steady")
    put(panel, "optimizer.freeze_step", "")
    assert "there is none" in note(panel, "optimizer.max_local_steps")
    put(panel, "zero.stage", 2)
    assert panel.config is None
    assert "zero.stage 2 partitions them; set zero.stage to 0" in panel.summary_text


def test_late_updates_are_offered_where_there_is_something_to_hide(panel: Panel) -> None:
    assert "offload the optimizer first" in note(panel, "offload.delayed_update")
    put(panel, "offload.optimizer", "host")
    assert "offload the optimizer first" not in note(panel, "offload.delayed_update")
    put(panel, "precision.dtype", "bfloat16")
    put(panel, "precision.masters", "none")
    assert "without masters" in note(panel, "offload.delayed_update")
    put(panel, "precision.masters", "float32")
    put(panel, "offload.delayed_update", "40")
    assert "one update older; here update and step share the cores" in note(panel, "offload.delayed_update")
    assert panel.config is not None
    assert panel.config.offload.delayed_update == 40
    put(panel, "offload.optimizer", "none")
    assert "offload.delayed_update 40 needs offload.optimizer 'host' or 'disk'" in panel.summary_text


def test_a_disk_is_measured_once_by_an_engine_and_told(cluster: Fakes, panel: Panel, tmp_path: Path) -> None:
    put(panel, "offload.folder", str(tmp_path))
    assert cluster.measured == []
    put(panel, "offload.optimizer", "disk")
    assert wait_for(lambda: "(measured)" in note(panel, "offload.optimizer"))
    assert "disk: reads 2.0 GB/s, writes 1.0 GB/s (measured)" in note(panel, "offload.optimizer")
    put(panel, "model.layers", 5)
    assert cluster.measured == [(str(tmp_path), 0)]
    shown = panel._view.states.value
    assert "disk: " in shown
    assert "free" in shown
    assert panel.prediction is not None
    assert [place.name for place in panel.prediction.plan.places] == ["device", "host", "disk"]


def test_what_a_disk_cannot_hold_is_not_trained(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "free_disk_bytes", lambda folder: 2**20)
    put(panel, "offload.optimizer", "disk")
    assert "does not fit: disk: " in panel.summary_text
    assert offered(panel) == set()
