"""The interface of transports. `Transport` itself uses torch.distributed's collectives, as for unknown backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.shared.mapped_shards import MappedShards

# torch 2.13 renamed the two; 2.11 and 2.12 have the older names only.
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], None]
"""Waits for a collective that was started. Call once."""


class Transport:
    """Collectives of flat parameters in one group. All ranks start the same ones in the same order."""

    ordered = True
    """Whether gathers of offered shards need one order on all ranks, too."""
    sums_early = True
    """Whether a rank may sum a reduction that all peers have started before any rank waits for it."""

    def __init__(self, wires: ProcessGroups, size: int, index: int, device: torch.device) -> None:
        self.wires, self.size, self.index, self.device = wires, size, index, device

    def cut(self) -> None:
        """Release works that were started and not awaited, because this rank has left the world."""

    @property
    def peers(self) -> list[int]:
        """Indices of the other ranks in the group."""
        return [peer for peer in range(self.size) if peer != self.index]

    def empty(self, numel: int, dtype: torch.dtype, place: int = 0) -> Tensor:
        """Allocate a tensor (numel,) that will often be sent, in the memory that is best for this transport.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            place: Index of the tensor's first element in the gathered tensor.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        """Return a tensor (numel,) for `join`, which maps memory of peers; None if that is impossible.

        Args:
            numel: Number of elements over all ranks.
            dtype: Type of the elements.
        """
        return None

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce shards that will be gathered. This does nothing if every gather is a collective.

        Args:
            shards: Shards of this rank.
        """

    def wait_until_all_read(self) -> None:
        """Wait until peers no longer need what this rank offered or gave to a reduction."""

    def wait_until_read(self, buffer: Tensor) -> None:
        """Wait until peers no longer need a buffer.

        Args:
            buffer: Input of a reduction that has ended on this rank.
        """

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        """Wait until no peer maps these shards in a joined tensor.

        Args:
            shards: Shards that all peers have taken.
        """

    def withdraw(self) -> None:
        """Forget the offers of an aborted pass."""

    def all_gather(self, full: Tensor, shard: Tensor, own: Tensor) -> Finish:
        """Start to gather every rank's shard.

        Args:
            full: (n × m,).
            shard: (m,).
            own: This rank's slice of `full`, which holds `shard` already.
        """
        return self._wait(gather_whole(full, own, group=self.wires.group, async_op=True))

    def join(self, joined: MappedShards, shard: Tensor) -> Finish:
        """Start to gather every rank's shard into a joined tensor, possibly made by another transport.

        Args:
            joined: Target.
            shard: (m,).
        """
        joined.separate()
        own = joined.tensor.view(self.size, -1)[self.index].copy_(shard)
        return self.all_gather(joined.tensor, shard, own)

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        """Start to sum this rank's slice of every rank's tensor.

        Args:
            full: (n × m,).
            into: (m,).
            accumulate: Add the sum to `into`.
        """
        summed = torch.empty(full.numel() // self.size, dtype=full.dtype, device=full.device)
        arrived = self._wait(scatter_sum(summed, full, group=self.wires.group, async_op=True))

        def finish() -> None:
            arrived()
            if accumulate:
                into.add_(summed)
            else:
                into.copy_(summed)

        return finish

    def all_reduce(self, full: Tensor) -> Finish:
        """Start to sum a tensor over the ranks, in place.

        Args:
            full: (n × m,).
        """
        return self._wait(dist.all_reduce(full, group=self.wires.group, async_op=True))

    @staticmethod
    def _wait(work: dist.Work | None) -> Finish:
        assert work is not None

        def finish() -> None:
            work.wait()

        return finish
