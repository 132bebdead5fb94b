"""Find and end the processes of a cluster, by the cluster's token in their environment, which child processes inherit.

A process is never identified by its name alone.
"""

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
"""Module of an engine's process, unless the engine is a fork of the fork server."""
NURSERY_MODULE = "speedlab.cluster.worker.fork_server"
SUPERVISOR_MODULE = "speedlab.cluster.supervisor"

_Result = TypeVar("_Result")

_ENGINE_NAME, _NURSERY_NAME, _NANNY_NAME = "sl-rank-", "sl-nursery", "sl-nanny"
_PR_SET_NAME, _NAME_BYTES = 15, 15
"""Constants of prctl(2): the option, and the maximum length of a process name."""

_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_YOUNG_SECONDS = 3.0
_LOADING_SECONDS = 0.1
"""How long to wait for the environment of a young process: it has none while its program is loaded."""
_KERNEL_THREADS = 2
"""Parent of kernel threads, which never have an environment."""


def is_alive(pid: int, token: str) -> bool:
    """Return whether `pid` is a running process of the cluster; a zombie or a reused id is not.

    Args:
        pid: Process id.
        token: Unique id of the cluster.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        environment = process.environ()
        if not environment:  # The process has just started, and its environment cannot be read yet.
            return time.time() - process.create_time() < _YOUNG_SECONDS
        return environment.get(TOKEN) == token
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def is_suspended(pid: int) -> bool:
    """Return whether the process was stopped by a signal and not ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def marked(token: str) -> list[psutil.Process]:
    """Return every process of a cluster, and all descendants.

    Args:
        token: Unique id of the cluster.
    """
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
            continue  # The process has ended or belongs to another user.
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
    """Name this process as the engine of `rank`, because a fork keeps the command of the fork server."""
    _name(f"{_ENGINE_NAME}{rank}")


def name_fork_server() -> None:
    """Name this process as the fork server; its forks keep the name until they have their own."""
    _name(_NURSERY_NAME)


def name_nanny() -> None:
    """Name this process as the nanny of an engine."""
    _name(_NANNY_NAME)


def _name(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES], 0, 0, 0)


def engines(token: str) -> list[psutil.Process]:
    """Return the engine processes of the cluster.

    A child of an engine has the same token, and a fork also the same command and name. It is left out while its parent
    lives.

    Args:
        token: Unique id of the cluster.
    """
    found = {process.pid: process for process in _with_mark(token) if _is_engine(process)}
    return [process for process in found.values() if _parent_of(process) not in found]


def rank_of(engine: psutil.Process) -> int | None:
    """Return the rank as which an engine was started; None if a program has changed the name.

    Raises:
        psutil.NoSuchProcess: If the engine has ended.
    """
    named, _, rank = engine.name().rpartition("-")
    if named == _ENGINE_NAME[:-1] and rank.isdigit():
        return int(rank)
    own = engine.environ().get("RANK")  # An engine without a fork server has no name in its first moments.
    return int(own) if own is not None else None


def fork_servers(token: str) -> list[psutil.Process]:
    """Return the fork servers of the cluster, and forks that are not engines yet.

    Args:
        token: Unique id of the cluster.
    """
    found = []
    for process in _with_mark(token):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == _NURSERY_NAME:
                found.append(process)
    return found


def _is_engine(process: psutil.Process) -> bool:
    """Return whether a process is an engine: by its command, or by its name and its own session.

    DataLoader workers are in the session of the engine that forked them, and any program can change its name.
    """
    try:
        command = process.cmdline()
        # Check in this order: a nanny gets its name before its session.
        leads = os.getsid(process.pid) == process.pid
        is_fork = NURSERY_MODULE in command and process.name() not in (_NURSERY_NAME, _NANNY_NAME)
        return ENGINE_MODULE in command or (is_fork and leads)
    except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
        return False


def of_host(token: str, started_by: Iterable[str]) -> list[psutil.Process]:
    """Return the processes of the cluster on a host of its engines.

    If supervisor and controller run on the same host, only what processes of `started_by` have started.

    Args:
        token: Unique id of the cluster.
        started_by: Modules of the processes.
    """
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
    """Return all descendants of a process, even with another environment."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(found: Iterable[psutil.Process], *, patience_seconds: float) -> list[psutil.Process]:
    """End processes: SIGTERM, wait, then SIGKILL.

    A zombie counts as ended: its memory and devices are free, and only its parent can reap it.

    Args:
        found: Processes.
        patience_seconds: Time between SIGTERM and SIGKILL; 0 for SIGKILL at once.

    Returns:
        Processes that still run; normally none.
    """
    left = list(found)
    if patience_seconds > 0:
        _signal(left, signal.SIGTERM)
        left = _wait_for_end(left, patience_seconds)
    _signal(left, signal.SIGKILL)
    return _wait_for_end(left, _KILL_SECONDS)


def uninterrupted(work: Callable[[], _Result]) -> _Result:
    """Run `work` to its end on a separate thread; raise a KeyboardInterrupt afterwards.

    So no process is started, changed or ended without being recorded.

    Args:
        work: Function without arguments.

    Returns:
        The result of `work`.
    """
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
            continue  # The process has ended already.


def _wait_for_end(found: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := [process for process in found if _is_running(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        # is_running() also detects a reused process id.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
