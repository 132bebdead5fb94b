"""What the panel's buttons do, with a cluster and runs without processes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import panel_fakes
import pytest
from cluster_helpers import wait_for
from panel_fakes import DEVICE, FakeRun, Fakes, html, offered, put, train
from speedlab_notebook.panel.changes import changes, live_config
from speedlab_notebook.panel.panel import Panel
from speedlab_notebook.panel.run_control import PollingThread, answer_line

from speedlab.cluster import ClusterError, RankError, RemoteFailure
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry.proof import Finding, Proof, Severity, write_proof
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.run_folder import RunFolder, RunFolderError

cluster, opened, panel = panel_fakes.cluster, panel_fakes.opened, panel_fakes.panel


# Engines that are not there yet


def test_without_engines_it_predicts_for_those_it_would_start(
    monkeypatch: pytest.MonkeyPatch, cluster: Fakes, opened: Callable[..., Panel]
) -> None:
    asked: list[int] = []

    def make(engines: int, **_: Any) -> Fakes:
        asked.append(engines)
        cluster.devices = [DEVICE] * engines
        return cluster

    started = threading.Event()
    monkeypatch.setattr(cluster, "start", lambda: started.wait(10), raising=False)
    monkeypatch.setattr("speedlab_notebook.panel.train.choose_devices", lambda count, _: [DEVICE] * (count or 4))
    monkeypatch.setattr("speedlab.cluster.Cluster", make, raising=False)
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
    def refuse(engines: int, **_: Any) -> None:
        raise ClusterError(f"{engines} engines were asked for, but only 1 GPU can be seen")

    monkeypatch.setattr("speedlab_notebook.panel.train.choose_devices", lambda count, _: [DEVICE] * (count or 4))
    monkeypatch.setattr("speedlab.cluster.Cluster", refuse, raising=False)
    panel = opened(None)
    panel.buttons["train"].click()
    wait_for(lambda: "train" in offered(panel) and panel.message_text)
    assert panel.message_text == "4 engines were asked for, but only 1 GPU can be seen"
    assert 'role="alert"' in html(panel, "message")
    assert panel.cluster is None


def test_engines_on_hosts_wait_in_a_queue_and_are_given_up(
    monkeypatch: pytest.MonkeyPatch, cluster: Fakes, opened: Callable[..., Panel]
) -> None:
    made: dict[str, Any] = {}
    given_up = threading.Event()

    def make(engines: int | None, **options: Any) -> Fakes:
        made.update(options, engines=engines)
        return cluster

    def start() -> None:
        made["progress"]("Slurm job 7 waits for its nodes: Resources, 2 jobs before it")
        assert given_up.wait(10)
        raise ClusterError("the start was given up; nothing of it is left")

    monkeypatch.setattr(cluster, "start", start, raising=False)
    monkeypatch.setattr(cluster, "give_up_start", given_up.set, raising=False)
    monkeypatch.setattr("speedlab_notebook.panel.train.choose_devices", lambda count, _: [DEVICE] * (count or 4))
    monkeypatch.setattr("speedlab.cluster.Cluster", make, raising=False)
    panel = opened(None)
    panel.hosts.value = "slurm nodes"
    assert "'nodes' has no value" in panel.summary_text
    assert "train" not in offered(panel)
    panel.hosts.value = "slurm nodes=2, gpus_per_node=4"
    assert "8 engines (not started) on slurm nodes=2, gpus_per_node=4: whether it fits" in panel.summary_text
    assert panel.batch_text.endswith("dp 8")
    assert panel.engines.disabled
    panel.buttons["train"].click()
    wait_for(lambda: "2 jobs before it; Stop gives the start up" in panel.status_text)
    assert offered(panel) == {"stop"}
    panel.buttons["stop"].click()
    wait_for(lambda: "train" in offered(panel))
    assert panel.message_text == "the start was given up; nothing of it is left"
    assert (made["engines"], made["slurm"], panel.cluster) == (None, {"nodes": 2, "gpus_per_node": 4}, None)
    panel.hosts.value = ""
    assert "4 engines (not started) on cpu <0>" in panel.summary_text


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
    wait_for(lambda: offered(panel) == {"pause", "save", "prove", "stop"})


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
    wait_for(lambda: offered(panel) == {"resume", "step", "save", "prove", "stop"})
    panel.step_count.value = 7
    for word in ("step", "resume", "save", "prove", "stop"):
        panel.buttons[word].click()
    assert [(p.word, p.arguments) for p in run.posted[1:]] == [
        ("step", {"n": 7}),
        ("resume", {}),
        ("save", {}),
        ("prove", {}),
        ("stop", {}),
    ]
    for pending in run.posted[1:]:
        pending.answer = Event(kind="warning", step=12, time=14.0)
    run.now(RunState.STOPPED)
    wait_for(lambda: offered(panel) == {"train", "resume", "save", "prove"})
    wait_for(lambda: not panel.following)  # The run has ended: nobody polls any more.
    panel.buttons["resume"].click()  # Until somebody goes on with it.
    assert panel.following


def test_the_proof_of_the_run_is_shown_and_asked_for(panel: Panel) -> None:
    run = train(panel)
    run.record(1, stage=2)
    assert html(panel, "proof") == ""
    found = Finding(kind="documents", severity=Severity.OK, text="<b>separate</b>", section="documents")
    proof = Proof(step=0, form="cheap", seconds=0.1, findings=(found,))
    write_proof(run.folder.path, proof)
    run.event(Event(kind="proof", step=1, time=1.0, text="1 ok"))
    wait_for(lambda: "proof of the first batch: 1 ok" in html(panel, "proof"))
    assert "<details open" not in html(panel, "proof")  # Nothing in it needs a look.
    assert "&lt;b&gt;separate&lt;/b&gt;" in html(panel, "proof")
    wait_for(lambda: "prove" in offered(panel))
    panel.buttons["prove"].click()
    assert [pending.word for pending in run.posted] == ["prove"]
    assert panel.message_text.startswith("proof: asked for; the ranks check the next batch")
    assert "not answered" in panel.buttons["prove"].tooltip
    write_proof(run.folder.path, Proof(step=7, form="full", seconds=0.1, findings=(found,)))
    run.event(Event(kind="proof", step=7, time=2.0, text="1 ok"))
    run.posted[0].answer = Event(kind="proof", step=7, time=2.0, text="1 ok", details={"seconds": 0.25})
    wait_for(lambda: "proof of the batch of step 8" in html(panel, "proof"))
    assert '<details class="speedlab-told" open>' in html(panel, "proof")
    wait_for(lambda: panel.message_text == "proof made at step 7 in 250 ms; the findings are below")
    wait_for(lambda: "Not now" not in panel.buttons["prove"].tooltip)
    assert html(panel, "proof").count("proof of the batch of step 8") == 1
    (run.folder.path / "proof.json").write_text("[")
    run.event(Event(kind="proof", step=8, time=3.0, text="1 ok"))
    wait_for(lambda: "proof.json" in panel.message_text)
    assert html(panel, "proof") == ""


def test_failed_checks_of_a_proof_are_an_error_that_names_the_first(panel: Panel) -> None:
    assert panel.buttons["prove"].tooltip.endswith("Not now: there is no run; Train starts one")
    run = train(panel)
    wait_for(lambda: "prove" in offered(panel))
    panel.buttons["prove"].click()
    details = {"failed": ["documents: the check failed: rank 1: ValueError: <b>", "gradients: the same"]}
    run.posted[0].answer = Event(kind="proof", step=7, time=2.0, text="3 ok, 4 not checked", details=details)
    wait_for(lambda: "2 checks failed" in panel.message_text)
    assert panel.message_text.endswith("2 checks failed. documents: the check failed: rank 1: ValueError: <b>")
    assert "speedlab-error" in html(panel, "message")
    panel.buttons["prove"].click()
    details = {"problem": "the proof could not be written: no space"}
    run.posted[1].answer = Event(kind="proof", step=1007, time=2.0, text="7 ok", details=details)
    wait_for(lambda: panel.message_text == "proof at step 1,007: the proof could not be written: no space")
    run.has_engines, run.refusal = False, RunError("run 'mine' has no engines here and cannot prove")
    panel.buttons["prove"].click()
    assert panel.message_text == "run 'mine' has no engines here and cannot prove"
    assert panel.buttons["prove"].tooltip.endswith("Not now: the engines of the run have ended")
    run.has_engines = True
    run.now(RunState.FAILED, "text")
    wait_for(lambda: panel.buttons["prove"].tooltip.endswith("Not now: the run is failed"))


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
    assert "speedlab-hidden" in panel._view.changes_row._dom_classes
    put(panel, "zero.stage", 3)
    assert [str(change) for change in panel.changes] == ["stage 2 → 3 (live, under 1 s)"]
    assert "changed: stage 2 → 3 (live, under 1 s)" in html(panel, "changes")
    assert {"apply", "reset"} <= offered(panel)
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


def test_a_live_layout_is_marked_applied_and_undone(panel: Panel) -> None:
    run = train(panel)
    run.record(3, stage=2)
    wait_for(lambda: "step 3" in panel.status_text)
    put(panel, "parallel.pp", 2)
    assert [str(change) for change in panel.changes] == ["pp 1 → 2 (live)", "micro-batches 1 → 2 (live)"]
    assert panel.batch_text == "global batch 32 = micro-batch 8 × accumulation 2 × dp 2"  # The run's data stay.
    panel.buttons["reset"].click()
    assert panel.changes == []
    put(panel, "parallel.pp", 2)
    put(panel, "parallel.tp", 2)
    put(panel, "parallel.schedule", "gpipe")
    put(panel, "batch.accumulation", "8")
    assert panel.batch_text == "global batch 32 = micro-batch 4 × accumulation 8 × dp 1"
    panel.buttons["apply"].click()
    wanted = {"tp": 2, "pp": 2, "schedule": "gpipe", "micro_batches": 8}
    assert (run.posted[0].word, run.posted[0].arguments) == ("reshape", wanted)
    before = {"zero": 2, "pp": 1, "dp": 4, "tp": 1, "schedule": "1f1b", "micro_batches": 1}
    done = Event(kind="reshaped", step=4, time=5.0, details={"before": before, "after": {**before, **wanted, "dp": 1}})
    run.event(done)
    run.posted[0].answer = done
    wait_for(lambda: panel.changes == [])
    put(panel, "parallel.pp", 1)
    put(panel, "parallel.tp", 1)
    put(panel, "steps", 300)
    assert [change.path for change in panel.changes] == ["tp", "pp", "steps"]
    panel.buttons["reset"].click()
    assert [panel.fields[f"parallel.{axis}"].control.value for axis in ("tp", "pp")] == [2, 2]
    assert panel.changes == []


def test_what_needs_a_restart_is_marked_and_undone(panel: Panel) -> None:
    train(panel)
    put(panel, "steps", 4000)
    put(panel, "optimizer.lr", 0.01)
    put(panel, "zero.stage", 0)
    put(panel, "name", "next")  # The next run's: no difference.
    assert [(change.path, change.live) for change in panel.changes] == [
        ("zero", True),
        ("steps", False),
        ("optimizer.lr", False),
    ]
    assert "steps 200 → 4,000 (needs a restart)" in html(panel, "changes").replace("&gt;", ">")
    put(panel, "zero.stage", 2)
    assert "apply" not in offered(panel)
    panel.buttons["reset"].click()
    assert panel.changes == []
    assert panel.fields["steps"].control.value == 200


def test_a_panel_of_a_run_shows_its_configuration_and_stage(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    run: Any = FakeRun(RunFolder.create(RunConfig(name="old", folder=cluster.folder, steps=77, zero=1)), cluster)
    run.record(5, stage=1)
    run.event(Event(kind="reshaped", step=6, time=6.5, details={"before": {"zero": 1}, "after": {"zero": 3}}))
    run.feed.poll()
    assert live_config(run, run.config, 4).zero.stage == 3
    panel = opened(cluster, run)
    assert panel.fields["steps"].control.value == 77
    assert panel.fields["zero.stage"].control.value == 3
    wait_for(lambda: "old running: step 5 of 77" in panel.status_text)
    assert panel.changes == []
    run.record(8, stage=2)  # Newer than the event.
    wait_for(lambda: panel.changes and panel.changes[0].before == 2)


def test_a_panel_follows_a_run_to_more_engines(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    run: Any = FakeRun(RunFolder.create(RunConfig(name="grows", folder=cluster.folder)), cluster)
    run.record(5, stage=2)
    panel = opened(cluster, run)
    wait_for(lambda: "grows running: step 5" in panel.status_text)
    assert panel.summary_text.startswith("4 engines on cpu")
    cluster.devices = [DEVICE] * 2  # What `run.reshape(engines=2)` in a cell does.
    wait_for(lambda: panel.engines.value == 2)
    wait_for(lambda: panel.summary_text.startswith("2 engines on cpu"))
    assert panel.fields["parallel.tp"].control.value == 1
    put(panel, "parallel.tp", 2)
    assert panel.problems == []
    assert panel.batch_text.endswith("× dp 1")


def test_a_run_without_engines_is_only_looked_at(cluster: Fakes, opened: Callable[..., Panel]) -> None:
    run = FakeRun(RunFolder.create(RunConfig(name="gone", folder=cluster.folder)), None)
    panel = opened(None, run)
    wait_for(lambda: "gone running" in panel.status_text)
    assert offered(panel) <= {"train", "reset"}


def test_changes_and_answers_in_words() -> None:
    config = RunConfig()
    assert changes(config, config, 4) == []
    assert [str(c) for c in changes(config.replace(zero=1), config.replace(clip_norm=None), 4)] == [
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

    watch = PollingThread(look)
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
    from speedlab_notebook.panel import panel as module

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


def test_a_run_that_cannot_be_read_is_told_and_not_followed(panel: Panel) -> None:
    run = train(panel)
    run.trouble = RunFolderError("status.json is damaged")
    wait_for(lambda: not panel.following)
    assert panel.message_text == "status.json is damaged"


def test_a_calibrated_machine_learns_from_a_run_that_finishes_and_tells_the_miss(
    monkeypatch: pytest.MonkeyPatch, panel: Panel, tmp_path: Path
) -> None:
    learned: list[str] = []

    def learn(folder: RunFolder) -> str:
        learned.append(folder.name)
        return "planned: predicted 100 ms a step, measured 120 ms (-17%)"

    monkeypatch.setattr("speedlab_notebook.panel.run_control.learn_from", learn)
    (tmp_path / "calibration.json").touch()
    run = train(panel)
    run.now(RunState.FINISHED)
    wait_for(lambda: learned == [run.name])
    wait_for(lambda: "measured 120 ms (-17%)" in panel.message_text)
