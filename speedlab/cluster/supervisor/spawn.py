"""Starting a supervisor, and connecting to the one that is there."""

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
    """Whoever waits for a start: `progress` hears what it waits for, `given_up` says whether nobody wants it any
    more."""

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
    """Start a cluster in its new folder, by starting its supervisor. Raises ClusterError when it does not come up."""
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
    """As `start`, on the hosts of `spec`."""
    asked = {
        "spec": fields_of(spec),
        "device": device,
        "backend": backend,
        "timeout_seconds": timeout_seconds,
        "interface": interface,
    }
    return _spawned(home, token, asked, printed, waiting)


def connect(home: ClusterDir, token: str, printed: Printed) -> Client:
    """A connection to the supervisor of a cluster that runs; where that has ended, to a new one, which takes over. The
    caller holds the home's lock. Raises ClusterError."""
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
    # Takes it off the system's list once it has ended; it outlives this process otherwise.
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
