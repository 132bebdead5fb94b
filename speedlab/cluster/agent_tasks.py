"""Functions that run in an agent, called by `agents.py` through ipyparallel. Plain data goes in and comes out.

What runs on the host is never remembered, but looked up: processes with the cluster's token and a rank in their
environment. So an agent that follows one that was killed knows the same.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
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

import speedlab.cluster.processes as processes
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launchers import ENGINE_ARGUMENTS, ENGINE_COMMAND, UNSUPERVISED_FILE
from speedlab.cluster.loads import Load, Loads
from speedlab.network import Endpoint, address_of, interface_towards

HOST = "SPEEDLAB_AGENT_HOST"
CONTROLLER = "SPEEDLAB_AGENT_CONTROLLER"
"""Environment variables of an agent: its host's name, and the controller's endpoint."""

SILENT_CONTROLLER_SECONDS = 30.0
"""How long an engine on a host of several, and the controller of it, bear to hear nothing of each other. An agent bears
twice as much, and ends all engines of its host then, also those that are too busy to look."""
HEARTBEAT_SECONDS = 0.2
"""Between two heartbeats of the controller (`start.CONTROLLER_ARGUMENTS`)."""


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
_started = 0.0
_heard = 0.0
_loads = Loads()
_children: dict[int, subprocess.Popen[bytes]] = {}
"""Engines that this agent has started, by process id: to hear how they ended."""


def begin(folder: Path, started: float) -> None:
    """This process is an agent, and `folder` its host's own."""
    global _folder, _started  # functions are sent by reference, and know their process by this
    _folder, _started = folder, started
    _hear()
    threading.Thread(target=_listen, name="speedlab-supervised", daemon=True).start()


def own_folder() -> Path:
    assert _folder is not None, "not an agent"
    return _folder


def who() -> dict[str, Any]:
    """Whether this is an agent (an engine of a rank is none), and of which host. A supervisor that asks is there."""
    if _folder is not None:
        _hear()
    number = next(
        (os.environ[name] for name in ("SLURM_NODEID", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), "0"
    )
    return {"agent": _folder is not None, "host": os.environ.get(HOST, ""), "pid": os.getpid(), "number": int(number)}


def _hear() -> None:
    global _heard  # noqa: PLW0603  # as `begin`: this process is one agent
    _heard = time.monotonic()
    with suppress(FileNotFoundError):
        _unsupervised().unlink()


def _listen() -> None:
    """Leave a file for the engines of this host while nobody asks: rank 0 then ends its step and the run pauses
    (`engine/run/supervised.py`). An agent that has ended leaves none: the supervisor starts another one."""
    while True:
        time.sleep(_HEARD_SECONDS)
        if time.monotonic() - _heard > SUPERVISOR_SECONDS:
            _unsupervised().touch(mode=0o600)


def _unsupervised() -> Path:
    return own_folder() / "rendezvous" / UNSUPERVISED_FILE


def describe(engines: int | None, device: str, interface: str) -> dict[str, Any]:
    """This host: its address and interface, and the devices for so many engines (None: all). `problem`: why it cannot
    be used, else ""."""
    try:
        devices = choose_devices(engines, device)
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


def free_port(address: str) -> int:
    """A port of this address that nobody listens on at this moment."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return server.getsockname()[1]


def set_generation(number: int) -> None:
    """Ranks of this host that join from now on meet in that generation."""
    file = own_folder() / "rendezvous" / "generation"
    draft = file.with_name(".generation")
    draft.write_text(f"{number}\n")
    draft.replace(file)


def start_engines(
    environments: Mapping[int, Mapping[str, str]], keep: Sequence[tuple[int, float]]
) -> dict[int, dict[str, Any]]:
    """Start the engine of each rank with its environment, and end others that run here, but for those to `keep`.
    Returns process id and start time by rank."""
    folder = own_folder()
    kept = {process.pid for process in _known(keep)}
    end_engines([(each["pid"], each["started"]) for each in _engine_processes() if each["pid"] not in kept], 0.0)
    known = {name: value for name, value in os.environ.items() if name not in (HOST, CONTROLLER, "IPP_CONNECTION_INFO")}
    command = [*ENGINE_COMMAND, f"--profile-dir={folder}", *ENGINE_ARGUMENTS, misses(SILENT_CONTROLLER_SECONDS)]
    started = {}
    for rank, environment in environments.items():
        with (folder / "log" / f"engine-{rank}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**known, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _children[process.pid] = process
        started[rank] = {"pid": process.pid, "started": psutil.Process(process.pid).create_time()}
    return started


def engines() -> list[dict[str, Any]]:
    """The engines of this host: rank (as which they were started), process id, start time, bytes of memory, whether
    they are stopped (`frozen`), whether they run; those that this agent has seen end, with their exit status (-9: the
    signal 9)."""
    found = []
    for process in _engine_processes():
        found.append({**process, "running": True, "exit": None})
    running = {each["pid"] for each in found}
    for pid, child in _children.items():
        if pid not in running and child.poll() is not None:
            found.append({"rank": None, "pid": pid, "running": False, "exit": child.returncode})
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
    token, found = os.environ[processes.TOKEN], []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(processes.TOKEN) != token or "RANK" not in environment:
                continue
            # Whatever an engine starts inherits its environment.
            if process.status() != psutil.STATUS_ZOMBIE and _rank_of(process.parent()) != environment["RANK"]:
                found.append(
                    {
                        "rank": int(environment["RANK"]),
                        "pid": process.pid,
                        "started": process.create_time(),
                        "rss_bytes": process.memory_info().rss,
                        "frozen": process.status() == psutil.STATUS_STOPPED,
                    }
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _rank_of(process: psutil.Process | None) -> str | None:
    try:
        return process.environ().get("RANK") if process is not None else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # Gone, or the system's own.


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
    shutil.rmtree(own_folder(), ignore_errors=True)
    threading.Timer(_ANSWERED_SECONDS, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return left


def end_here() -> None:
    """The controller is gone: end the engines, and remove the folder."""
    end_engines(None, 0.0)
    shutil.rmtree(own_folder(), ignore_errors=True)
    sys.stdout.flush()
