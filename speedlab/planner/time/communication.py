"""Seconds of collectives: a latency for each message and a bandwidth, over rings and trees. No torch.

Let n be the ranks of a group, of which k are in each host, and b the bytes of the whole tensor.

- all-gather and reduce-scatter go round a ring: n - 1 messages, b (n - 1) / n bytes over each link.
- all-reduce is both, or a tree down and up where messages are short: 2 log2(n) latencies, 2 b bytes.
- A ring through several hosts crosses each host's border once in each direction. A host's cards are shared by its
  ranks: a group with k of a host's ranks has k / per_host of them.
- A message from one rank to another goes through one card, however many its host has: collectives open a channel on
  each, a message has one.

Seconds in which a rank's parameters come together and its gradients are summed once, as they are sent: whole, or as
integers with their kernels, over all data-parallel ranks, or inside hosts and between them. No torch.
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
    """A group of ranks as its messages see it."""

    ranks: int
    bytes_per_second: float
    latency_seconds: float
    crosses_hosts: bool

    def gather(self, nbytes: float) -> float:
        """Seconds until every rank has the whole tensor of `nbytes`, of which each had 1/n."""
        n = self.ranks
        if n == 1:
            return 0.0
        return (n - 1) * self.latency_seconds + nbytes * (n - 1) / n / self.bytes_per_second

    def reduce_scatter(self, nbytes: float) -> float:
        """Seconds until every rank has 1/n of the sum of tensors of `nbytes`."""
        return self.gather(nbytes)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds until every rank has the sum of tensors of `nbytes`: the faster of ring and tree."""
        n = self.ranks
        if n == 1:
            return 0.0
        tree = 2 * math.ceil(math.log2(n)) * self.latency_seconds + 2 * nbytes / self.bytes_per_second
        return min(2 * self.gather(nbytes), tree)

    def send(self, nbytes: float) -> float:
        """Seconds of one message from a rank to the next."""
        return self.latency_seconds + nbytes / self.bytes_per_second if self.ranks > 1 else 0.0


def ring(machines: Machines, efficiency: Efficiency, *, ranks: int, stride: int, messages: bool = False) -> Ring:
    """The ring of `ranks` ranks whose numbers are `stride` apart; with `messages`, of ranks that send to the next one
    rather than sum or gather."""
    per_host = machines.per_host
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
    """A layout's groups."""

    dp: Ring
    """Of all ranks that hold the same parameters."""
    islands: Ring
    """Of the ranks that have the same part in each island."""
    inside: Ring
    """Of those on one host."""
    between: Ring
    """Of those at one place on all hosts."""
    secondary: Ring
    """Of a secondary partition's; of one where there is none."""
    cp: Ring
    tp: Ring
    pp: Ring


def rings(layout: Layout, machines: Machines, efficiency: Efficiency, *, secondary: int = 1) -> Rings:
    """Along each axis, as far apart as the layout puts its ranks; `secondary`: ranks of a secondary partition."""
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
    """The ways of one set-up's flats."""

    setup: Setup
    groups: Rings
    memory_bytes: float
    """Of a device in a second, which kernels that encode and decode read and write."""
    elements: float
    """That a rank holds or gathers."""
    units: int
    """In which they travel one after the other."""
    mapped: bool
    """Whether ranks use each other's parameters where they lie, so that these need not travel."""

    @property
    def _element(self) -> float:
        return ITEM_BYTES[self.setup.dtype]

    def parameters(self, *, again: bool = False) -> float:
        """Of all units; `again`: gathered before since the last update."""
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
        """Of all units, of so many bytes an element, into 1/dp on each rank."""
        each, groups = self.elements / self.units, self.groups
        if not self.setup.quantized_gradients:
            return self.units * groups.dp.reduce_scatter(each * element)
        inside, between = groups.inside, groups.between
        first = inside.gather(each * ITEM_BYTES[INT4])
        second = between.gather(each / inside.ranks * ITEM_BYTES[INT4])
        passes = (inside.ranks > 1) + (between.ranks > 1) / inside.ranks  # Encoded and summed, all, then a share.
        coded = passes * self.elements * (element + 2 * ITEM_BYTES[INT4]) / self.memory_bytes
        return self.units * (first + second) + coded
