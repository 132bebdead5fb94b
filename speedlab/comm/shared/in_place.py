"""Flats that live in shared memory: a reduction reads its peers' gradients where they are, a gather is one copy.

Nothing overlaps with computing, because there is next to nothing to hide. The rules that keep a rank from writing what
a peer still reads:

1. A tensor is offered when its values are final. Peers read it from then on.
2. A rank counts what it has read (TAKEN). `settle` waits until all peers have read all that this rank has offered;
   after it, the memory may be written again.
3. In an all-reduce every rank writes only its own slice of its own tensor while peers read the other slices; the sum is
   copied from its owner when that one has said that it stands there (SUMMED).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import numpy as np
import torch
from torch import Tensor

from cuda_ops.meter import meter
from cuda_ops.reduce import sum_at
from cuda_ops.tensors import array
from speedlab.comm.shared.meeting import Meeting, Number
from speedlab.comm.shared.segments import arena
from speedlab.comm.transport import Finish, Transport
from speedlab.comm.world import Wires


class InPlace(Transport):
    """Works on tensors that `empty` made; others travel through the group's staging areas."""

    def __init__(self, wires: Wires, size: int, index: int, device: torch.device) -> None:
        super().__init__(wires, size, index, device)
        self._meeting: Meeting = wires.group.meeting
        self._offered: dict[int, int] = {}
        """Shards that were offered and not gathered yet: address → number of the offer."""
        self._reduced: dict[int, int] = {}
        """Address of a tensor that was reduced → number of its offer."""
        self._taken = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return arena().empty(numel, dtype)

    def offer(self, shards: Sequence[Tensor]) -> None:
        for shard in shards:
            self._offered[shard.data_ptr()] = self._meeting.offer(shard.data_ptr(), shard.nbytes)

    def settle(self) -> None:
        self._meeting.wait_all(Number.TAKEN, self._meeting.offered)
        self._meeting.trim()

    def wait_free(self, buffer: Tensor) -> None:
        self._meeting.wait_all(Number.TAKEN, self._reduced.get(buffer.data_ptr(), -1) + 1)

    def is_free(self, buffer: Tensor) -> bool:
        return self._meeting.reached(Number.TAKEN, self._reduced.get(buffer.data_ptr(), -1) + 1)

    def withdraw(self) -> None:
        self._offered.clear()
        self._taken = self._meeting.offered
        self._meeting.raise_own(Number.TAKEN, self._taken)

    def all_gather(self, full: Tensor, shard: Tensor, own: Tensor) -> Finish:
        number = self._offered.pop(shard.data_ptr(), None)
        if number is None:
            if not _shared(shard):
                return super().all_gather(full, shard, own)
            number = self._meeting.offer(shard.data_ptr(), shard.nbytes)
        return lambda: self._copy(full, number)

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        if not _shared(full):
            return super().reduce_scatter(full, into, accumulate)
        number = self._reduced[full.data_ptr()] = self._meeting.offer(full.data_ptr(), full.nbytes)

        def finish() -> None:
            self._sum(full, into, number, accumulate)
            self._took()

        return finish

    def all_reduce(self, full: Tensor) -> Finish:
        if not _shared(full):
            return super().all_reduce(full)
        number = self._meeting.offer(full.data_ptr(), full.nbytes)

        def finish() -> None:
            addresses = self._sum(full, full.view(self.size, -1)[self.index], number, accumulate=False)
            self._meeting.raise_own(Number.SUMMED, number + 1)
            self._meeting.wait_all(Number.SUMMED, number + 1)
            nbytes = full.nbytes // self.size
            for peer in self.peers:
                memmove(full.data_ptr() + peer * nbytes, int(addresses[peer]) + peer * nbytes, nbytes)
            self._took()

        return finish

    def _copy(self, full: Tensor, number: int) -> None:
        nbytes = full.nbytes // self.size
        addresses = self._meeting.addresses(number, nbytes)
        with meter.record("gather", 2 * (self.size - 1) * nbytes, full.device):
            for peer in self.peers:
                memmove(full.data_ptr() + peer * nbytes, int(addresses[peer]), nbytes)
        self._took()

    def _sum(self, full: Tensor, into: Tensor, number: int, accumulate: bool) -> np.ndarray:
        """This rank's slice of all ranks' `full`, summed into `into`; returns where they stand."""
        addresses = self._meeting.addresses(number, full.nbytes)
        addresses[self.index] = full.data_ptr()
        nbytes = full.nbytes // self.size
        target = array(into)
        with meter.record("reduce", self.size * nbytes + into.nbytes, full.device):
            sum_at(
                addresses + self.index * nbytes,
                array(full[:0]),
                target,
                divisor=1,
                accumulate=accumulate,
                floating=full.dtype.is_floating_point,
            )
        return addresses

    def _took(self) -> None:
        self._taken += 1
        self._meeting.raise_own(Number.TAKEN, self._taken)


def _shared(tensor: Tensor) -> bool:
    return arena().locate(tensor.data_ptr(), tensor.nbytes) is not None
