"""Collectives on any CPU tensors, through small staging areas that stay in the CPU caches.

A collective is split into rounds. In round r a rank

1. waits until all peers have read round r - 2, which used the same half of the staging area,
2. writes its part into that half, and reports this,
3. waits until all peers have written their parts, reads them, and reports this.

The call of a round is written with the parts, and compared before a part is read (`SyncPage.meet`).

The rank that owns a slice sums it in rank order, 16-bit floats in float32. So every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_uint8, memmove
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ops.reduce import sum_at
from cuda_ops.tensor_checks import array
from speedlab.comm.errors import PeerLost
from speedlab.comm.shared.call_descriptions import Call
from speedlab.comm.shared.sync_page import STAGING_BYTES, Number, SyncPage

_WHOLE_BYTES = 16 << 10
"""Up to this size, every rank sums everything itself: one round and not two."""

PAIRWISE: dict[dist.ReduceOp.RedOpType, Callable[..., Tensor]] = {
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

_SUMMED = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def can_reduce(dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> bool:
    """Return whether a reduction is implemented here.

    Args:
        dtype: Type of the elements.
        op: Kind of the reduction.
    """
    return dtype in _SUMMED and (op in _SUMS or op in PAIRWISE)


class StagedCollectives:
    """The collectives of one group. All ranks call them in the same order, each after `announce`."""

    def __init__(self, meeting: SyncPage) -> None:
        self._meeting = meeting
        self._round = 0
        self._halves = [
            np.array([meeting.staging(k, half) for k in range(meeting.size)], dtype=np.int64) for half in (0, 1)
        ]

    # ---- a round -----------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[int, np.ndarray]:
        """Return (address of this rank's half, addresses of all ranks' halves), after this half may be written."""
        # 1: peers must have read this half.
        if self._round >= 2:
            self._meeting.wait_all(Number.READ, self._round - 1)
        halves = self._halves[self._round % 2]
        return int(halves[self._meeting.index]), halves

    def _written(self) -> None:
        """Report that this rank's part is written, and wait for all peers' parts of the same call."""
        # 2 and 3, with the comparison of calls.
        self._meeting.meet(self._round)

    def _read(self) -> None:
        self._round += 1
        self._meeting.raise_own(Number.READ, self._round)

    def announce(self, call: Call) -> None:
        """Set the call of the next collective.

        Args:
            call: Description of the call.

        Raises:
            PeerLost: The earlier error of this group, if there was one.
        """
        self._meeting.begin_call(call)

    def agree(self) -> None:
        """Compare the call with those of the peers, for a collective that another backend executes."""
        self.barrier()

    @property
    def words(self) -> tuple[int, int, int]:
        """The words of the call that ranks compare."""
        return self._meeting.words_of_call

    def asked(self) -> str:
        """Return the call as a sentence, for errors."""
        return self._meeting.own_call()

    def mismatch(self, reason: str) -> PeerLost:
        """Return the error of the call.

        Args:
            reason: Found by all ranks, or seen by them when they wait.
        """
        return self._meeting.mismatch(reason)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank arrives."""
        self._begin()
        self._written()
        self._read()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks, in place.

        Args:
            tensor: Contiguous.
            op: Kind of the reduction.
        """
        flat = tensor.view(-1)
        if flat.nbytes <= _WHOLE_BYTES:
            self._reduce_whole(flat, op)
            return
        size, index, width = self._meeting.size, self._meeting.index, flat.element_size()
        most = STAGING_BYTES // width
        for low in range(0, flat.numel(), most):
            piece = flat[low : low + most]
            # Slices have whole cache lines; the last may be shorter, or empty.
            step = -(-piece.numel() // (size * 64)) * 64
            bounds = [(min(k * step, piece.numel()), min((k + 1) * step, piece.numel())) for k in range(size)]
            first, last = bounds[index]
            own, halves = self._begin()
            for k in self._meeting.peers:
                start, stop = bounds[k]
                memmove(own + start * width, piece.data_ptr() + start * width, (stop - start) * width)
            self._written()
            self._reduce(halves + first * width, piece[first:last], piece[first:last], op)
            self._read()
            own, halves = self._begin()
            memmove(own, piece.data_ptr() + first * width, (last - first) * width)
            self._written()
            for k in self._meeting.peers:
                start, stop = bounds[k]
                memmove(piece.data_ptr() + start * width, int(halves[k]), (stop - start) * width)
            self._read()

    def _reduce_whole(self, flat: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        own, halves = self._begin()
        memmove(own, flat.data_ptr(), flat.nbytes)
        self._written()
        self._reduce(halves, None, flat, op)
        self._read()

    def reduce_scatter(
        self, out: Tensor, slices: Sequence[Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce slice number `index` of every rank into `out`.

        Args:
            out: Contiguous.
            slices: One contiguous tensor per rank, each of the size of `out`.
            op: Kind of the reduction.
        """
        size, index, width = self._meeting.size, self._meeting.index, out.element_size()
        out, flats = out.view(-1), [part.view(-1) for part in slices]
        most = STAGING_BYTES // (width * size)
        # Run at least one round, so that calls without elements are compared, too.
        for low in range(0, out.numel() or 1, most):
            count = min(most, out.numel() - low)
            own, halves = self._begin()
            for k in self._meeting.peers:
                memmove(own + k * most * width, flats[k].data_ptr() + low * width, count * width)
            self._written()
            self._reduce(halves + index * most * width, flats[index][low : low + count], out[low : low + count], op)
            self._read()

    def all_gather(self, outs: Sequence[Tensor], part: Tensor) -> None:
        """Gather every rank's `part`: outs[k] comes from rank k.

        Args:
            outs: One contiguous tensor per rank.
            part: Contiguous, same size; may be this rank's tensor in `outs`.
        """
        width, flat = part.element_size(), part.view(-1)
        most = STAGING_BYTES // width
        targets = [out.data_ptr() for out in outs]
        for low in range(0, flat.numel() or 1, most):
            nbytes = min(most, flat.numel() - low) * width
            source = flat.data_ptr() + low * width
            own, halves = self._begin()
            memmove(own, source, nbytes)
            self._written()
            for k in self._meeting.peers:
                memmove(targets[k] + low * width, int(halves[k]), nbytes)
            self._read()
        if targets[self._meeting.index] != flat.data_ptr():
            memmove(targets[self._meeting.index], flat.data_ptr(), flat.nbytes)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy a tensor from one rank to all, in place.

        Args:
            tensor: Contiguous.
            source: Index of the sender in the group.
        """
        address, total = tensor.data_ptr(), tensor.nbytes
        for low in range(0, total or 1, STAGING_BYTES):
            nbytes = min(STAGING_BYTES, total - low)
            own, halves = self._begin()
            if self._meeting.index == source:
                memmove(own, address + low, nbytes)
            self._written()
            if self._meeting.index != source:
                memmove(address + low, int(halves[source]), nbytes)
            self._read()

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Receive part number `index` of every rank: outs[k] comes from rank k.

        Args:
            outs: One contiguous tensor per rank, of any matching size.
            parts: One contiguous tensor per rank, of any matching size.

        Raises:
            CollectiveMismatch: If sizes do not match.
        """
        size, index = self._meeting.size, self._meeting.index
        sent = matched_parts(self, self._meeting.ranks, parts, outs)
        most = STAGING_BYTES // size // 64 * 64
        for low in range(0, int(sent.max()) * parts[index].element_size(), most):
            own, halves = self._begin()
            for k in self._meeting.peers:
                memmove(own + k * most, parts[k].data_ptr() + low, _left(parts[k].nbytes, low, most))
            self._written()
            for k in self._meeting.peers:
                memmove(outs[k].data_ptr() + low, int(halves[k]) + index * most, _left(outs[k].nbytes, low, most))
            self._read()
        outs[index].view(-1).copy_(parts[index].view(-1))

    def _reduce(self, addresses: np.ndarray, own: Tensor | None, out: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce the ranks' elements at `addresses` into `out`; this rank's elements come from `own` if given."""
        if out.numel() == 0:
            return
        target = array(out)
        if own is not None:
            addresses = addresses.copy()
            addresses[self._meeting.index] = own.data_ptr()
        if op in _SUMS:
            divisor = self._meeting.size if op == dist.ReduceOp.AVG else 1
            floating = out.dtype.is_floating_point
            sum_at(addresses, target[:0], target, divisor=divisor, accumulate=False, floating=floating)
            return
        terms = [tensor_at(int(address), out.numel(), out.dtype) for address in addresses]
        result = terms[0]
        for term in terms[1:]:
            result = PAIRWISE[op](result, term)
        out.copy_(result)


class _Comparing(Protocol):
    """StagedCollectives or a Hierarchy."""

    def all_gather(self, outs: Sequence[Tensor], part: Tensor) -> None: ...
    def mismatch(self, reason: str) -> PeerLost: ...


def matched_parts(group: _Comparing, ranks: Sequence[int], parts: Sequence[Tensor], outs: Sequence[Tensor]) -> Tensor:
    """Return the elements (n, n) that rank j of an all-to-all sends to rank k.

    Args:
        group: Compares the sizes.
        ranks: Names of the ranks in errors.
        parts: Tensors that this rank sends.
        outs: Tensors that this rank receives.

    Raises:
        CollectiveMismatch: On all ranks, if a rank expects another number of elements.
    """
    sizes = torch.tensor([[part.numel() for part in parts], [out.numel() for out in outs]], dtype=torch.int64)
    every = torch.empty((len(ranks), *sizes.shape), dtype=torch.int64)
    group.all_gather(list(every), sizes)
    sent, expected = every.unbind(1)
    differing = (sent != expected.T).nonzero().tolist()
    if differing:
        j, k = differing[0]
        raise group.mismatch(
            f"all_to_all: rank {ranks[j]} sends {int(sent[j, k]):,} elements to rank {ranks[k]}, which expects "
            f"{int(expected[k, j]):,}."
        )
    return sent


def tensor_at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor over memory that another object keeps alive.

    Args:
        address: Address in this process.
        numel: Number of elements.
        dtype: Type of the elements.
    """
    raw = np.ctypeslib.as_array((c_uint8 * (numel * dtype.itemsize)).from_address(address))
    return torch.from_numpy(raw).view(dtype)


def _left(total: int, low: int, most: int) -> int:
    return max(0, min(most, total - low))
