"""The end of a cluster for whoever has no handle of it, as a page: a start is given up, a running one stopped, what is
left of a dead one removed. `Cluster.stop` and `Cluster.start` share what ends processes."""

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
"""How long processes may take to end by themselves before they are killed."""
CANCEL_SECONDS = 60.0
"""How long a supervisor may take to give back what a start has begun: hosts are told one after another."""
_STOP_SECONDS = 15.0
STOP_HOSTS_SECONDS = 60.0


class NotStartingError(ClusterError):
    """Nobody starts the cluster, at least nobody who can be asked to leave it."""


def stop_seconds(state: ClusterState) -> float:
    """How long a supervisor may take to answer Stop."""
    return STOP_HOSTS_SECONDS if state.hosts else _STOP_SECONDS


def end_processes(home: ClusterDir, patience_seconds: float) -> None:
    """End whatever runs of the cluster that was begun last. Raises ClusterError where something stays."""
    token = home.token
    if token is None:
        return
    left = processes.end(processes.marked(token), patience_seconds=patience_seconds)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise ClusterError(f"processes {pids} cannot be ended; they may wait for a device or a disk")


def cancel_start(home: ClusterDir) -> None:
    """Give up a start that is under way, a place in a queue with it; whoever waits for it gets a ClusterError. Returns
    when nothing of it is left. Raises NotStartingError, and ClusterError once the cluster is ready, or where its
    supervisor is of another version: only that knows what it has begun on hosts."""
    token = home.token
    try:
        channel = connect(home.supervisor_socket, m.FromSupervisor)
    except OSError:
        raise NotStartingError(
            f"nobody starts cluster {home.name!r} any more; what is left of it can be removed"
        ) from None
    try:
        channel.send(m.Hello())
        deadline = time.monotonic() + CANCEL_SECONDS
        answer = _next(channel, deadline)
        if isinstance(answer, m.Progress):  # Not before: one that refuses the greeting reads nothing behind it.
            channel.send(m.Cancel(call=0))
        while isinstance(answer, m.Progress):
            answer = _next(channel, deadline)
        if isinstance(answer, m.Welcome):
            raise ClusterError(f"cluster {home.name!r} has just become ready; stop it instead")
        if isinstance(answer, m.Refused) and isinstance(error := error_of(answer), OtherVersionError):
            raise error
    except ChannelClosedError:
        pass  # It has ended, and given back what it had begun.
    finally:
        channel.close()
    # Whoever waits for the start holds the lock until it has cleaned up; it may be gone, as a kernel.
    with home.lock():
        if home.token == token and home.read() is None:
            end_processes(home, 0.0)
            home.remove()


def _next(channel: Channel, deadline: float) -> Any:
    if not channel.ready(max(0.0, deadline - time.monotonic())):
        raise ClusterError(f"the supervisor has not given up the start within {CANCEL_SECONDS:g} s; try again")
    return channel.receive()


def stop(home: ClusterDir, token: str) -> None:
    """End the running cluster with this token as `Cluster.stop` does. Does nothing where another one has its name by
    now. Raises ClusterError for one on several hosts whose supervisor has ended: only that gives hosts back."""
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
    """Remove the folder of a cluster that does not run, and end what is left of its processes. Raises ClusterError
    where it runs, or something stays, and OSError."""
    with home.lock():
        try:
            state = home.read()
        except ClusterError:
            state = None  # A damaged one is to be removed just as well.
        if state is not None and state.running:
            raise ClusterError(f"cluster {home.name!r} runs; stop it instead")
        end_processes(home, STOP_PATIENCE_SECONDS)
        home.remove()
