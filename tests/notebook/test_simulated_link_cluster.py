"""A cluster over a pretended link, with real engines: who is told of it, and that a step takes as long as it must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_helpers import small_run

from speedlab.cluster import Cluster, ClusterError
from speedlab.network import LinkRate
from speedlab.telemetry.figures import header
from speedlab.telemetry.history import History
from speedlab.telemetry.records import RunState

SECONDS = 60
LINK = "8 Mbit/s 1 ms"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    made = Cluster(2, name="test-pretended", device="cpu", link=LINK)
    yield made
    made.stop()


def pretended_here() -> str:
    from speedlab.comm import own_link

    return str(own_link())


@pytest.mark.timeout(180)
def test_a_cluster_over_a_pretended_link(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.link == LinkRate(bits_per_second=8e6, latency_seconds=1e-3)
    assert repr(cluster).endswith(f", over a pretended link of {LINK}>")
    with pytest.raises(ClusterError, match=r"pretend a link of 8 Mbit/s 1 ms, and 1 Gbit/s was asked for; use it as"):
        Cluster(name="test-pretended", link="1 Gbit/s")
    cluster.restart(1)
    assert cluster.submit(pretended_here).result(SECONDS) == [f"pretended {LINK}"] * 2
    run = cluster.train(small_run(tmp_path, "slow", steps=3))
    assert run.wait(SECONDS) is RunState.FINISHED
    for record in run.records()[1:]:
        # A million bytes a second; not how much longer computing takes.
        assert record.seconds > sum(record.sent_bytes.values()) / 1e6 > 0.01
    (started,) = [event for event in run.events if event.kind == "started"]
    assert started.text.endswith(f", over a pretended link of {LINK}")
    history = History.of(run.feed.records, run.events)
    assert header(history, name="slow", status=run.feed.status).text.endswith(
        f"2 engines over a pretended link of {LINK}"
    )
