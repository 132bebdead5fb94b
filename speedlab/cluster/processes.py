"""Processes of a cluster, known by the cluster's token in their environment, which whatever they start inherits.

A process is found, checked and ended by that mark, never by its name alone."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

TOKEN = "SPEEDLAB_CLUSTER_TOKEN"
"""Environment variable with the token."""

ENGINE_MODULE = "speedlab.cluster.engine_process"
"""What an engine's process runs."""
SUPERVISOR_MODULE = "speedlab.cluster.supervisor"

_Result = TypeVar("_Result")

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
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if _environment(process).get(TOKEN) == token:
                found[process.pid] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # Gone meanwhile, or somebody else's: not ours either way.
    for process in list(found.values()):
        found.update({child.pid: child for child in descendants(process)})
    return list(found.values())


def _environment(process: psutil.Process) -> dict[str, str]:
    deadline = time.monotonic() + _LOADING_SECONDS
    while not (environment := process.environ()):
        old = time.time() - process.create_time() > _YOUNG_SECONDS
        if old or process.ppid() == _KERNEL_THREADS or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return environment


def engines(token: str) -> list[psutil.Process]:
    """The engines' processes of the cluster with this token. Whatever they started is marked as they are; what was
    forked from one also has its command, and is left out as long as its parent lives."""
    found = {process.pid: process for process in marked(token) if _command_has(process, ENGINE_MODULE)}
    return [process for process in found.values() if _parent_of(process) not in found]


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
