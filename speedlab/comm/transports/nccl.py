"""Flats over torch's own collectives, with sums of narrow terms taken wide: on NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speedlab.comm.transports.base import Finish, Transport, gather_whole


class Exchanging(Transport):
    """A reduce-scatter of 16-bit floats over more than two ranks is an exchange of slices, then a sum in float32 on
    this rank: the bytes of a 16-bit reduce-scatter, and one rounding.

    NCCL's own sums round after every term. They remain where two terms are added, which is one rounding too, for wider
    dtypes, and in `all_reduce`: to sum its slices here would put off the gather until somebody waits.
    """

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
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
    """Slice k of `sent` (n × m,) goes to rank k; slice k of `received` comes from it. As bytes: gloo knows fewer dtypes
    than torch."""
    whole, into = (tensor.view(-1).view(torch.uint8) for tensor in (sent, received))
    return dist.all_to_all_single(into, whole, group=group, async_op=async_op)


def rounds_often(dtype: torch.dtype, terms: int) -> bool:
    """Whether a sum of so many terms, taken in their own dtype, is rounded more than once to few bits."""
    return terms > 2 and dtype.is_floating_point and dtype.itemsize < 4


def sum_of_slices(received: Tensor, size: int) -> Tensor:
    """The sum (m,) float32 of what `size` ranks sent, `received` (size × m,), in rank order."""
    return received.view(size, -1).sum(0, dtype=torch.float32)


def sum_wide(total: Tensor, *, group: Any) -> None:
    """Sum `total` over the ranks of `group`, in place and in float32, at the bytes of a sum in the tensor's own dtype:
    each rank sums a slice, then all gather them."""
    flat, size = total.view(-1), group.size()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    received = torch.empty_like(padded)
    exchange(received, padded, group)
    own = sum_of_slices(received, size).to(total.dtype)
    gather_whole(padded.view(torch.uint8), own.view(torch.uint8), group=group)
    flat.copy_(padded[: flat.numel()])


def scatter_sum_wide(own: Tensor, slices: Tensor, *, group: Any) -> None:
    """Fill `own` (m,) with the sum in float32 of what the ranks have for this one in their `slices` (n × m,), at the
    bytes of a reduction in the tensor's own dtype."""
    received = torch.empty_like(slices)
    exchange(received, slices, group)
    own.copy_(sum_of_slices(received, group.size()))
