"""Means over a few ranks of what each sends compressed to all others, with error feedback.

1. Each rank adds what it kept to what is given, and sends all others a code of that. What the code misses is kept.
2. Every rank takes the mean of all codes: the same bits on all.

There is one message and one error. `SignMeans` has two of each: of n ranks it sends 2 (n - 1) / n codes of a tensor
where this sends n - 1, which is as much for two ranks; for a few that are far apart the message saved is worth more.
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
    """How a tensor (m,) of float32 travels."""

    def nbytes(self, numel: int) -> int:
        """Of the code of so many elements; a multiple of a word."""
        ...

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        """Fill `code` (nbytes,) uint8 with that of `given` + `kept`; `given` becomes what it misses."""
        ...

    def mean(self, codes: Tensor, out: Tensor) -> None:
        """Write the mean of the ranks' `codes` (ranks, nbytes) to `out` (m,)."""
        ...


class Signs:
    """A sign for each element, times the mean magnitude of its chunk."""

    def nbytes(self, numel: int) -> int:
        return _signs_of(numel).end

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        _signs_of(given.numel()).put(code, *onebit_pack(kept, given, chunk=CHUNK))

    def mean(self, codes: Tensor, out: Tensor) -> None:
        piece = _signs_of(out.numel())
        onebit_average(piece.signs(codes), piece.magnitudes(codes), out, chunk=CHUNK)


def _signs_of(numel: int) -> SignPiece:
    middle = padded_numel(-(-numel // 8), _WORD)
    return SignPiece(numel, 0, middle, middle + _WORD * -(-numel // CHUNK))


class LargestElements:
    """The elements that are largest in magnitude, whole, each with its place (arXiv:1712.01887, without its momentum
    correction: what is sent is no momentum)."""

    def __init__(self, share: float) -> None:
        """`share` of the elements, at least one."""
        self._share = share

    def _count(self, numel: int) -> int:
        return min(numel, max(1, round(self._share * numel)))

    def nbytes(self, numel: int) -> int:
        return 2 * _WORD * self._count(numel)

    def pack(self, given: Tensor, kept: Tensor, code: Tensor) -> None:
        given.add_(kept)
        places = given.abs().topk(self._count(given.numel()), sorted=False).indices
        middle = code.numel() // 2
        code[:middle] = places.int().view(torch.uint8)
        code[middle:] = given[places].view(torch.uint8)
        given[places] = 0.0

    def mean(self, codes: Tensor, out: Tensor) -> None:
        middle = codes.shape[1] // 2
        out.zero_()
        for code in codes:  # In rank order, or ranks would have other bits.
            out.index_add_(0, code[:middle].view(torch.int32), code[middle:].view(torch.float32))
        out.div_(len(codes))


class CompressedMeans:
    """Such means of tensors of these sizes."""

    def __init__(self, group: Group, code: Code, numels: Sequence[int]) -> None:
        self._group, self._code, self._numels = group, code, numels
        self._ends = [0, *accumulate(code.nbytes(numel) for numel in numels)]
        self._spans = [slice(low, high) for low, high in zip(self._ends, self._ends[1:], strict=False)]

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in one exchange."""
        return (self._group.size - 1) * self._ends[-1]

    def send(self, given: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Begin to send `given` + `kept`, this rank's (m,) float32 of each tensor, all of it finite. Collective.

        `kept` stays as it is: what takes its place once `take` has returned then stands in `given`.
        """
        group = self._group
        self._messages = group.empty(group.size * self._ends[-1], torch.uint8).zero_().view(group.size, -1)
        own = self._messages[group.index]
        for values, before, span in zip(given, kept, self._spans, strict=True):  # 1
            self._code.pack(values, before, own[span])
        self._transfer = group.all_gather(self._messages.view(-1), own)

    def take(self) -> list[Tensor]:
        """Wait for what all ranks have sent: its means. What peers still read is not written any more."""
        self._transfer.wait()
        means = [torch.empty(numel, device=self._group.device) for numel in self._numels]
        for mean, span in zip(means, self._spans, strict=True):  # 2
            self._code.mean(self._messages[:, span], mean)
        return means
