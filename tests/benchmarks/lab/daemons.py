"""What administrators run on the hosts of a laboratory: sshd in each, and Slurm over all of them.

Keys, settings and logs lie in the laboratory's folder; all daemons listen on the hosts' own addresses only, and end
with their hosts. Needs openssh-server; munge, slurmctld, slurmd and slurm-client; of MPI only mpiexec itself (mpich).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.benchmarks.lab.network import Lab, LabHost

_READY_SECONDS = 30.0
_POLL_SECONDS = 0.05

_PROGRAMS = {
    "ssh": (["sshd", "ssh", "ssh-keygen"], "openssh-server openssh-client"),
    "slurm": (["munged", "slurmctld", "slurmd", "sbatch", "srun"], "munge slurmctld slurmd slurm-client"),
    "mpi": (["mpiexec"], "mpich"),
}


def missing_for(kind: str) -> str | None:
    """Why "ssh", "slurm" or "mpi" cannot be tried here, in a sentence; None when it can."""
    programs, packages = _PROGRAMS[kind]
    lacking = [name for name in programs if shutil.which(name) is None]
    if not lacking:
        return None
    return f"{', '.join(lacking)} not found; on Debian and Ubuntu: apt-get install {packages}"


def start_sshd(lab: Lab) -> Path:
    """Start an sshd in every host. Returns the client's settings, for `ssh -F`: host names are the laboratory's, the
    key is the only one that the hosts take, and theirs are known."""
    folder = lab.folder / "ssh"
    folder.mkdir(mode=0o700)
    _make_key(folder / "user")
    shutil.copy(folder / "user.pub", folder / "authorized")
    known, blocks = [], []
    for host in lab.hosts:
        key = folder / f"{host.name}.key"
        _make_key(key)
        known.append(f"{host.name} {key.with_suffix('.key.pub').read_text().strip()}")
        blocks.append(f"Host {host.name} {host.address}\n  HostName {host.address}\n  HostKeyAlias {host.name}\n")
        _start_daemon(
            lab, host, "sshd", [str(shutil.which("sshd")), "-D", "-e", "-f", str(_sshd_settings(host, folder))]
        )
    (folder / "known").write_text("\n".join(known) + "\n")
    common = [
        f"IdentityFile {folder / 'user'}",
        "IdentitiesOnly yes",
        f"UserKnownHostsFile {folder / 'known'}",
        "StrictHostKeyChecking yes",
        "BatchMode yes",
        "LogLevel ERROR",
    ]
    settings = folder / "client"
    settings.write_text("".join(blocks) + "Host *\n" + "".join(f"  {line}\n" for line in common))
    for host in lab.hosts:
        _await(lambda: _answers(host.address, 22), f"sshd of {host.name}", lab)  # noqa: B023  # asked at once
    return settings


def _sshd_settings(host: LabHost, folder: Path) -> Path:
    path = folder / f"{host.name}.settings"
    lines = [
        f"ListenAddress {host.address}",
        f"HostKey {folder / f'{host.name}.key'}",
        f"AuthorizedKeysFile {folder / 'authorized'}",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        "MaxStartups 200",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30)


def start_slurm(lab: Lab, *, cores: int = 2, partition: str = "lab") -> dict[str, str]:
    """Start Slurm: munge and the controller on the first host, a node on each. Returns the environment in which sbatch,
    squeue and their like speak to it.

    `cores`: how many a node offers. Jobs that end are reported within seconds, and time limits count in minutes.
    """
    folder = lab.folder / "slurm"
    folder.mkdir(mode=0o755)
    first = lab.hosts[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
    files = [f"--{name}-file={folder / f'munge.{name}'}" for name in ("pid", "seed", "log")]
    _start_daemon(lab, first, "munged", [*munged, *files])
    settings = folder / "slurm.conf"
    settings.write_text(_slurm_settings(lab, folder, cores, partition))
    environment = {"SLURM_CONF": str(settings)}
    _await((folder / "munge.socket").exists, "munged", lab)
    _start_daemon(lab, first, "slurmctld", ["slurmctld", "-D", "-f", str(settings)])
    for host in lab.hosts:
        _start_daemon(lab, host, "slurmd", ["slurmd", "-D", "-f", str(settings), "-N", host.name])
    known = {**os.environ, **environment}
    _await(lambda: _idle_nodes(known) == len(lab.hosts), "Slurm's nodes", lab)
    return environment


def _slurm_settings(lab: Lab, folder: Path, cores: int, partition: str) -> str:
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name} CPUs={cores} RealMemory=4000"
        for host in lab.hosts
    ]
    (folder / "state").mkdir()
    return "\n".join(
        [
            "ClusterName=lab",
            f"SlurmctldHost={lab.hosts[0].name}({lab.hosts[0].address})",
            f"AuthInfo=socket={folder / 'munge.socket'}",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder / 'spool'}-%n",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={folder / 'slurmd'}-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "KillWait=2",
            "MinJobAge=10",
            "SchedulerParameters=sched_min_interval=100000,batch_sched_delay=1",
            "SlurmdParameters=config_overrides",
            "CommunicationParameters=NoCtldInAddrAny",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            *nodes,
            f"PartitionName={partition} Nodes=ALL Default=YES MaxTime=60 State=UP",
            "",
        ]
    )


def _idle_nodes(environment: Mapping[str, str]) -> int:
    words = ["sinfo", "-h", "-N", "-o", "%T"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.split().count("idle")


def mpi_environment(lab: Lab, settings: Path) -> dict[str, str]:
    """The environment in which mpiexec (mpich) reaches the hosts by ssh, and they it; `settings` as `start_sshd`
    returns them. Hosts are named by their addresses there, since this machine does not know their names."""
    command = settings.with_name("ssh-to-host")
    command.write_text(f'#!/bin/sh\nexec ssh -F {settings} "$@"\n')
    command.chmod(0o700)
    return {"HYDRA_IFACE": lab.bridge, "HYDRA_BOOTSTRAP": "ssh", "HYDRA_BOOTSTRAP_EXEC": str(command)}


def _start_daemon(lab: Lab, host: LabHost, name: str, command: Sequence[str]) -> None:
    with (lab.folder / f"{name}-{host.name}.log").open("w") as log:
        host.start(*command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd="/")


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def _await(check: Callable[[], bool], what: str, lab: Lab) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not check():
        if time.monotonic() > deadline:
            logs = [f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in lab.folder.glob("*.log")]
            raise RuntimeError("\n".join([f"{what} did not come up in {_READY_SECONDS:g} s", *logs]))
        time.sleep(_POLL_SECONDS)
