"""ipyparallel launchers that start agents over SSH, Slurm and MPI, and engines on devices of this machine.

| launcher            | what holds the hosts afterwards             | how to release them        |
|---------------------|---------------------------------------------|----------------------------|
| AgentSSHLauncher    | nothing here: agents are detached           | agents end themselves      |
| AgentSlurmLauncher  | the job, by its number                      | scancel                    |
| AgentMPILauncher    | mpiexec, a process of this machine          | agents end, mpiexec after  |

No launcher copies files. Over SSH, an agent reads its order from stdin. In Slurm and MPI, it reads the order from the
cluster's folder, because other users may read the environments and command lines that these transmit.

`ipyparallel.Cluster(engines="speedlab")` uses `DeviceEngineSetLauncher`, which binds each engine to a device.
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
"""Time limit of ssh for reaching a host."""
_BEGIN_SECONDS = 60.0
_STEP_SECONDS = 60
"""How long a job without agents waits for a new step of an agent."""
_MODULE = ["-m", "speedlab.cluster.agents.process"]


class AgentSSHLauncher(SSHEngineLauncher):
    """One agent over one ssh connection.

    ipyparallel's own launcher makes about eight connections per engine, one after the other, and copies the connection
    file.
    """

    def connect(self, hostname: str, python: str) -> None:
        """Connect to a host and start a Python that waits for an order; no agent runs before `give`.

        Args:
            hostname: Host, as ssh accepts it.
            python: Interpreter on the host.

        Raises:
            ClusterError: If there is no ssh.
        """
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
        """Send the order; return the process id of the agent on its host.

        Args:
            order: Order as JSON.

        Raises:
            ClusterError: If the agent does not start; with what to do.
        """
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
        """Whether ssh still runs."""
        return self._connection.poll() is None

    def hang_up(self) -> None:
        """Close the connection without an order.

        Its output is not read: a proxy of ssh can outlive ssh and keep the pipes open.
        """
        self._connection.kill()
        self._connection.wait()
        for pipe in (self._connection.stdin, self._connection.stdout, self._connection.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def ssh_problem(host: str, python: str, status: int, said: str) -> str:
    """Return a sentence about a failure of ssh or of the remote shell.

    Args:
        host: Host, as ssh accepts it.
        python: Interpreter on the host.
        status: Exit status of ssh.
        said: Its stderr.
    """
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
        """Submit the job; return its number.

        Args:
            job: Resources of the job.

        Raises:
            ClusterError: If there is no Slurm or it refuses the job.
        """
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
        # sbatch prints the reason of a refusal on stderr.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(command), output=done.stderr or done.stdout)
        return done.stdout


def slurm_script(job: SlurmJob, cluster: str, order_file: str, output_file: str) -> str:
    """Return the batch script. It contains no secret.

    Args:
        job: Resources of the job.
        cluster: Name of the cluster.
        order_file: File with the order.
        output_file: File for the output.
    """
    words = [f"--job-name=speedlab-{cluster}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--output={output_file}"]
    words += [f"--{name}={value}" for name in ("partition", "time", "account", "qos") if (value := getattr(job, name))]
    if job.gpus_per_node is not None:
        words.append(f"--gres=gpu:{job.gpus_per_node}")
    directives = [f"#SBATCH {word}" for word in [*words, "--export=ALL", *job.options]]
    # If one agent ends, for example because its host fails, the others must continue.
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
    """Start an agent on a node of a running job again, in a step that shares the node's resources.

    Args:
        job: Resources of the job.
        number: Number of the job.
        host: Node.
        order_file: File with the order.
        output_file: File for the output.

    Returns:
        The process of srun, which runs as long as the agent.

    Raises:
        ClusterError: If there is no srun.
    """
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
    """One mpiexec with an agent on each host. Agents do not use MPI."""

    order_file = Unicode(help="The order, in a folder that all hosts see")

    @property
    def program(self) -> list[str]:
        """Command of an agent."""
        return list(self.engine_cmd)

    @property
    def program_args(self) -> list[str]:
        """Arguments of an agent."""
        return ["--order", self.order_file]

    def launch(self, hosts: MpiHosts) -> int:
        """Start mpiexec; return its process id on this machine.

        Args:
            hosts: Hosts of the host file.

        Raises:
            ClusterError: If there is no mpiexec.
        """
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
        # If one agent ends, the others must continue.
        return ["-f", str(plain), "-ppn", "1", "-disable-auto-cleanup"]


def _last_json(text: str) -> dict[str, Any]:
    """Return the last line of JSON; {} if there is none. Login scripts may print text before it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return {}


Fork = Callable[[dict[str, str], list[str], str], int]
"""fork(environment, arguments, log): start an engine and return its process id (`fork_server_client.py`)."""


class DeviceEngineLauncher(LocalEngineLauncher):
    """Launcher of one engine on its device; the identifier is the rank."""

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
        """Return the environment of the engine, with the variables of its rank."""
        return {**super().get_env(), **rank_environment(int(self.identifier), self.devices, self.rendezvous)}

    def start(self) -> None:
        """Fork the engine, or start it as a separate process without a fork server."""
        if self.fork is None:
            super().start()
            return
        self.pid = self.fork(self.get_env(), [*self.cluster_args, *self.engine_args], self.output_file)
        with contextlib.suppress(psutil.NoSuchProcess):  # The code that waits for the engine reports how it ended.
            self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)


class DeviceEngineSetLauncher(LocalEngineSetLauncher):
    """Launcher of one engine per device of this machine; chooses the devices if none are given."""

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
        """Start `n` engines; return the result of ipyparallel's launcher."""
        if not self.devices:
            self.devices = device_fields(choose_devices(n, "auto"))
        os.makedirs(self.rendezvous, mode=0o700, exist_ok=True)
        return super().start(n)
