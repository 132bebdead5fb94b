"""The panel: predictions without a run, and what its buttons do, with a cluster and runs without processes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_helpers import wait_for
from panel_fakes import DEVICE, FakeRun, Fakes, html, note, offered, put, train
from speedlab_notebook.panel import Panel
from speedlab_notebook.panel_actions import Watch, answer_line, changes, live_stage
from speedlab_notebook.panel_fields import SECTIONS, Choice

from speedlab.cluster import ClusterError, RankError, RemoteFailure
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.planner import model_states, parameter_count
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import Event, RunState

BOUND_MS = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path / "runs")


@pytest.fixture
def opened() -> Iterator[Callable[..., Panel]]:
    """Makes panels, and closes them and their runs at the end."""
    panels: list[Panel] = []

    def make(*arguments: Any, **more: Any) -> Panel:
        panels.append(Panel(*arguments, **more))
        return panels[-1]

    yield make
    for panel in panels:
        panel.close()
        assert not panel.following
        if panel.run is not None:
            panel.run.close()  # pyright: ignore[reportAttributeAccessIssue]  # a FakeRun


@pytest.fixture
def panel(cluster: Fakes, opened: Callable[..., Panel]) -> Panel:
    return opened(cluster)


# The form


def test_every_field_of_a_run_is_in_one_tab_with_its_description(panel: Panel) -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted(RunConfig.model_fields)
    kinds = RunConfig.model_fields
    for path, field in panel.fields.items():
        part, _, name = path.rpartition(".")
        owner = RunConfig.part_of(part).model_fields if part else kinds  # pyright: ignore[reportOptionalMemberAccess]
        assert field.description == owner[name].description
        tooltips = [b.tooltip for b in field.control.children[1:]] if isinstance(field.control, Choice) else []
        assert all(field.description in tip or "CPUs" in tip for tip in tooltips or [field.control.tooltip]), path
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
        parallel={"dp": 4},
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


def test_a_choice_always_has_one_pressed_and_can_grey_single_options() -> None:
    choice = Choice("stage", {0: "0", 1: "1"}, 0, tooltip="which", layout={})
    zero, one = choice.children[1:]
    one.value = True
    assert (choice.value, zero.value, one.value) == (1, False, True)
    one.value = False  # Pressed again: it stays.
    assert (choice.value, zero.value, one.value) == (1, False, True)
    choice.grey({0: "not here"})
    assert (zero.disabled, one.disabled) == (True, False)
    assert zero.tooltip == "0: not here"
    choice.grey({})
    assert not zero.disabled


# What is refused or greyed, and why


@pytest.mark.parametrize(
    ("path", "value", "beside", "words"),
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
    panel: Panel, path: str, value: Any, beside: str, words: str
) -> None:
    before = panel.fields[path].control.value
    put(panel, path, value)
    assert words in note(panel, beside).replace("&#x27;", "'")
    assert "speedlab-problem" in panel.fields[beside].note.value
    assert words in panel.summary_text
    assert [where for where, _ in panel.problems] == [beside]
    assert "train" not in offered(panel)
    put(panel, path, before)
    assert panel.problems == []
    assert "train" in offered(panel)


def test_what_is_greyed_says_why(panel: Panel) -> None:
    for path, reason in {
        "parallel.dp": "follows from the engines: dp 4 = 4 engines / (pp 1 × tp 1)",
        "parallel.tp": "tensor parallelism comes with a later version; dp = engines",
        "parallel.pp": "pipeline parallelism comes with a later version; dp = engines",
        "optimizer.momentum": "only sgd uses it; the optimizer is adamw",
        "precision.initial_loss_scale": "only float16 scales the loss; dtype is auto",
    }.items():
        assert panel.fields[path].control.disabled, path
        assert note(panel, path) == reason
    put(panel, "optimizer.name", "sgd")
    assert not panel.fields["optimizer.momentum"].control.disabled
    assert note(panel, "optimizer.betas") == "only adamw uses it; the optimizer is sgd"
    put(panel, "data.tokenizer", "bytes")
    assert panel.fields["data.vocab_size"].control.disabled


def test_float16_is_greyed_on_cpus_and_offered_on_gpus(
    panel: Panel, cluster: Fakes, opened: Callable[..., Panel], tmp_path: Path
) -> None:
    def buttons(of: Panel) -> dict[str, bool]:
        return {b.description: b.disabled for b in of.fields["precision.dtype"].control.children[1:]}

    assert buttons(panel) == {"auto": False, "float32": False, "bfloat16": False, "float16": True}
    assert "CPUs do not multiply float16 fast" in note(panel, "precision.dtype")
    assert "here: float32" in note(panel, "precision.dtype")
    gpu = replace(DEVICE, kind="cuda", fast_dtype="bfloat16")
    on_gpus = opened(Fakes(tmp_path, [gpu] * 2))
    assert not any(buttons(on_gpus).values())
    assert "here: bfloat16" in note(on_gpus, "precision.dtype")
    put(on_gpus, "precision.dtype", "float16")
    assert not on_gpus.fields["precision.initial_loss_scale"].control.disabled


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
    expected = [model_states(count, dp=4, stage=stage, dtype="float32") for stage in range(4)]
    assert panel.states == expected
    page = html(panel, "states")
    cells = dict(re.findall(r'data-stage="(\d)" data-category="total">([\d.,]+)<', page))
    for stage, state in enumerate(expected):
        assert float(cells[str(stage)]) == pytest.approx(state.total / 2**20, rel=0.01)
    assert page.count("<rect") == 4 * (3 + 1)  # Three categories (float32 needs no masters) and an outline each.
    assert "stage 2: gradients and optimizer states in 1/dp" in page


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
    assert panel.states[0].gradients == 2 * once == 4 * parameter_count(RunConfig().model)
    put(panel, "precision.dtype", "float32")
    assert panel.states[0].gradients == 4 * parameter_count(RunConfig().model)


def test_what_fits_and_what_does_not(panel: Panel) -> None:
    assert "fits, 3.0 GiB free of 4.0 GiB" in panel.summary_text
    assert "far above" in html(panel, "states")
    put(panel, "model.preset", "gpt2-medium")
    put(panel, "zero.stage", 0)
    assert "does not fit: stage 0 needs 5.3 GiB on each rank, and a device has 4.0 GiB; stage 1 fits" in (
        panel.summary_text
    )
    assert "speedlab-capacity" in html(panel, "states")
    assert "train" not in offered(panel)
    put(panel, "zero.stage", 1)
    assert "train" in offered(panel)
    put(panel, "model.preset", "gpt2-xl")
    put(panel, "model.layers", 480)
    assert "no stage fits; take more engines or a smaller model" in panel.summary_text


def test_less_free_than_needed_is_told_before_it_hurts(tmp_path: Path, opened: Callable[..., Panel]) -> None:
    panel = opened(Fakes(tmp_path, [DEVICE, replace(DEVICE, free_bytes=2**20)]))
    assert re.search(r"tight: stage 2 needs [\d.]+ MiB, and 1.0 MiB of 4.0 GiB is free now", panel.summary_text)


def test_a_control_is_shown_in_a_blink(panel: Panel) -> None:
    moves: list[tuple[str, Any]] = [
        ("zero.stage", 3),
        ("model.layers", 12),
        ("batch.micro_size", "4"),
        ("model.preset", "gpt2"),
        ("model.heads", 5),
    ]
    for path, value in moves:
        before = panel.fields[path].control.value
        times = []
        for _ in range(3):  # Others may use the machine: the quickest of three counts.
            put(panel, path, value)
            times.append(panel.update_ms)
            put(panel, path, before)
        assert 0 < min(times) < BOUND_MS, (path, times)


# Engines that are not there yet


def test_without_engines_it_predicts_for_those_it_would_start(
    monkeypatch: pytest.MonkeyPatch, cluster: Fakes, opened: Callable[..., Panel]
) -> None:
    asked: list[int] = []

    def start(engines: int) -> Fakes:
        asked.append(engines)
        cluster.devices = [DEVICE] * engines
        assert started.wait(10)
        return cluster

    started = threading.Event()
    monkeypatch.setattr("speedlab_notebook.panel.choose_devices", lambda count, _: [DEVICE] * (count or 4))
    monkeypatch.setattr("speedlab.cluster.Cluster", start, raising=False)
    panel = opened(None)
    assert "4 engines (not started) on cpu <0>" in panel.summary_text
    panel.engines.value = 2
    assert panel.batch_text.endswith("dp 2")
    panel.buttons["train"].click()
    assert panel.status_text == "starting 2 engines …"
    assert offered(panel) == set()
    started.set()
    run = wait_for(lambda: panel.run)
    wait_for(lambda: "running" in panel.status_text)
    assert asked == [2]
    assert cluster.trained == [RunConfig()]
    assert run.cluster is panel.cluster is cluster
    assert panel.engines.disabled


def test_engines_that_do_not_start_are_told(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Panel]) -> None:
    def refuse(engines: int) -> None:
        raise ClusterError(f"{engines} engines were asked for, but only 1 GPU can be seen")

    monkeypatch.setattr("speedlab_notebook.panel.choose_devices", lambda count, _: [DEVICE] * (count or 4))
    monkeypatch.setattr("speedlab.cluster.Cluster", refuse, raising=False)
    panel = opened(None)
    panel.buttons["train"].click()
    wait_for(lambda: "train" in offered(panel) and panel.message_text)
    assert panel.message_text == "4 engines were asked for, but only 1 GPU can be seen"
    assert 'role="alert"' in html(panel, "message")
    assert panel.cluster is None


# A run


def test_train_hands_over_what_the_controls_say(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    given: list[Any] = []
    panel = opened(cluster, on_run=given.append)
    put(panel, "name", "mine")
    put(panel, "zero.stage", 1)
    cluster.may_train.clear()
    panel.buttons["train"].click()
    assert panel.status_text == "checking configuration and data …"
    assert offered(panel) == set()
    cluster.may_train.set()
    run = wait_for(lambda: panel.run)
    wait_for(lambda: given == [run])
    assert cluster.trained == [RunConfig(name="mine", zero=1)]
    wait_for(lambda: panel.status_text == "● mine running: step 0 of 200")
    wait_for(lambda: offered(panel) == {"pause", "save", "stop"})


@pytest.mark.parametrize(
    "refusal",
    [ConfigError("name: 'mine' is taken; 'mine-2' is free"), ClusterError("rank 1 is dead; cluster.restart(1)")],
)
def test_what_train_refuses_is_told_and_can_be_tried_again(panel: Panel, cluster: Fakes, refusal: Exception) -> None:
    cluster.refusal = refusal
    panel.buttons["train"].click()
    wait_for(lambda: "train" in offered(panel) and panel.message_text)
    assert panel.message_text == str(refusal)
    assert panel.run is None
    cluster.refusal = None
    train(panel)
    assert panel.message_text == ""


def test_what_nobody_foresaw_comes_with_its_traceback(panel: Panel, cluster: Fakes) -> None:
    cluster.refusal = KeyError("surprise")
    panel.buttons["train"].click()
    wait_for(lambda: "train" in offered(panel) and panel.message_text)
    assert "KeyError: 'surprise'" in panel.message_text
    assert "Traceback" in panel.message_text


def test_buttons_post_words_and_follow_the_state(panel: Panel) -> None:
    run = train(panel)
    run.record(12, stage=2)
    wait_for(lambda: "step 12 of 200 · loss 5.250 · 41 k tokens/s" in panel.status_text)
    panel.buttons["pause"].click()
    (pause,) = run.posted
    assert pause.word == "pause"
    assert "pause" not in offered(panel)  # Asked for, not yet answered.
    assert panel.message_text == "pause: asked for; the ranks act after the step that is being computed"
    run.now(RunState.PAUSED)
    pause.answer = Event(kind="paused", step=12, time=13.0, text="after step 12", details={"seconds": 1e-5})
    wait_for(lambda: panel.message_text == "paused after step 12")
    wait_for(lambda: offered(panel) == {"resume", "step", "save", "stop"})
    panel.step_count.value = 7
    for word in ("step", "resume", "save", "stop"):
        panel.buttons[word].click()
    assert [(p.word, p.arguments) for p in run.posted[1:]] == [
        ("step", {"n": 7}),
        ("resume", {}),
        ("save", {}),
        ("stop", {}),
    ]
    for pending in run.posted[1:]:
        pending.answer = Event(kind="warning", step=12, time=14.0)
    run.now(RunState.STOPPED)
    wait_for(lambda: offered(panel) == {"train", "save"})
    wait_for(lambda: not panel.following)  # The run has ended: nobody polls any more.


def test_a_word_that_is_refused_is_told(panel: Panel) -> None:
    run = train(panel)
    panel.buttons["save"].click()
    run.posted[0].answer = RunError("control word 1 (save) was refused at step 3: no space")
    wait_for(lambda: "was refused at step 3: no space" in panel.message_text)
    assert "speedlab-error" in html(panel, "message")
    run.refusal = ClusterError("ranks [1] are dead")
    panel.buttons["pause"].click()
    assert panel.message_text == "ranks [1] are dead"


def test_a_failure_is_told_once_with_its_ranks(panel: Panel) -> None:
    run = train(panel)
    run.errors.append(RankError({0: RemoteFailure(kind="RuntimeError", message="shapes", step=57)}))
    run.now(RunState.FAILED, "text")
    wait_for(lambda: "RankError on rank 0, step 57" in panel.message_text)
    assert "RuntimeError: shapes" in panel.message_text
    wait_for(lambda: "train" in offered(panel))


def test_a_live_stage_is_marked_applied_and_arrives(panel: Panel) -> None:
    run = train(panel)
    run.record(3, stage=2)
    wait_for(lambda: "step 3" in panel.status_text)
    assert panel.changes == []
    assert panel._view.changes_row.layout.display == "none"
    put(panel, "zero.stage", 3)
    assert [str(change) for change in panel.changes] == ["stage 2 → 3 (live, under 1 s)"]
    assert "changed: stage 2 → 3 (live, under 1 s)" in html(panel, "changes")
    assert {"apply", "undo"} <= offered(panel)
    assert 'data-stage="2"' in html(panel, "states")
    panel.buttons["apply"].click()
    assert (run.posted[0].word, run.posted[0].arguments) == ("reshape", {"zero": 3})
    assert "apply" not in offered(panel)
    done = Event(
        kind="reshaped",
        step=4,
        time=5.0,
        text="zero stage 2 → 3",
        details={"before": 2, "zero": 3, "seconds": 0.034},
    )
    run.event(done)
    run.posted[0].answer = done
    wait_for(lambda: panel.message_text == "reshaped zero stage 2 → 3 at step 4 in 34 ms")
    wait_for(lambda: panel.changes == [])
    assert re.search(r'speedlab-chosen" data-stage="3">.*?>now<', html(panel, "states"))


def test_what_needs_a_restart_is_marked_and_undone(panel: Panel) -> None:
    train(panel)
    put(panel, "steps", 4000)
    put(panel, "optimizer.lr", 0.01)
    put(panel, "zero.stage", 0)
    put(panel, "name", "next")  # The next run's: no difference.
    assert [(change.path, change.live) for change in panel.changes] == [
        ("zero.stage", True),
        ("steps", False),
        ("optimizer.lr", False),
    ]
    assert "steps 200 → 4,000 (needs a restart)" in html(panel, "changes").replace("&gt;", ">")
    put(panel, "zero.stage", 2)
    assert "apply" not in offered(panel)
    panel.buttons["undo"].click()
    assert panel.changes == []
    assert panel.fields["steps"].control.value == 200


def test_a_panel_of_a_run_shows_its_configuration_and_stage(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    run: Any = FakeRun(RunFolder.create(RunConfig(name="old", folder=cluster.folder, steps=77, zero=1)), cluster)
    run.record(5, stage=1)
    run.event(Event(kind="reshaped", step=6, time=6.5, details={"before": 1, "zero": 3}))
    run.feed.poll()
    assert live_stage(run) == 3
    panel = opened(cluster, run)
    assert panel.fields["steps"].control.value == 77
    assert panel.fields["zero.stage"].control.value == 3
    wait_for(lambda: "old running: step 5 of 77" in panel.status_text)
    assert panel.changes == []
    run.record(8, stage=2)  # Newer than the event.
    wait_for(lambda: panel.changes and panel.changes[0].before == 2)


def test_a_run_without_engines_is_only_looked_at(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    run = FakeRun(RunFolder.create(RunConfig(name="gone", folder=cluster.folder)), None)
    panel = opened(None, run)
    wait_for(lambda: "gone running" in panel.status_text)
    assert offered(panel) <= {"train", "undo"}


def test_changes_and_answers_in_words() -> None:
    config = RunConfig()
    assert changes(config, 2, config) == []
    assert [str(c) for c in changes(config, 1, config.replace(clip_norm=None))] == [
        "stage 1 → 2 (live, under 1 s)",
        "clip norm 1.0 → – (needs a restart)",
    ]
    saved = Event(kind="checkpoint", step=5, time=0.0, text="step-000005", details={"bytes": 2**20, "seconds": 0.5})
    assert answer_line(saved) == "checkpoint step-000005, 1.0 MiB in 500 ms"


def test_a_watch_looks_again_when_it_is_started_again() -> None:
    looks: list[float | None] = [60.0, None, None]
    seen = threading.Semaphore(0)

    def look() -> float | None:
        seen.release()
        return looks.pop(0)

    watch = Watch(look)
    watch.start()
    assert seen.acquire(timeout=10)
    watch.start()  # Wakes it from its minute.
    assert seen.acquire(timeout=10)
    wait_for(lambda: not watch.running)
    watch.start()
    assert seen.acquire(timeout=10)
    watch.close()
    assert not watch.running
    watch.start()
    assert not watch.running


def test_show_displays_and_sets_run_in_the_namespace(monkeypatch: pytest.MonkeyPatch, cluster: Fakes) -> None:
    from speedlab_notebook import panel as module

    shown: list[Any] = []
    pushed: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    shell = SimpleNamespace(push=pushed.append)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    panel = module.show(cluster)  # pyright: ignore[reportArgumentType]  # a fake
    assert shown == [panel]
    assert repr(panel) == "<Panel: no run, 4 engines on cpu <0>>"
    run = train(panel)
    wait_for(lambda: pushed)
    assert pushed == [{"run": run, "cluster": cluster}]
    panel.close()
    run.close()
