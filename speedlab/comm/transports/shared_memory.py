"""Flats that live in shared memory: a reduction reads its peers' gradients where they are, a gather is one copy.

Nothing overlaps with computing, because there is next to nothing to hide. The rules that keep a rank from writing what
a peer still reads:

1. A tensor is offered when its values are final. Peers read it from then on.
2. A rank counts what it has read (TAKEN). `wait_until_all_read` waits until all peers have read all that this rank
   has offered; after it, the memory may be written again.
3. In an all-reduce every rank writes only its own slice of its own tensor while peers read the other slices; the sum is
   copied from its owner when that one has said that it stands there (SUMMED). Whoever starts another one sums its slice
   of those before it to which all peers have come: a peer that waits for one later finds it summed.
4. What is gathered into a `MappedShards` tensor is mapped, not copied: it is taken at once, and in use until that
   tensor goes. `wait_until_let_go` waits for that, of some shards only: those of other engines may stay for a while.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memmove

import numpy as np
import torch
from torch import Tensor

from cuda_ops.meter import meter
from cuda_ops.reduce import sum_at
from cuda_ops.tensor_checks import array
from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.shared.shared_tensors import arena
from speedlab.comm.shared.sync_page import Number, OfferPurpose, SyncPage, transfer_code
from speedlab.comm.transports.base import Finish, Transport

LEAST_JOINED_BYTES = 256 << 10
"""Of a shard that is mapped. Less is copied in microseconds, and the pages in which shards meet, which each rank keeps
for itself, would be much of it."""


class InPlace(Transport):
    """Works on tensors that `empty` made; others are copied to such memory first."""

    ordered = False

    def __init__(self, wires: ProcessGroups, size: int, index: int, device: torch.device) -> None:
        super().__init__(wires, size, index, device)
        self._meeting: SyncPage = wires.group.meeting
        self._offered: dict[int, int] = {}
        """Shards that were offered and not gathered yet: address → number of the offer."""
        self._given: dict[int, int] = {}
        """Address of a tensor that was reduced, or gathered without being offered before → number of its offer."""
        self._unsummed: deque[tuple[int, Tensor]] = deque()
        """All-reduces in which this rank has to sum its slice yet: (number of the offer, its memory), oldest first."""

    def empty(self, numel: int, dtype: torch.dtype, place: int = 0) -> Tensor:
        return arena().empty(numel, dtype, byte=place * dtype.itemsize % mmap.PAGESIZE)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        if numel // self.size * dtype.itemsize < LEAST_JOINED_BYTES or not MappedShards.fits(self.size):
            return None
        with suppress(OSError):
            return MappedShards(numel, dtype, self.size)
        return None

    def offer(self, shards: Sequence[Tensor]) -> None:
        for shard in shards:
            self._offered[shard.data_ptr()] = self._offer_whole(shard, OfferPurpose.ALL_GATHER)[0]

    def wait_until_all_read(self) -> None:
        self._meeting.wait_until_all_read()

    def wait_until_read(self, buffer: Tensor) -> None:
        self._meeting.wait_all(Number.TAKEN, self._given.get(buffer.data_ptr(), -1) + 1)

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        places = (arena().find(shard.data_ptr(), shard.nbytes) for shard in shards)
        self._meeting.wait_until_let_go([place.block for place in places if place is not None])

    def withdraw(self) -> None:
        self._offered.clear()
        self._meeting.take_no_more()

    def all_gather(self, full: Tensor, shard: Tensor, own: Tensor) -> Finish:
        number = self._number_of(shard)
        return lambda: self._copy(full, number)

    def join(self, joined: MappedShards, shard: Tensor) -> Finish:
        number = self._number_of(shard)

        def finish() -> None:
            joined.take(self._meeting, number)
            self._meeting.took()

        return finish

    def _number_of(self, shard: Tensor) -> int:
        """Of the offer of `shard` that comes next, which is made now where it was not before."""
        number = self._offered.pop(shard.data_ptr(), None)
        if number is None:
            number, _ = self._offer_whole(shard, OfferPurpose.ALL_GATHER)
            self._given[shard.data_ptr()] = number
        return number

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        number, shared = self._offer_whole(full, OfferPurpose.REDUCE_SCATTER)
        self._given[full.data_ptr()] = number

        def finish() -> None:
            self._sum(shared, into, self._meeting.addresses(number), accumulate)
            self._meeting.took()

        return finish

    def all_reduce(self, full: Tensor) -> Finish:
        number, shared = self._offer_whole(full, OfferPurpose.ALL_REDUCE)
        self._given[full.data_ptr()] = number
        while self.sums_early and self._unsummed and self._meeting.reached(Number.OFFERED, self._unsummed[0][0] + 1):
            self._sum_oldest()
        self._unsummed.append((number, shared))

        def finish() -> None:
            while self._unsummed and self._unsummed[0][0] <= number:
                self._sum_oldest()
            self._meeting.wait_all(Number.SUMMED, number + 1)
            addresses = self._meeting.addresses(number)
            addresses[self.index] = shared.data_ptr()
            nbytes = full.nbytes // self.size
            for k in self.peers if shared is full else range(self.size):
                memmove(full.data_ptr() + k * nbytes, int(addresses[k]) + k * nbytes, nbytes)
            self._meeting.took()

        return finish

    def _sum_oldest(self) -> None:
        """This rank's slice of the oldest all-reduce that lacks it. In this order: SUMMED counts all up to it."""
        number, shared = self._unsummed[0]
        addresses = self._meeting.addresses(number)  # What fails here fails again for who waits for it.
        self._unsummed.popleft()  # Before: what is cut off must not be summed twice.
        self._sum(shared, shared.view(self.size, -1)[self.index], addresses, accumulate=False)
        self._meeting.raise_own(Number.SUMMED, number + 1)

    def _offer_whole(self, tensor: Tensor, transfer: OfferPurpose) -> tuple[int, Tensor]:
        """(number of the offer, the memory that peers read): `tensor` itself, or a copy if it came from elsewhere."""
        shared = tensor
        if arena().find(tensor.data_ptr(), tensor.nbytes) is None:
            shared = arena().empty(tensor.numel(), tensor.dtype).copy_(tensor)
        return self._meeting.offer(shared.data_ptr(), shared.nbytes, transfer_code(transfer, tensor.dtype)), shared

    def _copy(self, full: Tensor, number: int) -> None:
        nbytes = full.nbytes // self.size
        addresses = self._meeting.addresses(number)
        with meter.record("gather", 2 * (self.size - 1) * nbytes, full.device):
            for peer in self.peers:
                memmove(full.data_ptr() + peer * nbytes, int(addresses[peer]), nbytes)
        self._meeting.took()

    def _sum(self, full: Tensor, into: Tensor, addresses: np.ndarray, accumulate: bool) -> None:
        """This rank's slice of all ranks' `full`, of which the peers' stand at these addresses, summed into `into`."""
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
