"""Transport in shared memory: reductions read the peers' gradients in place, and a gather is one copy.

Transfers do not overlap with computation, because they are very short. These rules keep a rank from writing memory that
a peer still reads:

1. A tensor is offered when its values are final. Peers may read it from then on.
2. A rank counts the offers it has read (TAKEN). `wait_until_all_read` waits until all peers have read all offers of
   this rank; then the memory may be written again.
3. In an all-reduce, every rank writes only its own slice of its own tensor, while peers read the other slices. The
   owner reports that the sum is in place (SUMMED), then peers copy it. A rank that starts a later all-reduce first sums
   its slice of all earlier ones that every peer has started, so that a waiting peer finds it summed.
4. A gather into a `MappedShards` tensor maps memory and copies nothing. It counts as taken at once, and is in use until
   that tensor is freed. `wait_until_let_go` waits for given shards only, because other engines may keep theirs.
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

from cuda_ops.kernel_usage import meter
from cuda_ops.reduce import sum_at
from cuda_ops.tensor_checks import array
from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.shared.shared_tensors import arena
from speedlab.comm.shared.sync_page import Number, OfferPurpose, SyncPage, transfer_code
from speedlab.comm.transports.base import Finish, Transport

LEAST_JOINED_BYTES = 256 << 10
"""Smallest shard that is mapped. Copying less takes microseconds, and pages on shard boundaries, which each rank
copies, would be a large part.
"""


class InPlace(Transport):
    """Transfers between tensors that `empty` made; other tensors are first copied to shared memory."""

    ordered = False

    def __init__(self, wires: ProcessGroups, size: int, index: int, device: torch.device) -> None:
        super().__init__(wires, size, index, device)
        self._meeting: SyncPage = wires.group.meeting
        self._offered: dict[int, int] = {}
        """Shards that were offered and not gathered yet: address → number of the offer."""
        self._given: dict[int, int] = {}
        """Tensors that were reduced, or gathered without an earlier offer: address → number of the offer."""
        self._unsummed: deque[tuple[int, Tensor]] = deque()
        """All-reduces in which this rank must still sum its slice: (number of the offer, its memory), oldest first."""

    def empty(self, numel: int, dtype: torch.dtype, place: int = 0) -> Tensor:
        """Allocate shared memory; see `Transport.empty`."""
        return arena().empty(numel, dtype, byte=place * dtype.itemsize % mmap.PAGESIZE)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        """Return a tensor of mapped shards, if they are large enough; see `Transport.joined`."""
        if numel // self.size * dtype.itemsize < LEAST_JOINED_BYTES or not MappedShards.fits(self.size):
            return None
        with suppress(OSError):
            return MappedShards(numel, dtype, self.size)
        return None

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Publish the addresses of shards; see `Transport.offer`."""
        for shard in shards:
            self._offered[shard.data_ptr()] = self._offer_whole(shard, OfferPurpose.ALL_GATHER)[0]

    def wait_until_all_read(self) -> None:
        """Wait until peers have read all offers; see `Transport.wait_until_all_read`."""
        self._meeting.wait_until_all_read()

    def wait_until_read(self, buffer: Tensor) -> None:
        """Wait until peers have read a reduced tensor; see `Transport.wait_until_read`."""
        self._meeting.wait_all(Number.TAKEN, self._given.get(buffer.data_ptr(), -1) + 1)

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        """Wait until no peer maps these shards; see `Transport.wait_until_let_go`."""
        places = (arena().find(shard.data_ptr(), shard.nbytes) for shard in shards)
        self._meeting.wait_until_let_go([place.block for place in places if place is not None])

    def withdraw(self) -> None:
        """Forget the offers of an aborted pass; see `Transport.withdraw`."""
        self._offered.clear()
        self._meeting.take_no_more()

    def all_gather(self, full: Tensor, shard: Tensor, own: Tensor) -> Finish:
        """Copy every rank's shard; see `Transport.all_gather`."""
        number = self._number_of(shard)
        return lambda: self._copy(full, number)

    def join(self, joined: MappedShards, shard: Tensor) -> Finish:
        """Map every rank's shard; see `Transport.join`."""
        number = self._number_of(shard)

        def finish() -> None:
            joined.take(self._meeting, number)
            self._meeting.took()

        return finish

    def _number_of(self, shard: Tensor) -> int:
        """Return the number of the shard's next offer, and offer the shard if it was not offered before."""
        number = self._offered.pop(shard.data_ptr(), None)
        if number is None:
            number, _ = self._offer_whole(shard, OfferPurpose.ALL_GATHER)
            self._given[shard.data_ptr()] = number
        return number

    def reduce_scatter(self, full: Tensor, into: Tensor, accumulate: bool) -> Finish:
        """Sum the peers' tensors in place; see `Transport.reduce_scatter`."""
        number, shared = self._offer_whole(full, OfferPurpose.REDUCE_SCATTER)
        self._given[full.data_ptr()] = number

        def finish() -> None:
            self._sum(shared, into, self._meeting.addresses(number), accumulate)
            self._meeting.took()

        return finish

    def all_reduce(self, full: Tensor) -> Finish:
        """Sum one slice per rank in place, then copy the others; see `Transport.all_reduce`."""
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
        """Sum this rank's slice of the oldest pending all-reduce. Keep this order, because SUMMED is a count."""
        number, shared = self._unsummed[0]
        addresses = self._meeting.addresses(number)  # An error here is raised again by the wait for this all-reduce.
        self._unsummed.popleft()  # Remove the entry first: an interrupted sum must not be repeated.
        self._sum(shared, shared.view(self.size, -1)[self.index], addresses, accumulate=False)
        self._meeting.raise_own(Number.SUMMED, number + 1)

    def _offer_whole(self, tensor: Tensor, transfer: OfferPurpose) -> tuple[int, Tensor]:
        """Return (number of the offer, the memory that peers read): `tensor` itself, or a copy if it is not in shared
        memory.
        """
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
        """Sum this rank's slice of all ranks' `full` into `into`. `addresses` locate the peers' tensors."""
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
