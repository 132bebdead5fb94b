"""Files in the rendezvous folder: the generation of the process group, and what each engine works on.

In a cluster of several hosts, each host has its own folder. The generation has several writers (threads and processes);
a lock lets one at a time read and replace it.

`controller_address` chooses where the controller of a cluster of several hosts listens, so that the hosts reach it.
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
"""Id of the ipyparallel message that this engine works on."""


def set_generation(rendezvous: Path, number: int) -> None:
    """Let ranks that join from now on use this generation, or keep a later one.

    Args:
        rendezvous: Rendezvous folder.
        number: Generation.

    Raises:
        OSError: If the file cannot be written.
    """
    with _only_writer(rendezvous):
        with contextlib.suppress(FileNotFoundError, ValueError):
            if generation(rendezvous) >= number:
                return
        _write_generation(rendezvous, number)


def next_generation(rendezvous: Path) -> None:
    """Let ranks that join from now on use a new generation. Raises OSError.

    Args:
        rendezvous: Rendezvous folder.
    """
    with _only_writer(rendezvous):
        _write_generation(rendezvous, generation(rendezvous) + 1)


def generation(rendezvous: Path) -> int:
    """Return the generation that ranks join next; `speedlab.comm.join` reads it, too."""
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
    """Record, inside the block, that this engine works on a message; its agent reads the record.

    Args:
        message: Id of the ipyparallel message.
    """
    global _message  # noqa: PLW0603  # an engine works on one at a time
    file = _work_file(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), os.getpid())
    _message = message
    with contextlib.suppress(OSError):  # With a full disk, the engine works but cannot be interrupted.
        file.write_text(message)
    try:
        yield
    finally:
        _message = ""
        with contextlib.suppress(OSError):
            file.unlink()


def mean(rendezvous: Path, pid: int, message: str) -> None:
    """Record that the next signal to an engine is for its work on a message.

    Args:
        rendezvous: Rendezvous folder.
        pid: Process id of the engine.
        message: Id of the ipyparallel message.
    """
    file, draft = _meant_file(rendezvous, pid), rendezvous / f".meant-{pid}"
    try:
        draft.write_text(message)
        draft.replace(file)
    except OSError:  # With a full disk, remove the record of an earlier signal.
        with contextlib.suppress(OSError):
            file.unlink()


def is_meant() -> bool:
    """Return whether the last signal is for the current work of this engine; True without a record.

    On a busy machine, a signal may take long to reach the thread that waits for it.
    """
    try:
        return _meant_file(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), os.getpid()).read_text() == _message
    except OSError:
        return True


def works_on(rendezvous: Path, pid: int) -> str:
    """Return the message that an engine of this host works on; "" if it works on none.

    Args:
        rendezvous: Rendezvous folder.
        pid: Process id of the engine.
    """
    try:
        return _work_file(rendezvous, pid).read_text()
    except OSError:
        return ""


def _meant_file(rendezvous: Path, pid: int) -> Path:
    return rendezvous / f"meant-{pid}"


def _work_file(rendezvous: Path, pid: int) -> Path:
    return rendezvous / f"work-{pid}"


def controller_address(spec: Spec, interface: str = "") -> str:
    """Return the address of this machine at which the hosts reach the controller.

    Args:
        spec: Hosts of the cluster.
        interface: Network interface; "" for the one that leads to the hosts.

    Raises:
        ClusterError: If a host or the interface is unknown.
    """
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
        # Resolve the name with the user's ssh configuration.
        host = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line).get("hostname", host)
    try:
        return interface_towards(socket.getaddrinfo(host, None)[0][4][0])[1]  # type: ignore[arg-type]  # of IP families
    except OSError as error:
        reason = error.strerror or error
        raise ClusterError(
            f"{spec.names[0]} is not known here ({reason}); check the name in the list of hosts"
        ) from None


def _slurm_controller() -> str:
    """Return the address of Slurm's controller, which shares a network with the nodes."""
    shown = ask_slurm("scontrol", "show", "config")
    found = re.search(r"^SlurmctldHost\S*\s*=\s*([^(\s]+)(?:\(([^)]+)\))?", shown, re.MULTILINE)
    if found is None:
        raise ClusterError("Slurm does not say where its controller is; name the interface that leads to its nodes")
    return str(socket.getaddrinfo(found[2] or found[1], None)[0][4][0])
