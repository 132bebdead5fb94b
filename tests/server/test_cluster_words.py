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

from speedlab.cluster import Cluster, processes
from speedlab.cluster.known_runs import run_id

NAME = "of-the-server"


def test_a_run_is_paused_and_resumed_without_a_kernel(
    server: JupyterServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(server.ipython))
    cluster = Cluster(2, name=NAME, device="cpu")
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

        hanging_delays_nobody(server, cluster)
    finally:
        cluster.stop()
    status, answer = server.ask(f"clusters/{NAME}")
    assert (status, "it was stopped, or never started" in answer["text"]) == (404, True)
    wait_for(lambda: [r for r in server.ask("runs")[1]["runs"] if r["name"] == "steered" and r["cluster"] == ""])


def give(server: JupyterServer, way: str, word: dict[str, Any]) -> dict[str, Any]:
    """Give a word; returns the event that answers it."""
    status, answer = server.ask(f"{way}/words", word)
    assert (status, answer["type"]) == (202, "WordGiven"), answer

    def event() -> dict[str, Any] | None:
        events = server.ask(f"{way}/events")[1]["events"]
        return next((event for event in events if event["command"] == answer["number"]), None)

    return wait_for(event)


def hanging_delays_nobody(server: JupyterServer, cluster: Cluster) -> None:
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
