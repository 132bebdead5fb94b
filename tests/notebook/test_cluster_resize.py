"""Engines are added and removed while the cluster runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_helpers import is_gone, look_around, sum_over_ranks, wait_for

from speedlab.cluster import Cluster, ClusterError, processes

NAME = "test-resize"
SECONDS = 60


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Engines import the modules of functions they run.
    cluster = Cluster(2, name=NAME, device="cpu")
    everything = processes.marked(psutil.Process(cluster.status()[0].pid).environ()[processes.TOKEN])
    try:
        yield cluster
    finally:
        cluster.stop()
        assert [process.pid for process in everything if not is_gone(process.pid)] == []


def pids(cluster: Cluster) -> list[int]:
    return [status.pid for status in cluster.status()]


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
    assert lines == [([0, 1, 2, 3], "one line of four\n")]

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


def test_what_cannot_be_resized_stays_as_it_is(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pids(cluster)
    with pytest.raises(ClusterError, match="0 engines was asked for"):
        cluster.resize(0)

    busy = cluster.submit(__import__("time").sleep, 60, ranks=[1])
    with pytest.raises(ClusterError, match="rank 1 is busy, and all engines have to be idle"):
        cluster.resize(4)
    cluster.interrupt()
    wait_for(lambda: busy.done)

    monkeypatch.setattr("speedlab.cluster.launchers.ENGINE_COMMAND", ["sh", "-c", "exit 3"])
    with pytest.raises(ClusterError, match="the engine of rank 2 ended before it was ready"):
        cluster.resize(4, progress=lambda line: None)
    assert pids(cluster) == first
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]


def test_an_interrupt_while_engines_start_leaves_the_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pids(cluster)
    token = psutil.Process(first[0]).environ()[processes.TOKEN]
    before = {process.pid for process in processes.marked(token)}

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("speedlab.cluster.start._await_engines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.resize(4, progress=lambda line: None)
    assert {process.pid for process in processes.marked(token) if not is_gone(process.pid)} == before
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]


def test_engines_that_cannot_change_over_go_on_as_before(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pids(cluster)
    made = __import__("speedlab.cluster.resize", fromlist=["rank_environment"]).rank_environment

    def environment(rank: int, devices: list[dict[str, object]], rendezvous: str) -> dict[str, str]:
        wrong = {"OMP_NUM_THREADS": "many"} if len(devices) == 3 and rank == 1 else {}
        return {**made(rank, devices, rendezvous), **wrong}

    monkeypatch.setattr("speedlab.cluster.resize.rank_environment", environment)
    with pytest.raises(RuntimeError, match=r"rank 1(?s:.)*invalid literal for int.*'many'"):
        cluster.resize(3, progress=lambda line: None)
    assert pids(cluster) == first
    found = cluster.submit(look_around).result(SECONDS)
    assert [rank["environment"]["WORLD_SIZE"] for rank in found] == ["2", "2"]
    assert [rank["threads"] for rank in found] == [device.threads for device in cluster.devices]
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]
