"""Hosts without any: what a person says of them, who runs where, what ssh's and Slurm's words come to, and ports."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from telemetry_samples import eventually, make_folder

import speedlab.cluster.agents.pool as agents
import speedlab.cluster.launch.host_specs as host_specs
import speedlab.network as network
from speedlab.cluster.agents.process import Order, own_versions, problem_here
from speedlab.cluster.agents.registration import check_equal
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState, EngineEntry
from speedlab.cluster.launch.backends import InSlurm, OverSSH
from speedlab.cluster.launch.environment import host_environment
from speedlab.cluster.launch.host_specs import (
    MpiHosts,
    SlurmJob,
    SshHosts,
    fields_of,
    of_fields,
    of_words,
    parse,
    parse_hosts,
)
from speedlab.cluster.launch.ipyparallel_launchers import slurm_script, slurm_step, ssh_problem
from speedlab.cluster.launch.placement import Host, rank_hosts
from speedlab.cluster.launch.start import controller_arguments
from speedlab.cluster.supervisor.host_process_control import RemoteProcesses, found_on_hosts
from speedlab.hardware import cpu_devices
from speedlab.network import Endpoint, try_to_reach


def host(name: str, engines: int) -> Host:
    return Host(name=name, address=f"10.0.0.{len(name)}", interface="ib0", devices=tuple(cpu_devices(engines)))


# ---- what a person says ----------------------------------------------------------------------------------------------


def test_hosts_are_read() -> None:
    assert parse() is None
    assert parse(hosts=["gpu-1:8", "me@gpu-2"]) == SshHosts(names=("gpu-1", "me@gpu-2"), engines=(8, None))
    assert parse(hosts="a:1, b:2") == SshHosts(names=("a", "b"), engines=(1, 2))  # type: ignore[arg-type]  # of a command line
    job = parse(slurm={"nodes": 4, "gpus_per_node": 8, "partition": "a100", "time": "8:00:00"})
    assert job == SlurmJob(nodes=4, gpus_per_node=8, partition="a100", time="8:00:00")
    assert isinstance(job, SlurmJob)
    assert job.per_host == 8


def test_a_host_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\ngpu-1:8\n\ngpu-2 slots=4  # half of it\ngpu-3\n")
    read = parse(mpi={"hostfile": str(file)})
    assert read == MpiHosts(hostfile=str(file), names=("gpu-1", "gpu-2", "gpu-3"), engines=(8, 4, None))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hosts": []}, "hosts is empty; name at least one"),
        ({"hosts": ["gpu-1:0"]}, "'gpu-1:0' asks for no engine"),
        ({"hosts": ["gpu 1"]}, "'gpu 1' is no host; write 'name' or 'name:engines'"),
        ({"hosts": ["-oProxyCommand=x"]}, "'-oProxyCommand=x' is no host"),
        ({"hosts": ["a:1", "b:1", "a:2"]}, "a named twice; give a host all its engines at once"),
        ({"hosts": ["a"], "slurm": {"nodes": 1}}, "hosts and slurm were given; a cluster is started in one of these"),
        ({"slurm": {"nodes": 0}}, "nodes is 0; it is a whole number, at least 1"),
        ({"slurm": {"gpus_per_node": 8}}, "'nodes' is missing"),
        ({"slurm": {"nodes": 1, "gpu_per_node": 8}}, "'gpu_per_node' is not known; did you mean 'gpus_per_node'?"),
        ({"slurm": {"nodes": 1, "time": "soon"}}, "time is 'soon'; sbatch takes '30'"),
        ({"slurm": {"nodes": 1, "partition": "a b"}}, "partition is 'a b'; it is a name"),
        ({"slurm": {"nodes": 1, "options": "--exclusive"}}, "it is a list of words for sbatch"),
        ({"mpi": {"hostfile": "/nowhere/hosts"}}, "the host file /nowhere/hosts cannot be read"),
        ({"mpi": {"hostfile": "/dev/null"}}, "names no host; write one a line"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError) as raised:
        parse(**given)
    assert said in str(raised.value)


def test_a_job_is_asked_for_as_it_was_said() -> None:
    job = SlurmJob(
        nodes=2, gpus_per_node=8, partition="a100", time="30", options=("--exclusive",), python="/opt/py thon"
    )
    lines = slurm_script(job, "mine", "/home/me/order.json", "/home/me/slurm.log").splitlines()
    assert lines[0] == "#!/bin/sh"
    assert {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")} == {
        "job-name=speedlab-mine",
        "nodes=2",
        "ntasks-per-node=1",
        "output=/home/me/slurm.log",
        "partition=a100",
        "time=30",
        "gres=gpu:8",
        "export=ALL",
        "exclusive",
    }
    (agents,) = [line for line in lines if line.startswith("srun")]
    assert agents.endswith("'/opt/py thon' -m speedlab.cluster.agents.process --order /home/me/order.json")


@pytest.mark.parametrize(
    ("srun", "status", "looks"),
    [("exit 3", 3, 0), ("exit 0", 0, 0), ("exit 137", 137, 3)],
    ids=["wrong", "end", "killed"],
)
def test_a_job_whose_agents_were_killed_waits_for_the_steps_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, status: int, looks: int
) -> None:
    steps = tmp_path / "steps"
    for name, lines in {
        "srun": srun,
        "sleep": "exit 0",
        "squeue": f'echo 7.batch; echo x >> {steps}; [ "$(wc -l < {steps})" -gt 2 ] || echo 7.1',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = slurm_script(SlurmJob(nodes=1), "mine", "order.json", "slurm.log")
    done = subprocess.run(["sh", "-c", script], env={**os.environ, "SLURM_JOB_ID": "7"}, timeout=10, check=False)
    assert done.returncode == status
    assert (len(steps.read_text().split()) if steps.exists() else 0) == looks


def test_a_job_that_its_time_limit_has_ended_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = InSlurm(ClusterDir("slurm", tmp_path), SlurmJob(nodes=1, time="8:00:00"))
    slurm.job = "81"
    monkeypatch.setattr("speedlab.cluster.launch.backends.slurm_state", lambda job: ("TIMEOUT", "TimeLimit"))
    reported = "job 81 was ended by its time limit of 8:00:00; ask for a longer 'time'"
    assert slurm.why_over() == reported
    with pytest.raises(ClusterError, match=f"^{reported}$"):  # While it waits for agents.
        slurm.progress()


def test_hosts_with_different_numbers_of_devices_are_refused_unless_each_is_told() -> None:
    unequal = [host("gpu-1", 2), host("gpu-2", 1)]
    reported = r"gpu-1 has 2, gpu-2 has 1\. Say how many each gives, as \['gpu-1:1', 'gpu-2:1'\]"
    with pytest.raises(ClusterError, match=reported):
        check_equal(unequal, [None, None])
    check_equal(unequal, [2, 1])
    check_equal([host("gpu-1", 2), host("gpu-2", 2)], [None, None])


def test_an_agent_is_started_once_more_in_a_step_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    log = tmp_path / "steps.log"
    job = SlurmJob(nodes=2, gpus_per_node=8, python="/py")
    assert slurm_step(job, "7", "gpu-1.site", "/home/me/order.json", str(log)).wait(10) == 0
    words = log.read_text().split()
    assert {"--jobid=7", "--overlap", "--nodelist=gpu-1", "--ntasks=1", "--gres=gpu:8"} <= set(words)
    assert words[-5:] == ["/py", "-m", "speedlab.cluster.agents.process", "--order", "/home/me/order.json"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ClusterError, match="srun is not found"):
        slurm_step(job, "7", "gpu-1", "order.json", str(log))


class FakeAgents:
    """Of host-a, whose agent does not answer until another one was started."""

    out_of_reach: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.answers = False
        self.reached: list[int] = []
        self.generation = 0
        """Of which the host was told."""
        self.hosts = [host("host-a", 1)]
        self.known = {"host-a": SimpleNamespace(host=self.hosts[0])}

    def silent(self, hosts: Iterable[str]) -> list[str]:
        return [] if self.answers else list(hosts)

    def restart(self, host: str) -> None:
        self.answers = True

    def set_generation(self, number: int) -> list[str]:
        self.generation = number if self.answers else self.generation
        return self.silent(["host-a"])

    def to_fields(self) -> dict[str, Any]:
        return {}

    def signal(self, engines: list[EngineEntry], number: int) -> list[EngineEntry]:
        self.reached += [engine.pid for engine in engines if self.answers]
        return engines if self.answers else []

    def ask_all(self, function: Any, *, seconds: float, hosts: Any) -> tuple[dict[str, Any], list[str]]:
        return ({"host-a": []}, []) if self.answers else ({}, list(hosts))

    def ask_each(self, by_host: dict[str, Any], function: Any, *, seconds: float) -> dict[str, bool]:
        return dict.fromkeys(by_host, True) if self.answers else {}


def test_what_is_asked_of_a_host_whose_agent_has_just_ended_waits_for_another_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setattr("speedlab.cluster.supervisor.host_process_control._is_there", lambda host: True)
    home = ClusterDir("killed")
    home.create("a token")
    agents = FakeAgents()
    hands = RemoteProcesses(home, agents, "a token", "gloo", 0.0, {})  # type: ignore[arg-type]  # as much of them as is asked
    assert hands.wire(make_folder(tmp_path, "a-run")) is None  # Not refused: the host is there, and sees the folder.

    agents.answers = False
    hands.next_generation()
    assert (agents.generation, home.generation) == (1, 1)  # Ranks there meet the others where these meet.


def test_an_engine_on_a_host_that_is_just_back_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent's connection may come back long after the host; another agent is started first."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    home = ClusterDir("back")
    home.create("a token")
    agents = FakeAgents()
    hands = RemoteProcesses(home, agents, "a token", "gloo", 0.0, {})  # type: ignore[arg-type]  # as much of them as is asked
    engine = EngineEntry(rank=0, pid=7, engine_id=0, host="host-a")
    assert hands.end([engine], lambda gone: None) == []
    assert agents.reached == [7]


def test_a_damaged_file_of_agents_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    home = ClusterDir("damaged")
    home.create("a token")
    state = ClusterState(
        name="damaged", token="a token", controller_pid=7, started=0.0, devices=(), engines=(), backend="gloo",
        host="here", hosts=("a", "b"),
    )  # fmt: skip
    for text in ("{", "[]", '{"spec": {}}'):
        (home.path / "hosts.json").write_text(text)
        with pytest.raises(
            ClusterError, match=r"hosts.json is damaged .* agents there are on a, b; end the controller"
        ):
            found_on_hosts(home, state, None)  # type: ignore[arg-type]  # nobody is asked


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (255, "ssh: Could not resolve hostname g: Name", "g is not known here"),
        (255, "me@g: Permission denied (publickey).", "g refuses the key"),
        (255, "Host key verification failed.", "g is not known to be g"),
        (255, "ssh: connect to host g port 22: Connection timed out", "g cannot be reached by ssh"),
        (127, "sh: 1: /py: not found", "g has no /py (sh: 1: /py: not found); install it at that path, or name"),
        (1, "/py: No module named 'speedlab'", "g: /py says No module named 'speedlab'; install SpeedLab there"),
        (1, "", "g did not start an agent: status 1"),
    ],
)
def test_what_ssh_says_becomes_a_sentence(status: int, said: str, expected: str) -> None:
    assert ssh_problem("g", "/py", status, said).startswith(expected)


def test_the_controller_is_encrypted_and_listens_where_hosts_reach_it() -> None:
    arguments = controller_arguments("10.0.0.7", range(10101, 10104))
    assert "--IPController.enable_curve=True" in arguments
    assert [a for a in arguments if a.startswith(("--ip", "--location", "--ports"))] == [
        "--ip=10.0.0.7",
        "--location=10.0.0.7",
        "--ports=10101,10102,10103",
    ]
    assert not [a for a in arguments if "127.0.0.1" in a]


# ---- who runs where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (3, "with status 3"),
        (-11, "killed by signal 11, Segmentation fault"),
        (-9, "killed by signal 9, Killed, as the system does where memory has run out"),
        (-40, "killed by signal 40, Real-time signal 6"),
    ],
)
def test_how_an_engine_has_ended_is_told(status: int, how: str) -> None:
    assert agents._ending(status) == how


def test_ranks_go_through_the_hosts_in_order() -> None:
    hosts = [host("a", 2), host("bb", 1), host("ccc", 3)]
    assert [(p.rank, p.host, p.local_rank) for p in rank_hosts(hosts)] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 2, 0),
        (4, 2, 1),
        (5, 2, 2),
    ]
    store = Endpoint(host="a", address="10.0.0.1", port=29500)
    environment = host_environment(4, hosts, "/meet", store)
    assert environment["RANK"] == "4"
    assert environment["WORLD_SIZE"] == "6"
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert (environment["SPEEDLAB_HOST"], environment["GLOO_SOCKET_IFNAME"]) == ("ccc", "ib0")
    assert Endpoint.parse(environment["SPEEDLAB_STORE"]) == store
    assert json.loads(environment["SPEEDLAB_DEVICE"])["cores"] == list(hosts[2].devices[1].cores)
    assert Host.from_fields({**json.loads(json.dumps(hosts[1].to_fields())), "later": 1}) == hosts[1]


def test_an_agent_wants_the_same_versions_and_the_controller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        order = Order(
            cluster="c", token="t", connection={}, controller=f"here=127.0.0.1:{port}", expected=own_versions()
        )
        assert Order.from_json(order.to_json()) == order
        assert problem_here(order, "g") is None
        other = Order.from_json(json.dumps({**json.loads(order.to_json()), "expected": {"python": "2.7"}, "later": 1}))
        assert "the cluster Python 2.7; all hosts need the same" in str(problem_here(other, "g"))
        other = Order.from_json(json.dumps({**json.loads(order.to_json()), "expected": {"nothing": "1"}}))
        assert str(problem_here(other, "g")).startswith("g has no nothing in ")
    assert str(problem_here(order, "g")) == (
        f"g cannot reach here (127.0.0.1) at TCP port {port}: it answers, but nothing listens there. "
        "Agents and engines connect to the controller there"
    )


# ---- ports -----------------------------------------------------------------------------------------------------------


def test_a_port_is_reached_or_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with network.listen("127.0.0.1") as server:
        place = Endpoint(host="h", address="127.0.0.1", port=server.getsockname()[1])
        assert try_to_reach(place, "me") is None
    refused = try_to_reach(place, "me")
    assert isinstance(refused, ConnectionRefusedError)
    for error, words in (
        (TimeoutError(), "no answer within 0.1 s. A firewall drops what comes in there, or the link to h is down"),
        (PermissionError(13, "denied"), "a firewall forbids it"),
        (OSError(113, "No route to host"), "No route to host. h is down, or no link leads there"),
        (socket.gaierror(-2, "Name or service not known"), "the name is not known (Name or service not known)"),
    ):

        def fail(*_: Any, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
        problem = try_to_reach(place, "me", 0.1)
        assert not isinstance(problem, ConnectionRefusedError)
        assert str(problem).startswith(f"me cannot reach h (127.0.0.1) at TCP port {place.port}: {words}")


def test_a_link_that_has_just_come_back_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    connects, calls = socket.create_connection, itertools.count()

    def connect(*arguments: Any) -> socket.socket:
        if next(calls) < 2:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return connects(*arguments)

    monkeypatch.setattr(socket, "create_connection", connect)
    with network.listen("127.0.0.1") as server:
        place = Endpoint(host="h", address="127.0.0.1", port=server.getsockname()[1])
        assert try_to_reach(place, "me") is None
    assert next(calls) == 3


def test_interfaces_and_endpoints() -> None:
    assert network.address_of("lo") == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == ("lo", "127.0.0.1")
    with pytest.raises(ValueError, match=r"no network interface 'ib7' with an address; there are .*lo"):
        network.address_of("ib7")
    assert Endpoint.parse("h=::1:80") == Endpoint(host="h", address="::1", port=80)
    for text in ("h", "h=1.2.3.4", "=1.2.3.4:5", "h=:5", "h=1.2.3.4:x"):
        with pytest.raises(ValueError, match="is no endpoint; expected a host's name, '=', its address"):
            Endpoint.parse(text)


def test_hosts_from_a_command_line() -> None:
    assert of_words() == {}
    assert parse(**of_words(hosts="gpu-1:8, gpu-2")) == parse_hosts(["gpu-1:8", "gpu-2"])
    slurm = {"nodes": 4, "gpus_per_node": 8, "time": "8:00:00"}
    assert of_words(slurm="nodes=4,gpus_per_node=8,time=8:00:00") == {"slurm": slurm}
    assert of_words(mpi="hosts") == {"mpi": {"hostfile": "hosts"}}
    for spec in (parse_hosts(["gpu-1:8", "gpu-2"]), parse(slurm={**slurm, "options": ["--exclusive"]})):
        assert spec is not None
        assert of_fields(json.loads(json.dumps({**fields_of(spec), "later": 1}))) == spec  # As a supervisor gets it.
    with pytest.raises(ClusterError, match=r"slurm: 'nodes' has no value; each word is a name, '=' and a value"):
        of_words(slurm="nodes")


def test_a_cluster_that_runs_is_what_was_asked_for_or_it_is_not() -> None:
    ssh = host_specs.parse(hosts=["me@gpu-1:8", "gpu-2:8"])
    assert host_specs.may_be(None, ())
    assert host_specs.may_be(None, ("gpu-9",))
    assert host_specs.may_be(ssh, ("gpu-1", "gpu-2"))
    assert host_specs.may_be(ssh, ("gpu-2",))
    assert not host_specs.may_be(ssh, ())
    assert not host_specs.may_be(ssh, ("gpu-1", "gpu-3"))
    job = host_specs.parse(slurm={"nodes": 2, "engines_per_node": 1})
    assert host_specs.may_be(job, ("node-7", "node-9"))
    assert not host_specs.may_be(job, ())


def test_a_line_of_hosts() -> None:
    assert host_specs.of_line(" ") == {}
    assert host_specs.of_line("gpu-1:8, gpu-2:8") == {"hosts": ["gpu-1:8", "gpu-2:8"]}
    assert host_specs.of_line("slurm nodes=2, gpus_per_node=4") == {"slurm": {"nodes": 2, "gpus_per_node": 4}}
    assert host_specs.of_line("mpi hostfile") == {"mpi": {"hostfile": "hostfile"}}
    with pytest.raises(ClusterError, match="what follows 'slurm' is missing; for instance 'slurm nodes=4"):
        host_specs.of_line("slurm")
    asked = host_specs.parse(**host_specs.of_line("gpu-1:8, gpu-2:4"))
    assert asked is not None
    assert host_specs.engines_asked(asked) == 12
    asked = host_specs.parse(hosts=["gpu-1", "gpu-2:4"])
    assert asked is not None
    assert host_specs.engines_asked(asked) is None


PRETENDED_SSH = """#!{python}
import pathlib, subprocess, sys
proxy = subprocess.Popen(["sleep", "30"])  # It outlives an ssh that is killed, and holds its pipes.
folder, host = pathlib.Path({folder!r}), sys.argv[sys.argv.index("--") - 1]
(folder / f"{{host}} connected").touch()
order = sys.stdin.read()
proxy.kill()
if order:
    (folder / f"{{host}} ordered").write_text(order)
    wrong = host == "a" and (folder / "wrong").exists()
    print('{{"problem": "a is not as it should be"}}' if wrong else '{{"pid": 7}}')
(folder / f"{{host}} left").touch()
"""


def test_all_hosts_are_connected_to_and_the_first_one_looks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(PRETENDED_SSH.format(python=sys.executable, folder=str(tmp_path)))
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    order = Order(cluster="c", token="t", connection={}, controller="")

    def reported(word: str) -> list[str]:
        return sorted(file.name.partition(" ")[0] for file in tmp_path.glob(f"* {word}"))

    def connect() -> OverSSH:
        launching = OverSSH(ClusterDir("c", tmp_path), SshHosts(names=("a", "b", "c"), engines=(1, 2, None)))
        launching.prepare()
        eventually(lambda: reported("connected") == ["a", "b", "c"])
        assert reported("ordered") == []
        return launching

    began = time.monotonic()
    connect().abandon()
    assert time.monotonic() < began + 20
    (tmp_path / "wrong").touch()
    launching = connect()
    with pytest.raises(ClusterError, match=r"^a is not as it should be$"):
        launching.start(order)
    assert (reported("ordered"), launching.began) == (["a"], ["a"]), "nothing was begun on the others"
    assert reported("left") == ["a"], "they were left without a word"
    for file in [tmp_path / "wrong", *tmp_path.glob("a *")]:
        file.unlink()

    launching = connect()
    launching.start(order)
    given = [Order.from_json((tmp_path / f"{host} ordered").read_text()) for host in "abc"]
    assert [(each.name, each.engines) for each in given] == [("a", 1), ("b", 2), ("c", 0)]
    assert launching.stop(order, ["a", "b"]) == []
    assert Order.from_json((tmp_path / "c ordered").read_text()).end
