"""Functions that run in an agent, called by `agents.py` through ipyparallel. Plain data goes in and comes out.

What runs on the host is never remembered, but looked up: processes with the cluster's token in their environment, and
the name or command of an engine. So an agent that follows one that was killed knows the same.
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
"""Environment variables of an agent: its host's name, and the controller's endpoint."""


def misses(seconds: float) -> str:
    """The option of an engine that ends after so long without a heartbeat: it looks half a second less often than the
    controller beats."""
    return f"--IPEngine.max_heartbeat_misses={round(seconds / (HEARTBEAT_SECONDS + 0.5))}"


SUPERVISOR_SECONDS = 10.0
"""How long an agent is asked nothing before it takes the supervisor for ended: that asks once a second."""

_END_SECONDS = 1.0
_ANSWERED_SECONDS = 1.0
"""After which an agent that was ended has answered."""
_HEARD_SECONDS = 1.0
_SAME_SECONDS = 0.05
_folder: Path | None = None
_lobby: DebugRelay | None = None
_started = 0.0
_heard = 0.0
_loads = Loads()
_children: dict[int, subprocess.Popen[bytes]] = {}
"""Engines that this agent has started by themselves, by process id: to hear how they ended."""
_nursery: ForkServer | None = None
"""What the others are forked off."""
_threads = 1


def begin(folder: Path, started: float) -> None:
    """This process is an agent, and `folder` its host's own."""
    global _folder, _started, _lobby  # functions are sent by reference, and know their process by this
    _folder, _started, _lobby = folder, started, DebugRelay(folder)
    _hear()
    threading.Thread(target=_listen, name="speedlab-supervised", daemon=True).start()


def own_folder() -> Path:
    assert _folder is not None, "not an agent"
    return _folder


def who() -> dict[str, Any]:
    """Whether this is an agent (an engine of a rank is none), of which host, and who waits in its lobby. A supervisor
    that asks is there."""
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
    """What ranks that are debugged have said, by their numbers in the lobby, for what is given to them."""
    assert _lobby is not None, "not an agent"
    return _lobby.exchange(given)


def _hear() -> None:
    global _heard  # noqa: PLW0603  # as `begin`: this process is one agent
    _heard = time.monotonic()
    with suppress(FileNotFoundError):
        _unsupervised().unlink()


def _listen() -> None:
    """Leave a file for the engines of this host while nobody asks: rank 0 then ends its step and the run pauses
    (`trainer/health.py`). An agent that has ended leaves none: the supervisor starts another one."""
    while True:
        time.sleep(_HEARD_SECONDS)
        if time.monotonic() - _heard > SUPERVISOR_SECONDS:
            with suppress(OSError):  # The folder may have gone, or be full; it is tried again.
                _unsupervised().touch(mode=0o600)
        if _lobby is not None:
            _lobby.end_forgotten(SUPERVISOR_SECONDS)


def _unsupervised() -> Path:
    return own_folder() / "rendezvous" / UNSUPERVISED_FILE


def expect(engines: int | None, device: str) -> None:
    """So many engines (None: one for each device) are going to be asked for: what they are forked off begins to import
    torch. `describe` says what is wrong with it."""
    with suppress(ClusterError, OSError, ValueError):
        _have_nursery(choose_devices(engines, device))


def describe(engines: int | None, device: str, interface: str) -> dict[str, Any]:
    """This host: its address and interface, and the devices for so many engines (None: all). `problem`: why it cannot
    be used, else ""."""
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
    """Engines of these will be forks, where they can be. What they are forked off begins to import torch now, unless
    there are engines already: then this agent has followed another one, and may never be asked for more."""
    global _nursery, _threads  # noqa: PLW0603  # as `begin`: this process is one agent
    if not can_fork(each.kind for each in devices):
        return
    if _nursery is None:
        _nursery = ForkServer(_engine_environment(), own_folder() / "log" / "nursery.log")
    _threads = devices[0].threads
    if not _engine_processes():
        _nursery.begin(_threads)


def _engine_environment() -> dict[str, str]:
    """What an engine of this host has, besides what is its rank's."""
    return {name: value for name, value in os.environ.items() if name not in (HOST, CONTROLLER, "IPP_CONNECTION_INFO")}


def ready() -> bool:
    """Whether engines can be started without a wait in which this agent would answer nobody. Raises ClusterError where
    what they are forked off has ended over its imports."""
    return _nursery is None or _nursery.ready(_threads)


def set_generation(number: int) -> None:
    """Ranks of this host that join from now on meet in that generation."""
    host_rendezvous.set_generation(own_folder() / "rendezvous", number)


def start_engines(
    environments: Mapping[int, Mapping[str, str]], keep: Sequence[tuple[int, float]]
) -> dict[int, dict[str, Any]]:
    """Start the engine of each rank with its environment, and end others that run here, but for those to `keep`.
    Returns process id and start time by rank."""
    if not ready():  # Before anything is ended.
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
        end_engines([(each["pid"], each["started"]) for each in started.values()], 0.0)  # Nobody would hear of them.
        raise
    return started


def _start_of(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:  # Who waits for it says how it ended.
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
    """The engines of this host: rank (as which they were started), process id, start time, bytes of memory, whether
    they are stopped (`frozen`), whether they run; those that this agent has seen end, with their exit status (-9: the
    signal 9)."""
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
    """The engines of this host that run, as `engines` has them, and how busy each is (`load`, the fields of a Load)."""
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
    """Of these (process id, start time) the engines of this cluster that run: a number alone may be somebody else's by
    now. A time of 0 stands for any."""
    found = []
    for pid, started in wanted:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            same = not started or abs(process.create_time() - started) < _SAME_SECONDS
            if same and processes.is_alive(pid, os.environ[processes.TOKEN]):
                found.append(process)
    return found


def send_signal(wanted: Sequence[tuple[int, float]], number: int) -> list[int]:
    """Send a signal to these engines, by process id and start time; returns the ids of those that run."""
    reached = []
    for process in _known(wanted):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            reached.append(process.pid)
    return reached


def signal_at_work(wanted: Sequence[tuple[int, float, str]], number: int) -> list[int]:
    """As `send_signal`, to those that work on ipyparallel's message of that id: this may be asked long before the host
    is back that has to do it. Returns the process ids of all: one that has ended hears no more, and is not to be
    waited for."""
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
    """End these engines, None: all, and everything they started; returns process ids that are left."""
    if wanted is None:
        wanted = [(engine["pid"], engine["started"]) for engine in _engine_processes()]
    engines = _known(wanted)
    found = [*engines, *(child for engine in engines for child in processes.descendants(engine))]
    left = processes.end(found, patience_seconds=patience_seconds)
    for child in _children.values():
        child.poll()  # Takes what has ended off the system's list.
    return [process.pid for process in left]


def end_other_agents() -> None:
    """End agents of this cluster and host that this one has followed: one may be stopped, or cut off."""
    others = [each for each in processes.marked(os.environ[processes.TOKEN]) if each.pid != os.getpid()]
    processes.end([each for each in others if _is_agent_of(each, os.environ[HOST])], patience_seconds=0.0)


def _is_agent_of(process: psutil.Process, host: str) -> bool:
    try:
        return process.environ().get(HOST) == host
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def log_tail(name: str, most_bytes: int) -> str:
    """The end of a log of this host: 'engine-3' or 'agent'; "" where there is none."""
    try:
        with (own_folder() / "log" / f"{name}.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def end() -> list[int]:
    """End every engine of this host, and this agent once it has answered; returns process ids that are left."""
    left = end_engines(None, _END_SECONDS)
    if _nursery is not None:
        _nursery.close()
    shutil.rmtree(own_folder(), ignore_errors=True)
    threading.Timer(_ANSWERED_SECONDS, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return left


def end_here() -> None:
    """The controller is gone: end the engines, and remove the folder."""
    end_engines(None, 0.0)
    if _nursery is not None:
        _nursery.close()
    shutil.rmtree(own_folder(), ignore_errors=True)
    sys.stdout.flush()
