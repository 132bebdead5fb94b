"""The panel with two real engines: a run is trained, paused, moved from stage 2 to 3, resumed and stopped by clicks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_helpers import is_gone, wait_for
from panel_fakes import html, offered, put
from speedlab_notebook.panel.panel import Panel

from speedlab.cluster import Cluster, Run
from speedlab.telemetry.records import RunState

NAME = "test-panel-two"
SECONDS = 60


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    # An own cluster is started by Train, as everywhere, but under a name that is nobody else's.
    monkeypatch.setattr(
        "speedlab.cluster.Cluster",
        lambda engines, **options: Cluster(engines, name=NAME, device="cpu", **options),
        raising=False,
    )
    monkeypatch.setattr("speedlab.hardware.cuda_devices", list)
    panel = Panel(None)
    try:
        yield panel
    finally:
        panel.close()
        if panel.cluster is not None:
            pids = [engine.pid for engine in panel.cluster.status()]
            panel.cluster.stop()
            assert [pid for pid in pids if not is_gone(pid)] == []


def test_a_run_from_train_to_stop(panel: Panel, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    for path, value in {
        "model.layers": 2,
        "model.hidden": 32,
        "model.heads": 2,
        "model.ffn_hidden": 64,
        "model.context": 32,
        "data.source": str(tmp_path / "nothing-here"),
        "data.tokenizer": "bytes",
        "data.sequence_length": 32,
        "data.heldout_share": 0.2,
        "batch.micro_size": "2",
        "precision.dtype": "float32",
        "eval.every_steps": 0,
        "steps": 100_000,
    }.items():
        put(panel, path, value)
    panel.engines.value = 2
    assert panel.problems == []

    # Data that is not there: told, with the engines kept.
    panel.buttons["train"].click()
    assert panel.status_text == "starting 2 engines …"
    wait_for(lambda: "train" in offered(panel) and panel.message_text, SECONDS)
    assert "nothing-here" in panel.message_text
    assert "Traceback" not in panel.message_text
    assert panel.cluster is not None
    assert panel.cluster.running

    put(panel, "data.source", str(text))
    panel.buttons["train"].click()
    run: Run = wait_for(lambda: panel.run, SECONDS)
    wait_for(lambda: run.step >= 2 and "apply" not in offered(panel) and "pause" in offered(panel), SECONDS)
    wait_for(lambda: f"● {run.name} running: step" in panel.status_text)
    assert run.records()[-1].zero_stage == 2

    panel.buttons["pause"].click()
    wait_for(lambda: panel.message_text.startswith("paused after step"), SECONDS)
    wait_for(lambda: {"resume", "step", "save", "stop"} <= offered(panel))
    paused_at = run.step

    put(panel, "zero.stage", 3)
    wait_for(lambda: "apply" in offered(panel))
    panel.buttons["apply"].click()
    wait_for(lambda: panel.message_text.startswith("reshaped zero stage 2"), SECONDS)
    wait_for(lambda: panel.changes == [])
    assert "now</text>" in html(panel, "states")

    panel.step_count.value = 3
    panel.buttons["step"].click()
    wait_for(lambda: run.state is RunState.PAUSED and run.step == paused_at + 3, SECONDS)
    assert run.records()[-1].zero_stage == 3
    measured, predicted = run.records()[-1].ledger, panel.states[3]
    assert measured.optimizer_moments == pytest.approx(predicted.optimizer_moments, rel=0.05)
    assert measured.parameters == pytest.approx(predicted.parameters, rel=0.05)

    wait_for(lambda: "resume" in offered(panel), SECONDS)
    panel.buttons["resume"].click()
    wait_for(lambda: run.step > paused_at + 4, SECONDS)
    wait_for(lambda: "stop" in offered(panel))
    panel.buttons["stop"].click()
    wait_for(lambda: run.state is RunState.STOPPED, SECONDS)
    wait_for(lambda: offered(panel) == {"train", "resume", "save", "prove"} and not panel.following, SECONDS)
    assert panel.status_text.startswith(f"■ {run.name} stopped: step")
