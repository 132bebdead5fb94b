"""A cluster over the hosts of a laboratory, from `Cluster(hosts=…)` to its end: what a notebook does with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_helpers import SECONDS, await_true, config, needs
from person import Person

from speedlab.cluster import Cluster, ClusterError, RankError
from speedlab.cluster.debug.post_mortem import debug
from speedlab.cluster.files.processes import TOKEN
from speedlab.cluster.launch.host_specs import parse_hosts
from speedlab.telemetry.records import RunState
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import mpi_environment, start_slurm


@pytest.fixture(scope="module")
def cluster(settings: Path) -> Iterator[Cluster]:
    made = Cluster(hosts=parse_hosts(["host-a:2", "host-b:2"], config=str(settings)), name="over", device="cpu")
    yield made
    made.stop()


def left(lab: Lab, token: str) -> list[int]:
    """Processes of a cluster on the hosts."""
    found = []
    for host in lab.hosts:
        for process in host.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
                if process.environ().get(TOKEN) == token:
                    found.append(process.pid)
    return found


def where() -> tuple[str, str, str]:
    import os

    return os.environ["SPEEDLAB_HOST"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.timeout(240)
def test_work_and_training_over_hosts_equal_one_hosts(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.size == 4
    assert cluster.submit(where).result(SECONDS) == [
        ("host-a", "0", "2"),
        ("host-a", "1", "2"),
        ("host-b", "0", "2"),
        ("host-b", "1", "2"),
    ]
    statuses = cluster.status()
    assert [status.state for status in statuses] == ["idle"] * 4
    assert [status.place.partition(" on ")[2] for status in statuses] == ["host-a", "host-a", "host-b", "host-b"]
    assert all(status.rss_bytes > 50 * 2**20 for status in statuses)
    run = cluster.train(config(tmp_path, "over", steps=10, parallel={"tp": 2}))
    assert run.wait(SECONDS) is RunState.FINISHED
    assert run.errors == []
    here = Cluster(4, name="here", device="cpu")
    try:
        alone = here.train(config(tmp_path, "here", steps=10, parallel={"tp": 2}))
        assert alone.wait(SECONDS) is RunState.FINISHED
    finally:
        here.stop()
    assert [record.loss for record in run.records()] == pytest.approx(
        [record.loss for record in alone.records()], abs=1e-6, rel=0
    )
    # A cell on one host is interrupted, and the rest goes on; an engine comes back on its host.
    with pytest.raises(
        ClusterError,
        match="3 engines were asked for, and hosts come and go whole: there are host-a: 2, host-b: 2; 2 or 4",
    ):
        cluster.resize(3)
    cluster.restart(3)
    assert cluster.submit(where, ranks=[3]).result(SECONDS) == [("host-b", "1", "2")]
    again = Cluster.attach("over")
    assert again.submit(where).result(SECONDS)[2] == ("host-b", "0", "2")


def slurm_request(lab: Lab, settings: Path, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(what Cluster takes, the environment in which it finds it)."""
    return {"slurm": {"nodes": 2, "engines_per_node": 2, "time": "5"}}, start_slurm(lab)


def mpi_request(lab: Lab, settings: Path, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    (folder / "hosts").write_text("".join(f"{host.address} slots=2\n" for host in lab.hosts))
    return {"mpi": {"hostfile": str(folder / "hosts")}}, mpi_environment(lab, settings)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("way", "request_of"),
    [
        pytest.param("slurm", slurm_request, id="slurm"),
        # Its agents come, go and come back in test_agents.py.
        pytest.param("mpi", mpi_request, id="mpi", marks=pytest.mark.nightly),
    ],
)
def test_a_cluster_of_a_scheduler_trains_and_gives_its_hosts_back(
    lab: Lab,
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
    request_of: Any,
) -> None:
    needs(way)
    given, environment = request_of(lab, settings, tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    made = Cluster(name=way, device="cpu", progress=said.append, **given)
    token = made.token
    try:
        assert "starting engines" in said
        assert made.submit(where).result(SECONDS) == [
            ("host-a", "0", "2"),
            ("host-a", "1", "2"),
            ("host-b", "0", "2"),
            ("host-b", "1", "2"),
        ]
        with pytest.raises(RankError, match="KeyError"):
            made.execute("value = {'a': 3}\nvalue['b']", ranks=[3]).result(SECONDS)
        debug(made, 3, Person("p value['a'] + 4", "q"))
        assert "\n7\n" in capsys.readouterr().out
        # A cell between two steps, which stops in the debugger on the other host while the rest waits.
        run = made.train(config(tmp_path, f"{way}-live", steps=100_000))
        monkeypatch.setattr("builtins.input", person := Person("p engine.global_step >= 0", "c"))
        cell = run.live("import os\nif os.environ['RANK'] == '2': breakpoint()\nos.environ['SPEEDLAB_HOST']")
        assert cell.wait(SECONDS) == {0: "'host-a'", 1: "'host-a'", 2: "'host-b'", 3: "'host-b'"}
        assert person.prompts == ["rank 2 (Pdb) "] * 2
        assert "True\n" in capsys.readouterr().out
        run.stop().wait(SECONDS)
        run = made.train(config(tmp_path, way, steps=3))
        assert run.wait(SECONDS) is RunState.FINISHED
        assert [record.step for record in run.records()] == [1, 2, 3]
        assert left(lab, token)
    finally:
        made.stop()
    await_true(lambda: left(lab, token) == [], "every process on the hosts has ended")
    if way == "slurm":
        shown = ["squeue", "-h", "-t", "pending,running", "-o", "%i"]
        await_true(lambda: lab.hosts[0].run(*shown, env=dict(os.environ)).stdout == "", "the job has ended")


@pytest.mark.timeout(120)
def test_stop_leaves_nothing_on_any_host(settings: Path, lab: Lab) -> None:
    made = Cluster(hosts=parse_hosts(["host-a:1", "host-b:1"], config=str(settings)), name="brief", device="cpu")
    token = made.token
    assert left(lab, token)
    made.stop()
    await_true(lambda: left(lab, token) == [], "every process on the hosts has ended")
    with pytest.raises(ClusterError, match="nowhere"):
        Cluster(hosts=parse_hosts(["nowhere:1"], config=str(settings)), name="brief", device="cpu")
    assert not made.directory.exists()
