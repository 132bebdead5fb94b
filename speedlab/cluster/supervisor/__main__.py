"""Process of a supervisor: `python -m speedlab.cluster.supervisor ROOT NAME`, started by `spawn.py`.

The environment holds the token of the cluster. The standard input holds, as JSON, what to start; null to take over.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab.cluster.files.file_locks import hold
from speedlab.cluster.files.processes import TOKEN
from speedlab.cluster.supervisor.channel import listen

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.supervisor import Begin

_LOCK_SECONDS = 5.0
"""A rank that checks for a supervisor holds the lock for a moment."""


def main() -> None:
    """Supervise the cluster until it ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the clients.
    home = ClusterDir(sys.argv[2], Path(sys.argv[1]))
    lock = _locked(home.supervisor_lock)
    listening = listen(home.supervisor_socket)
    asked = json.load(sys.stdin)
    begin = _what_was_asked(home, asked)

    # These imports load ipyparallel, which is slow. Clients can already connect and wait.
    from speedlab.cluster.supervisor.server import Server
    from speedlab.cluster.supervisor.supervisor import Supervisor

    supervisor = Supervisor(home, os.environ[TOKEN])
    server = Server(listening, supervisor)
    try:
        supervisor.serve(server, begin)
    except ClusterError as error:
        logging.getLogger("speedlab.supervisor").error("%s", error)
        sys.exit(1)
    finally:
        os.close(lock)


def _what_was_asked(home: ClusterDir, asked: dict[str, Any] | None) -> Begin:
    from speedlab.cluster.worker.fork_server_client import ForkServer, can_fork
    from speedlab.hardware import Device

    token = os.environ[TOKEN]
    if asked is None:
        from speedlab.cluster.supervisor.supervisor import find

        return find(home)
    if "spec" in asked:
        from speedlab.cluster.supervisor.host_process_control import start_on_hosts

        return functools.partial(start_on_hosts, home, token, asked)
    devices = [Device(**{**device, "cores": tuple(device["cores"])}) for device in asked["devices"]]
    between = asked["backend"], asked["link"], asked["timeout_seconds"]
    environment = home.environment(token, *between)
    nursery = ForkServer({**os.environ, **environment}, home.nursery_log)
    if can_fork(device.kind for device in devices):
        nursery.begin(devices[0].threads)  # The fork server imports torch while this process imports ipyparallel.
    from speedlab.cluster.supervisor.supervisor import start_here

    return start_here(home, token, devices, *between, nursery)


def _locked(path: Path) -> int:
    """Return the lock that marks a running supervisor. The lock ends with this process."""
    try:
        return hold(path, _LOCK_SECONDS)
    except TimeoutError:
        sys.exit(f"{path}: the cluster has a supervisor")


if __name__ == "__main__":
    main()
