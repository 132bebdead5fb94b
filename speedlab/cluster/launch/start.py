"""Start processes on this machine and wait until they are ready: a controller with engines, or engines of a running
cluster.

All processes start at once, so that importing torch, the slowest part, overlaps with the start of the controller.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipyparallel
from ipyparallel.serialize.canning import can_map

import speedlab.cluster.files.processes as processes
from speedlab.cluster.agents.registration import EngineRegistration, EngineWatch
from speedlab.cluster.agents.rpc import Calls
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState, EngineEntry
from speedlab.cluster.launch.environment import HEARTBEAT_SECONDS, SILENT_SECONDS, device_fields
from speedlab.cluster.launch.ipyparallel_launchers import DeviceEngineLauncher, DeviceEngineSetLauncher, Fork
from speedlab.cluster.worker.fork_server_client import START_SECONDS, ForkServer, can_fork
from speedlab.config.errors import more_in
from speedlab.hardware import Device
from speedlab.network import reserved_ports

LOCALHOST = "127.0.0.1"
_POLL_SECONDS = 0.02
_LOG_LINES = 12

log = logging.getLogger("speedlab.cluster.ipyparallel")
log.setLevel(logging.CRITICAL)  # ipyparallel logs the end of every process, even if SpeedLab ended it.


def controller_arguments(address: str, ports: Iterable[int]) -> list[str]:
    """Return the command-line arguments of a controller.

    Args:
        address: Address to listen at.
        ports: About twenty ports; the controller uses the first ones. They must be free until it listens: if a
            scheduler's port is taken, its thread ends and the controller continues without it.
    """
    return [
        f"--HeartMonitor.period={round(1000 * HEARTBEAT_SECONDS)}",
        f"--HeartMonitor.max_heartmonitor_misses={round(SILENT_SECONDS / HEARTBEAT_SECONDS)}",
        # Messages are signed, but any user of this host could read them.
        "--IPController.enable_curve=True",
        f"--ip={address}",
        # Otherwise the host's name, which a client tries to resolve.
        f"--location={address}",
        f"--ports={','.join(map(str, ports))}",
        # Schedulers as threads of one process, not as eight processes.
        "--usethreads",
        "--log-level=WARN",
    ]


def start_cluster(
    home: ClusterDir,
    token: str,
    devices: Sequence[Device],
    backend: str,
    link: str,
    timeout_seconds: float,
    nursery: ForkServer,
    cancelled: Callable[[], bool],
) -> tuple[ClusterState, ipyparallel.Client]:
    """Start a controller and one engine per device; return after all are ready and have imported torch.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        devices: Devices by rank.
        backend: Backend of the process group.
        link: Simulated link between engines; "" for none.
        timeout_seconds: Timeout of collectives; 0 for the default.
        nursery: Fork server for CPU engines.
        cancelled: Polled during the start.

    Returns:
        The state of the cluster and a client of its controller.

    Raises:
        ClusterError: If a process does not start (with the end of the logs), or the start was cancelled. No engine is
            left then.
    """
    client = None
    try:
        own = home.environment(token, backend, link, timeout_seconds)
        fork = _fork(nursery, devices, cancelled)
        with reserved_ports() as ports:
            controller_pid, engine_pids = asyncio.run(_launch_all(home, devices, own, fork, ports))
            client = connect_to(home, controller_pid, token)
            engines = _await_engines(home, client, engine_pids, token, cancelled)
        state = ClusterState(
            name=home.name,
            token=token,
            controller_pid=controller_pid,
            started=time.time(),
            devices=tuple(devices),
            engines=tuple(engines),
            backend=backend,
            link=link,
            timeout_seconds=timeout_seconds,
        )
        home.write(state)
        return state, client
    except BaseException:
        if client is not None:
            client.close(linger=0)
        processes.end([found for found in processes.marked(token) if found.pid != os.getpid()], patience_seconds=0.0)
        raise


def _fork(nursery: ForkServer, devices: Sequence[Device], cancelled: Callable[[], bool]) -> Fork | None:
    """Return the function that forks engines, and let the fork server import torch; None if these devices need own
    processes.
    """
    if not can_fork(device.kind for device in devices):
        return None
    nursery.begin(devices[0].threads)
    return functools.partial(nursery.fork, cancelled=cancelled)


def start_engines(
    home: ClusterDir,
    state: ClusterState,
    client: ipyparallel.Client,
    ranks: Iterable[int],
    nursery: ForkServer,
    cancelled: Callable[[], bool],
) -> tuple[EngineEntry, ...]:
    """Start engines for these ranks; return after all are ready.

    Args:
        home: Folder of the cluster.
        state: State of the cluster.
        client: Client of the controller.
        ranks: Ranks to start.
        nursery: Fork server for CPU engines.
        cancelled: Polled during the start.

    Raises:
        ClusterError: As for `start_cluster`. None of these engines is left then.
    """
    pids: dict[int, int] = {}
    fork = _fork(nursery, state.devices, cancelled)

    async def launch() -> None:
        # Inside the coroutine, because a launcher binds to the running event loop.
        for rank in ranks:
            launcher = DeviceEngineLauncher(
                parent=None,
                log=log,
                work_dir=".",
                profile_dir=str(home.path),
                cluster_id=home.name,
                identifier=str(rank),
                devices=device_fields(state.devices),
                rendezvous=str(home.rendezvous),
                environment=home.environment(state.token, state.backend, state.link, state.timeout_seconds),
                output_file=str(home.log / f"engine-{rank}.log"),
                fork=fork,
            )
            launcher.start()
            pids[rank] = launcher.pid

    try:
        asyncio.run(launch())
        return tuple(_await_engines(home, client, pids, state.token, cancelled))
    except BaseException:
        processes.end([process for pid in pids.values() for process in tree(pid, state.token)], patience_seconds=0.0)
        raise


def connect(home: ClusterDir, state: ClusterState) -> ipyparallel.Client:
    """Return a client of the running cluster.

    Args:
        home: Folder of the cluster.
        state: State of the cluster.
    """
    return connect_to(home, state.controller_pid, state.token)


def read_connection(home: ClusterDir) -> dict[str, Any]:
    """Return what a client needs to connect: addresses, ports and the key that signs messages."""
    return json.loads(home.connection_file("client").read_text())


def tree(pid: int, token: str) -> list[Any]:
    """Return the process `pid`, if it belongs to this cluster, and its descendants.

    Args:
        pid: Process id.
        token: Unique id of the cluster.
    """
    found = [process for process in processes.marked(token) if process.pid == pid]
    return [*found, *(child for process in found for child in processes.descendants(process))]


async def _launch_all(
    home: ClusterDir, devices: Sequence[Device], environment: dict[str, str], fork: Fork | None, ports: Iterable[int]
) -> tuple[int, dict[int, int]]:
    """Start all processes; return (process id of the controller, process ids of the engines by rank)."""
    cluster = ipyparallel.Cluster(
        engines=DeviceEngineSetLauncher,
        profile_dir=str(home.path),
        cluster_id=home.name,
        n=len(devices),
        delay=0,
        controller_args=controller_arguments(LOCALHOST, ports),
        send_engines_connection_env=False,
        shutdown_atexit=False,
        load_profile=False,
        parent=None,
        log=log,
    )
    await cluster.start_controller(environment=environment)
    await cluster.start_engines(
        len(devices),
        devices=device_fields(devices),
        rendezvous=str(home.rendezvous),
        environment=dict(environment),
        fork=fork,
    )
    # Keep this file, so that ipyparallel.Cluster.from_file works. Clear its name, so that ipyparallel does not rewrite
    # it when a process ends.
    os.chmod(cluster.cluster_file, 0o600)
    cluster.cluster_file = ""
    launchers = cluster.engine_set.launchers  # pyright: ignore[reportOptionalMemberAccess]  # they were just started
    pid = cluster.controller.pid  # pyright: ignore[reportOptionalMemberAccess]  # likewise
    return pid, {int(identifier): launcher.pid for identifier, launcher in launchers.items()}


async def launch_controller(home: ClusterDir, environment: dict[str, str], address: str, ports: Iterable[int]) -> int:
    """Start a controller without engines; return its process id.

    Args:
        home: Folder of the cluster.
        environment: Environment of the controller.
        address: Address to listen at.
        ports: Free ports, see `controller_arguments`.
    """
    cluster = ipyparallel.Cluster(
        profile_dir=str(home.path),
        cluster_id=home.name,
        controller_args=controller_arguments(address, ports),
        send_engines_connection_env=False,
        shutdown_atexit=False,
        load_profile=False,
        parent=None,
        log=log,
    )
    await cluster.start_controller(environment=environment)
    cluster.cluster_file = ""
    return cluster.controller.pid  # pyright: ignore[reportOptionalMemberAccess]  # it was just started


def connect_to(home: ClusterDir, controller_pid: int, token: str) -> ipyparallel.Client:
    """Wait for a controller and return a client of it.

    Args:
        home: Folder of the cluster.
        controller_pid: Process id of the controller.
        token: Unique id of the cluster.

    Raises:
        ClusterError: If the controller ended or does not answer.
    """

    def read() -> dict[str, Any] | None:
        try:
            return read_connection(home)
        except (FileNotFoundError, json.JSONDecodeError):
            if not processes.is_alive(controller_pid, token):
                raise ClusterError(
                    f"the controller of {home.name!r} ended before it was ready\n{_logs(home)}"
                ) from None
            return None

    # ipyparallel would import numpy at its first message, for arrays. Our messages have none.
    can_map.pop("numpy.ndarray", None)
    connection = _poll(read, START_SECONDS, lambda: f"the controller of {home.name!r} is not ready\n{_logs(home)}")
    try:
        return ipyparallel.Client(connection, profile_dir=str(home.path), timeout=int(START_SECONDS))
    except TimeoutError:
        raise ClusterError(f"the controller of {home.name!r} does not answer\n{_logs(home)}") from None


def _await_engines(
    home: ClusterDir,
    client: ipyparallel.Client,
    pids: dict[int, int],
    token: str,
    cancelled: Callable[[], bool],
) -> list[EngineEntry]:
    """Wait until the engine of each of these ranks has answered."""
    roll, register = EngineRegistration(Calls(client)), EngineWatch(client)
    asked = _busy_elsewhere(home)
    found: dict[int, EngineEntry] = {}

    def ready() -> list[EngineEntry] | None:
        if cancelled():
            raise ClusterError("it was interrupted")
        for rank, pid in pids.items():
            if rank not in found and not processes.is_alive(pid, token):
                raise ClusterError(f"the engine of rank {rank} ended before it was ready\n{_logs(home)}")
        new = register.ids() - asked
        asked.update(new)
        roll.ask(new)
        for who in roll.answers():
            # Compare the process id: an engine of an earlier supervisor may have the same rank.
            if pids.get(who.rank) == who.pid:
                found[who.rank] = EngineEntry(rank=who.rank, pid=who.pid, engine_id=who.engine_id)
        return [found[rank] for rank in sorted(found)] if len(found) == len(pids) else None

    def late() -> str:
        counted = f"the controller counts engines {sorted(register.ids())}"
        return f"only ranks {sorted(found)} of {sorted(pids)} are ready, and {counted}\n{_logs(home)}"

    return _poll(ready, START_SECONDS, late)


def _busy_elsewhere(home: ClusterDir) -> set[int]:
    """Return the ids of known engines. They may be busy for long, so they are not asked."""
    state = home.read()
    return {engine.engine_id for engine in state.engines} if state is not None else set()


def _poll(check: Callable[[], Any], seconds: float, what: Callable[[], str]) -> Any:
    deadline = time.monotonic() + seconds
    while (answer := check()) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"after {seconds:g} s {what()}")
        time.sleep(_POLL_SECONDS)
    return answer


def _logs(home: ClusterDir) -> str:
    """Return the last lines of every log, and where to read more."""
    parts = []
    for path in sorted(home.log.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        if lines:
            parts.append("\n".join([f"{path.name}:", *(f"  {line}" for line in lines)]))
    return "\n".join([*(parts or ["(their logs are empty)"]), more_in("engines")])
