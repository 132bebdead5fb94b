"""A link that is pretended between ranks of one host: what is sent takes as long as it would over a link of a stated
bandwidth and latency. For lessons; needs no root.

1. Every rank is pretended to be a host of its own, with one line, which carries what is sent one after the other.
2. A transfer starts when the line is free. What it sends has arrived when its last byte has left and the latency has
   passed, once for each trip: a sum goes there and comes back.
3. A rank takes part in what memory would do at once only when its own part has arrived: nobody can have it earlier. So
   collectives in which all send equally much, and those that wait at once, take exactly as long as they would; one that
   was started before a peer began may end too early here, and the next that waits makes up for it.
4. With a message goes when it arrives (all ranks of a host have one clock): its receiver waits until then.

Computing goes on meanwhile, so what a step overlaps costs nothing here, either.
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
"""The link that an engine is to pretend, as `LinkRate.parse` reads it."""

_TRIPS = {"all_reduce": 2}
"""Latencies in a collective; 1 in all others."""


def arrival(rate: LinkRate, *, now: float, free: float, nbytes: int, trips: int = 1) -> tuple[float, float]:
    """(when `nbytes` that are sent `now` have arrived, when the line is free again), where it is busy until `free`."""
    sent = max(now, free) + rate.seconds(nbytes)
    return sent + trips * rate.latency_seconds, sent


class SimulatedLink:
    """The line of this rank, for all of its groups. From any thread."""

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
        """When `nbytes` of the collective `name`, which this rank begins to send, have arrived."""
        with self._lock:
            trips = _TRIPS.get(name, 1)
            there, self._free = arrival(self.rate, now=self._clock(), free=self._free, nbytes=nbytes, trips=trips)
        return there

    def wait_until(self, there: float) -> None:
        """Return when what was booked has arrived."""
        left = there - self._clock()
        if left > 0:
            self._sleep(left)

    def has_arrived(self, there: float) -> bool:
        return self._clock() >= there

    def send(self, group: Any, tensor: Tensor, peer: int, tag: int) -> SimulatedMessage:
        """Send `tensor` as `group.send` does, and with it when it arrives."""
        there = self.book("send", tensor.nbytes)
        works = [group.send([each], peer, tag) for each in (tensor, torch.tensor([there], dtype=torch.float64))]
        return SimulatedMessage(self, works, lambda: there)

    def receive(self, group: Any, tensor: Tensor, peer: int, tag: int) -> SimulatedMessage:
        """Receive what `send` has sent."""
        there = torch.zeros(1, dtype=torch.float64)
        works = [group.recv([each], peer, tag) for each in (tensor, there)]
        return SimulatedMessage(self, works, there.item)


@dataclass(frozen=True)
class SimulatedMessage:
    """A message under way, with the interface of torch's works. `there`: when it arrives, once the works are over."""

    line: SimulatedLink
    works: list[Any]
    there: Callable[[], float]

    def wait(self, timeout: Any = None) -> None:
        for work in self.works:
            wait_for(work)
        self.line.wait_until(self.there())

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works) and self.line.has_arrived(self.there())


@functools.cache
def own_link() -> SimulatedLink | None:
    """The line that this process pretends; None where links are what they are."""
    text = os.environ.get(LINK)
    return SimulatedLink(LinkRate.parse(text)) if text else None
