"""What tests over hosts share: a login machine with a controller, from which agents are started."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ipyparallel
import psutil
import pytest

import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.start as start
from speedlab.cluster import Cluster
from speedlab.cluster.agents.pool import Agents, start_agents
from speedlab.cluster.files.cluster_dir import ClusterDir, EngineEntry
from speedlab.cluster.launch.backends import launching_for
from speedlab.cluster.launch.host_specs import Spec, parse_hosts
from speedlab.cluster.launch.rendezvous import controller_address
from speedlab.config import RunConfig
from speedlab.network import reserved_ports
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import missing_for

SECONDS = 90
"""For whatever may take its time on a machine that does other work as well."""
STEPS = 30


@contextlib.contextmanager
def cluster_over(lab: Lab, settings: Path, name: str, *hosts: str) -> Iterator[Cluster]:
    """Over hosts of the laboratory, which are mended before it is stopped."""
    made = Cluster(hosts=parse_hosts(hosts, config=str(settings)), name=name, device="cpu")
    try:
        yield made
    finally:
        for host in lab.hosts:
            host.mend()
        made.stop()


def config(place: Path, name: str, **changes: object) -> RunConfig:
    """A small run in `place`."""
    text = place / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    return RunConfig(
        **{
            "name": name,
            "folder": place / "runs",
            "steps": STEPS,
            "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 32},
            "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 32, "heldout_share": 0.2},
            "precision": "float32",
            "zero": 2,
            "batch": {"micro_size": 2, "global_size": 8},
            "eval": {"every_steps": 0},
            "checkpoint": {"every_steps": 10},
            "telemetry": {"tensorboard": False},
            **changes,
        }
    )


def needs(kind: str) -> None:
    """Skip where "ssh", "slurm" or "mpi" is not installed."""
    if missing := missing_for(kind):
        pytest.skip(missing)


def await_true(check: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


_OWN_NAMESPACE = os.stat("/proc/self/ns/pid").st_ino


def _is_here(process: psutil.Process) -> bool:
    """Whether it is one of this machine: from here those of the hosts can be seen, too."""
    try:
        return os.stat(f"/proc/{process.pid}/ns/pid").st_ino == _OWN_NAMESPACE
    except FileNotFoundError:
        return False


class Login:
    """This machine, from which a person works: a cluster's folder, its controller, and a client of it."""

    def __init__(self, lab: Lab, spec: Spec) -> None:
        self.lab, self.spec, self.token = lab, spec, secrets.token_hex(16)
        self.home = ClusterDir("over-hosts")
        self.home.create(self.token)
        environment = {
            **os.environ,
            processes.TOKEN: self.token,
            "IPP_CLUSTER_ID": self.home.name,
            "IPP_PROFILE_DIR": str(self.home.path),
        }
        self.address = controller_address(spec)
        command = [sys.executable, "-m", "ipyparallel.controller", f"--profile-dir={self.home.path}"]
        with reserved_ports() as ports, (self.home.log / "controller.log").open("w") as log:
            command += start.controller_arguments(self.address, ports)
            self.controller = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                self.client: ipyparallel.Client = start.connect_to(self.home, self.controller.pid, self.token)
            except BaseException:
                self.end_controller()
                raise

    def start_agents(self, **options: object) -> Agents:
        launching = launching_for(self.home, self.spec)
        return start_agents(self.home, self.client, launching, token=self.token, device="cpu", **options)  # type: ignore[arg-type]  # of the test

    def start_engines(self, agents: Agents, ranks: list[int] | None = None) -> tuple[EngineEntry, ...]:
        return agents.start_engines({processes.TOKEN: self.token, "SPEEDLAB_BACKEND": "shared"}, ranks)

    def left(self) -> list[str]:
        """What runs of this cluster on the hosts: 'host-a: sl-rank-0, python -m …'."""
        found = []
        for host in self.lab.hosts:
            for process in host.processes():
                try:
                    if process.environ().get(processes.TOKEN) == self.token:
                        found.append(f"{host.name}: {process.name()}, {' '.join(process.cmdline())}")
                except psutil.NoSuchProcess:
                    continue
        return found

    def folders_left(self) -> list[Path]:
        """Agents' own: sshd hands no TMPDIR on."""
        places = {os.environ["TMPDIR"], "/tmp"}
        return [found for place in places for found in Path(place).glob(f"speedlab-*-{self.token[:12]}-*")]

    def end_controller(self) -> None:
        # It has children, such as the one that beats its heart.
        here = [each for each in processes.marked(self.token) if _is_here(each)]
        processes.end(here, patience_seconds=0.0)
        self.controller.wait(10)

    def close(self) -> None:
        self.client.close(linger=0)
        self.end_controller()
        self.home.remove()
