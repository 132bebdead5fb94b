"""Simulate a link of given bandwidth and latency between ranks of one host, for lessons. No root needed.

1. Every rank acts as a host of its own, with one line that sends transfers one after another.
2. A transfer starts when the line is free. Its data arrive after the last byte has left and the latency has passed,
   once per trip: a sum goes there and back.
3. A rank joins an immediate operation in memory only after its own data have arrived, because no peer could have them
   earlier. Collectives with equal bytes on all ranks, and blocking ones, take exactly the right time. A transfer that
   started before a peer's may end too early; the next blocking one compensates.
4. A message carries its arrival time (all ranks of a host share a clock), and its receiver waits until then.

Computation continues in the meantime, so overlapped transfers cost nothing, as on a real link.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.comm.timeouts import wait_for
from speedlab.network import LinkRate

LINK = "SPEEDLAB_LINK"
"""Environment variable with the link to simulate, in the form that `LinkRate.parse` reads."""

_TRIPS = {"all_reduce": 2}
"""Latencies of a collective; 1 for all others."""


def arrival(rate: LinkRate, *, now: float, free: float, nbytes: int, trips: int = 1) -> tuple[float, float]:
    """Return when data arrive, and when the line is free again.

    Args:
        rate: Bandwidth and latency.
        now: Time of the send, in seconds.
        free: Time until which the line is busy.
        nbytes: Bytes to send.
        trips: Number of latencies.
    """
    sent = max(now, free) + rate.seconds(nbytes)
    return sent + trips * rate.latency_seconds, sent


class SimulatedLink:
    """The line of this rank, for all of its groups. Thread-safe."""

    def __init__(
        self,
        rate: LinkRate,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock, self._sleep = clock, sleep
        self._free = 0.0
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"pretended {self.rate}"

    def book(self, name: str, nbytes: int) -> float:
        """Reserve the line and return the arrival time.

        Args:
            name: Name of the collective.
            nbytes: Bytes that this rank sends.
        """
        with self._lock:
            trips = _TRIPS.get(name, 1)
            there, self._free = arrival(self.rate, now=self._clock(), free=self._free, nbytes=nbytes, trips=trips)
        return there

    def wait_until(self, there: float) -> None:
        """Wait until an arrival time.

        Args:
            there: Result of `book`.
        """
        left = there - self._clock()
        if left > 0:
            self._sleep(left)

    def has_arrived(self, there: float) -> bool:
        """Return whether an arrival time has passed.

        Args:
            there: Result of `book`.
        """
        return self._clock() >= there

    def send(self, group: Any, tensor: Tensor, peer: int, tag: int) -> SimulatedMessage:
        """Send a tensor, and a second message with its arrival time.

        Args:
            group: Process group.
            tensor: Contiguous tensor.
            peer: Index of the receiver in the group.
            tag: Tag of both messages.
        """
        there = self.book("send", tensor.nbytes)
        works = [group.send([each], peer, tag) for each in (tensor, torch.tensor([there], dtype=torch.float64))]
        return SimulatedMessage(self, works, lambda: there)

    def receive(self, group: Any, tensor: Tensor, peer: int, tag: int) -> SimulatedMessage:
        """Receive the messages of `send`.

        Args:
            group: Process group.
            tensor: Contiguous tensor to fill.
            peer: Index of the sender in the group.
            tag: Tag of both messages.
        """
        there = torch.zeros(1, dtype=torch.float64)
        # Both messages have one tag; they arrive in the order of the sends.
        works = [group.recv([each], peer, tag) for each in (tensor, there)]
        return SimulatedMessage(self, works, there.item)


@dataclass(frozen=True)
class SimulatedMessage:
    """A message in flight, with the interface of torch's works.

    Attributes:
        line: The link.
        works: Works of the process group.
        there: Returns the arrival time, after the works have ended.
    """

    line: SimulatedLink
    works: list[Any]
    there: Callable[[], float]

    def wait(self, timeout: Any = None) -> None:
        """Wait until the message has arrived over the simulated link."""
        for work in self.works:
            wait_for(work)
        self.line.wait_until(self.there())

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return all(work.is_completed() for work in self.works) and self.line.has_arrived(self.there())


@functools.cache
def own_link() -> SimulatedLink | None:
    """Return the simulated link of this process; None without one."""
    text = os.environ.get(LINK)
    return SimulatedLink(LinkRate.parse(text)) if text else None
