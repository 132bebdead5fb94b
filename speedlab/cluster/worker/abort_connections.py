"""Abort connections between ranks, so that a rank that waits in native code for a peer returns to Python.

A rank in a collective with a missing peer waits inside gloo or NCCL for the group's timeout of minutes. SIGINT is
noticed only afterwards, and gloo has no call to stop a wait. The end of the connection ends the wait:

1. The engine blocks SIGUSR2 in all threads except one, which only waits for it.
2. `Cluster.interrupt` sends SIGUSR2 to a rank that did not stop after SIGINT.
3. That thread shuts down the TCP connections to the processes of the other ranks, and aborts NCCL. The wait raises, and
   the pending interrupt is delivered.
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
    """Start the thread that waits for CUT_SIGNAL. Call it before any other thread starts, because threads inherit the
    signal mask.
    """
    # sigwait receives only blocked signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {CUT_SIGNAL})
    threading.Thread(target=_cut_when_reported, name="speedlab-cutter", daemon=True).start()


def _cut_when_reported() -> None:
    while True:
        signal.sigwait({CUT_SIGNAL})
        try:
            cut(host_rendezvous.is_meant)
        except (OSError, psutil.Error, RuntimeError, ValueError) as error:
            # The thread must survive errors: the cluster sends the signal again while the rank does not stop.
            log.warning("connections to the other ranks could not be cut: %s", error)


def cut(is_meant: Callable[[], bool] = lambda: True) -> int:
    """End this process's connections to the other ranks.

    Args:
        is_meant: Polled: whether the signal is still for the current work.

    Returns:
        Number of connections that were ended.
    """
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
    """Shut down the connection to `peer`; return False if its owner has closed it already."""
    try:
        # Duplicate the descriptor, because its owner closes the original. Check the peer, because the number may be
        # reused.
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.getpeername() != peer:
                return False
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _addresses_of_others() -> set[tuple[str, int]]:
    """Return the local ends of the TCP connections of the other ranks' processes.

    In a cluster of several hosts, other processes cannot be inspected. Then return the far ends of all connections of
    this process, except those to the controller.
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
            continue  # The process has ended, so its connections are closed.
        addresses.update(_address(connection.laddr) for connection in connections if connection.raddr)
    return addresses


def _far_ends() -> set[tuple[str, int]]:
    ends = {_address(connection.raddr) for connection in psutil.Process().net_connections("tcp") if connection.raddr}
    return {end for end in ends if not ipaddress.ip_address(end[0]).is_loopback}


def _controller_ends() -> set[tuple[str, int]]:
    """Return the addresses at which the controller listens for engines."""
    known = json.loads(os.environ["IPP_CONNECTION_INFO"])
    address = known["interface"].partition("://")[2]
    return {(address, port) for value in known.values() for port in _numbers(value)}


def _numbers(value: Any) -> list[int]:
    """Return the ports in an entry of the connection file: one or several."""
    found = value if isinstance(value, list) else [value]
    return [port for port in found if isinstance(port, int)]


def _address(end: Any) -> tuple[str, int]:
    """Return psutil's address of one end; ('', 0) without one, such as the far end of a listening socket."""
    return (end.ip, end.port) if end else ("", 0)


def _abort_nccl() -> None:
    """Abort NCCL, which also communicates over shared memory and NVLink."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if "nccl" in distributed.get_backend_config():
        distributed.distributed_c10d._abort_process_group()
