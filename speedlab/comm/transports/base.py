"""How flats travel between ranks. `Transport` itself uses torch.distributed's collectives as they are, as on NCCL."""

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
"""What is left of a collective that was started; to be called once."""


class Transport:
    """Starts collectives of one group; all its ranks start the same ones in the same order."""

    ordered = True
    """Whether this holds for gathers of what was offered, too."""
    sums_early = True
    """Whether a rank may sum what all peers have begun before anybody waits for it, where it does so itself."""

    def __init__(self, wires: ProcessGroups, size: int, index: int, device: torch.device) -> None:
        self.wires, self.size, self.index, self.device = wires, size, index, device

    def cut(self) -> None:
        """This rank has left the world: let go of works that were started and not waited for."""

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.index]

    def empty(self, numel: int, dtype: torch.dtype, place: int = 0) -> Tensor:
        """Memory for a tensor that will be sent often, where this transport likes it best. `place`: which element of
        what is gathered of such ones it begins with."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        """A tensor (numel,) that `join` gathers by mapping memory of its peers; None where that cannot be done."""
        return None

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce `shards` that will be gathered. Nothing to do where every gather is a collective of its own."""

    def wait_until_all_read(self) -> None:
        """Wait until peers need nothing more of what this rank has offered or given to a reduction."""

    def wait_until_read(self, buffer: Tensor) -> None:
        """Wait until peers need nothing more of `buffer`, which was given to a reduction that has ended here."""

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        """Wait until no peer has `shards`, which all have taken, in a joined tensor."""

    def withdraw(self) -> None:
        """Stop counting on what a broken pass has offered."""

    def all_gather(self, full: Tensor, shard: Tensor, own: Tensor) -> Finish:
        """Fill `full` with every rank's shard; `own`, this rank's slice of it, holds `shard` already."""
        return self._wait(gather_whole(full, own, group=self.wires.group, async_op=True))

    def join(self, joined: MappedShards, shard: Tensor) -> Finish:
        """Give `joined`, which came from a transport that may have been another one, every rank's shard."""
        joined.separate()
        own = joined.tensor.view(self.size, -1)[self.index].copy_(shard)
        return self.all_gather(joined.tensor, shard, own)

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        """Sum this rank's slice of every rank's `full` into `into`."""
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
        """Sum `full` over the ranks, in place."""
        return self._wait(dist.all_reduce(full, group=self.wires.group, async_op=True))

    @staticmethod
    def _wait(work: dist.Work | None) -> Finish:
        assert work is not None

        def finish() -> None:
            work.wait()

        return finish
