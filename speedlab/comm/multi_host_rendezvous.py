"""Rendezvous of ranks on several hosts: a store on rank 0, and a test of every path between hosts.

1. Rank 0 listens at SPEEDLAB_STORE ("host=address:port"), on that address only, and serves the store until its process
   ends. Each generation of the world uses its own keys.
2. The other ranks connect. They wait if nothing listens yet, because rank 0 may start later; other errors fail at once.
3. Every rank publishes its host. Then the first rank of each host listens on a port of its interface
   (GLOO_SOCKET_IFNAME, or the route to the store), tries the ports of all other hosts, and publishes the results.
4. All ranks read all results, and raise MeetingFailed together if a path is blocked. gloo would wait for minutes and
   name neither host nor port.

All waits poll in Python, so that interrupts are handled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from speedlab.comm.errors import MeetingFailed
from speedlab.network import Endpoint, address_of, interface_towards, listen, try_to_reach

STORE = "SPEEDLAB_STORE"
"""Environment variable: endpoint of rank 0's store. Without it, ranks meet in a file of a shared folder."""
HOST = "SPEEDLAB_HOST"
"""Environment variable: the name of this rank's host."""

SILENCE_SECONDS = 20.0
"""How long a connection to another host may be silent before it counts as broken."""

_POLL_SECONDS = 0.01
_MOST_NAMED = 8

_served: dict[Endpoint, Any] = {}
"""Stores of this process, which live until it ends."""


def own_host() -> str:
    """Return the name of this rank's host."""
    return os.environ.get(HOST) or socket.gethostname()


def meet(place: Endpoint, rank: int, size: int, prefix: str, timeout_seconds: float) -> Any:
    """Connect to the store after all ranks have arrived and all paths between hosts are open. Collective.

    Args:
        place: Endpoint of the store.
        rank: This rank.
        size: Number of ranks.
        prefix: Prefix of this generation's keys.
        timeout_seconds: Timeout of the rendezvous and of the store.

    Returns:
        The store of this generation.

    Raises:
        MeetingFailed: If a path is blocked (names hosts, port and direction), or ranks did not arrive (names them).
    """
    deadline = time.monotonic() + timeout_seconds
    here = own_host()
    if rank == 0:
        _serve(place, timeout_seconds)
    else:
        _await_server(place, here, deadline, timeout_seconds)
    limit = timedelta(seconds=timeout_seconds)
    client = dist.TCPStore(place.address, place.port, is_master=False, timeout=limit, wait_for_workers=False)
    store = dist.PrefixStore(prefix, client)

    def missing(keys: Sequence[str], who: Sequence[str]) -> MeetingFailed:
        absent = [name for key, name in zip(keys, who, strict=True) if not store.check([key])]
        return MeetingFailed(
            f"{_named(absent)} did not come to the meeting of ranks at {place.words} within {timeout_seconds:g} s"
        )

    hosts = _tell(store, "host", str(rank), here, [str(k) for k in range(size)], deadline, missing)
    leaders = {name: k for k, name in reversed(list(enumerate(hosts)))}
    if len(leaders) > 1:
        names = list(leaders)
        found = _try_ways(store, here if leaders[here] == rank else None, names, place, deadline, missing)
        if found:
            raise MeetingFailed("\n".join(found))
    return store


def _serve(place: Endpoint, timeout_seconds: float) -> None:
    if place in _served:
        return
    try:
        server = listen(place.address, place.port)
    except OSError as error:
        raise MeetingFailed(
            f"rank 0 cannot listen at {place.words}: {error.strerror}. Another process has the port, or {place.host} "
            "has another address; start the cluster again, which chooses again"
        ) from error
    # The store takes ownership of the socket.
    _served[place] = dist.TCPStore(
        place.address,
        place.port,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def _await_server(place: Endpoint, own_host: str, deadline: float, timeout_seconds: float) -> None:
    while (problem := try_to_reach(place, own_host)) is not None:
        if not isinstance(problem, ConnectionRefusedError):
            raise MeetingFailed(str(problem))
        if time.monotonic() > deadline:
            raise MeetingFailed(f"{problem}: rank 0 did not come within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)


Missing = Callable[[Sequence[str], Sequence[str]], MeetingFailed]


def _tell(
    store: Any, what: str, own: str | None, said: str, all_who: Sequence[str], deadline: float, missing: Missing
) -> list[str]:
    """Publish `said` as `own` (None: only read), and return what each of `all_who` has published about `what`."""
    if own is not None:
        store.set(f"{what}/{own}", said)
    keys = [f"{what}/{who}" for who in all_who]
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise missing(keys, [f"{'rank' if who.isdecimal() else 'host'} {who}" for who in all_who])
        time.sleep(_POLL_SECONDS)
    return [store.get(key).decode() for key in keys]


def _try_ways(
    store: Any, leads: str | None, hosts: Sequence[str], place: Endpoint, deadline: float, missing: Missing
) -> list[str]:
    """Return a sentence for each blocked path between `hosts`. `leads`: the host for which this rank tests, or None."""
    with contextlib.ExitStack() as kept:
        own = None
        if leads is not None:
            server = kept.enter_context(listen(own_address(place)))
            own = Endpoint(host=leads, address=server.getsockname()[0], port=server.getsockname()[1])
        ways = _tell(store, "way", leads, str(own), hosts, deadline, missing)
        said = "[]"
        if leads is not None:
            others = [way for way in map(Endpoint.parse, ways) if way.host != leads]
            with ThreadPoolExecutor(min(16, len(others))) as pool:
                problems = pool.map(lambda way: try_to_reach(way, leads), others)
                said = json.dumps([str(problem) for problem in problems if problem is not None])
        # Keep listening until all hosts have published their results.
        return [
            line
            for reported in _tell(store, "tried", leads, said, hosts, deadline, missing)
            for line in json.loads(reported)
        ]


def own_address(place: Endpoint) -> str:
    """Return the address at which other hosts reach this host's ranks.

    Args:
        place: Endpoint of the store.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    return address_of(named) if named else interface_towards(place.address)[1]


def bound_silence() -> int:
    """Let this process's connections to other hosts fail after SILENCE_SECONDS without a sign of the other end.

    Without this, waiting for a disconnected host ends only with the group's timeout. gloo has no such setting, so this
    sets kernel options of its sockets: keepalive probes on idle connections, and a limit for unacknowledged data.

    Returns:
        Number of connections.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return 0  # Only Linux has this option.
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    count = 0
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr or connection.raddr.ip in own:
            continue
        try:
            end = socket.socket(fileno=os.dup(connection.fd))
        except OSError:
            continue  # The connection was closed in the meantime.
        probes = max(1, int(SILENCE_SECONDS / 4))
        with end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probes)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probes)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_SECONDS * 1000))
            count += 1
    return count


def _named(who: Iterable[str]) -> str:
    names = list(who)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
