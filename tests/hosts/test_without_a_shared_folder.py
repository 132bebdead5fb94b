"""Hosts that do not see the folder of a run: what ranks write there comes over the wire, and what cannot is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_helpers import SECONDS, config, needs

from speedlab.cluster import Cluster, ClusterError
from speedlab.cluster.launch.host_specs import parse_hosts
from speedlab.telemetry.records import RunState
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import start_sshd


@pytest.fixture
def cluster(hosts_are_possible: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two hosts that share the programs and the text, but neither the cluster's folder nor those of runs."""
    needs("ssh")
    for name in ("own", "hosts", "ipython"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "hosts"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with Lab(2, private=[tmp_path / "own", tmp_path / "ipython"]) as lab:
        settings = start_sshd(lab)
        made = Cluster(hosts=parse_hosts(["host-a:1", "host-b:1"], config=str(settings)), name="apart", device="cpu")
        yield made
        made.stop()


@pytest.mark.timeout(240)
def test_a_run_whose_folder_no_host_sees_is_whole_on_this_side(cluster: Cluster, tmp_path: Path) -> None:
    separate = {"folder": tmp_path / "own" / "runs"}
    with pytest.raises(ClusterError, match=r"host-a, host-b does not see .*every_steps is 10, and ranks of all hosts"):
        cluster.train(config(tmp_path, "refused", **separate))
    assert not (tmp_path / "own" / "runs" / "refused").exists()
    with pytest.raises(ClusterError, match=r"text.txt is not on host-a, and its ranks read it there; copy it to"):
        cluster.train(config(tmp_path / "own", "no-text", checkpoint={"every_steps": 0}, **separate))

    run = cluster.train(config(tmp_path, "apart", checkpoint={"every_steps": 0}, **separate))
    run.wait_until(5, SECONDS)
    with pytest.raises(ClusterError, match="save: ranks of run 'apart' would exchange what they hold"):
        run.save()
    run.pause().wait(SECONDS)
    assert run.wait(SECONDS) is RunState.PAUSED
    at = run.step
    assert [len(run.records(rank)) for rank in (0, 1)] == [at, at]
    run.resume().wait(SECONDS)
    assert run.wait(SECONDS) is RunState.FINISHED
    assert [event.kind for event in run.events] == ["started", "proof", "paused", "resumed", "finished"]
    assert [event.command for event in run.events] == [None, None, 1, 2, None]
    assert run.proof()["first update"].severity == "ok"
    assert [[record.step for record in run.records(rank)] for rank in (0, 1)] == [[*range(1, 31)]] * 2
    assert run.placement(1)
    assert run.table()
    assert {"events.jsonl", "placement", "records", "tokenizer"} <= {path.name for path in run.folder.path.iterdir()}

    # The same as where all see it.
    seen = cluster.train(config(tmp_path, "seen", checkpoint={"every_steps": 0}))
    assert seen.wait(SECONDS) is RunState.FINISHED
    assert [record.loss for record in run.records(1)] == [record.loss for record in seen.records(1)]
    assert not (tmp_path / "runs" / "seen" / "wire.json").exists()
