"""ipyparallel's launchers for SSH, Slurm and MPI, starting agents: one process on each host, whatever it has to run.

| launcher            | what stands for the hosts afterwards             | to give them back         |
|---------------------|--------------------------------------------------|---------------------------|
| AgentSSHLauncher    | nothing here: agents are detached                | agents end themselves     |
| AgentSlurmLauncher  | the job, by its number                           | scancel                   |
| AgentMPILauncher    | mpiexec, a process of this machine               | agents end, mpiexec after |

None of them copies files. Over SSH an agent's order travels on stdin; Slurm's and MPI's read it from the cluster's
folder, because what these pass on by themselves (environments, command lines) others may read.

ipyparallel launchers that bind each engine to a device: `ipyparallel.Cluster(engines="speedlab")`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import (
    LocalEngineLauncher,
    LocalEngineSetLauncher,
    MPIEngineSetLauncher,
    SlurmEngineSetLauncher,
    SSHEngineLauncher,
)
from traitlets import Any as AnyTrait
from traitlets import Dict, List, Unicode, default

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.environment import ENGINE_ARGUMENTS, ENGINE_COMMAND, device_fields, rank_environment
from speedlab.cluster.launch.host_specs import MpiHosts, SlurmJob
from speedlab.cluster.launch.placement import choose_devices
from speedlab.cluster.launch.slurm import error_lines

CONNECT_SECONDS = 10
"""How long ssh may take to reach a host."""
_BEGIN_SECONDS = 60.0
_STEP_SECONDS = 60
"""How long a job without agents waits for the step of one."""
_MODULE = ["-m", "speedlab.cluster.agents.process"]


class AgentSSHLauncher(SSHEngineLauncher):
    """One agent over one connection: ipyparallel's own launcher makes about eight for each engine, in series, and
    copies the connection file."""

    def connect(self, hostname: str, python: str) -> None:
        """Begin to connect to `hostname`, where `python` then waits for an order; nothing runs there before. Raises
        ClusterError where there is no ssh."""
        self.hostname, self._python = hostname, python
        path = os.environ.get("PYTHONPATH")
        begin = [*(["env", f"PYTHONPATH={path}"] if path else []), python, *_MODULE, "--detach"]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        command = [*self.ssh_cmd, *self.ssh_args, *options, self.location, "--", shlex.join(begin)]
        pipe = subprocess.PIPE
        try:
            self._connection = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace"
            )
        except FileNotFoundError:
            raise ClusterError("no ssh on this machine; install the OpenSSH client") from None

    def give(self, order: str) -> int:
        """Start the agent; returns its process id there. Raises ClusterError that says what to do."""
        try:
            said, complained = self._connection.communicate(order, timeout=_BEGIN_SECONDS)
        except subprocess.TimeoutExpired:
            self.hang_up()
            raise ClusterError(
                f"{self.hostname} did not start an agent within {_BEGIN_SECONDS:g} s; try: ssh {self.hostname}"
            ) from None
        except BaseException:
            self.hang_up()
            raise
        answer = _last_json(said)
        if "pid" not in answer:
            problem = ssh_problem(self.hostname, self._python, self._connection.returncode, complained)
            raise ClusterError(answer.get("problem") or problem)
        self.pid = int(answer["pid"])
        self.notify_start({"host": self.location, "pid": self.pid})
        return self.pid

    @property
    def connects(self) -> bool:
        """Whether the connection, or the attempt, is still there."""
        return self._connection.poll() is None

    def hang_up(self) -> None:
        """End the connection, without an order. What it says is not read: a proxy of ssh's, which outlives it, could
        keep its end of the pipes for as long as it likes."""
        self._connection.kill()
        self._connection.wait()
        for pipe in (self._connection.stdin, self._connection.stdout, self._connection.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def ssh_problem(host: str, python: str, status: int, said: str) -> str:
    """A sentence for what ssh, or the shell behind it, said."""
    said = said.strip()
    last = said.splitlines()[-1] if said else f"status {status}"
    if status == 255:
        if "resolve hostname" in said:
            return f"{host} is not known here ({last}); check the name, or give it an entry in ~/.ssh/config"
        if "Permission denied" in said:
            return f"{host} refuses the key ({last}); `ssh {host}` must work without a password: ssh-copy-id {host}"
        if "Host key verification failed" in said:
            return f"{host} is not known to be {host} ({last}); connect once by hand and compare its key: ssh {host}"
        return f"{host} cannot be reached by ssh ({last}); try: ssh {host}"
    if lacking := re.search(r"No module named '?[\w.]+'?", said):
        return f"{host}: {python} says {lacking[0]}; install SpeedLab there, or name another: speedlab guide hosts"
    if status in (126, 127):
        return f"{host} has no {python} ({last}); install it at that path, or name another: speedlab guide hosts"
    return f"{host} did not start an agent: {last}"


class AgentSlurmLauncher(SlurmEngineSetLauncher):
    """One job with an agent on each node."""

    order_file = Unicode(help="The order, in a folder that all nodes see")

    def submit(self, job: SlurmJob) -> str:
        """Hand the job in; returns its number. Raises ClusterError with what sbatch said."""
        self.batch_template = slurm_script(job, self.cluster_id, self.order_file, self.output_file)
        try:
            return str(self.start(job.nodes))
        except FileNotFoundError:
            raise ClusterError(
                "no Slurm here: sbatch is not found; start this on a login node of the cluster"
            ) from None
        except subprocess.CalledProcessError as error:
            raise ClusterError(f"Slurm refuses the job: {error_lines(error.output)}") from None

    def _run_command(self, command: Sequence[str], **options: Any) -> str:
        # What sbatch says of a job that it refuses comes on stderr.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(command), output=done.stderr or done.stdout)
        return done.stdout


def slurm_script(job: SlurmJob, cluster: str, order_file: str, output_file: str) -> str:
    """The batch script; it holds no secret."""
    words = [f"--job-name=speedlab-{cluster}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--output={output_file}"]
    words += [f"--{name}={value}" for name in ("partition", "time", "account", "qos") if (value := getattr(job, name))]
    if job.gpus_per_node is not None:
        words.append(f"--gres=gpu:{job.gpus_per_node}")
    directives = [f"#SBATCH {word}" for word in [*words, "--export=ALL", *job.options]]
    # An agent that ends, because its host fails, must not take the others with it.
    step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    agent = [job.python, *_MODULE, "--order", order_file]
    return "\n".join(["#!/bin/sh", *directives, shlex.join([*step, *agent]), *_OUTLIVE_KILLED_AGENTS, ""])


_OUTLIVE_KILLED_AGENTS = (
    "status=$?",
    "# Agents that were killed are followed by others, in steps of their own (slurm_step): the job ends with those.",
    "if [ $status -gt 128 ]; then",
    f"  sleep {_STEP_SECONDS}",
    r"""  while squeue -h -s -j "$SLURM_JOB_ID" -o %i | grep -qv '\.\(batch\|extern\)$'; do sleep 5; done""",
    "fi",
    "exit $status",
)


def slurm_step(job: SlurmJob, number: str, host: str, order_file: str, output_file: str) -> subprocess.Popen[bytes]:
    """Start an agent on a node of job `number` once more, in a step that shares what the job has there; returns srun,
    which lasts as long as the agent. Raises ClusterError where there is no srun."""
    node = host.partition(".")[0]
    words = [f"--jobid={number}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=0"]
    words += [f"--output={output_file}", "--open-mode=append", "--chdir=/"]
    if job.gpus_per_node is not None:
        words.append(f"--gres=gpu:{job.gpus_per_node}")
    with open(output_file, "ab") as output:
        try:
            return subprocess.Popen(
                ["srun", *words, job.python, *_MODULE, "--order", order_file],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ClusterError("no Slurm here: srun is not found") from None


class AgentMPILauncher(MPIEngineSetLauncher):
    """One mpiexec with an agent on each host. The agents do not use MPI."""

    order_file = Unicode(help="The order, in a folder that all hosts see")

    @property
    def program(self) -> list[str]:
        return list(self.engine_cmd)

    @property
    def program_args(self) -> list[str]:
        return ["--order", self.order_file]

    def launch(self, hosts: MpiHosts) -> int:
        """Start mpiexec; returns its process id here. Raises ClusterError where there is none."""
        self.engine_cmd = [hosts.python, *_MODULE]
        self.mpi_args = self._one_each(hosts)
        self.start(len(hosts.names))
        return self.pid

    def _one_each(self, hosts: MpiHosts) -> list[str]:
        try:
            version = subprocess.run(
                [*self.mpi_cmd, "--version"], capture_output=True, text=True, check=False, timeout=30
            )
        except FileNotFoundError:
            raise ClusterError(
                "no MPI here: mpiexec is not found; load its module, or reach the hosts over SSH"
            ) from None
        plain = Path(self.order_file).with_name("hosts")
        plain.write_text("\n".join(hosts.names) + "\n")
        if "Open MPI" in version.stdout:
            return ["--hostfile", str(plain), "--map-by", "ppr:1:node"]
        # An agent that ends must not take the others with it.
        return ["-f", str(plain), "-ppn", "1", "-disable-auto-cleanup"]


def _last_json(text: str) -> dict[str, Any]:
    """Login scripts may have printed something before."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return {}


Fork = Callable[[dict[str, str], list[str], str], int]
"""fork(environment, arguments, log): an engine's process id (`nursery.py`)."""


class DeviceEngineLauncher(LocalEngineLauncher):
    """One engine on its device. The identifier is the rank."""

    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)
    fork = AnyTrait(None, help="A Fork that makes its process; None: it is started by itself")

    @default("fork")
    def _default_fork(self) -> Fork | None:
        return getattr(self.parent, "fork", None)

    @default("devices")
    def _default_devices(self) -> list[dict[str, Any]]:
        return getattr(self.parent, "devices", [])

    @default("rendezvous")
    def _default_rendezvous(self) -> str:
        return getattr(self.parent, "rendezvous", "")

    @default("engine_cmd")
    def _default_engine_cmd(self) -> list[str]:
        return list(ENGINE_COMMAND)

    @default("engine_args")
    def _default_engine_args(self) -> list[str]:
        return list(ENGINE_ARGUMENTS)

    def get_env(self) -> dict[str, str]:
        return {**super().get_env(), **rank_environment(int(self.identifier), self.devices, self.rendezvous)}

    def start(self) -> None:
        if self.fork is None:
            super().start()
            return
        self.pid = self.fork(self.get_env(), [*self.cluster_args, *self.engine_args], self.output_file)
        with contextlib.suppress(psutil.NoSuchProcess):  # Who waits for it says how it ended.
            self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)


class DeviceEngineSetLauncher(LocalEngineSetLauncher):
    """One engine per device of this machine; `devices` are chosen when none are given."""

    launcher_class = DeviceEngineLauncher
    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)
    fork = AnyTrait(None, help="As of DeviceEngineLauncher")

    @default("delay")
    def _default_delay(self) -> float:
        return 0.0

    @default("rendezvous")
    def _default_rendezvous(self) -> str:
        return str(Path(self.profile_dir) / f"rendezvous-{self.cluster_id}")

    @default("engine_cmd")
    def _default_engine_cmd(self) -> list[str]:
        return list(ENGINE_COMMAND)

    @default("engine_args")
    def _default_engine_args(self) -> list[str]:
        return list(ENGINE_ARGUMENTS)

    def start(self, n: int) -> list[int]:
        if not self.devices:
            self.devices = device_fields(choose_devices(n, "auto"))
        os.makedirs(self.rendezvous, mode=0o700, exist_ok=True)
        return super().start(n)
