"""Cutting the connections between ranks, so that a rank that waits in native code for a peer comes back to Python.

A rank in a collective whose peer never comes waits inside gloo or NCCL for the group's timeout of minutes. SIGINT is
noticed only afterwards, and gloo cannot be asked to stop. What releases it is the end of the connection, so:

1. The engine blocks SIGUSR2 in all threads but one, which does nothing but wait for it.
2. `Cluster.interrupt` sends SIGUSR2 to a rank that did not come back on SIGINT.
3. That thread shuts down the TCP connections to the processes of the cluster's other ranks, and aborts NCCL's. The
   wait raises, and the interrupt that is due with it.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import speedlab.cluster.launch.rendezvous as host_rendezvous

CUT_SIGNAL = signal.SIGUSR2

log = logging.getLogger("speedlab.cluster")


def start_cutter() -> None:
    """Start the thread that waits for CUT_SIGNAL. Call it before any other thread starts: they inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {CUT_SIGNAL})
    threading.Thread(target=_cut_when_told, name="speedlab-cutter", daemon=True).start()


def _cut_when_told() -> None:
    while True:
        signal.sigwait({CUT_SIGNAL})
        try:
            cut(host_rendezvous.is_meant)
        except (OSError, psutil.Error, RuntimeError, ValueError) as error:
            # The thread must outlive it: the cluster sends the signal again while the rank does not come back.
            log.warning("connections to the other ranks could not be cut: %s", error)


def cut(is_meant: Callable[[], bool] = lambda: True) -> int:
    """End this process's connections to the other ranks, as long as they are those that were meant; returns how
    many."""
    if not is_meant():
        return 0
    _abort_nccl()
    others = _addresses_of_others()
    count = 0
    for connection in psutil.Process().net_connections("tcp"):
        peer = _address(connection.raddr)
        if peer in others and is_meant():
            count += _shut_down(connection.fd, peer)
    return count


def _shut_down(descriptor: int, peer: tuple[str, int]) -> bool:
    """Shut the connection to `peer` down; False when its owner closed it before, woken by the end of another one."""
    try:
        # A duplicate, so that the number stays the owner's to close; and it may be somebody else's number by now.
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.getpeername() != peer:
                return False
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _addresses_of_others() -> set[tuple[str, int]]:
    """Local ends of the TCP connections of the other ranks' processes.

    On a cluster of several hosts, whose processes cannot be looked at from here: the far ends of all connections of
    this process, but those to the controller.
    """
    if "SPEEDLAB_STORE" in os.environ:
        return _far_ends() - _controller_ends()
    state = json.loads((Path(os.environ["SPEEDLAB_RENDEZVOUS"]).parent / "cluster.json").read_text())
    addresses: set[tuple[str, int]] = set()
    for engine in state["engines"]:
        if engine["pid"] == os.getpid():
            continue
        try:
            connections = psutil.Process(engine["pid"]).net_connections("tcp")
        except psutil.NoSuchProcess:
            continue  # Its ends are closed already.
        addresses.update(_address(connection.laddr) for connection in connections if connection.raddr)
    return addresses


def _far_ends() -> set[tuple[str, int]]:
    ends = {_address(connection.raddr) for connection in psutil.Process().net_connections("tcp") if connection.raddr}
    return {end for end in ends if not ipaddress.ip_address(end[0]).is_loopback}


def _controller_ends() -> set[tuple[str, int]]:
    """Where the controller listens for engines."""
    known = json.loads(os.environ["IPP_CONNECTION_INFO"])
    address = known["interface"].partition("://")[2]
    return {(address, port) for value in known.values() for port in _numbers(value)}


def _numbers(value: Any) -> list[int]:
    """Ports in an entry of the connection's description: one, or several."""
    found = value if isinstance(value, list) else [value]
    return [port for port in found if isinstance(port, int)]


def _address(end: Any) -> tuple[str, int]:
    """psutil's address of one end; ('', 0) where there is none, as the far end of a listening socket."""
    return (end.ip, end.port) if end else ("", 0)


def _abort_nccl() -> None:
    """NCCL's ranks talk through shared memory and NVLink, too, but it can be asked to stop."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if "nccl" in distributed.get_backend_config():
        distributed.distributed_c10d._abort_process_group()
