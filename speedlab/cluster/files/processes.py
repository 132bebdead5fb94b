"""Processes of a cluster, known by the cluster's token in their environment, which whatever they start inherits.

A process is found, checked and ended by that mark, never by its name alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

TOKEN = "SPEEDLAB_CLUSTER_TOKEN"
"""Environment variable with the token."""

ENGINE_MODULE = "speedlab.cluster.worker.process"
"""What an engine's process runs, unless it is a fork of the next one."""
NURSERY_MODULE = "speedlab.cluster.worker.fork_server"
SUPERVISOR_MODULE = "speedlab.cluster.supervisor"

_Result = TypeVar("_Result")

_ENGINE_NAME, _NURSERY_NAME, _NANNY_NAME = "sl-rank-", "sl-nursery", "sl-nanny"
_PR_SET_NAME, _NAME_BYTES = 15, 15
"""Of prctl(2), and how long the name of a process may be."""

_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_YOUNG_SECONDS = 3.0
_LOADING_SECONDS = 0.1
"""How long the environment of a young process is waited for: while its program is being loaded it has none."""
_KERNEL_THREADS = 2
"""The process whose children are threads of the kernel, which never have an environment."""


def is_alive(pid: int, token: str) -> bool:
    """Whether `pid` is a running process of the cluster with this token; a zombie or a reused number is not."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        environment = process.environ()
        if not environment:  # It has only just been started, and its environment cannot be read yet.
            return time.time() - process.create_time() < _YOUNG_SECONDS
        return environment.get(TOKEN) == token
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def is_suspended(pid: int) -> bool:
    """Whether the process was stopped by a signal, and not ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def marked(token: str) -> list[psutil.Process]:
    """Every process of the cluster with this token, children and their children included."""
    found = {process.pid: process for process in _with_mark(token)}
    for process in list(found.values()):
        found.update({child.pid: child for child in descendants(process)})
    return list(found.values())


def _with_mark(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if _environment(process).get(TOKEN) == token:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # Gone meanwhile, or somebody else's: not ours either way.
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    deadline = time.monotonic() + _LOADING_SECONDS
    while not (environment := process.environ()):
        old = time.time() - process.create_time() > _YOUNG_SECONDS
        if old or process.ppid() == _KERNEL_THREADS or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return environment


def name_engine(rank: int) -> None:
    """Let this process be listed as the engine of `rank`: a fork has the command of what it was forked off."""
    _name(f"{_ENGINE_NAME}{rank}")


def name_fork_server() -> None:
    """Let this process be listed as what engines are forked off; its forks have the name until they have their own."""
    _name(_NURSERY_NAME)


def name_nanny() -> None:
    """Let this process be listed as what watches an engine that it was forked off."""
    _name(_NANNY_NAME)


def _name(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def engines(token: str) -> list[psutil.Process]:
    """The engines' processes of the cluster with this token. Whatever they started is marked as they are; what was
    forked from one also has its command and name, and is left out as long as its parent lives."""
    found = {process.pid: process for process in _with_mark(token) if _is_engine(process)}
    return [process for process in found.values() if _parent_of(process) not in found]


def rank_of(engine: psutil.Process) -> int | None:
    """As which rank it was started; None where a program that it runs has taken its name. Raises
    psutil.NoSuchProcess."""
    named, _, rank = engine.name().rpartition("-")
    if named == _ENGINE_NAME[:-1] and rank.isdigit():
        return int(rank)
    own = engine.environ().get("RANK")  # It was started by itself, a moment ago.
    return int(own) if own is not None else None


def fork_servers(token: str) -> list[psutil.Process]:
    """What engines of the cluster with this token are forked off, and forks that have not taken their place yet."""
    found = []
    for process in _with_mark(token):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == _NURSERY_NAME:
                found.append(process)
    return found


def _is_engine(process: psutil.Process) -> bool:
    """By its name, or its command and its own session: workers of a DataLoader are in that of the engine that they were
    forked off, and any program may change the name that it runs under."""
    try:
        command = process.cmdline()
        # In this order: a nanny has its name before it has its session.
        leads = os.getsid(process.pid) == process.pid
        is_fork = NURSERY_MODULE in command and process.name() not in (_NURSERY_NAME, _NANNY_NAME)
        return ENGINE_MODULE in command or (is_fork and leads)
    except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
        return False


def of_host(token: str, started_by: Iterable[str]) -> list[psutil.Process]:
    """What runs of the cluster on a host of its engines: all that is marked; but where the cluster's own side
    (supervisor and controller) is on the same host, only what processes of these modules have started."""
    found = marked(token)
    if not any(_command_has(process, SUPERVISOR_MODULE) for process in found):
        return found
    roots = [process for process in found if any(_command_has(process, module) for module in started_by)]
    wanted = {process.pid for process in roots} | {child.pid for root in roots for child in descendants(root)}
    return [process for process in found if process.pid in wanted]


def _command_has(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Children of `process` and theirs, also those with another environment."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(found: Iterable[psutil.Process], *, patience_seconds: float) -> list[psutil.Process]:
    """End processes: ask, wait `patience_seconds`, then kill. Returns those that are still there, normally none.

    A zombie counts as ended: its memory and devices are free, and only its parent, or init, can take it off the list.
    """
    left = list(found)
    if patience_seconds > 0:
        _signal(left, signal.SIGTERM)
        left = _wait_for_end(left, patience_seconds)
    _signal(left, signal.SIGKILL)
    return _wait_for_end(left, _KILL_SECONDS)


def uninterrupted(work: Callable[[], _Result]) -> _Result:
    """Run `work` to its end, on a thread of its own. A KeyboardInterrupt that comes meanwhile is raised afterwards, so
    that no process is started, changed or ended without being counted."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="speedlab-processes")
    thread.start()
    interrupt: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as asked:
            interrupt = asked
    if errors:
        raise errors[0]
    if interrupt is not None:
        raise interrupt
    return results[0]


def _signal(found: list[psutil.Process], number: signal.Signals) -> None:
    for process in found:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue  # It ended by itself.


def _wait_for_end(found: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := [process for process in found if _is_running(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        # is_running() also tells a process from a later one of the same number.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
