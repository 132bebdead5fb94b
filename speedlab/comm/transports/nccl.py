"""Transport over NCCL: torch's collectives, and sums of 16-bit terms in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speedlab.comm.transports.base import Finish, Transport, gather_whole


class Exchanging(Transport):
    """A reduce-scatter of 16-bit floats over more than two ranks is an all-to-all and a float32 sum on each rank.

    It sends the bytes of a 16-bit reduce-scatter and rounds once. NCCL's own sums round after every term. NCCL still
    sums two terms (one rounding, too), wider dtypes, and `all_reduce`: summing its slices here would delay the gather
    until a rank waits.
    """

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        """Sum in float32; see `Transport.reduce_scatter`."""
        if not rounds_often(full.dtype, self.size):
            return super().reduce_scatter(full, into, accumulate)
        received = torch.empty_like(full)
        arrived = self._wait(exchange(received, full, self.wires.group, async_op=True))

        def finish() -> None:
            arrived()
            summed = sum_of_slices(received, self.size)
            if accumulate:
                into.add_(summed)
            else:
                into.copy_(summed)

        return finish


def exchange(received: Tensor, sent: Tensor, group: Any, *, async_op: bool = False) -> dist.Work | None:
    """All-to-all: slice k of `sent` goes to rank k. Sent as bytes, because gloo supports fewer dtypes than torch.

    Args:
        received: (n × m,), filled: slice k comes from rank k.
        sent: (n × m,).
        group: Process group.
        async_op: Return a work and do not wait.
    """
    whole, into = (tensor.view(-1).view(torch.uint8) for tensor in (sent, received))
    return dist.all_to_all_single(into, whole, group=group, async_op=async_op)


def rounds_often(dtype: torch.dtype, terms: int) -> bool:
    """Return whether a sum in its own dtype rounds more than once to fewer than 32 bits.

    Args:
        dtype: Type of the terms.
        terms: Number of terms.
    """
    return terms > 2 and dtype.is_floating_point and dtype.itemsize < 4


def sum_of_slices(received: Tensor, size: int) -> Tensor:
    """Return the sum of the received slices in rank order, (m,) float32.

    Args:
        received: (size × m,).
        size: Number of ranks.
    """
    return received.view(size, -1).sum(0, dtype=torch.float32)


def sum_wide(total: Tensor, *, group: Any) -> None:
    """Sum over the ranks in float32, in place, at the bytes of a sum in the tensor's dtype.

    Each rank sums one slice; then all ranks gather the slices.

    Args:
        total: Contiguous tensor.
        group: Process group.
    """
    flat, size = total.view(-1), group.size()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    received = torch.empty_like(padded)
    exchange(received, padded, group)
    own = sum_of_slices(received, size).to(total.dtype)
    gather_whole(padded.view(torch.uint8), own.view(torch.uint8), group=group)
    flat.copy_(padded[: flat.numel()])


def scatter_sum_wide(own: Tensor, slices: Tensor, *, group: Any) -> None:
    """Sum this rank's slice over the ranks in float32, at the bytes of a reduction in the tensor's dtype.

    Args:
        own: (m,), filled.
        slices: (n × m,), or n stacked slices.
        group: Process group.
    """
    received = torch.empty_like(slices)
    exchange(received, slices, group)
    own.copy_(sum_of_slices(received, group.size()))
