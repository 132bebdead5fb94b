"""What a cluster's processes leave each other in the folder in which ranks meet, or, in a cluster of several hosts, in
the host's own: the generation of the process group, and what an engine works on.

The generation has several writers, threads and processes: a lock lets one at a time read and replace it.

Where the controller of a cluster of several hosts listens, so that they reach it and nobody else understands it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.file_locks import hold
from speedlab.cluster.launch.host_specs import SlurmJob, Spec, SshHosts
from speedlab.cluster.launch.slurm import ask_slurm
from speedlab.network import address_of, interface_towards

_LOCK_SECONDS = 5.0

_message = ""
"""On which this process works, as an engine."""


def set_generation(rendezvous: Path, number: int) -> None:
    """Ranks that join from now on meet in that generation, or in a later one of which somebody has heard. Raises
    OSError."""
    with _only_writer(rendezvous):
        with contextlib.suppress(FileNotFoundError, ValueError):
            if generation(rendezvous) >= number:
                return
        _write_generation(rendezvous, number)


def next_generation(rendezvous: Path) -> None:
    """Ranks that join from now on meet in a generation of which nobody has heard. Raises OSError."""
    with _only_writer(rendezvous):
        _write_generation(rendezvous, generation(rendezvous) + 1)


def generation(rendezvous: Path) -> int:
    """The number of the process group that ranks join next; `speedlab.comm.join` reads it, too."""
    return int((rendezvous / "generation").read_text())


def _write_generation(rendezvous: Path, number: int) -> None:
    draft = rendezvous / ".generation"
    draft.write_text(f"{number}\n")
    draft.replace(rendezvous / "generation")


@contextlib.contextmanager
def _only_writer(rendezvous: Path) -> Iterator[None]:
    lock = hold(rendezvous / "generation.lock", _LOCK_SECONDS)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def at_work(message: str) -> Iterator[None]:
    """Inside, this engine works on ipyparallel's message of that id, and its agent finds that it does."""
    global _message  # noqa: PLW0603  # an engine works on one at a time
    file = _work_file(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), os.getpid())
    _message = message
    with contextlib.suppress(OSError):  # On a full disk it works all the same, and cannot be interrupted.
        file.write_text(message)
    try:
        yield
    finally:
        _message = ""
        with contextlib.suppress(OSError):
            file.unlink()


def mean(rendezvous: Path, pid: int, message: str) -> None:
    """The signal that comes next to this engine is for its work on that message."""
    file, draft = _meant_file(rendezvous, pid), rendezvous / f".meant-{pid}"
    try:
        draft.write_text(message)
        draft.replace(file)
    except OSError:  # On a full disk nothing is said, rather than what was meant before.
        with contextlib.suppress(OSError):
            file.unlink()


def is_meant() -> bool:
    """Whether the signal that came last is for what this engine works on now: where all cores compute, it may be long
    on its way to the thread that waits for it. True where nobody has said what it is for."""
    try:
        return _meant_file(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), os.getpid()).read_text() == _message
    except OSError:
        return True


def works_on(rendezvous: Path, pid: int) -> str:
    """The message on which an engine of this host works; "" where it works on none."""
    try:
        return _work_file(rendezvous, pid).read_text()
    except OSError:
        return ""


def _meant_file(rendezvous: Path, pid: int) -> Path:
    return rendezvous / f"meant-{pid}"


def _work_file(rendezvous: Path, pid: int) -> Path:
    return rendezvous / f"work-{pid}"


def controller_address(spec: Spec, interface: str = "") -> str:
    """The address of this machine at which the hosts of `spec` reach the controller: that of `interface`, else of the
    one that leads to them. Raises ClusterError for a host that is not known here."""
    if interface:
        try:
            return address_of(interface)
        except ValueError as error:
            raise ClusterError(str(error)) from None
    if isinstance(spec, SlurmJob):
        return interface_towards(_slurm_controller())[1]
    host = spec.names[0].rpartition("@")[2]
    if isinstance(spec, SshHosts):
        words = ["ssh", *(["-F", spec.config] if spec.config else []), "-G", spec.names[0]]
        try:
            shown = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout
        except FileNotFoundError:
            raise ClusterError("no ssh on this machine; install the OpenSSH client") from None
        # What the user's settings make of the name.
        host = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line).get("hostname", host)
    try:
        return interface_towards(socket.getaddrinfo(host, None)[0][4][0])[1]  # type: ignore[arg-type]  # of IP families
    except OSError as error:
        reason = error.strerror or error
        raise ClusterError(
            f"{spec.names[0]} is not known here ({reason}); check the name in the list of hosts"
        ) from None


def _slurm_controller() -> str:
    """Slurm's own controller is on the network that its nodes are on."""
    shown = ask_slurm("scontrol", "show", "config")
    found = re.search(r"^SlurmctldHost\S*\s*=\s*([^(\s]+)(?:\(([^)]+)\))?", shown, re.MULTILINE)
    if found is None:
        raise ClusterError("Slurm does not say where its controller is; name the interface that leads to its nodes")
    return str(socket.getaddrinfo(found[2] or found[1], None)[0][4][0])
