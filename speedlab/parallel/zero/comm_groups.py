"""Groups and codecs of ZeRO transfers: the columns `sent` and `secondary` of the placement table (ZeRO++,
arXiv:2306.10209).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speedlab.comm import Blocks, Codec, CodedGathers, CodedSums, Group, HierarchicalGroups
from speedlab.layout import partition_range
from speedlab.placement import INT4, INT8

CODECS: dict[str, Codec] = {INT8: Blocks(8), INT4: Blocks(4)}
"""Codecs by their names in the placement table."""

_FLOAT32 = 4


class PendingWork(Protocol):
    """A pending operation; `wait` returns after its end."""

    def wait(self) -> None:
        """Wait for the end of the operation."""
        ...


class AllGather(Protocol):
    """Gathers the shards of a flat."""

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce the shards that peers will gather in this pass, each once, in an order that all ranks share.

        Args:
            shards: This rank's shards.
        """
        ...

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        """Start to gather a flat.

        Args:
            full: Output, (padded,).
            shard: This rank's shard, (padded / ranks,).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ZeroCommGroups:
    """The groups of ranks that hold the same part of the model."""

    gather: Group
    """All of these ranks; parameters are gathered over this group."""
    reduce: Group
    """All of these ranks; gradients are reduced over this group."""
    hosts: HierarchicalGroups[Group] | None = None
    """The ranks of `reduce` by host, for hierarchical exchanges of quantized gradients; None: not configured."""
    secondary: Group | None = None
    """The ranks of this rank's secondary partition; None: not configured."""

    @property
    def of_parameters(self) -> list[Group]:
        """All groups over which parameters are gathered."""
        return [self.gather] if self.secondary is None else [self.gather, self.secondary]

    @property
    def all(self) -> list[Group]:
        inside = [] if self.hosts is None else [self.hosts.inside, self.hosts.across]
        return [*self.of_parameters, self.reduce, *inside]

    def gathering(self, sent: str) -> Group | CodedGathers:
        """Return the object that gathers flats in this format.

        Args:
            sent: Name of a codec; "" for none.
        """
        return CodedGathers(self.gather, CODECS[sent]) if sent else self.gather

    def summing(self, sent: str) -> Group | CodedSums:
        """Return the object that reduces gradients in this format.

        Args:
            sent: Name of a codec; "" for none.
        """
        if not sent:
            return self.reduce
        assert self.hosts is not None  # The groups exist if the configuration asks for quantized gradients.
        # Quantized reductions run inside each host first, then across hosts (ZeRO++, section 4.3).
        return CodedSums(self.reduce, self.hosts, CODECS[sent])


class SecondaryPartition:
    """A secondary partition of a flat's parameters over ranks of one host (section 4.2 of ZeRO++).

    The first gather after an update fills the partition. Later gathers read from the partition, so they send nothing
    between hosts.
    """

    def __init__(self, group: Group, padded: int, dtype: torch.dtype) -> None:
        self.group = group
        self._start, self._end = partition_range(padded, group.size, group.index)
        self.shard = group.empty(self._end - self._start, dtype).zero_()
        self.fresh = False
        """Whether `shard` has the current parameters. All ranks agree on this between two passes."""

    def gather(self, full: Tensor, *, in_place_of: Group) -> PendingWork:
        """Start to gather the full flat from this partition.

        Args:
            full: Output, (padded,).
            in_place_of: The group of the primary gather, for the count of saved bytes.
        """
        others = in_place_of.size - 1
        sent = (self.group.size - 1) * self.shard.nbytes
        self.group.traffic.compressed(sent, others * _FLOAT32 * (full.numel() // in_place_of.size))
        return self.group.all_gather(full, self.shard)

    def take(self, full: Tensor) -> None:
        """Copy this rank's shard from a gathered flat.

        Args:
            full: The gathered flat, (padded,).
        """
        self.shard.copy_(full[self._start : self._end])
        self.fresh = True


class ReadThenGathered:
    """A gather that first reads this rank's shard from host or disk."""

    def __init__(self, reading: PendingWork, gathering: AllGather, full: Tensor, own: Tensor) -> None:
        """Store the parts; the read has already started.

        Args:
            reading: The pending read of this rank's shard.
            gathering: Gathers the shards afterwards.
            full: Output, (padded,).
            own: This rank's part of `full`, the target of the read.
        """
        self.reading, self._gathering, self._full, self._own = reading, gathering, full, own

    def wait(self) -> None:
        """Wait for the read, then gather from the other ranks, if there are any."""
        self.reading.wait()
        if self._own.numel() < self._full.numel():  # Otherwise this rank is alone.
            self._gathering.all_gather(self._full, self._own).wait()


class TakenBySecondary:
    """A gather over all ranks that also fills the secondary partition."""

    def __init__(self, gather: PendingWork, secondary: SecondaryPartition, full: Tensor) -> None:
        self._gather, self._secondary, self._full = gather, secondary, full

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the gather, then fill the secondary partition."""
        self._gather.wait()
        self._secondary.take(self._full)
