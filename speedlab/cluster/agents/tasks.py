"""Functions that run in an agent, called by `pool.py` through ipyparallel. Arguments and results are plain data.

An agent keeps no list of engines. It looks up processes by the cluster's token in their environment and by the command
of an engine. So an agent that replaces a killed one finds the same engines.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.rendezvous as host_rendezvous
from speedlab.cluster.debug.agent_relay import DebugRelay, Given, Said
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.environment import (
    ENGINE_ARGUMENTS,
    ENGINE_COMMAND,
    HEARTBEAT_SECONDS,
    SILENT_SECONDS,
    UNSUPERVISED_FILE,
)
from speedlab.cluster.launch.placement import choose_devices
from speedlab.cluster.worker.fork_server_client import ForkServer, can_fork
from speedlab.cluster.worker.utilization import Load, Loads
from speedlab.hardware import Device
from speedlab.network import Endpoint, address_of, interface_towards

HOST = "SPEEDLAB_AGENT_HOST"
CONTROLLER = "SPEEDLAB_AGENT_CONTROLLER"
"""Environment variables of an agent: the name of its host, and the endpoint of the controller."""


def misses(seconds: float) -> str:
    """Return the option that ends an engine without heartbeats.

    The engine checks half a second less often than the controller sends.

    Args:
        seconds: Time without heartbeat after which the engine ends.
    """
    return f"--IPEngine.max_heartbeat_misses={round(seconds / (HEARTBEAT_SECONDS + 0.5))}"


SUPERVISOR_SECONDS = 10.0
"""After this time without a request, an agent assumes that the supervisor has ended: it asks once a second."""

_END_SECONDS = 1.0
_ANSWERED_SECONDS = 1.0
"""After this time, an agent that ends has sent its answer."""
_HEARD_SECONDS = 1.0
_SAME_SECONDS = 0.05
_folder: Path | None = None
_lobby: DebugRelay | None = None
_started = 0.0
_heard = 0.0
_loads = Loads()
_children: dict[int, subprocess.Popen[bytes]] = {}
"""Engines that this agent started as separate processes, by process id; kept for their exit status."""
_nursery: ForkServer | None = None
"""Fork server for CPU engines."""
_threads = 1


def begin(folder: Path, started: float) -> None:
    """Make this process an agent.

    Args:
        folder: Folder of this host.
        started: Start time of the agent, in seconds since the epoch.
    """
    global _folder, _started, _lobby  # functions are sent by reference, and know their process by this
    _folder, _started, _lobby = folder, started, DebugRelay(folder)
    _hear()
    threading.Thread(target=_listen, name="speedlab-supervised", daemon=True).start()


def own_folder() -> Path:
    """Return the folder of this host."""
    assert _folder is not None, "not an agent"
    return _folder


def who() -> dict[str, Any]:
    """Return whether this process is an agent, of which host, and which ranks wait to be debugged.

    An engine of a rank is no agent. A call proves that the supervisor is alive.
    """
    if _folder is not None:
        _hear()
    number = next(
        (os.environ[name] for name in ("SLURM_NODEID", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), "0"
    )
    return {
        "agent": _folder is not None,
        "host": os.environ.get(HOST, ""),
        "pid": os.getpid(),
        "number": int(number),
        "waiting": _lobby.waiting() if _lobby is not None else {},
    }


def exchange(given: Mapping[str, Given]) -> dict[str, Said]:
    """Exchange data with debugged ranks.

    Args:
        given: Data for each rank, by its caller id.

    Returns:
        Data from each rank, by its caller id.
    """
    assert _lobby is not None, "not an agent"
    return _lobby.exchange(given)


def _hear() -> None:
    global _heard  # noqa: PLW0603  # as `begin`: this process is one agent
    _heard = time.monotonic()
    with suppress(FileNotFoundError):
        _unsupervised().unlink()


def _listen() -> None:
    """Make a file for the engines of this host while no supervisor asks.

    Rank 0 then ends its step and the run pauses (`trainer/health.py`). An agent that has ended makes no file: the
    supervisor restarts the agent.
    """
    while True:
        time.sleep(_HEARD_SECONDS)
        if time.monotonic() - _heard > SUPERVISOR_SECONDS:
            with suppress(OSError):  # The folder may be deleted or the disk full; the next round tries again.
                _unsupervised().touch(mode=0o600)
        if _lobby is not None:
            _lobby.end_forgotten(SUPERVISOR_SECONDS)


def _unsupervised() -> Path:
    return own_folder() / "rendezvous" / UNSUPERVISED_FILE


def expect(engines: int | None, device: str) -> None:
    """Let the fork server import torch before engines are requested. `describe` reports errors.

    Args:
        engines: Number of engines; None for one per device.
        device: 'cuda', 'cpu' or 'auto'.
    """
    with suppress(ClusterError, OSError, ValueError):
        _have_nursery(choose_devices(engines, device))


def describe(engines: int | None, device: str, interface: str) -> dict[str, Any]:
    """Describe this host: its address and interface, its folders, and its devices.

    Args:
        engines: Number of engines; None for one per device.
        device: 'cuda', 'cpu' or 'auto'.
        interface: Network interface; "" for the one that leads to the controller.

    Returns:
        Fields of the host. `problem` says why it cannot be used, else "".
    """
    try:
        devices = choose_devices(engines, device)
        _have_nursery(devices)
        if interface:
            name, address = interface, address_of(interface)
        else:
            name, address = interface_towards(Endpoint.parse(os.environ[CONTROLLER]).address)
    except (ClusterError, OSError, ValueError) as error:
        return {"problem": str(error)}
    return {
        "problem": "",
        "node": platform.node(),
        "address": address,
        "interface": name,
        "devices": [asdict(each) for each in devices],
        "rendezvous": str(own_folder() / "rendezvous"),
        "folder": str(own_folder()),
    }


def _have_nursery(devices: Sequence[Device]) -> None:
    """Make the fork server if engines on these devices can be forked.

    It begins to import torch now, unless engines run already: then this agent has replaced another one, and may never
    be asked for engines.
    """
    global _nursery, _threads  # noqa: PLW0603  # as `begin`: this process is one agent
    if not can_fork(each.kind for each in devices):
        return
    if _nursery is None:
        _nursery = ForkServer(_engine_environment(), own_folder() / "log" / "nursery.log")
    _threads = devices[0].threads
    if not _engine_processes():
        _nursery.begin(_threads)


def _engine_environment() -> dict[str, str]:
    """Return the environment of an engine on this host, without the variables of its rank."""
    return {name: value for name, value in os.environ.items() if name not in (HOST, CONTROLLER, "IPP_CONNECTION_INFO")}


def ready() -> bool:
    """Return whether engines can be started without a wait, in which this agent would answer no call.

    Raises:
        ClusterError: If the fork server ended during its imports.
    """
    return _nursery is None or _nursery.ready(_threads)


def set_generation(number: int) -> None:
    """Let ranks of this host that join from now on use this generation of the store."""
    host_rendezvous.set_generation(own_folder() / "rendezvous", number)


def start_engines(
    environments: Mapping[int, Mapping[str, str]], keep: Sequence[tuple[int, float]]
) -> dict[int, dict[str, Any]]:
    """Start the engine of each rank; end other engines of this host, except those in `keep`.

    Args:
        environments: Environment variables by rank.
        keep: (process id, start time) of engines that stay.

    Returns:
        Process id and start time by rank.

    Raises:
        ClusterError: If the fork server is not ready; nothing was ended then.
    """
    if not ready():  # Check before any engine is ended.
        raise ClusterError("what engines are forked off has just ended, and imports torch again; ask once more")
    folder = own_folder()
    kept = {process.pid for process in _known(keep)}
    end_engines([(each["pid"], each["started"]) for each in _engine_processes() if each["pid"] not in kept], 0.0)
    arguments = [f"--profile-dir={folder}", *ENGINE_ARGUMENTS, misses(SILENT_SECONDS)]
    started: dict[int, dict[str, Any]] = {}
    try:
        for rank, environment in environments.items():
            log = folder / "log" / f"engine-{rank}.log"
            if _nursery is not None:
                pid = _nursery.fork(environment, arguments, str(log), lambda: False)
            else:
                pid = _started_by_itself(environment, arguments, log)
            started[rank] = {"pid": pid, "started": _start_of(pid)}
    except BaseException:
        # The caller gets no list of them, so nothing else would end them.
        end_engines([(each["pid"], each["started"]) for each in started.values()], 0.0)
        raise
    return started


def _start_of(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:  # The code that waits for the engine reports how it ended.
        return time.time()


def _started_by_itself(environment: Mapping[str, str], arguments: Sequence[str], log: Path) -> int:
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*ENGINE_COMMAND, *arguments],
            env={**_engine_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    _children[process.pid] = process
    return process.pid


def engines() -> list[dict[str, Any]]:
    """Return the engines of this host.

    Returns:
        For each: rank at its start, process id, start time, memory in bytes, whether it is suspended (`frozen`),
        whether it runs. Also engines that this agent saw end, with their exit status (-9: signal 9).
    """
    found = []
    for process in _engine_processes():
        found.append({**process, "running": True, "exit": None})
    running = {each["pid"] for each in found}
    ended = {pid: child.returncode for pid, child in _children.items() if child.poll() is not None}
    if _nursery is not None:
        ended |= _nursery.ended()
    found += [
        {"rank": None, "pid": pid, "running": False, "exit": status}
        for pid, status in ended.items()
        if pid not in running
    ]
    return found


def look() -> list[dict[str, Any]]:
    """Return the running engines of this host, see `engines`, with their `load` (the fields of a Load)."""
    found = _engine_processes()
    for engine in found:
        engine["load"] = tuple(Load())
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            engine["load"] = tuple(_loads.of(psutil.Process(engine["pid"])))
    return found


def _engine_processes() -> list[dict[str, Any]]:
    found = []
    for process in processes.engines(os.environ[processes.TOKEN]):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(
                    {
                        "rank": processes.rank_of(process),
                        "pid": process.pid,
                        "started": process.create_time(),
                        "rss_bytes": process.memory_info().rss,
                        "frozen": process.status() == psutil.STATUS_STOPPED,
                    }
                )
    return found


def _known(wanted: Sequence[tuple[int, float]]) -> list[psutil.Process]:
    """Return the running engines among (process id, start time). The start time detects a reused id; 0 accepts any."""
    found = []
    for pid, started in wanted:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            same = not started or abs(process.create_time() - started) < _SAME_SECONDS
            if same and processes.is_alive(pid, os.environ[processes.TOKEN]):
                found.append(process)
    return found


def send_signal(wanted: Sequence[tuple[int, float]], number: int) -> list[int]:
    """Send a signal to engines.

    Args:
        wanted: (process id, start time) of engines.
        number: Number of the signal.

    Returns:
        Process ids of those that run.
    """
    reached = []
    for process in _known(wanted):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            reached.append(process.pid)
    return reached


def signal_at_work(wanted: Sequence[tuple[int, float, str]], number: int) -> list[int]:
    """Send a signal to engines that still work on a message. The request may be old if the host was cut off.

    Args:
        wanted: (process id, start time, ipyparallel's message id) of engines.
        number: Number of the signal.

    Returns:
        All process ids, because an engine that has ended must not be awaited.
    """
    running = _known([(pid, started) for pid, started, _ in wanted])
    messages = {pid: message for pid, _, message in wanted}
    place = own_folder() / "rendezvous"
    for process in running:
        if host_rendezvous.works_on(place, process.pid) == messages[process.pid] != "":
            host_rendezvous.mean(place, process.pid, messages[process.pid])
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    return [pid for pid, _, _ in wanted]


def end_engines(wanted: Sequence[tuple[int, float]] | None, patience_seconds: float) -> list[int]:
    """End engines and their child processes.

    Args:
        wanted: (process id, start time) of engines; None for all.
        patience_seconds: Time between SIGTERM and SIGKILL.

    Returns:
        Process ids that are left.
    """
    if wanted is None:
        wanted = [(engine["pid"], engine["started"]) for engine in _engine_processes()]
    engines = _known(wanted)
    found = [*engines, *(child for engine in engines for child in processes.descendants(engine))]
    left = processes.end(found, patience_seconds=patience_seconds)
    for child in _children.values():
        child.poll()  # Reap ended processes, so that they are no zombies.
    return [process.pid for process in left]


def end_other_agents() -> None:
    """End earlier agents of this cluster on this host: one may be suspended or cut off."""
    others = [each for each in processes.marked(os.environ[processes.TOKEN]) if each.pid != os.getpid()]
    processes.end([each for each in others if _is_agent_of(each, os.environ[HOST])], patience_seconds=0.0)


def _is_agent_of(process: psutil.Process, host: str) -> bool:
    try:
        return process.environ().get(HOST) == host
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def log_tail(name: str, most_bytes: int) -> str:
    """Return the end of a log of this host; "" if there is none.

    Args:
        name: 'engine-3' or 'agent'.
        most_bytes: Maximum length in bytes.
    """
    try:
        with (own_folder() / "log" / f"{name}.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def end() -> list[int]:
    """End every engine of this host, and this agent after its answer was sent; return process ids that are left."""
    left = end_engines(None, _END_SECONDS)
    if _nursery is not None:
        _nursery.close()
    shutil.rmtree(own_folder(), ignore_errors=True)
    # Kill this process later, so that the answer of this call is sent first.
    threading.Timer(_ANSWERED_SECONDS, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return left


def end_here() -> None:
    """End the engines and remove the folder, because the controller is gone."""
    end_engines(None, 0.0)
    if _nursery is not None:
        _nursery.close()
    shutil.rmtree(own_folder(), ignore_errors=True)
    sys.stdout.flush()
