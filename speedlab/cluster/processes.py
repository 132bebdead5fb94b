"""Processes of a cluster, known by the cluster's token in their environment, which whatever they start inherits.

A process is found, checked and ended by that mark, never by its name."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

TOKEN = "SPEEDLAB_CLUSTER_TOKEN"
"""Environment variable with the token."""

_Result = TypeVar("_Result")

_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_YOUNG_SECONDS = 3.0


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


def marked(token: str) -> list[psutil.Process]:
    """Every process of the cluster with this token, children and their children included."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token:
                found[process.pid] = process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # Gone meanwhile, or somebody else's: not ours either way.
    for process in list(found.values()):
        found.update({child.pid: child for child in descendants(process)})
    return list(found.values())


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
