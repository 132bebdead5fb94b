"""End a cluster without a handle, for example from a web page: cancel a start, stop it, or remove the rest of a dead
one.

`Cluster.stop` and `Cluster.start` use `end_processes`, too.
"""

from __future__ import annotations

import time
from typing import Any

import speedlab.cluster.files.processes as processes
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor.channel import Channel, ChannelClosedError, connect
from speedlab.cluster.supervisor.client import Client, OtherVersionError, SupervisorGoneError, error_of

STOP_PATIENCE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL."""
CANCEL_SECONDS = 60.0
"""Time limit for a supervisor to undo a start: it contacts hosts one after the other."""
_STOP_SECONDS = 15.0
STOP_HOSTS_SECONDS = 60.0


class NotStartingError(ClusterError):
    """No process starts the cluster, or it cannot be asked to cancel the start."""


def stop_seconds(state: ClusterState) -> float:
    """Return the time limit in seconds for a supervisor to answer Stop."""
    return STOP_HOSTS_SECONDS if state.hosts else _STOP_SECONDS


def end_processes(home: ClusterDir, patience_seconds: float) -> None:
    """End all processes of the last cluster in this folder.

    Args:
        home: Folder of the cluster.
        patience_seconds: Time between SIGTERM and SIGKILL.

    Raises:
        ClusterError: If a process cannot be ended.
    """
    token = home.token
    if token is None:
        return
    left = processes.end(processes.marked(token), patience_seconds=patience_seconds)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise ClusterError(f"processes {pids} cannot be ended; they may wait for a device or a disk")


def cancel_start(home: ClusterDir) -> None:
    """Cancel a start in progress, including its position in a queue; return when nothing of it is left.

    Callers that wait for the start get a ClusterError.

    Args:
        home: Folder of the cluster.

    Raises:
        NotStartingError: If no supervisor is starting the cluster.
        ClusterError: If the cluster has become ready, or its supervisor has another version: only that knows what it
            started on hosts.
    """
    token = home.token
    try:
        channel = connect(home.supervisor_socket, m.FromSupervisor)
    except OSError:
        raise NotStartingError(
            f"no process starts cluster {home.name!r} any more; what is left of it can be removed"
        ) from None
    try:
        channel.send(m.Hello())
        deadline = time.monotonic() + CANCEL_SECONDS
        answer = _next(channel, deadline)
        if isinstance(answer, m.Progress):  # Only now: a supervisor that refuses the greeting reads no further message.
            channel.send(m.Cancel(call=0))
        while isinstance(answer, m.Progress):
            answer = _next(channel, deadline)
        if isinstance(answer, m.Welcome):
            raise ClusterError(f"cluster {home.name!r} has just become ready; stop it instead")
        if isinstance(answer, m.Refused) and isinstance(error := error_of(answer), OtherVersionError):
            raise error
    except ChannelClosedError:
        pass  # The supervisor has ended, and has undone the start.
    finally:
        channel.close()
    # A process that waits for the start holds the lock while it cleans up. It may have ended, such as a kernel.
    with home.lock():
        if home.token == token and home.read() is None:
            end_processes(home, 0.0)
            home.remove()


def _next(channel: Channel, deadline: float) -> Any:
    if not channel.ready(max(0.0, deadline - time.monotonic())):
        raise ClusterError(f"the supervisor has not given up the start within {CANCEL_SECONDS:g} s; try again")
    return channel.receive()


def stop(home: ClusterDir, token: str) -> None:
    """End the running cluster with this token, as `Cluster.stop` does; do nothing if another cluster has the name now.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.

    Raises:
        ClusterError: If the cluster has several hosts and its supervisor has ended: only a supervisor can return hosts.
    """
    with home.lock():
        state = home.read()
        if state is None or state.token != token:
            return
        if state.running:
            _ask_to_stop(home, state)
        end_processes(home, STOP_PATIENCE_SECONDS)
        home.remove()


def _ask_to_stop(home: ClusterDir, state: ClusterState) -> None:
    try:
        client = Client(home.supervisor_socket, lambda ranks, stream, text: None)
        try:
            client.ask(m.Stop(), seconds=stop_seconds(state))
        finally:
            client.close()
    except (SupervisorGoneError, ClusterError, TimeoutError) as error:
        if state.hosts:
            raise ClusterError(
                f"cluster {home.name!r} was not stopped: {error}. Only its supervisor gives hosts back; from a "
                f"notebook, speedlab.Cluster.attach({home.name!r}).stop() starts another one for that"
            ) from None


def remove(home: ClusterDir) -> None:
    """Remove the folder of a cluster that does not run, and end its remaining processes.

    Args:
        home: Folder of the cluster.

    Raises:
        ClusterError: If the cluster runs, or a process cannot be ended.
        OSError: If the folder cannot be removed.
    """
    with home.lock():
        try:
            state = home.read()
        except ClusterError:
            state = None  # A damaged folder is removed, too.
        if state is not None and state.running:
            raise ClusterError(f"cluster {home.name!r} runs; stop it instead")
        end_processes(home, STOP_PATIENCE_SECONDS)
        home.remove()
