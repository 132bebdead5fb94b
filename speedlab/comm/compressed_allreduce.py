"""Means over a few ranks, where each rank sends its compressed values to all others, with error feedback.

1. Each rank adds its kept error to the given values and sends the code of the sum to all others. What the code misses
   is the new error.
2. Every rank computes the mean of all codes: the same bits on all ranks.

This needs one message and one error; `SignMeans` needs two of each. For n ranks, `SignMeans` sends 2 (n - 1) / n codes
of a tensor, and this class n - 1. For two ranks the bytes are equal. For a few distant ranks, saving one message
outweighs the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from cuda_ops.onebit import onebit_average, onebit_pack
from speedlab.comm.group import Group
from speedlab.comm.onebit_allreduce import CHUNK, SignPiece
from speedlab.layout import padded_numel

_WORD = 4
"""Bytes of a float32 and of an int32. Codes begin at multiples of it."""


class Code(Protocol):
    """The compression of a float32 tensor (m,)."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a code, a multiple of a word.

        Args:
            numel: Number of elements.
        """
        ...

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        """Write the code of `given` + `kept` to `code`. Afterwards `given` holds what the code misses.

        Args:
            given: (m,) float32, changed in place.
            kept: Error of the last step, (m,) float32.
            code: (nbytes,) uint8.
        """
        ...

    def mean(self, codes: Tensor, out: Tensor) -> None:
        """Write the mean of the ranks' codes.

        Args:
            codes: (ranks, nbytes) uint8.
            out: (m,) float32.
        """
        ...


class Signs:
    """One sign for each element, times the mean magnitude of its chunk."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of signs and magnitudes; see `Code.nbytes`."""
        return _signs_of(numel).end

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        """Write signs and magnitudes; see `Code.pack`."""
        _signs_of(given.numel()).put(code, *onebit_pack(kept, given, chunk=CHUNK))

    def mean(self, codes: Tensor, out: Tensor) -> None:
        """Write the mean of the decoded codes; see `Code.mean`."""
        piece = _signs_of(out.numel())
        onebit_average(piece.signs(codes), piece.magnitudes(codes), out, chunk=CHUNK)


def _signs_of(numel: int) -> SignPiece:
    middle = padded_numel(-(-numel // 8), _WORD)
    return SignPiece(numel, 0, middle, middle + _WORD * -(-numel // CHUNK))


class LargestElements:
    """The elements of largest magnitude, exact, with their indices (arXiv:1712.01887).

    The paper's momentum correction is not needed, because the values sent are no momenta.
    """

    def __init__(self, share: float) -> None:
        """Set the share of elements that are sent; at least one element is.

        Args:
            share: Share of the elements, 0 to 1.
        """
        self._share = share

    def _count(self, numel: int) -> int:
        return min(numel, max(1, round(self._share * numel)))

    def nbytes(self, numel: int) -> int:
        """Return the bytes of indices and values; see `Code.nbytes`."""
        return 2 * _WORD * self._count(numel)

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        """Write indices and values; see `Code.pack`."""
        given.add_(kept)
        places = given.abs().topk(self._count(given.numel()), sorted=False).indices
        middle = code.numel() // 2
        code[:middle] = places.int().view(torch.uint8)
        code[middle:] = given[places].view(torch.uint8)
        # The sent elements are exact, so their error is 0.
        given[places] = 0.0

    def mean(self, codes: Tensor, out: Tensor) -> None:
        """Write the mean of the decoded codes; see `Code.mean`."""
        middle = codes.shape[1] // 2
        out.zero_()
        for code in codes:  # Add in rank order, so that all ranks get the same bits.
            out.index_add_(0, code[:middle].view(torch.int32), code[middle:].view(torch.float32))
        out.div_(len(codes))


class CompressedMeans:
    """Means over the ranks of tensors with fixed sizes."""

    def __init__(self, group: Group, code: Code, numels: Sequence[int]) -> None:
        self._group, self._code, self._numels = group, code, numels
        self._ends = [0, *accumulate(code.nbytes(numel) for numel in numels)]
        self._spans = [slice(low, high) for low, high in zip(self._ends, self._ends[1:], strict=False)]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in one exchange."""
        return (self._group.size - 1) * self._ends[-1]

    def send(self, given: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Start to send `given` + `kept`. Collective.

        `kept` is not changed. After `take`, `given` holds the new error.

        Args:
            given: This rank's (m,) float32 of each tensor, all finite; changed in place.
            kept: Error of the last exchange, (m,) float32 of each tensor.
        """
        group = self._group
        self._messages = group.empty(group.size * self._ends[-1], torch.uint8).zero_().view(group.size, -1)
        own = self._messages[group.index]
        for values, before, span in zip(given, kept, self._spans, strict=True):  # 1
            self._code.pack(values, before, own[span])
        self._transfer = group.all_gather(self._messages.view(-1), own)

    def take(self) -> list[Tensor]:
        """Wait for the messages of all ranks and return their means.

        The messages are not written again, because peers may still read them.
        """
        self._transfer.wait()
        means = [torch.empty(numel, device=self._group.device) for numel in self._numels]
        for mean, span in zip(means, self._spans, strict=True):  # 2
            self._code.mean(self._messages[:, span], mean)
        return means
