"""Engines are added and removed while the cluster runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import is_gone, look_around, small_run, sum_over_ranks, wait_for

from speedlab.cluster import Cluster, ClusterError, Run, attach
from speedlab.cluster.files import processes
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry.current_config import shape_of
from speedlab.telemetry.records import RunState

if TYPE_CHECKING:
    from torch import nn

NAME = "test-resize"
SECONDS = 60


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules here come before those that are installed, in what engines are forked off from `import_anew` on."""
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, broken: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        # Engines import the modules of functions they run; and what a test puts into `broken`.
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{broken}")
        cluster = Cluster(2, name=NAME, device="cpu")
        everything: list[psutil.Process] = []
        try:
            yield cluster
            everything = processes.marked(token_of(cluster))
        finally:
            cluster.stop()
            assert [process.pid for process in everything if not is_gone(process.pid)] == []


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Two engines, whatever the test before has left."""
    if {status.state for status in started.status()} != {"idle"}:  # It failed; the next one need not.
        started.stop()
        started.start()
    started.resize(2, progress=lambda line: None)
    return started


def pids(cluster: Cluster) -> list[int]:
    return [status.pid for status in cluster.status()]


def import_again(token: str) -> None:
    """The next engine is forked off another process, which has to import everything."""
    processes.end(processes.fork_servers(token), patience_seconds=0.0)


def token_of(cluster: Cluster) -> str:
    return psutil.Process(pids(cluster)[0]).environ()[processes.TOKEN]


def bound_threads() -> list[list[int]]:
    """The cores of every thread of this engine."""
    return [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]


def test_engines_come_and_go(cluster: Cluster) -> None:
    cluster.execute("kept = 42").result(SECONDS)
    first = pids(cluster)
    other = Cluster.attach(NAME)
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]

    said: list[str] = []
    cluster.resize(4, progress=said.append)
    assert pids(cluster)[:2] == first
    assert cluster.size == other.size == 4
    assert [line.partition(" on ")[0] for line in said] == ["2 → 4 engines"]
    found = cluster.submit(look_around).result(SECONDS)
    assert [rank["rank"] for rank in found] == [0, 1, 2, 3]
    assert [rank["environment"]["WORLD_SIZE"] for rank in found] == ["4"] * 4
    assert [rank["environment"]["LOCAL_WORLD_SIZE"] for rank in found] == ["4"] * 4
    assert [rank["threads"] for rank in found] == [device.threads for device in cluster.devices]
    for threads, device in zip(cluster.submit(bound_threads).result(SECONDS), cluster.devices, strict=True):
        assert threads == [list(device.cores)] * len(threads)
    assert cluster.execute("kept", ranks=[0, 1]).result(SECONDS) == ["42", "42"]
    assert other.submit(sum_over_ranks, 1.0).result(SECONDS) == [4.0] * 4

    lines: list[tuple[list[int], str]] = []
    cluster.output.subscribe(lambda ranks, stream, text: lines.append((ranks, text)))
    cluster.execute("print('one line of four')").result(SECONDS)
    by_rank = sorted((rank, text) for ranks, text in lines for rank in ranks)  # In one piece, but on busy cores.
    assert by_rank == [(rank, "one line of four\n") for rank in range(4)]

    removed = pids(cluster)[1:]
    cluster.resize(1, progress=said.append)
    assert pids(cluster) == first[:1]
    assert [pid for pid in removed if not is_gone(pid)] == []
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [1.0]
    with pytest.raises(ClusterError, match="cluster 'test-resize' has rank 0"):
        cluster.submit(abs, 1, ranks=[1])
    cluster.resize(1, progress=said.append)
    assert len(said) == 2
    assert Cluster(1, name=NAME).size == 1


def test_what_cannot_be_resized_stays_as_it_is(cluster: Cluster, broken: Path) -> None:
    first = pids(cluster)
    with pytest.raises(ClusterError, match="0 engines was asked for"):
        cluster.resize(0)

    busy = cluster.submit(__import__("time").sleep, 60, ranks=[1])
    with pytest.raises(ClusterError, match="rank 1 is busy, and all engines have to be idle"):
        cluster.resize(4)
    cluster.interrupt()
    wait_for(lambda: busy.done)

    (broken / "torch.py").write_text("raise SystemExit('no such library')")
    import_again(token_of(cluster))
    with pytest.raises(ClusterError, match=r"(?s)ended before they were ready.*no such library"):
        cluster.resize(4, progress=lambda line: None)
    (broken / "torch.py").unlink()
    assert pids(cluster) == first
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]


def test_an_interrupt_while_engines_start_leaves_the_cluster(cluster: Cluster, broken: Path) -> None:
    token = token_of(cluster)
    import_again(token)
    before = {process.pid for process in processes.marked(token) if not is_gone(process.pid)}

    (broken / "torch.py").write_text(f"open({str(broken / 'begun')!r}, 'w'); import time; time.sleep(60)")

    def interrupt_once_begun() -> None:
        wait_for((broken / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt_once_begun)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.resize(4, progress=lambda line: None)
    interrupting.join()
    (broken / "torch.py").unlink()
    assert {process.pid for process in processes.marked(token) if not is_gone(process.pid)} == before
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]


FAILS_WITH_THREE = """
import speedlab.cluster.worker.remote as remote
made = remote.rebind
def rebind(environment):
    three = environment["WORLD_SIZE"] == "3"
    made({**environment, "OMP_NUM_THREADS": "many"} if three else environment)
remote.rebind = rebind
"""


def test_engines_that_cannot_change_over_go_on_as_before(cluster: Cluster) -> None:
    first = pids(cluster)
    cluster.execute(FAILS_WITH_THREE, ranks=[1]).result(SECONDS)
    with pytest.raises(RuntimeError, match=r"rank 1(?s:.)*invalid literal for int.*'many'"):
        cluster.resize(3, progress=lambda line: None)
    assert pids(cluster) == first
    found = cluster.submit(look_around).result(SECONDS)
    assert [rank["environment"]["WORLD_SIZE"] for rank in found] == ["2", "2"]
    assert [rank["threads"] for rank in found] == [device.threads for device in cluster.devices]
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]


STEPS = 60


def config(folder: Path, name: str) -> RunConfig:
    return small_run(folder, name, STEPS, batch={"micro_size": 4})


def losses(run: Run) -> list[float]:
    assert [record.step for record in run.records()] == list(range(1, STEPS + 1))
    return [record.loss for record in run.records()]


def test_a_run_goes_on_with_more_and_with_fewer_engines(cluster: Cluster, tmp_path: Path) -> None:
    whole = cluster.train(config(tmp_path, "whole"))
    assert whole.wait(SECONDS) is RunState.FINISHED

    run = cluster.train(config(tmp_path, "moved"))
    run.pause()
    run.advance(3)
    run.wait(SECONDS)
    at = run.step
    with pytest.raises(ClusterError, match=rf"run 'moved' is paused at step {at} and it has no checkpoint"):
        cluster.resize(4)
    with pytest.raises(ConfigError, match=r"global 8 = micro \? × accumulation \? × dp 3"):
        run.reshape(engines=3)
    assert cluster.size == 2

    run.reshape(engines=4).wait(SECONDS)  # Paused, it stays paused, with the new engines.
    assert (run.state, run.step, cluster.size) == (RunState.PAUSED, at, 4)
    (reported,) = [event for event in run.events if event.kind == "reshaped"]
    assert (reported.step, reported.details["after"]["dp"], reported.details["after"]["zero"]) == (at, 4, 2)
    assert reported.text == "2 → 4 engines, pp 1 × dp 2 × tp 1 → pp 1 × dp 4 × tp 1"
    assert run.present_config.batch.resolve(4).global_size == 8
    assert shape_of(run.present_config, 4) == shape_of(attach(run.folder.path).config, 4) == reported.details["after"]
    run.reshape(zero=3).wait(SECONDS)
    run.advance(3)
    run.wait(SECONDS)
    assert [len(run.records(rank)) for rank in range(4)] == [at + 3, at + 3, 3, 3]

    run.resume()
    run.wait_until(at + 4, SECONDS)
    run.reshape(engines=2)  # Running, it goes on, with the stage that it has.
    assert cluster.size == 2
    assert run.wait(SECONDS) is RunState.FINISHED
    assert run.records()[-1].zero_stage == 3
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)


def only_on_two() -> nn.Module:
    from speedlab.config import ModelConfig
    from speedlab.models import GPT

    if os.environ["WORLD_SIZE"] != "2":
        raise MemoryError("no room for it here")
    return GPT(ModelConfig(layers=2, hidden=32, heads=2, ffn_hidden=64, context=32, vocab_size=512))


def test_a_run_that_cannot_go_on_elsewhere_goes_on_as_before(cluster: Cluster, tmp_path: Path) -> None:
    whole = cluster.train(config(tmp_path, "whole"), model=only_on_two)
    assert whole.wait(SECONDS) is RunState.FINISHED

    run = cluster.train(config(tmp_path, "stays"), model=only_on_two)
    run.wait_until(3, SECONDS)
    with pytest.raises(RunError, match=r"goes on with 2 engines as before; with 4(?s:.)*no room for it here"):
        run.reshape(engines=4)
    assert cluster.size == 2
    assert run.wait(SECONDS) is RunState.FINISHED
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)


def test_a_run_is_not_left_behind(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.train(config(tmp_path, "on").replace(steps=100_000))
    run.wait_until(1, SECONDS)
    with pytest.raises(ClusterError, match=r"run 'on' is running .* run.reshape\(engines=4\) takes it along"):
        cluster.resize(4)
    run.stop().wait(SECONDS)
    run.wait(SECONDS)
    with pytest.raises(RunError, match="run 'on' is stopped at step"):
        run.reshape(engines=4)
    cluster.resize(1, progress=lambda line: None)  # Nobody will ask for what it holds.
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [1.0]
