"""The groups that flats travel over, and as what: the columns `sent` and `secondary` of the placement table, carried
out (ZeRO++, arXiv:2306.10209)."""

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
"""By the names that the placement table has for them."""

_FLOAT32 = 4


class Work(Protocol):
    """What is under way until `wait` has returned."""

    def wait(self) -> None: ...


class AllGather(Protocol):
    """How the shards of a flat come together."""

    def offer(self, shards: Sequence[Tensor]) -> None: ...
    def all_gather(self, full: Tensor, shard: Tensor) -> Work: ...


class Summing(Protocol):
    """How the ranks' terms of a flat's gradient are summed where each rank owns a part."""

    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> Work: ...


@dataclass(frozen=True, kw_only=True)
class ZeroCommGroups:
    """The groups of the ranks that hold the same part of the model."""

    gather: Group
    """All of them: parameters come together over it."""
    reduce: Group
    """All of them: gradients are summed over it."""
    hosts: HierarchicalGroups[Group] | None = None
    """Where gradients are exchanged host by host: how `reduce` lies on hosts."""
    secondary: Group | None = None
    """Where parameters are partitioned a second time: the ranks of this one's secondary partition."""

    @property
    def of_parameters(self) -> list[Group]:
        """Over which parameters come together."""
        return [self.gather] if self.secondary is None else [self.gather, self.secondary]

    @property
    def all(self) -> list[Group]:
        inside = [] if self.hosts is None else [self.hosts.inside, self.hosts.across]
        return [*self.of_parameters, self.reduce, *inside]

    def gathering(self, sent: str) -> Group | CodedGathers:
        """How a flat comes together that is sent as `sent`."""
        return CodedGathers(self.gather, CODECS[sent]) if sent else self.gather

    def summing(self, sent: str) -> Group | CodedSums:
        """How gradients are summed that are sent as `sent`."""
        if not sent:
            return self.reduce
        assert self.hosts is not None  # Made where the configuration asks for it.
        return CodedSums(self.reduce, self.hosts, CODECS[sent])


class SecondaryPartition:
    """A second partition of a flat's parameters, over ranks of one host (section 4.2): the first gather after an update
    fills it, the others take it from there, so that nothing of theirs leaves the host."""

    def __init__(self, group: Group, padded: int, dtype: torch.dtype) -> None:
        self.group = group
        self._start, self._end = partition_range(padded, group.size, group.index)
        self.shard = group.empty(self._end - self._start, dtype).zero_()
        self.fresh = False
        """Whether it has the values of the present parameters; the same on all ranks between two passes."""

    def gather(self, full: Tensor, *, in_place_of: Group) -> Work:
        """Start to fill `full` from the ranks of this partition, in the place of all."""
        others = in_place_of.size - 1
        sent = (self.group.size - 1) * self.shard.nbytes
        self.group.traffic.compressed(sent, others * _FLOAT32 * (full.numel() // in_place_of.size))
        return self.group.all_gather(full, self.shard)

    def take(self, full: Tensor) -> None:
        """Keep this rank's part of `full`, which has been gathered."""
        self.shard.copy_(full[self._start : self._end])
        self.fresh = True


class ReadThenGathered:
    """A gather whose own shard has to come from its place first."""

    def __init__(self, reading: Work, gathering: AllGather, full: Tensor, own: Tensor) -> None:
        """`own`: this rank's part of `full`, which is read."""
        self.reading, self._gathering, self._full, self._own = reading, gathering, full, own

    def wait(self) -> None:
        self.reading.wait()
        if self._own.numel() < self._full.numel():  # There are others.
            self._gathering.all_gather(self._full, self._own).wait()


class TakenBySecondary:
    """A gather over all ranks, which fills a secondary partition."""

    def __init__(self, gather: Work, secondary: SecondaryPartition, full: Tensor) -> None:
        self._gather, self._secondary, self._full = gather, secondary, full

    @torch.no_grad()
    def wait(self) -> None:
        self._gather.wait()
        self._secondary.take(self._full)
