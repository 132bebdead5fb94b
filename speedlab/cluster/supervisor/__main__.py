"""The process of a supervisor: `python -m speedlab.cluster.supervisor ROOT NAME`, started by `spawn.py`.

Its environment holds the cluster's token; what it is to start comes as JSON on its input, nothing when it takes over.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import Home
from speedlab.cluster.processes import TOKEN
from speedlab.cluster.supervisor.channel import listen

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.supervisor import Begin

_LOCK_SECONDS = 5.0
"""A rank that looks whether a supervisor is there holds the lock for a moment."""


def main() -> None:
    """Supervise the cluster until it ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A Ctrl-C is its clients' to hear.
    home = Home(sys.argv[2], Path(sys.argv[1]))
    lock = _locked(home.supervisor_lock)
    listening = listen(home.supervisor_socket)
    asked = json.load(sys.stdin)

    # What follows imports ipyparallel, which takes a while: clients can already connect, and wait.
    from speedlab.cluster.supervisor.server import Server
    from speedlab.cluster.supervisor.supervisor import Supervisor

    supervisor = Supervisor(home, os.environ[TOKEN])
    server = Server(listening, supervisor)
    try:
        supervisor.serve(server, _what_was_asked(home, asked))
    except ClusterError as error:
        logging.getLogger("speedlab.supervisor").error("%s", error)
        sys.exit(1)
    finally:
        os.close(lock)


def _what_was_asked(home: Home, asked: dict[str, Any] | None) -> Begin:
    from speedlab.cluster.supervisor.supervisor import find, start_here
    from speedlab.hardware import Device

    token = os.environ[TOKEN]
    if asked is None:
        return find(home)
    if "spec" in asked:
        from speedlab.cluster.supervisor.hands_on_hosts import start_on_hosts

        return functools.partial(start_on_hosts, home, token, asked)
    devices = [Device(**{**device, "cores": tuple(device["cores"])}) for device in asked["devices"]]
    return start_here(home, token, devices, asked["backend"], asked["link"])


def _locked(path: Path) -> int:
    """The lock that says that a supervisor is there; it is the system's, and goes with this process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                sys.exit(f"{path}: the cluster has a supervisor")
            time.sleep(0.02)


if __name__ == "__main__":
    main()
