"""A cluster with a real supervisor and two engines, steered and looked at with no kernel."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import small_run, wait_for
from server_helpers import JupyterServer

from speedlab.cluster import Cluster
from speedlab.cluster.files import processes
from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab.cluster.known_runs import run_id

NAME = "of-the-server"


def test_a_run_is_paused_and_resumed_without_a_kernel(
    server: JupyterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(server.ipython))
    cluster = started(server)
    try:
        config = small_run(
            tmp_path, "steered", 100_000, batch={"micro_size": 2, "global_size": 4}, telemetry={"tensorboard": False}
        )
        run = cluster.train(config)
        way = f"runs/{run_id(run.folder.path)}"
        wait_for(lambda: server.ask(way)[1]["run"]["step"] >= 3)

        assert server.ask(way)[1]["run"]["cluster"] == NAME
        paused = give(server, way, {"word": "pause"})
        assert paused["kind"] == "paused"
        wait_for(lambda: server.ask(way)[1]["run"]["state"] == "paused")
        _, one = server.ask(f"clusters/{NAME}")
        assert [(rank["rank"], rank["device"]["kind"]) for rank in one["ranks"]] == [(0, "cpu"), (1, "cpu")]
        assert (one["cluster"]["state"], one["problem"], one["runs"]) == ("running", "", [run_id(run.folder.path)])
        assert all(entry["held"][0][0] > 0 for entry in one["memory"])
        # From the second look on, once half a second has passed.
        wait_for(lambda: all(rank["cpu_share"] is not None for rank in server.ask(f"clusters/{NAME}")[1]["ranks"]))
        assert all(0 <= rank["cpu_share"] < 1.5 for rank in server.ask(f"clusters/{NAME}")[1]["ranks"])

        # What the run itself refuses, it refuses a page in the same words.
        status, answer = server.ask(f"{way}/words", {"word": "reshape", "arguments": {"tp": 3}})
        assert status == 409
        assert "3" in answer["text"]
        give(server, way, {"word": "reshape", "arguments": {"zero": 3}})
        give(server, way, {"word": "resume"})
        step = server.ask(way)[1]["run"]["step"]
        wait_for(lambda: server.ask(way)[1]["run"]["step"] > step)
        cluster.submit(print, "said on the ranks")  # It comes once the run rests.
        give(server, way, {"word": "stop"})
        wait_for(lambda: server.ask(f"{way}/output?match=SAID")[1]["ranks"])

        hanging_delays_no_one(server, cluster)
        status, answer = server.ask(f"clusters/{NAME}/words", {"word": "cancel"})
        assert (status, answer["text"]) == (409, f"cancel: cluster {NAME!r} was not touched: it runs; stop it instead")
        token = cluster.token
        assert server.ask(f"clusters/{NAME}/words", {"word": "stop"})[0] == 200
        assert processes.marked(token) == []
    finally:
        cluster.stop()
    status, answer = server.ask(f"clusters/{NAME}")
    assert (status, "it was stopped, or never started" in answer["text"]) == (404, True)
    wait_for(lambda: [r for r in server.ask("runs")[1]["runs"] if r["name"] == "steered" and r["cluster"] == ""])


def started(server: JupyterServer) -> Cluster:
    """By the server, with its own Python."""
    start = {"name": NAME, "place": "server", "engines": 2}
    # What lies in the server's root, which may be others' to write, is none of a start's modules.
    others = [server.root / f"{name}.py" for name in ("speedlab", "ipyparallel", "torch", "zmq")]
    for file in others:
        file.write_text("raise SystemExit('a module of the root')")
    try:
        status, answer = server.ask("clusters", start)
        assert (status, answer["word"], answer["cluster"]) == (202, "start", NAME)
        assert state_of(server) == "starting"
        assert server.ask("clusters", start)[0] == 409
        wait_for(lambda: state_of(server) != "starting", 120)
        assert state_of(server) == "running", server.ask("clusters")
    finally:
        for file in others:
            file.unlink()
    return Cluster.attach(NAME)


def state_of(server: JupyterServer) -> str | None:
    found = server.ask("clusters")[1]["clusters"]
    return next((cluster["state"] for cluster in found if cluster["name"] == NAME), None)


def test_a_start_is_given_up_and_leaves_nothing(server: JupyterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(server.ipython))
    home = ClusterDir(NAME)
    assert server.ask("clusters", {"name": NAME, "place": "server", "engines": 1})[0] == 202
    wait_for(home.supervisor_socket.exists, 60)
    token = home.token
    assert token is not None
    assert server.ask(f"clusters/{NAME}/words", {"word": "cancel"})[0] == 200
    assert not home.path.exists()
    wait_for(lambda: processes.marked(token) == [])
    wait_for(lambda: state_of(server) is None)


def give(server: JupyterServer, way: str, word: dict[str, Any]) -> dict[str, Any]:
    """Give a word; returns the event that answers it."""
    status, answer = server.ask(f"{way}/words", word)
    assert (status, answer["type"]) == (202, "WordGiven"), answer

    def event() -> dict[str, Any] | None:
        events = server.ask(f"{way}/events")[1]["events"]
        return next((event for event in events if event["command"] == answer["number"]), None)

    return wait_for(event)


def hanging_delays_no_one(server: JupyterServer, cluster: Cluster) -> None:
    (supervisor,) = [
        process for process in processes.marked(cluster.token) if processes.SUPERVISOR_MODULE in process.cmdline()
    ]
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        answers: list[Any] = []
        waiting = [threading.Thread(target=lambda: answers.append(server.ask(f"clusters/{NAME}"))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        assert server.ask("runs")[0] == server.ask("clusters")[0] == 200
        assert not answers  # Those still wait for the supervisor.
        for thread in waiting:
            thread.join(20)
        assert [status for status, _ in answers] == [200] * 3
        for _, answer in answers:
            assert "did not answer within 3 s" in answer["problem"]
            assert [rank["state"] for rank in answer["ranks"]] == ["unknown", "unknown"]
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
