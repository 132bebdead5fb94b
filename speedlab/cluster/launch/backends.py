"""Allocate hosts: one class per launcher (SSH, Slurm, MPI) that starts the agents, reports progress, and releases the
hosts.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from speedlab.cluster.agents.process import Order
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, write_private
from speedlab.cluster.launch.host_specs import MpiHosts, SlurmJob, Spec, SshHosts
from speedlab.cluster.launch.ipyparallel_launchers import (
    AgentMPILauncher,
    AgentSlurmLauncher,
    AgentSSHLauncher,
    slurm_step,
)
from speedlab.cluster.launch.slurm import slurm_cancel, slurm_state

_AT_ONCE = 16
"""Simultaneous ssh connections. An sshd accepts 10 that have not logged in, and one host is often the gateway
to all.
"""
_SLURM_POLL_SECONDS = 1.0
_MOST_UNANSWERED = 60
"""Number of failed job queries in a row after which a start is given up."""
_MPIEXEC_SECONDS = 3.0
_STEPS_LOG = "slurm-steps.log"
_STEP_END_SECONDS = 5.0
_RUNS = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED"})

log = logging.getLogger("speedlab.cluster.ipyparallel")


class Launching(Protocol):
    """The agents of one cluster, from the request to the release of the hosts."""

    names: tuple[str, ...]
    """Names of the hosts, if they are known before the agents register."""
    count: int
    """Number of hosts."""

    def engines_of(self, number: int) -> int | None:
        """Return the number of engines that host `number` was asked for; None for one per device."""
        ...

    def prepare(self) -> None:
        """Do what is possible without an order, such as connecting; start no agent. Raises ClusterError."""
        ...

    def abandon(self) -> None:
        """Undo `prepare`: there will be no order."""
        ...

    def start(self, order: Order) -> None:
        """Start the agents.

        Args:
            order: Order for every agent.

        Raises:
            ClusterError: With what to do; nothing was started then.
        """
        ...

    def progress(self) -> str:
        """Return what the agents wait for, as text; "" if they may register at any moment.

        Raises:
            ClusterError: If they will not register.
        """
        ...

    def again(self, host: str, order: Order) -> None:
        """Start the agent of one host again. Raises ClusterError.

        Args:
            host: Name of the host.
            order: Order for the agent.
        """
        ...

    def said(self) -> str:
        """Return the log of an agent that `again` started and that did not register; "" if there is none."""
        ...

    def why_over(self) -> str | None:
        """Return why the provider of the hosts took them away; None if it did not."""
        ...

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """Release the hosts, and end what runs on hosts that have not ended.

        Args:
            order: Order as for the start.
            ended: Hosts that have ended.

        Returns:
            Hosts on which this failed.
        """
        ...

    def to_fields(self) -> dict[str, Any]:
        """Return what a later process needs to stop the agents."""
        ...


class OverSSH:
    """Agents over SSH, with connections made in advance.

    The first host gets its order alone, because an error there usually occurs on all hosts; then all others at once.
    """

    def __init__(self, home: ClusterDir, spec: SshHosts) -> None:
        self._home, self._spec = home, spec
        self.names, self.count = spec.names, len(spec.names)
        self.began: list[str] = []
        """Hosts on which something may run."""
        self._connected: dict[str, AgentSSHLauncher] = {}
        """Connections that wait for an order, by host."""

    def engines_of(self, number: int) -> int | None:
        """Return the number of engines that the user named for host `number`; None for one per device."""
        return self._spec.engines[number]

    def prepare(self) -> None:
        """Connect to the first hosts."""
        for host in self.names[:_AT_ONCE]:
            self._connected[host] = self._connection(host)

    def abandon(self) -> None:
        """Close the connections."""
        while self._connected:
            self._connected.popitem()[1].hang_up()

    def start(self, order: Order) -> None:
        """Start all agents; see `Launching.start`."""
        try:
            self.again(self.names[0], order)
            problems = self._on_all(self.names[1:], order)
        finally:
            self.abandon()
        if problems:
            raise ClusterError("\n".join(problems.values()))

    def _on_all(self, hosts: Sequence[str], order: Order) -> dict[str, str]:
        """Give the order to these hosts at once; return errors by host."""
        problems: dict[str, str] = {}

        def begin(host: str) -> None:
            try:
                self.again(host, order)
            except ClusterError as error:
                problems[host] = str(error)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(begin, hosts))
        return {host: problems[host] for host in hosts if host in problems}

    def progress(self) -> str:
        """Return "": agents register at once."""
        return ""

    def again(self, host: str, order: Order) -> None:
        """Start the agent of one host; see `Launching.again`."""
        launcher = self._connected.pop(host, None)
        if launcher is None or not launcher.connects:  # The network may have closed an idle connection.
            launcher = self._connection(host)
        if host not in self.began:
            self.began.append(host)
        engines = dict(zip(self.names, self._spec.engines, strict=True)).get(host)
        launcher.give(replace(order, name=host, engines=engines or 0).to_json())

    def _connection(self, host: str) -> AgentSSHLauncher:
        arguments = ["-F", self._spec.config] if self._spec.config else []
        launcher = AgentSSHLauncher(work_dir=".", profile_dir=str(self._home.path), log=log, ssh_args=arguments)
        launcher.connect(host, self._spec.python)
        return launcher

    def said(self) -> str:
        """Return "": errors are raised at the start."""
        return ""

    def why_over(self) -> str | None:
        """Return None: no provider takes these hosts away."""
        return None

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """End agents over SSH; see `Launching.stop`."""
        left = [host for host in self.began if host not in ended]
        return list(self._on_all(left, replace(order, end=True)))

    def to_fields(self) -> dict[str, Any]:
        """Return the hosts on which something may run."""
        return {"kind": "ssh", "began": self.began}


class InSlurm:
    """Agents in a Slurm job, one per node."""

    def __init__(self, home: ClusterDir, spec: SlurmJob) -> None:
        self._home, self._spec = home, spec
        self.names: tuple[str, ...] = ()
        self.count = spec.nodes
        self.job = ""
        self._asked = 0.0
        self._unanswered = 0
        self._said = ""
        self._steps: list[subprocess.Popen[bytes]] = []
        """Job steps of agents that were started again; the last one is awaited."""

    def engines_of(self, number: int) -> int | None:
        """Return the number of engines per node; None for one per device."""
        del number
        return self._spec.per_host

    def prepare(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def start(self, order: Order) -> None:
        """Submit the job; see `Launching.start`."""
        launcher = AgentSlurmLauncher(
            work_dir=str(_agents_folder(self._home)),
            profile_dir=str(self._home.path),
            cluster_id=self._home.name,
            log=log,
            order_file=_write_order(self._home, self._for_each(order)),
            output_file=str(self._home.log / "slurm.log"),
        )
        self.job = launcher.submit(self._spec)

    def progress(self) -> str:
        """Return the position of the job in the queue; see `Launching.progress`."""
        if self._steps and self._steps[-1].poll() is not None:
            raise ClusterError(f"the step of job {self.job} ended before its agent came:\n{self.said()}")
        if time.monotonic() - self._asked < _SLURM_POLL_SECONDS:
            return self._said
        self._asked = time.monotonic()
        try:
            state, words = slurm_state(self.job)
        except ClusterError:
            self._unanswered += 1
            if self._unanswered > _MOST_UNANSWERED:
                raise
            # A restart of the scheduler must not end the start, which would lose the position in the queue.
            return self._said
        self._unanswered = 0
        if state not in _RUNS:
            raise ClusterError(self.ended(state, words))
        _raise_problems(self._home)
        self._said = f"job {self.job} {words}" if state == "PENDING" else ""
        return self._said

    def ended(self, state: str, reason: str) -> str:
        """Return a sentence about a job that has ended.

        Args:
            state: Slurm's state of the job.
            reason: Slurm's reason.
        """
        match state:
            case "TIMEOUT":
                limit = f" of {self._spec.time}" if self._spec.time else ""
                return f"job {self.job} was ended by its time limit{limit}; ask for a longer 'time'"
            case "CANCELLED":
                return f"job {self.job} was cancelled"
            case "NODE_FAIL" | "BOOT_FAIL":
                return f"job {self.job} ended because a node failed; start again"
        tail = _tail(self._home.log / "slurm.log")
        return f"job {self.job} ended before its agents came: {state}, {reason}\n{tail}"

    def said(self) -> str:
        """Return the end of the log of the job steps."""
        return _tail(self._home.log / _STEPS_LOG)

    def _for_each(self, order: Order) -> Order:
        return replace(order, engines=self._spec.per_host or 0)

    def why_over(self) -> str | None:
        """Return why the job has ended; None while it runs."""
        state, reason = slurm_state(self.job)
        return None if state in _RUNS else self.ended(state, reason)

    def again(self, host: str, order: Order) -> None:
        """Start the agent of one node in a new job step; see `Launching.again`."""
        (_agents_folder(self._home) / f"problem-{host}").unlink(missing_ok=True)
        file = _write_order(self._home, self._for_each(order))
        self._steps = [step for step in self._steps if step.poll() is None]
        self._steps.append(slurm_step(self._spec, self.job, host, file, str(self._home.log / _STEPS_LOG)))

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """Cancel the job; see `Launching.stop`."""
        if self.job:
            slurm_cancel(self.job)
        for step in self._steps:
            try:
                step.wait(_STEP_END_SECONDS)
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
        return []

    def to_fields(self) -> dict[str, Any]:
        """Return the number of the job."""
        return {"kind": "slurm", "job": self.job}


class UnderMPI:
    """Agents under one mpiexec, one per host."""

    def __init__(self, home: ClusterDir, spec: MpiHosts) -> None:
        self._home, self._spec = home, spec
        self.names: tuple[str, ...] = ()  # mpiexec may report addresses.
        self.count = len(spec.names)
        self.pid = 0
        self._ssh = OverSSH(home, SshHosts(names=(), engines=(), python=spec.python))
        self._alike = (spec.engines[0] or 0) if len(set(spec.engines)) == 1 else 0
        """Number of engines per host; 0 if it differs or is not known yet."""

    def engines_of(self, number: int) -> int | None:
        """Return the number of engines of host `number` in the host file; None for one per device."""
        return self._spec.engines[number]

    def prepare(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def start(self, order: Order) -> None:
        """Start mpiexec; see `Launching.start`."""
        launcher = AgentMPILauncher(
            work_dir=".",
            profile_dir=str(self._home.path),
            cluster_id=self._home.name,
            log=log,
            order_file=_write_order(self._home, replace(order, engines=self._alike)),
            output_file=str(self._home.log / "mpiexec.log"),
        )
        self.pid = launcher.launch(self._spec)

    def progress(self) -> str:
        """Return ""; raise ClusterError if mpiexec has ended."""
        _raise_problems(self._home)
        if not self._runs():
            raise ClusterError(f"mpiexec ended before its agents came:\n{_tail(self._home.log / 'mpiexec.log')}")
        return ""

    def _runs(self) -> bool:
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def again(self, host: str, order: Order) -> None:
        """Start the agent of one host over SSH, because mpiexec cannot start an agent again."""
        try:
            self._ssh.again(host, order)
        except ClusterError as error:
            raise ClusterError(f"mpiexec cannot start an agent a second time, and over SSH: {error}") from None

    def said(self) -> str:
        """Return "": errors are raised at the start."""
        return ""

    def why_over(self) -> str | None:
        """Return the end of mpiexec's log if it has ended; None while it runs."""
        return None if self._runs() else f"mpiexec has ended:\n{_tail(self._home.log / 'mpiexec.log')}"

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """Wait for mpiexec, which ends after its agents; end it if an agent does not answer. See `Launching.stop`."""
        if not self.pid:
            return []
        try:
            process = psutil.Process(self.pid)
            if len(ended) < self.count or not _ends_within(process, _MPIEXEC_SECONDS):
                process.terminate()
                _ends_within(process, _MPIEXEC_SECONDS)
        except psutil.NoSuchProcess:
            pass
        return self._ssh.stop(order, ended)

    @property
    def began(self) -> list[str]:
        """Hosts on which an agent was started over SSH."""
        return self._ssh.began

    @began.setter
    def began(self, hosts: list[str]) -> None:
        self._ssh.began = hosts

    def to_fields(self) -> dict[str, Any]:
        """Return mpiexec's process id, and the hosts with agents over SSH."""
        return {"kind": "mpi", "pid": self.pid, "began": self.began}


def _ends_within(process: psutil.Process, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def launching_for(home: ClusterDir, spec: Spec) -> OverSSH | InSlurm | UnderMPI:
    """Return the launcher for the hosts of `spec`.

    Args:
        home: Folder of the cluster.
        spec: Hosts of the cluster.
    """
    match spec:
        case SshHosts():
            return OverSSH(home, spec)
        case SlurmJob():
            return InSlurm(home, spec)
        case MpiHosts():
            return UnderMPI(home, spec)


def _agents_folder(home: ClusterDir) -> Path:
    folder = home.path / "agents"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _write_order(home: ClusterDir, order: Order) -> str:
    file = _agents_folder(home) / "order.json"
    write_private(file, order.to_json())
    return str(file)


def _raise_problems(home: ClusterDir) -> None:
    found = sorted(_agents_folder(home).glob("problem-*"))
    if found:
        raise ClusterError("\n".join(file.read_text() for file in found))


def _tail(file: Path, lines: int = 12) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
