"""Links between hosts: interfaces, addresses, free ports, and whether a port of another host is reachable. No torch."""

from __future__ import annotations

import errno
import math
import random
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import psutil

CONNECT_SECONDS = 5.0
"""How long a port of another host may take to answer. A working network takes milliseconds."""

RESERVED_PORTS = 31
"""Number of ports that `reserved_ports` reserves."""
_LOWEST_PORT, _END_PORT = 20_000, 30_000
"""Range of reserved ports. Lower ports belong to services that users start by hand. From 30,000 on, Kubernetes
redirects ports of its nodes without an open socket.
"""
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BLOCKS_TRIED = 100

_ROUTE_SECONDS = 0.05
"""Pause between two checks for a route."""

_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})


_LINK = re.compile(
    r"(?P<rate>\d+(\.\d+)?)\s*(?P<prefix>[kMG]?)bit/s(\s+(?P<latency>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|s))?"
)
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """Bandwidth in each direction and latency of a link."""

    bits_per_second: float
    latency_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LinkRate:
        """Parse a text such as '1 Gbit/s 1 ms' or '100 Mbit/s'.

        Args:
            text: Bandwidth and optional latency.

        Raises:
            ValueError: If the text has another form.
        """
        found = _LINK.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or not 0 < float(found["rate"]) < math.inf or float(found["latency"] or 0) == math.inf:
            raise ValueError(
                f"link {text!r} cannot be read; write a bandwidth above 0 in bit/s, kbit/s, Mbit/s or Gbit/s, and "
                "after it a latency in us, ms or s if there is one: '1 Gbit/s 1 ms'"
            )
        return cls(
            bits_per_second=float(found["rate"]) * _PREFIXES[found["prefix"]],
            latency_seconds=float(found["latency"]) * _UNITS[found["unit"]] if found["latency"] else 0.0,
        )

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        prefix = next((p for p in ("G", "M", "k") if self.bits_per_second >= _PREFIXES[p]), "")
        rate = f"{_plain(self.bits_per_second / _PREFIXES[prefix])} {prefix}bit/s"
        if not self.latency_seconds:
            return rate
        unit = next((u for u in ("s", "ms") if self.latency_seconds >= _UNITS[u]), "us")
        return f"{rate} {_plain(self.latency_seconds / _UNITS[unit])} {unit}"

    def seconds(self, nbytes: float) -> float:
        """Return the seconds until `nbytes` have left this end of the link, without the latency.

        Args:
            nbytes: Number of bytes.
        """
        return 8 * nbytes / self.bits_per_second


def _plain(number: float) -> str:
    """Return 12 digits without an exponent."""
    return f"{Decimal(f'{number:.12g}'):f}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A TCP port of a host. `host` is the name that users know."""

    host: str
    address: str
    port: int

    def __str__(self) -> str:
        """Return 'host-a=10.0.0.1:29500', which `parse` reads."""
        return f"{self.host}={self.address}:{self.port}"

    @property
    def words(self) -> str:
        """The endpoint as text for messages."""
        return f"{self.host} ({self.address}) at TCP port {self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse 'host=address:port'.

        Args:
            text: Text of this form.

        Raises:
            ValueError: If the text has another form.
        """
        host, equals, place = text.rpartition("=")
        address, _, port = place.rpartition(":")
        if not (host and equals and address and port.isdecimal()):
            raise ValueError(f"{text!r} is no endpoint; expected a host's name, '=', its address, ':' and a port")
        return cls(host=host, address=address, port=int(port))


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on this address only.

    Args:
        address: IPv4 or IPv6 address of this host.
        port: TCP port; 0 for any free port.

    Raises:
        OSError: If the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=512)


@contextmanager
def reserved_ports() -> Iterator[Sequence[int]]:
    """Yield RESERVED_PORTS ports that are free on this host, for processes that bind them inside this context.

    If a process binds port 0, the kernel may give the same port to another process once it is closed. These ports are
    outside the kernel's range, and concurrent callers get different ports. If the kernel's range leaves no room, the
    kernel chooses the ports.
    """
    size = 1 + RESERVED_PORTS  # The port before each block stays bound as a lock.
    blocks = range(_LOWEST_PORT, min(_END_PORT, _kernel_ports_begin()) - size + 1, size)
    # Random order, so that concurrent callers rarely try the same block.
    for first in random.sample(blocks, min(len(blocks), _BLOCKS_TRIED)):
        with ExitStack() as guard, ExitStack() as probes:
            try:
                guard.enter_context(_bound(first))
                for port in range(first + 1, first + size):
                    probes.enter_context(_bound(port))
            except OSError:
                continue
            # Free the ports for the caller; the guard port stays bound.
            probes.close()
            yield range(first + 1, first + size)
            return
    with ExitStack() as probes:
        given = [probes.enter_context(_bound(0)).getsockname()[1] for _ in range(RESERVED_PORTS)]
    yield given


def free_port() -> int:
    """Return a port that is free on this host and will probably stay free until a new process binds it."""
    with reserved_ports() as ports:
        return random.choice(ports)


def _kernel_ports_begin() -> int:
    with suppress(OSError, ValueError):
        return int(_KERNEL_PORTS.read_text().split()[0])
    return _END_PORT  # Without this file, the kernel's range begins above _END_PORT.


def _bound(port: int) -> socket.socket:
    """Return a socket bound to the port on all addresses, which does not listen.

    Raises OSError if another socket has the port on any address.
    """
    both = socket.has_dualstack_ipv6()
    found = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        if both:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("::" if both else "", port))
    except BaseException:
        found.close()
        raise
    return found


def try_to_reach(place: Endpoint, own_host: str, seconds: float = CONNECT_SECONDS) -> OSError | None:
    """Connect to `place` and close the connection.

    Args:
        place: Endpoint on another host.
        own_host: Name of this host, for the message.
        seconds: Timeout.

    Returns:
        None, or an error with a complete message. ConnectionRefusedError: the host answers, but no process listens
            there (yet). Other errors come from the network.
    """
    try:
        _connect(place, seconds)
    except OSError as error:
        kind = ConnectionRefusedError if error.errno in _REFUSED else OSError
        return kind(f"{own_host} cannot reach {place.words}: {_reason(error, place, seconds)}")
    return None


def _connect(place: Endpoint, seconds: float) -> None:
    """Connect and close the connection. Raises OSError.

    After a link comes back, the host has no route until the neighbour's hardware address is resolved. So 'no route to
    host' is retried for `seconds`.
    """
    deadline = time.monotonic() + seconds
    remaining, no_route = seconds, None
    while True:
        try:
            socket.create_connection((place.address, place.port), remaining).close()
            return
        except TimeoutError as error:
            raise no_route or error from None
        except OSError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            no_route = error
        time.sleep(_ROUTE_SECONDS)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise no_route


def _reason(error: OSError, place: Endpoint, seconds: float) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return (
            f"no answer within {seconds:g} s. A firewall drops what comes in there, or the link to {place.host} is "
            "down; ports that ranks listen on must be open between the hosts"
        )
    if error.errno in _REFUSED:
        return "it answers, but nothing listens there"
    if error.errno in _FORBIDDEN:
        return "a firewall forbids it; ports that ranks listen on must be open between the hosts"
    if isinstance(error, socket.gaierror):
        return f"the name is not known ({error.strerror})"
    return f"{error.strerror or error}. {place.host} is down, or no link leads there"


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface of this host, otherwise its IPv6 address.

    Args:
        interface: Name of the interface.

    Raises:
        ValueError: If there is no such interface with an address; names the existing ones.
    """
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known.get(interface, []):
            if entry.family == family:
                return entry.address
    raise ValueError(f"no network interface {interface!r} with an address; there are {', '.join(sorted(known))}")


def interface_towards(address: str) -> tuple[str, str]:
    """Return name and address of the interface that sends packets to `address`.

    Args:
        address: IPv4 or IPv6 address of another host.

    Raises:
        OSError: If there is no route or no such interface.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Connecting a UDP socket sends nothing: the kernel only chooses a route.
        own = probe.getsockname()[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name, own
    raise OSError(errno.EADDRNOTAVAIL, f"no interface has the address {own}, from which {address} is reached")
