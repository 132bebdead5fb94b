"""Start a supervisor, or connect to a running one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import speedlab.cluster.files.processes as processes
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab.cluster.launch.environment import device_fields
from speedlab.cluster.launch.host_specs import Spec, fields_of
from speedlab.cluster.supervisor.client import Client, SupervisorGoneError
from speedlab.config.errors import more_in
from speedlab.hardware import Device

_LISTEN_SECONDS = 30.0
_POLL_SECONDS = 0.01
_LOG_LINES = 12

Printed = Callable[[list[int], str, str], object]


@dataclass(frozen=True, kw_only=True)
class StartWaiter:
    """The user's side of a start: `progress` receives what the start waits for, `given_up` returns True to
    cancel it.
    """

    progress: Callable[[str], object] = lambda words: None
    given_up: Callable[[], bool] = lambda: False


def start(
    home: ClusterDir,
    token: str,
    devices: Sequence[Device],
    backend: str,
    link: str,
    timeout_seconds: float,
    printed: Printed,
    waiting: StartWaiter,
) -> Client:
    """Start a cluster on this host, in its new folder, by starting its supervisor.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        devices: Devices by rank.
        backend: Backend of the process group.
        link: Simulated link between CPU engines; "" for none.
        timeout_seconds: Timeout of collectives; 0 for the default.
        printed: Called with (ranks, stream, text).
        waiting: Progress and cancellation.

    Returns:
        A connection to the supervisor; the engines are ready.

    Raises:
        ClusterError: If the cluster does not start.
    """
    asked = {
        "devices": device_fields(devices),
        "backend": backend,
        "link": link,
        "timeout_seconds": timeout_seconds,
    }
    return _spawned(home, token, asked, printed, waiting)


def start_on_hosts(
    home: ClusterDir,
    token: str,
    spec: Spec,
    *,
    device: str,
    backend: str,
    timeout_seconds: float,
    interface: str,
    printed: Printed,
    waiting: StartWaiter,
) -> Client:
    """Start a cluster on the hosts of `spec`; see `start`.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        spec: Hosts and how to reach them.
        device: 'cuda', 'cpu' or 'auto'.
        backend: Backend of the process group.
        timeout_seconds: Timeout of collectives; 0 for the default.
        interface: Network interface of the hosts; "" for the one that leads here.
        printed: Called with (ranks, stream, text).
        waiting: Progress and cancellation.

    Raises:
        ClusterError: If the cluster does not start.
    """
    asked = {
        "spec": fields_of(spec),
        "device": device,
        "backend": backend,
        "timeout_seconds": timeout_seconds,
        "interface": interface,
    }
    return _spawned(home, token, asked, printed, waiting)


def connect(home: ClusterDir, token: str, printed: Printed) -> Client:
    """Connect to the supervisor of a running cluster; start a new supervisor if it has ended. Hold the cluster's lock.

    Args:
        home: Folder of the cluster.
        token: Unique id of the cluster.
        printed: Called with (ranks, stream, text).

    Raises:
        ClusterError: If the supervisor does not start.
    """
    try:
        return Client(home.supervisor_socket, printed)
    except SupervisorGoneError:
        return _spawned(home, token, None, printed, StartWaiter())


def _spawned(
    home: ClusterDir,
    token: str,
    asked: dict[str, object] | None,
    printed: Printed,
    waiting: StartWaiter,
) -> Client:
    with open(home.log / "supervisor.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", processes.SUPERVISOR_MODULE, str(home.root), home.name],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, processes.TOKEN: token},
        )
    # Reap the process after its end, so that it is no zombie; usually it outlives this process.
    threading.Thread(target=process.wait, name="speedlab-reaper", daemon=True).start()
    assert process.stdin is not None
    with process.stdin as given:
        given.write(json.dumps(asked).encode())
    deadline = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            return Client(home.supervisor_socket, printed, waiting.progress, waiting.given_up)
        except SupervisorGoneError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the supervisor of {home.name!r} did not come up\n{_last_lines(home)}") from None
        time.sleep(_POLL_SECONDS)


def _last_lines(home: ClusterDir) -> str:
    lines = (home.log / "supervisor.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([*(f"  {line}" for line in lines), more_in("engines")])
