"""A host of a cluster goes: who is told what, and when; how its run goes on without it, and with it again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_helpers import SECONDS, await_true, cluster_over, config

from speedlab.cluster import Cluster, RankError
from speedlab.telemetry.records import RunState
from tests.benchmarks.host_loss import lose_a_host
from tests.benchmarks.lab import Lab

NAMED_SECONDS = 15.0
"""With tests beside it; `python -m tests.benchmarks hosts` tells the time on a quiet machine, whose goal is 5."""


@pytest.fixture
def cluster(settings: Path, lab: Lab) -> Iterator[Cluster]:
    with cluster_over(lab, settings, "goes", "host-a:2", "host-b:2") as made:
        yield made


@pytest.mark.timeout(240)
def test_a_run_goes_on_without_a_host_and_with_it_again(
    cluster: Cluster, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(tmp_path, "goes", steps=10**5, zero=1, parallel={"tp": 2}, recover={"attempts": 2})
    loss, run = lose_a_host(cluster, lab.hosts[1], wanted, after_step=25)
    assert loss.named_seconds < NAMED_SECONDS
    assert loss.said.startswith(
        "host-b does not answer: it is down or cut off (ranks 2–3; they worked on goes, and have"
    )
    assert loss.gone_on_seconds < SECONDS
    assert 0 <= loss.lost_steps <= 30
    # The layout allows one on the host that is left: dp 2 becomes dp 1, and 2 again.
    assert [event.text for event in run.events if event.kind == "reshaped"] == [
        "4 → 2 engines, pp 1 × dp 2 × tp 2 → pp 1 × dp 1 × tp 2",
        "2 → 4 engines, pp 1 × dp 1 × tp 2 → pp 1 × dp 2 × tp 2",
    ]
    (reported,) = [event.text for event in run.events if event.kind == "recovering"]
    assert "ranks 2–3: EngineDied; attempt 1 of 2 at once, from step" in reported
    assert (cluster.size, run.present_config.layout(4).dp) == (4, 2)
    run.stop().wait(SECONDS)
    assert run.state is RunState.STOPPED
    assert [error.by_rank[2].kind for error in run.errors] == ["EngineDied"]
    with capsys.disabled():
        print("", *loss.lines, sep="\n  ")


@pytest.mark.timeout(240)
def test_without_recover_the_failure_says_what_can_be_done(cluster: Cluster, lab: Lab, tmp_path: Path) -> None:
    run = cluster.train(config(tmp_path, "by-hand", steps=10**5, zero=1, parallel={"tp": 2}))
    run.wait_until(15, SECONDS)
    lab.hosts[0].cut()  # That of rank 0.
    with pytest.raises(RankError) as raised:
        run.wait(30)
    said = str(raised.value)
    assert "host-a does not answer: it is down or cut off (ranks 0–1; they worked on by-hand" in said
    assert re.search(r"once it is back, cluster.restart\(0\) and run.resume\(\) goes on from step \d+; without: ", said)
    assert re.search(r"run.reshape\(engines=2\) goes on from step \d+ as pp 1 × dp 1 × tp 2", said)
    began = time.monotonic()
    cluster.status()
    assert time.monotonic() - began < 5  # Nobody waits for the host that is lost.
    # The others leave their group after the run has told of its end.
    states = ["dead", "dead", "idle", "idle"]
    await_true(lambda: [status.state for status in cluster.status()] == states, "the others are free", SECONDS)
    run.reshape(engines=2)
    run.wait_until(run.step + 3, SECONDS)
    run.stop().wait(SECONDS)
    assert (cluster.size, run.state) == (2, RunState.STOPPED)
