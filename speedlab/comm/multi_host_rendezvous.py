"""Ranks of several hosts meet: in a store that rank 0 serves, after every way between the hosts has been tried.

1. Rank 0 listens where SPEEDLAB_STORE says ("host=address:port"), on that address alone, and serves the store for as
   long as its process lives. Each generation of the group has keys of its own there.
2. The others connect. Rank 0 may come later than they, so "nothing listens" is waited out; any other refusal is not.
3. Every rank tells which host it is on. When all have, the first rank of each host listens on a port of its interface
   (GLOO_SOCKET_IFNAME, or the one that leads to the store), tries the port of every other host, and tells the outcome.
4. All read all outcomes, and raise MeetingFailed together where a way is closed: gloo would wait for minutes, and say
   neither which host nor which port.

Everything waits in Python, a moment at a time, so that an interrupt is heard.
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
"""Environment variable: where rank 0 serves the store. Without it ranks meet in a file of a folder that all see."""
HOST = "SPEEDLAB_HOST"
"""Environment variable: the name of this rank's host."""

SILENCE_SECONDS = 20.0
"""How long a connection to another host may go without an answer before it counts as broken."""

_POLL_SECONDS = 0.01
_MOST_NAMED = 8

_served: dict[Endpoint, Any] = {}
"""Stores that this process serves; they end with it."""


def own_host() -> str:
    """The name of this rank's host."""
    return os.environ.get(HOST) or socket.gethostname()


def meet(place: Endpoint, rank: int, size: int, prefix: str, timeout_seconds: float) -> Any:
    """The store of one generation of the group, `prefix`, when all `size` ranks are there and all ways are open.

    Raises MeetingFailed, with the hosts, the port and the direction, or with the ranks that did not come.
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
            "has another address; start the cluster again, which chooses anew"
        ) from error
    # The store takes the descriptor over.
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
    """Say `said` as `own` (None: only listen), and return what each of `all_who` has said about `what`."""
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
    """What is wrong with the ways between `hosts`, a sentence each. `leads`: the host for which this rank tries."""
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
        # Nobody stops listening before all have tried.
        return [
            line for told in _tell(store, "tried", leads, said, hosts, deadline, missing) for line in json.loads(told)
        ]


def own_address(place: Endpoint) -> str:
    """The address of this host at which its ranks are reached."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    return address_of(named) if named else interface_towards(place.address)[1]


def bound_silence() -> int:
    """Let connections of this process to other hosts fail after SILENCE_SECONDS without a sign of the other end;
    returns how many there are. Else the wait for a host that was cut off ends with the group's timeout.

    gloo has no setting for it, so its sockets are given the kernel's: a probe every few seconds where nothing is
    sent, and a limit to how long what was sent may go unanswered.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return 0  # Only Linux has it.
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    count = 0
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr or connection.raddr.ip in own:
            continue
        try:
            end = socket.socket(fileno=os.dup(connection.fd))
        except OSError:
            continue  # Closed meanwhile.
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
