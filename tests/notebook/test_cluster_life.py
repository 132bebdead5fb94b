"""Beginnings and ends of clusters: other kernels, side by side, dead controllers, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster_helpers import backend, break_a_deadlock, is_gone, wait_for

import speedlab.cluster.cluster as cluster_file
from speedlab.cluster import Cluster, ClusterError, RankError
from speedlab.cluster.files import processes
from speedlab.cluster.files.cluster_dir import ClusterDir, running_clusters

START_AND_DIE = """
import os, signal, speedlab
cluster = speedlab.Cluster(1, name="outlives", device="cpu")
cluster.execute("kept = 42").result()
print(cluster.status()[0].pid, flush=True)
cluster.submit(__import__("time").sleep, 3.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_ipython_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Engines import the modules of functions they run.


def leave_children() -> list[int]:
    """Start a child, and one that has left its parent's session."""
    import subprocess

    return [subprocess.Popen(["sleep", "300"], start_new_session=new).pid for new in (False, True)]


def test_engines_outlive_their_kernel_and_stop_ends_all_they_started() -> None:
    kernel = subprocess.run(
        [sys.executable, "-c", START_AND_DIE], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert kernel.returncode == -signal.SIGKILL
    engine = int(kernel.stdout)
    cluster = Cluster.attach()
    assert cluster.name == "outlives"
    assert [status.pid for status in cluster.status()] == [engine]
    assert cluster.status()[0].state == "busy"  # With a task of the kernel that is gone.
    assert cluster.execute("kept").result(20) == ["42"]
    (children,) = cluster.submit(leave_children).result()
    token = psutil.Process(engine).environ()[processes.TOKEN]
    everything = {process.pid for process in processes.marked(token)}
    assert everything > {engine, *children}
    cluster.stop()
    assert [pid for pid in everything if not is_gone(pid)] == []
    assert not cluster.running
    assert not cluster.directory.exists()
    with pytest.raises(ClusterError, match="is not running"):
        cluster.submit(abs, 1)


def test_two_clusters_side_by_side_and_a_dead_controller() -> None:
    first = Cluster(1, name="left", device="cpu")
    second = Cluster(1, name="right", device="cpu")
    try:
        assert {state.name for state in running_clusters()} == {"left", "right"}
        first.execute("side = 'left'").result()
        second.execute("side = 'right'").result()
        assert first.execute("side").result() == ["'left'"]
        assert second.execute("side").result() == ["'right'"]

        results = second.submit(time.sleep, 60)
        second.stop()
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            results.result(5)
        assert first.execute("side").result() == ["'left'"]

        engine = first.status()[0].pid
        state = ClusterDir("left").read()
        assert state is not None
        results = first.submit(time.sleep, 60)
        os.kill(state.controller_pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="controller of cluster 'left' has died"):
            results.result(10)
        first.start()
        assert is_gone(engine)
        assert first.submit(abs, -1).result() == [1]
    finally:
        second.stop()
        first.stop()
    assert running_clusters() == []


def test_a_start_that_fails_shows_the_log_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import sys; sys.exit('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tokens: list[str] = []
    made = cluster_file.secrets.token_hex
    monkeypatch.setattr(cluster_file.secrets, "token_hex", lambda size: tokens.append(made(size)) or tokens[-1])
    with pytest.raises(ClusterError, match=r"(?s)ended before they were ready.*no such library"):
        Cluster(1, name="broken", device="cpu")
    wait_for(lambda: processes.marked(tokens[0]) == [])
    assert running_clusters() == []
    assert not ClusterDir("broken").path.exists()


def test_the_backend_is_chosen_when_a_cluster_starts() -> None:
    with pytest.raises(ClusterError, match="backend is 'mpi'; it is 'shared' or 'gloo'"):
        Cluster(2, backend="mpi")
    cluster = Cluster(2, name="sockets", device="cpu", backend="gloo")
    try:
        assert cluster.submit(backend).result(60) == ["gloo", "gloo"]
        assert Cluster(2, name="sockets").size == 2  # Who does not ask takes what runs.
        with pytest.raises(ClusterError, match="through 'gloo', and 'shared' was asked for"):
            Cluster(2, name="sockets", backend="shared")
        break_a_deadlock(cluster)  # In native code, unlike waiting on shared memory.
    finally:
        cluster.stop()
