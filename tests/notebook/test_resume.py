"""Going on with a run, and going back, as people do it: in a cell, after a restart of the kernel, in a terminal."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import wait_for
from jupyter_client.manager import KernelManager

from speedlab.cluster import Cluster, Run, attach
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry.checkpoint_index import CheckpointError
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "steps": 10**6,
    "model": {"layers": 1, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 32, "vocab_size": 257},
    "data": {"source": "text", "tokenizer": "bytes", "sequence_length": 32},
    "precision": "float32",
    "batch": {"global_size": 4, "micro_size": 1},
    "eval": {"every_steps": 0},
    "telemetry": {"tensorboard": False},
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own to work in, with a text, and with no clusters but its own."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("going-on")
        patch.setenv("IPYTHONDIR", str(path / "ipython"))
        for kind in ("CONFIG", "DATA", "RUNTIME"):
            patch.setenv(f"JUPYTER_{kind}_DIR", str(path / kind.lower()))
        patch.chdir(path)
        (path / "text").mkdir()
        for number in range(8):
            (path / "text" / f"{number}.txt").write_text(f"the {number} quick brown foxes jump over lazy dogs. " * 30)
        yield path


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    cluster = Cluster(2, name="going-on", device="cpu")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Any]:
    """Starts runs that train until the test ends."""
    runs: list[Run] = []

    def start(name: str, **changes: Any) -> Run:
        runs.append(cluster.train(RunConfig(**{**SETTINGS, "name": name, **changes})))
        return runs[-1]

    yield start
    for run in runs:
        if run.state not in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED):
            run.stop().wait(60)


def names(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder.path / "checkpoints").iterdir() if path.is_dir())


def test_a_run_that_was_paused_writes_text_at_once(start: Any) -> None:
    run = start("writes")
    for _ in range(7):
        run.pause().wait(60)
        assert isinstance(run.generate("the ", tokens=2), str)
        run.resume().wait(60)
    with pytest.raises(RunError, match=r"its ranks are busy; run\.pause\(\)\.wait\(\) first"):
        run.generate("the ")


def test_a_run_goes_back_to_what_save_returned_and_on_from_there(start: Any) -> None:
    run = start("back")
    saved = run.save("lunch")
    at = saved.wait(60).step
    run.wait_until(at + 3, 60)
    run.pause().wait(60)
    later = run.save().wait(60)
    for wrong, message in (
        ({"tag": "nope"}, rf"holds no checkpoint 'nope'; it holds {later.text}, lunch"),
        ({"step": at + 1}, f"holds no checkpoint of step {at + 1}; it holds"),
        ({"step": at, "tag": "lunch"}, "both name a checkpoint; give one of them"),
        ({"tag": run.folder.path / "config.json"}, "there is no such folder"),
        ({"steps": at}, rf"would go on from step {later.step} and ends at step {at}; .* more than {later.step} steps"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            run.resume(**wrong)
    for way in (saved, saved.wait(), at, "lunch", run.folder.path / "checkpoints" / "lunch"):
        assert run.resume(way).wait(60).text == "from lunch"
        run.pause().wait(60)
    # What was left behind is there, but no longer what the run goes on from; its name is not taken.
    steps = later.step - run.step
    if steps > 0:
        run.advance(steps).wait(60)
        run.wait(60)
    assert run.save().wait(60).text == (f"{later.text}-2" if run.step == later.step else f"step-{run.step:06d}")
    run.stop().wait(60)
    with pytest.raises(RunError, match=r"the run is stopped; run\.resume\(\) goes on with it"):
        run.advance(1).wait(60)
    assert attach("back").resume().wait(60).kind == "resumed"  # Another handle, as another kernel has it.
    run.wait_until(run.step + 2, 60)


def test_a_finished_run_is_made_longer(start: Any) -> None:
    run = start("longer", steps=2)
    assert run.wait(60) is RunState.FINISHED
    with pytest.raises(ConfigError, match=r"from step 2 and ends at step 2; .*run\.resume\(steps=4\)"):
        run.resume()
    run.resume(steps=4).wait(60)
    assert run.wait(60) is RunState.FINISHED
    assert (run.step, run.config.steps, run.folder.read_status().steps) == (4, 4, 4)


WAIT = """
look, told = run._resting_state, []
def waits():
    told or told.append(print("waits", flush=True))
    return look()
run._resting_state = waits
run.wait()
"""
"""Sits in a wait, and says so from within."""


def test_a_kernel_that_is_restarted_in_a_wait_stops_nothing(cluster: Cluster, place: Path) -> None:
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(place), env=dict(os.environ))
    client = kernel.client()
    client.start_channels()

    def run_until_it_waits(code: str) -> None:
        client.wait_for_ready(timeout=60)
        client.execute(f"import speedlab\nrun = {code}\n{WAIT}")
        wait_for(lambda: "waits" in client.get_iopub_msg(timeout=60)["content"].get("text", ""), 60)

    try:
        settings = {**SETTINGS, "name": "outlives"}
        run_until_it_waits(f"speedlab.Cluster.attach('going-on').train(speedlab.RunConfig(**{settings!r}))")
        run = attach(place / "runs" / "outlives")
        run.wait_until(2, 60)
        kernel.restart_kernel(now=False)
        run.wait_until(run.step + 5, 60)
        assert run.state is RunState.RUNNING
        assert [event.kind for event in run.events] == ["started", "proof"]
        run_until_it_waits("speedlab.attach('outlives')")
        kernel.interrupt_kernel()  # The user's own interrupt is another thing.
        wait_for(lambda: run.state is RunState.PAUSED, 30)
        run.stop().wait(60)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def terminal(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "speedlab.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_in_a_terminal_prints_the_line_that_goes_on(cluster: Cluster, place: Path) -> None:
    (place / "small.json").write_text(json.dumps({**SETTINGS, "name": "typed", "folder": "elsewhere"}))
    training = terminal("train", "small.json", "--cluster", cluster.name)
    wait_for((place / "elsewhere/typed/records/rank-0.jsonl").exists, 90)
    training.send_signal(signal.SIGINT)
    reported = training.communicate(timeout=90)[1]
    assert training.returncode == 130, reported
    stopped = RunFolder("elsewhere/typed").read_status()
    assert stopped.state is RunState.STOPPED
    (line,) = [line.partition("resume:")[2].strip() for line in reported.splitlines() if line.startswith("resume:")]
    assert line == f"speedlab train --resume elsewhere/typed --cluster {cluster.name}"
    again = terminal("train", "small.json", "--cluster", cluster.name)
    assert f"`{line}` goes on with it" in again.communicate(timeout=60)[1]
    assert again.returncode == 2
    on = terminal(*shlex.split(line)[1:], "--steps", str(stopped.step + 3))
    reported = on.communicate(timeout=120)[1]
    assert on.returncode == 0, reported
    run = Run("elsewhere/typed")
    assert (run.state, run.step) == (RunState.FINISHED, stopped.step + 3)
    assert [record.step for record in run.records()] == list(range(1, stopped.step + 4))
    assert f"step-{stopped.step + 3:06d}" in names(run)


def test_what_is_on_the_disk_is_looked_at_and_gone_on_with_when_its_engines_are_gone(cluster: Cluster) -> None:
    own = Cluster(1, name="ends", device="cpu")
    try:
        run = own.train(RunConfig(**{**SETTINGS, "name": "kept"}))
        run.wait_until(2, 60)
        at = run.save("mine").wait(60).step
        run.stop().wait(60)
        stopped_at = run.step
    finally:
        own.stop()
    assert [row["stage"] for row in run.table()] == [2]
    assert "no engines" in repr(run)
    assert len(run.layout_table()) == 1
    assert len(run.placement()) > 5
    with pytest.raises(
        RunError, match=rf"its engines are gone; run\.resume\(\) goes on from its checkpoint of step {at}"
    ):
        run.pause()
    # The handle of before, and one of another kernel: both take the engines that run, of whatever number.
    assert run.resume().wait(60).step == at <= stopped_at
    assert run.cluster is not None
    assert run.cluster.name == cluster.name
    run.wait_until(at + 3, 60)
    assert [event.text for event in run.events if event.kind == "reshaped"] == [
        "1 → 2 engines, pp 1 × dp 1 × tp 1 → pp 1 × dp 2 × tp 1"
    ]
    run.stop().wait(60)
    other = attach("kept")
    assert other.resume("mine").wait(60).text == "from mine"
    other.stop().wait(60)
