"""Predict seconds of collectives: latency and bandwidth, over rings and trees. No torch.

Let n be the ranks of a group, of which k are in each host, and b the bytes of the whole tensor.

- all-gather and reduce-scatter use a ring: n - 1 messages, b (n - 1) / n bytes over each link.
- all-reduce is both, or a tree up and down for short messages: 2 log2(n) latencies, 2 b bytes.
- A ring through several hosts crosses each host's border once in each direction. The ranks of a host share its cards: a
  group with k ranks in a host gets k / per_host of them.
- A message between two ranks uses one card, even in a host with several: collectives open a channel on each card, a
  message has one.

`Sending` applies this to ZeRO: gather parameters and reduce gradients, whole or quantized (with the time of the
kernels), over all data-parallel ranks, or first inside hosts and then between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from speedlab.layout import Layout
from speedlab.placement import INT4, INT8, ITEM_BYTES
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A group of ranks, described by its size, bandwidth and latency."""

    ranks: int
    bytes_per_second: float
    latency_seconds: float
    crosses_hosts: bool

    def gather(self, nbytes: float) -> float:
        """Return the seconds of an all-gather.

        Args:
            nbytes: bytes of the whole tensor, of which each rank has 1/n.
        """
        n = self.ranks
        if n == 1:
            return 0.0
        return (n - 1) * self.latency_seconds + nbytes * (n - 1) / n / self.bytes_per_second

    def reduce_scatter(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter.

        Args:
            nbytes: bytes of each rank's tensor; each rank gets 1/n of the sum.
        """
        return self.gather(nbytes)

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce, by the faster of ring and tree.

        Args:
            nbytes: bytes of each rank's tensor.
        """
        n = self.ranks
        if n == 1:
            return 0.0
        # Few latencies, but all bytes twice: faster than a ring for short messages.
        tree = 2 * math.ceil(math.log2(n)) * self.latency_seconds + 2 * nbytes / self.bytes_per_second
        return min(2 * self.gather(nbytes), tree)

    def send(self, nbytes: float) -> float:
        """Return the seconds of one message from a rank to the next.

        Args:
            nbytes: bytes of the message.
        """
        return self.latency_seconds + nbytes / self.bytes_per_second if self.ranks > 1 else 0.0


def ring(machines: Machines, efficiency: Efficiency, *, ranks: int, stride: int, messages: bool = False) -> Ring:
    """Return the ring of `ranks` ranks with a distance of `stride` between their rank numbers.

    Args:
        machines: the hosts, their devices and links.
        efficiency: reached shares of the bandwidths.
        ranks: size of the group.
        stride: distance of neighbours in rank numbers; decides how many of the ranks share a host.
        messages: whether ranks send to the next one, rather than reduce or gather.
    """
    per_host = machines.per_host
    # Ranks of the group in one host.
    inside = min(ranks, max(1, per_host // stride))
    in_host = machines.in_host_bytes_per_second(inside) * (efficiency.messages if messages else efficiency.in_host)
    crosses = ranks * stride > per_host and ranks > inside and machines.between is not None
    if not crosses or machines.between is None:
        return Ring(
            ranks=ranks,
            bytes_per_second=in_host,
            latency_seconds=machines.in_host.latency_seconds,
            crosses_hosts=False,
        )
    share = efficiency.messages if messages else efficiency.between
    # The group's share of the host's cards.
    network = machines.between.host_bytes_per_second * inside / per_host
    if messages:
        network = min(network, machines.between.bandwidth_bytes_per_second)
    network *= share
    return Ring(
        ranks=ranks,
        bytes_per_second=min(in_host, network) if inside > 1 else network,
        latency_seconds=machines.between.latency_seconds,
        crosses_hosts=True,
    )


@dataclass(frozen=True, kw_only=True)
class Rings:
    """The groups of a layout."""

    dp: Ring
    """All ranks with the same parameters."""
    islands: Ring
    """Ranks with the same part in each island."""
    inside: Ring
    """Ranks of `dp` on one host."""
    between: Ring
    """Ranks of `dp` at the same place on all hosts."""
    secondary: Ring
    """Ranks of a secondary partition; one rank if there is none."""
    cp: Ring
    tp: Ring
    pp: Ring


def rings(layout: Layout, machines: Machines, efficiency: Efficiency, *, secondary: int = 1) -> Rings:
    """Return the groups along each axis of a layout.

    Args:
        layout: the ranks.
        machines: the hosts, their devices and links.
        efficiency: reached shares of the bandwidths.
        secondary: ranks of a secondary partition.
    """
    stride = layout.stride("cp")
    inside = math.gcd(layout.replicas, max(1, machines.per_host // stride))
    return Rings(
        dp=ring(machines, efficiency, ranks=layout.replicas, stride=stride),
        islands=ring(machines, efficiency, ranks=layout.islands, stride=layout.stride("islands")),
        inside=ring(machines, efficiency, ranks=inside, stride=stride),
        between=ring(machines, efficiency, ranks=layout.replicas // inside, stride=stride * inside),
        secondary=ring(machines, efficiency, ranks=min(secondary, layout.replicas), stride=stride),
        cp=ring(machines, efficiency, ranks=layout.cp, stride=layout.stride("cp"), messages=True),
        tp=ring(machines, efficiency, ranks=layout.tp, stride=layout.stride("tp")),
        pp=ring(machines, efficiency, ranks=layout.pp, stride=layout.stride("pp"), messages=True),
    )


@dataclass(frozen=True, kw_only=True)
class Sending:
    """Data-parallel traffic of one set-up."""

    setup: Setup
    groups: Rings
    memory_bytes: float
    """Memory bandwidth of a device in bytes/s, for kernels that encode and decode."""
    elements: float
    """Elements that a rank holds or gathers."""
    units: int
    """Number of units, sent one after the other."""
    mapped: bool
    """Whether ranks read each other's parameters in shared memory, so that no parameters are sent."""

    @property
    def _element(self) -> float:
        return ITEM_BYTES[self.setup.dtype]

    def parameters(self, *, again: bool = False) -> float:
        """Return the seconds to gather all units.

        Args:
            again: whether the units were already gathered since the last update.
        """
        if self.mapped:
            return self.units * self.groups.dp.gather(0)
        each = self.elements / self.units
        if again and self.setup.secondary_partition:
            return self.units * self.groups.secondary.gather(each * self._element)
        if not self.setup.quantized_weights:
            return self.units * self.groups.dp.gather(each * self._element)
        decoded = self.elements * (ITEM_BYTES[INT8] + self._element) / self.memory_bytes
        return self.units * self.groups.dp.gather(each * ITEM_BYTES[INT8]) + decoded * (self.groups.dp.ranks > 1)

    def gradients(self, element: float) -> float:
        """Return the seconds to reduce all units' gradients to 1/dp on each rank.

        Args:
            element: bytes of an element.
        """
        each, groups = self.elements / self.units, self.groups
        if not self.setup.quantized_gradients:
            return self.units * groups.dp.reduce_scatter(each * element)
        inside, between = groups.inside, groups.between
        first = inside.gather(each * ITEM_BYTES[INT4])
        second = between.gather(each / inside.ranks * ITEM_BYTES[INT4])
        passes = (inside.ranks > 1) + (between.ranks > 1) / inside.ranks  # Encode and sum everything, then a share.
        coded = passes * self.elements * (element + 2 * ITEM_BYTES[INT4]) / self.memory_bytes
        return self.units * (first + second) + coded
