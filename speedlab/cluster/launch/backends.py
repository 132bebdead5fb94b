"""Getting hosts: one object for each way, which starts the agents, tells how that goes, and gives the hosts back."""

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
"""ssh connections at the same time: an sshd takes 10 that have not logged in, and one host is often the way to all."""
_SLURM_POLL_SECONDS = 1.0
_MOST_UNANSWERED = 60
"""Looks at a job in a row that may fail before its start is given up."""
_MPIEXEC_SECONDS = 3.0
_STEPS_LOG = "slurm-steps.log"
_STEP_END_SECONDS = 5.0
_RUNS = frozenset({"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED"})

log = logging.getLogger("speedlab.cluster.ipyparallel")


class Launching(Protocol):
    """The agents of one cluster, from being asked for to being given back."""

    names: tuple[str, ...]
    """Of the hosts, where they are known before they come."""
    count: int
    """Of hosts."""

    def engines_of(self, number: int) -> int | None:
        """How many engines host `number` was asked to have; None: one for each of its devices."""
        ...

    def prepare(self) -> None:
        """What can be done while there is no order yet: no agent is begun on any host. Raises ClusterError."""
        ...

    def abandon(self) -> None:
        """There will be no order for what was prepared."""
        ...

    def start(self, order: Order) -> None:
        """Ask for the agents. Raises ClusterError with what to do; then nothing was started."""
        ...

    def progress(self) -> str:
        """What the agents wait for, in words; "" when they may come at any moment. Raises ClusterError when they will
        not come."""
        ...

    def again(self, host: str, order: Order) -> None:
        """Start the agent of one host once more. Raises ClusterError."""
        ...

    def said(self) -> str:
        """What the agent that was started `again` left behind where it does not come, in lines; "" for nothing."""
        ...

    def why_over(self) -> str | None:
        """Why whoever lent the hosts has taken them back; None where that did not happen."""
        ...

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """Give back what was taken, and end what runs on hosts that are not among the `ended`; returns those where that
        could not be done. `order`: as for the start."""
        ...

    def to_fields(self) -> dict[str, Any]:
        """What a later process needs to know to stop it."""
        ...


class OverSSH:
    """The first host alone is given its order, since what is wrong there is mostly wrong everywhere; then all others at
    once. The connections are made before."""

    def __init__(self, home: ClusterDir, spec: SshHosts) -> None:
        self._home, self._spec = home, spec
        self.names, self.count = spec.names, len(spec.names)
        self.began: list[str] = []
        """Hosts on which something may run."""
        self._connected: dict[str, AgentSSHLauncher] = {}
        """Hosts that wait for an order."""

    def engines_of(self, number: int) -> int | None:
        return self._spec.engines[number]

    def prepare(self) -> None:
        for host in self.names[:_AT_ONCE]:
            self._connected[host] = self._connection(host)

    def abandon(self) -> None:
        while self._connected:
            self._connected.popitem()[1].hang_up()

    def start(self, order: Order) -> None:
        try:
            self.again(self.names[0], order)
            problems = self._on_all(self.names[1:], order)
        finally:
            self.abandon()
        if problems:
            raise ClusterError("\n".join(problems.values()))

    def _on_all(self, hosts: Sequence[str], order: Order) -> dict[str, str]:
        """Give the order to these hosts, all at once; returns what went wrong, by host."""
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
        return ""

    def again(self, host: str, order: Order) -> None:
        launcher = self._connected.pop(host, None)
        if launcher is None or not launcher.connects:  # It may have waited longer than the network allows.
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
        return ""

    def why_over(self) -> str | None:
        return None

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        left = [host for host in self.began if host not in ended]
        return list(self._on_all(left, replace(order, end=True)))

    def to_fields(self) -> dict[str, Any]:
        return {"kind": "ssh", "began": self.began}


class InSlurm:
    def __init__(self, home: ClusterDir, spec: SlurmJob) -> None:
        self._home, self._spec = home, spec
        self.names: tuple[str, ...] = ()
        self.count = spec.nodes
        self.job = ""
        self._asked = 0.0
        self._unanswered = 0
        self._said = ""
        self._steps: list[subprocess.Popen[bytes]] = []
        """Of agents that were started once more; the last one is waited for."""

    def engines_of(self, number: int) -> int | None:
        del number
        return self._spec.per_host

    def prepare(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def start(self, order: Order) -> None:
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
            return self._said  # A scheduler that is restarted must not cost a place in its queue.
        self._unanswered = 0
        if state not in _RUNS:
            raise ClusterError(self.ended(state, words))
        _raise_problems(self._home)
        self._said = f"job {self.job} {words}" if state == "PENDING" else ""
        return self._said

    def ended(self, state: str, reason: str) -> str:
        """A sentence for a job that is no more."""
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
        return _tail(self._home.log / _STEPS_LOG)

    def _for_each(self, order: Order) -> Order:
        return replace(order, engines=self._spec.per_host or 0)

    def why_over(self) -> str | None:
        state, reason = slurm_state(self.job)
        return None if state in _RUNS else self.ended(state, reason)

    def again(self, host: str, order: Order) -> None:
        (_agents_folder(self._home) / f"problem-{host}").unlink(missing_ok=True)
        file = _write_order(self._home, self._for_each(order))
        self._steps = [step for step in self._steps if step.poll() is None]
        self._steps.append(slurm_step(self._spec, self.job, host, file, str(self._home.log / _STEPS_LOG)))

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
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
        return {"kind": "slurm", "job": self.job}


class UnderMPI:
    def __init__(self, home: ClusterDir, spec: MpiHosts) -> None:
        self._home, self._spec = home, spec
        self.names: tuple[str, ...] = ()  # It may give addresses.
        self.count = len(spec.names)
        self.pid = 0
        self._ssh = OverSSH(home, SshHosts(names=(), engines=(), python=spec.python))
        self._alike = (spec.engines[0] or 0) if len(set(spec.engines)) == 1 else 0
        """How many engines each host has; 0 where they differ, or it is not known here."""

    def engines_of(self, number: int) -> int | None:
        return self._spec.engines[number]

    def prepare(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def start(self, order: Order) -> None:
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
        try:
            self._ssh.again(host, order)
        except ClusterError as error:
            raise ClusterError(f"mpiexec cannot start an agent a second time, and over SSH: {error}") from None

    def said(self) -> str:
        return ""

    def why_over(self) -> str | None:
        return None if self._runs() else f"mpiexec has ended:\n{_tail(self._home.log / 'mpiexec.log')}"

    def stop(self, order: Order, ended: Collection[str]) -> list[str]:
        """mpiexec ends when its agents have; where they do not answer it is ended, and they with it."""
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
        return {"kind": "mpi", "pid": self.pid, "began": self.began}


def _ends_within(process: psutil.Process, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def launching_for(home: ClusterDir, spec: Spec) -> OverSSH | InSlurm | UnderMPI:
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
