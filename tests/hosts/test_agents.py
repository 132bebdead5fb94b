"""Agents on the hosts of a laboratory, started over SSH, in Slurm and under MPI: what they do, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_helpers import Login, await_true, needs

import speedlab.cluster.agents.tasks as agent_tasks
import speedlab.cluster.files.processes as processes
import speedlab.cluster.worker.remote as remote
from speedlab.cluster.agents.pool import Agents
from speedlab.cluster.agents.process import own_versions
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.host_specs import SlurmJob, Spec, parse, parse_hosts
from speedlab.cluster.worker.abort_connections import CUT_SIGNAL
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import mpi_environment, start_slurm

LoginTo = Callable[[Spec], Login]


def join_and_sum() -> tuple[int, float, str, str]:
    import os

    import torch
    import torch.distributed as dist

    from speedlab.comm import join

    world = join(timeout_seconds=30)
    tensor = torch.tensor([2.0**world.rank])
    dist.all_reduce(tensor)
    return world.rank, tensor.item(), os.environ["LOCAL_RANK"], os.uname().nodename


def wait_for_a_host_that_does_not_come() -> str:
    import os
    import time

    import torch
    import torch.distributed as dist

    from speedlab.comm import leave

    if os.environ["SPEEDLAB_HOST"] == "host-b":
        time.sleep(0.5)
        return "never came"
    try:
        dist.all_reduce(torch.zeros(3))
    except RuntimeError as error:
        return type(error).__name__
    finally:
        leave(failed=True)
    return "went through"


def inside(lab: Lab, host: str, pid: int) -> psutil.Process:
    """The process that has number `pid` in its host."""
    number = [each.name for each in lab.hosts].index(host)
    for process in lab.hosts[number].processes():
        status = Path(f"/proc/{process.pid}/status").read_text()
        if f"\t{pid}\n" in status.partition("NSpid:")[2].partition("\nNSpgid")[0] + "\n":
            return process
    raise AssertionError(f"no process {pid} on {host}")


@pytest.mark.timeout(150)
def test_a_cluster_over_ssh(two: Lab, ssh: Path, login: LoginTo) -> None:
    here = login(parse_hosts(["host-a:2", "host-b:2"], config=str(ssh)))
    assert here.address == two.address
    assert here.home.connection_file("client").stat().st_mode & 0o077 == 0
    assert '"curve_serverkey": null' not in here.home.connection_file("client").read_text()
    agents = here.start_agents()
    assert [(host.name, host.address, host.interface, len(host.devices)) for host in agents.hosts] == [
        (host.name, host.address, "eth0", 2) for host in two.hosts
    ]
    for entry in agents.entries:
        process = inside(two, entry.host.name, entry.pid)
        assert process.memory_info().rss < 120 * 2**20
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    engines = here.start_engines(agents)
    assert [(engine.rank, engine.host) for engine in engines] == [
        (0, "host-a"),
        (1, "host-a"),
        (2, "host-b"),
        (3, "host-b"),
    ]

    def on_all(function: Callable[..., Any]) -> list[Any]:
        return [here.client[engine.engine_id].apply_async(function) for engine in engines]

    found = [task.get(timeout=60) for task in on_all(join_and_sum)]
    assert found == [(rank, 15.0, str(rank % 2), f"host-{'ab'[rank // 2]}") for rank in range(4)]

    # Cut, ranks come back from a collective, and stay the controller's.
    tasks = on_all(wait_for_a_host_that_does_not_come)
    assert [task.get(timeout=30) for task in tasks[2:]] == ["never came"] * 2
    assert agents.signal(engines[:2], CUT_SIGNAL) == list(engines[:2])
    assert [task.get(timeout=30) for task in tasks[:2]] == ["PeerLost"] * 2

    # An agent that is killed is named at once; the next one finds what runs there.
    before = sorted((engine["rank"], engine["pid"]) for engine in agents.engines())
    assert before == [(engine.rank, engine.pid) for engine in engines]
    inside(two, "host-b", agents.entries[1].pid).kill()
    assert agents.silent() == ["host-b"]
    agents.restart("host-b")
    assert agents.silent() == []
    assert sorted((engine["rank"], engine["pid"]) for engine in agents.engines()) == before

    # An engine that dies on a host, and how.
    inside(two, "host-a", engines[1].pid).send_signal(signal.SIGSEGV)
    await_true(lambda: len([e for e in agents.engines() if e["running"]]) == 3, "one engine less")
    ended = [(engines[1].pid, -signal.SIGSEGV)]  # A process that is ending has no name any more, and no status yet.
    await_true(lambda: [(e["pid"], e["exit"]) for e in agents.engines() if not e["running"]] == ended, "how it ended")
    assert agents.signal(engines[:3], signal.SIGINT) == [engines[0], engines[2]]
    reused = [replace(engine, started=engine.started - 100) for engine in engines]
    assert agents.signal(reused, signal.SIGKILL) == [], "a number that is another process's by now"

    # Another process takes over, and ends everything.
    later = Agents.of(here.home, here.client, here.spec, here.token, agents.to_fields())
    assert len(here.left()) >= 5
    assert later.end() == []
    await_true(lambda: here.left() == [], "nothing is left on any host")
    assert here.folders_left() == []


@pytest.mark.timeout(120)
def test_a_job_of_slurm(two: Lab, login: LoginTo, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("slurm")
    for name, value in start_slurm(two).items():
        monkeypatch.setenv(name, value)
    spec = parse(slurm={"nodes": 2, "engines_per_node": 1, "partition": "lab", "time": "5"})
    assert isinstance(spec, SlurmJob)
    here = login(spec)
    agents = here.start_agents()
    assert [host.name for host in agents.hosts] == ["host-a", "host-b"]
    job = agents.to_fields()["launching"]["job"]

    # Agents that are killed, all of them, are followed by others in the same job.
    engines = here.start_engines(agents)
    for entry in agents.entries:
        inside(two, entry.host.name, entry.pid).kill()
    await_true(lambda: agents.silent() == ["host-a", "host-b"], "both are gone")
    for host in ("host-a", "host-b"):
        agents.restart(host)
    assert agents.silent() == []
    assert agents.why_over() is None
    assert agents.to_fields()["launching"]["job"] == job
    again = here.start_engines(agents)
    found = [here.client[engine.engine_id].apply_async(join_and_sum) for engine in again]
    assert [task.get(timeout=60)[:2] for task in found] == [(0, 3.0), (1, 3.0)]
    assert {engine.pid for engine in engines}.isdisjoint(engine.pid for engine in again)

    # A second cluster has to wait, says where it stands, and can be cancelled.
    said: list[str] = []
    cancelled = threading.Event()

    def hear(words: str) -> None:
        said.append(words)
        if "1st of 1" in words and "Resources" in words:
            cancelled.set()

    another = login(SlurmJob(nodes=2, engines_per_node=1, options=("--exclusive",)))
    with pytest.raises(ClusterError, match="the start of the cluster was cancelled; nothing is left of it"):
        another.start_agents(progress=hear, cancelled=cancelled)
    assert said[-1].startswith(f"job {int(job) + 1} is queued, 1st of 1 in lab (Resources)")
    assert two.hosts[0].run("squeue", "-h", "-t", "pending", "-o", "%i", env=dict(os.environ)).stdout == ""

    # A job that is ended under its agents: named, and the engines' side hears it.
    two.hosts[0].run("scancel", job, env=dict(os.environ))
    await_true(lambda: agents.silent() == ["host-a", "host-b"], "agents of a job that is no more")
    await_true(lambda: agents.why_over() is not None, "why the job is over")
    assert agents.why_over() == f"job {job} was cancelled"
    assert agents.end() == []
    await_true(lambda: here.left() == [], "nothing is left on any host")

    with pytest.raises(ClusterError, match=r"Slurm refuses the job: .*[Ii]nvalid partition"):
        login(SlurmJob(nodes=1, partition="a100")).start_agents()


@pytest.mark.timeout(120)
def test_hosts_of_an_mpiexec_host_file(
    two: Lab, ssh: Path, login: LoginTo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mpi")
    for name, value in mpi_environment(two, ssh).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "hosts").write_text("".join(f"{host.address}:{k + 1}\n" for k, host in enumerate(two.hosts)))
    here = login(parse(mpi={"hostfile": str(tmp_path / "hosts")}) or pytest.fail("no spec"))
    agents = here.start_agents()
    assert [(host.name, len(host.devices)) for host in agents.hosts] == [("host-a", 1), ("host-b", 2)]
    mpiexec = psutil.Process(agents.to_fields()["launching"]["pid"])

    # mpiexec starts no agent a second time; ssh does, where it reaches the host.
    inside(two, "host-b", agents.entries[1].pid).kill()
    await_true(lambda: agents.silent() == ["host-b"], "it is gone")
    with pytest.raises(ClusterError, match="mpiexec cannot start an agent a second time, and over SSH: host-b is not"):
        agents.restart("host-b")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {ssh} "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    agents.restart("host-b")
    assert agents.silent() == []
    assert mpiexec.is_running()
    agents = Agents.of(here.home, here.client, here.spec, here.token, agents.to_fields())
    assert agents.end() == []
    await_true(lambda: here.left() == [], "nothing is left on any host")
    await_true(lambda: not mpiexec.is_running() or mpiexec.status() == psutil.STATUS_ZOMBIE, "mpiexec has ended")


# ---- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_what_is_wrong_with_a_host_is_said_and_nothing_is_left(
    two: Lab, ssh: Path, login: LoginTo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = login(parse_hosts(["host-a:1", "host-b:1"], config=str(ssh)))

    def problem(spec: Spec, **options: Any) -> str:
        here.spec = spec
        with pytest.raises(ClusterError) as raised:
            here.start_agents(**options)
        await_true(lambda: here.left() == [], f"nothing is left after: {raised.value}")
        return str(raised.value)

    def hosts(*names: str, **options: Any) -> Spec:
        return parse_hosts(names, **{"config": str(ssh), **options})

    text = ssh.read_text()
    (tmp_path / "key").write_text("no key")
    (tmp_path / "stranger").write_text(
        text.replace(f"IdentityFile {ssh.with_name('user')}", f"IdentityFile {tmp_path}/key")
    )
    (tmp_path / "no known").write_text(text.replace(str(ssh.with_name("known")), str(tmp_path / "nobody")))
    refused = problem(hosts("host-a", config=str(tmp_path / "stranger")))
    assert refused.startswith("host-a refuses the key (")
    assert refused.endswith("`ssh host-a` must work without a password: ssh-copy-id host-a")
    unknown = problem(hosts("host-a", config=str(tmp_path / "no known")))
    assert unknown.startswith("host-a is not known to be host-a (")
    assert "connect once by hand and compare its key: ssh host-a" in unknown
    assert problem(hosts("host-a:1", "host-z")).startswith("host-z is not known here (ssh: Could not resolve hostname")
    without = problem(hosts("host-a", python="/opt/no/python"))
    assert without.startswith("host-a has no /opt/no/python (")
    assert without.endswith("install it at that path, or name another: speedlab guide hosts")
    with monkeypatch.context() as patch:
        patch.delenv("PYTHONPATH")
        plain = os.path.realpath(sys.executable)
        lacking = f"host-a: {plain} says No module named 'speedlab'; install SpeedLab there"
        assert problem(hosts("host-a", python=plain)).startswith(lacking)
    assert (
        problem(hosts("host-a"), interface="ib0")
        == "host-a: no network interface 'ib0' with an address; there are eth0, lo"
    )
    monkeypatch.setattr(
        "speedlab.cluster.agents.registration.own_versions", lambda: {"python": "3.11", "torch": "9.9.9"}
    )
    version = problem(hosts("host-a"))
    assert "the cluster torch 9.9.9; all hosts need the same" in version
    assert version.startswith("host-a has torch ")
    monkeypatch.setattr("speedlab.cluster.agents.registration.own_versions", own_versions)
    port = json.loads(here.home.connection_file("engine").read_text())["registration"]
    two.hosts[1].run("ip", "rule", "add", "to", two.address, "ipproto", "tcp", "dport", str(port), "prohibit")
    blocked = problem(hosts("host-a:1", "host-b:1"))
    assert blocked.startswith(
        f"host-b cannot reach {os.uname().nodename} ({two.address}) at TCP port {port}: a firewall"
    )
    assert blocked.endswith("Agents and engines connect to the controller there")


def test_without_a_scheduler_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speedlab.cluster.launch.rendezvous import controller_address

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="no Slurm here: scontrol is not found"):
        controller_address(SlurmJob(nodes=1))


@pytest.mark.nightly  # A run does the same in test_lost_host.py.
@pytest.mark.timeout(150)
def test_a_cluster_goes_on_without_a_host_and_grows_again(two: Lab, ssh: Path, login: LoginTo) -> None:
    here = login(parse_hosts(["host-a:1", "host-b:1"], config=str(ssh)))
    agents = here.start_agents()
    engines = here.start_engines(agents)
    two.hosts[0].cut()
    begin = time.monotonic()
    assert agents.silent() == ["host-a"]
    assert time.monotonic() - begin < 5
    # The rank of host-b is rank 0 from now on.
    agents.out_of_reach = {"host-a"}
    agents.use(["host-b"])
    here.home.next_generation()
    assert agents.set_generation(here.home.generation) == []
    alone = agents.environments({})
    here.client[engines[1].engine_id].apply(remote.rebind, alone[0]).get(timeout=30)
    assert here.client[engines[1].engine_id].apply(join_and_sum).get(timeout=30) == (0, 1.0, "0", "host-b")
    assert agents.aside == {"host-a": 1}
    two.hosts[0].mend()
    agents.use(["host-b", "host-a"])
    agents.restart("host-a")
    here.home.next_generation()
    both = agents.environments({})
    (new,) = agents.start_engines({processes.TOKEN: here.token, "SPEEDLAB_BACKEND": "shared"}, [1])
    assert (new.rank, new.host) == (1, "host-a")
    assert [engine["pid"] for engine in agents.engines() if engine["host"] == "host-a"] == [new.pid], (
        "the old one ended"
    )
    here.client[engines[1].engine_id].apply(remote.rebind, both[0]).get(timeout=30)
    tasks = [here.client[e.engine_id].apply_async(join_and_sum) for e in (engines[1], new)]
    assert [task.get(timeout=60) for task in tasks] == [(0, 3.0, "0", "host-b"), (1, 3.0, "0", "host-a")]
    assert agents.end() == []
    await_true(lambda: here.left() == [], "nothing is left on any host")


# ---- hosts that go ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_ends_what_it_runs_and_comes_back(two: Lab, ssh: Path, login: LoginTo) -> None:
    here = login(parse_hosts(["host-a:1", "host-b:1"], config=str(ssh)))
    agents = here.start_agents()
    here.start_engines(agents)
    two.hosts[1].cut()
    begin = time.monotonic()
    assert agents.silent() == ["host-b"]
    assert time.monotonic() - begin < 5
    seconds = agent_tasks.SILENT_SECONDS
    await_true(
        lambda: not any(" sl-rank-" in text for text in here.left() if "host-b" in text), "engines", seconds + 20
    )
    await_true(lambda: not any("host-b" in text for text in here.left()), "the agent", 60)
    two.hosts[1].mend()
    agents.restart("host-b")
    assert agents.silent() == []
    assert [engine["host"] for engine in agents.engines()] == ["host-a"]
    assert agents.end() == []
    await_true(lambda: here.left() == [], "nothing is left on any host")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_without_a_controller_hosts_end_what_they_run(two: Lab, ssh: Path, login: LoginTo) -> None:
    here = login(parse_hosts(["host-a:1", "host-b:1"], config=str(ssh)))
    agents = here.start_agents()
    here.start_engines(agents)
    assert len(here.left()) >= 4
    here.end_controller()
    await_true(lambda: here.left() == [], "nothing is left on any host", 90)
    assert here.folders_left() == []
