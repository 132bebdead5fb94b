"""What lies between hosts: interfaces, addresses, and whether a port of another host can be reached. No torch."""

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
"""How long a port of another host may take to answer. On a working network it is milliseconds."""

RESERVED_PORTS = 31
"""How many ports `reserved_ports` reserves."""
_LOWEST_PORT, _END_PORT = 20_000, 30_000
"""Ports below belong to services that people start by hand; from 30,000 on Kubernetes redirects those of its nodes, and
no socket tells."""
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BLOCKS_TRIED = 100

_ROUTE_SECONDS = 0.05
"""Between two looks for a route."""

_REFUSED = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})


_LINK = re.compile(
    r"(?P<rate>\d+(\.\d+)?)\s*(?P<prefix>[kMG]?)bit/s(\s+(?P<latency>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|s))?"
)
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """What a link carries in each direction, and how long a bit is under way."""

    bits_per_second: float
    latency_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LinkRate:
        """'1 Gbit/s 1 ms', '100 Mbit/s'. Raises ValueError, with the rule and an example, for anything else."""
        found = _LINK.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or not 0 < float(found["rate"]) < math.inf or float(found["latency"] or 0) == math.inf:
            raise ValueError(
                f"link {text!r} cannot be read; write a bandwidth above 0 in bit/s, kbit/s, Mbit/s or Gbit/s, and "
                "behind it a latency in us, ms or s if there is one: '1 Gbit/s 1 ms'"
            )
        return cls(
            bits_per_second=float(found["rate"]) * _PREFIXES[found["prefix"]],
            latency_seconds=float(found["latency"]) * _UNITS[found["unit"]] if found["latency"] else 0.0,
        )

    def __str__(self) -> str:
        """As `parse` reads it."""
        prefix = next((p for p in ("G", "M", "k") if self.bits_per_second >= _PREFIXES[p]), "")
        rate = f"{_plain(self.bits_per_second / _PREFIXES[prefix])} {prefix}bit/s"
        if not self.latency_seconds:
            return rate
        unit = next((u for u in ("s", "ms") if self.latency_seconds >= _UNITS[u]), "us")
        return f"{rate} {_plain(self.latency_seconds / _UNITS[unit])} {unit}"

    def seconds(self, nbytes: float) -> float:
        """Until `nbytes` have left this end of the link; the latency comes on top."""
        return 8 * nbytes / self.bits_per_second


def _plain(number: float) -> str:
    """To 12 digits, without an exponent."""
    return f"{Decimal(f'{number:.12g}'):f}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A TCP port of a host. `host` is the name that people know it by."""

    host: str
    address: str
    port: int

    def __str__(self) -> str:
        """'host-a=10.0.0.1:29500', as `parse` reads it."""
        return f"{self.host}={self.address}:{self.port}"

    @property
    def words(self) -> str:
        return f"{self.host} ({self.address}) at TCP port {self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raises ValueError for another form than 'host=address:port'."""
        host, equals, place = text.rpartition("=")
        address, _, port = place.rpartition(":")
        if not (host and equals and address and port.isdecimal()):
            raise ValueError(f"{text!r} is no endpoint; expected a host's name, '=', its address, ':' and a port")
        return cls(host=host, address=address, port=int(port))


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on that address alone; port 0 takes any that is free. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=512)


@contextmanager
def reserved_ports() -> Iterator[Sequence[int]]:
    """RESERVED_PORTS ports on which nothing of this host listens, for processes that will before the block is left.

    A port that the kernel gives whoever binds port 0 is given to the next one as soon as it is let go of. These are
    outside the range that the kernel gives from, and who reserves ports here, too, gets other ones. Where that range
    leaves no room they are the kernel's.
    """
    size = 1 + RESERVED_PORTS  # In front of each block a port that stays bound.
    blocks = range(_LOWEST_PORT, min(_END_PORT, _kernel_ports_begin()) - size + 1, size)
    for first in random.sample(blocks, min(len(blocks), _BLOCKS_TRIED)):
        with ExitStack() as guard, ExitStack() as probes:
            try:
                guard.enter_context(_bound(first))
                for port in range(first + 1, first + size):
                    probes.enter_context(_bound(port))
            except OSError:
                continue
            probes.close()
            yield range(first + 1, first + size)
            return
    with ExitStack() as probes:
        given = [probes.enter_context(_bound(0)).getsockname()[1] for _ in range(RESERVED_PORTS)]
    yield given


def free_port() -> int:
    """One on which nothing of this host listens, nor is likely to before a process that is started now does."""
    with reserved_ports() as ports:
        return random.choice(ports)


def _kernel_ports_begin() -> int:
    with suppress(OSError, ValueError):
        return int(_KERNEL_PORTS.read_text().split()[0])
    return _END_PORT  # Where the kernel does not say so, they begin higher.


def _bound(port: int) -> socket.socket:
    """A socket that has that port at all addresses, and does not listen. Raises OSError where another one has it at
    any."""
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
    """Connect to `place` and close; returns what went wrong, with the whole sentence as its text, or None.

    ConnectionRefusedError: the host answers, but nothing listens there (yet). Anything else is the network's.
    """
    try:
        _connect(place, seconds)
    except OSError as error:
        kind = ConnectionRefusedError if error.errno in _REFUSED else OSError
        return kind(f"{own_host} cannot reach {place.words}: {_reason(error, place, seconds)}")
    return None


def _connect(place: Endpoint, seconds: float) -> None:
    """Connect and close. A link that has just come back has no route until the neighbour's hardware address is known
    again: 'no route to host' counts only when it lasts for `seconds`, as no answer does. Raises OSError."""
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
    """The IPv4 address of an interface of this host, else its IPv6 one. Raises ValueError with the names there are."""
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known.get(interface, []):
            if entry.family == family:
                return entry.address
    raise ValueError(f"no network interface {interface!r} with an address; there are {', '.join(sorted(known))}")


def interface_towards(address: str) -> tuple[str, str]:
    """(name, address) of this host's interface from which packets to `address` leave. Raises OSError without one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Nothing is sent: the kernel only looks for the way.
        own = probe.getsockname()[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name, own
    raise OSError(errno.EADDRNOTAVAIL, f"no interface has the address {own}, from which {address} is reached")
