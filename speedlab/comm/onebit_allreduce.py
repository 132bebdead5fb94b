"""Means over ranks with one bit per element and error feedback on both sides (arXiv:2102.02888, algorithm 1).

1. Each rank adds its kept error to the given values. It sends to every rank the signs of that rank's slice, with the
   mean magnitude of each chunk. What signs times magnitudes miss is the worker error.
2. Each rank computes the mean of its slice over the ranks, adds its kept error, and sends signs and magnitudes to all
   ranks. What they miss is the server error.
3. All ranks have the same signs and magnitudes, so the same bits of the mean.

`reduce` is step 1 and the mean of step 2; `spread` is the rest. In between, a rank may transform its mean.

Tensors share few messages, because each message costs time on slow networks. Over n ranks, an element costs 2 (n - 1) /
n bits in place of 2 (n - 1) / n words for float32, plus a word per chunk.

If hosts have several ranks each (`Group.rails`), hosts take the role of ranks:

- Values and errors are summed exactly inside a host, through its memory.
- Each rank exchanges the slices of its rail with its peers on other hosts. The messages are gathered inside the host.
  So hosts send each other as much as with one rank each.
- The rank that packed a slice keeps the host's error, times the ranks of a host. The mean over all ranks turns this
  into the mean over hosts, as the next sum expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ops.onebit import onebit_average, onebit_pack, onebit_take
from cuda_ops.warm import SIGNS
from speedlab.comm.group import Group
from speedlab.comm.process_groups import HierarchicalGroups
from speedlab.comm.transfers import Transfer
from speedlab.layout import padded_numel

CHUNK = 1 << 10
"""Elements that share a magnitude. One word for 2¹⁰ signs keeps 31/32 of the saving. With 2¹⁴, the error was 50 %
larger after some hundred steps of a small GPT, because rows of embeddings differ.
"""

_LEAST_BYTES, _MOST_MESSAGES = 32 << 10, 8
"""Least bytes of a message to each peer, and most messages of a reduction. 32 KiB take 3 ms at 100 Mbit/s, many times
the cost of a message itself.
"""

_WORD = 4
"""Bytes of a magnitude. Pieces of a message begin at multiples of it."""


@dataclass(frozen=True)
class SignPiece:
    """Byte offsets of a slice's signs and magnitudes in a message; the slice has `numel` elements."""

    numel: int
    start: int
    middle: int
    end: int

    def put(self, message: Tensor, signs: Tensor, magnitudes: Tensor) -> None:
        """Write signs and magnitudes into a message.

        Args:
            message: (bytes,) uint8.
            signs: (ceil(numel / 8),) uint8.
            magnitudes: (chunks,) float32.
        """
        message[self.start : self.start + signs.numel()] = signs
        message[self.middle : self.end] = magnitudes.view(torch.uint8)

    def signs(self, messages: Tensor) -> Tensor:
        """Return the signs in messages.

        Args:
            messages: (ranks, bytes) uint8.

        Returns:
            (ranks, ceil(numel / 8)) uint8.
        """
        return messages[:, self.start : self.start + -(-self.numel // 8)].contiguous()

    def after(self, start: int) -> SignPiece:
        """Return the same piece for a message that begins at byte `start` of this one.

        Args:
            start: Byte offset.
        """
        return SignPiece(self.numel, self.start - start, self.middle - start, self.end - start)

    def magnitudes(self, messages: Tensor) -> Tensor:
        """Return the magnitudes in messages.

        Args:
            messages: (ranks, bytes) uint8.

        Returns:
            (ranks, chunks) float32.
        """
        return messages[:, self.middle : self.end].contiguous().view(torch.float32)


Pieces = list[tuple[int, SignPiece]]
"""Content of one message: indices of tensors, and their offsets in the message."""


@dataclass(frozen=True)
class Reduction:
    """Messages in flight, with their receive buffers."""

    _messages: list[tuple[Pieces, Tensor, Transfer]]

    def means(self) -> list[Tensor]:
        """Wait for the messages and return this rank's slices (m,) of the means. Call once. Collective."""
        means = []
        for pieces, received, transfer in self._messages:
            transfer.wait()
            for _, piece in pieces:  # 2
                mean = torch.empty(piece.numel, dtype=torch.float32, device=received.device)
                onebit_average(piece.signs(received), piece.magnitudes(received), mean, chunk=CHUNK)
                means.append(mean)
        return means


@dataclass(frozen=True)
class Spread:
    """Signs of all slices of the tensors: the same bits on all ranks."""

    _messages: Tensor
    _pieces: list[SignPiece]

    @property
    def finite(self) -> bool:
        """Whether every magnitude is finite; the same on all ranks. This is a device sync."""
        sums = [piece.magnitudes(self._messages).sum() for piece in self._pieces]
        return bool(torch.stack(sums).isfinite().all()) if sums else True

    def take(self, number: int, given: Tensor, worker: Tensor, *, share: float) -> Tensor:
        """Replace a tensor by its spread value and update its worker error.

        Args:
            number: Index of the tensor.
            given: What signs missed of the reduced values, (n × m,); becomes the spread value.
            worker: (n × m,); becomes that error plus `share` times the spread value.
            share: Factor.

        Returns:
            Sum of squares of the error, float64 scalar.
        """
        piece = self._pieces[number]
        signs, magnitudes = piece.signs(self._messages), piece.magnitudes(self._messages)
        return onebit_take(signs, magnitudes, given, worker, share=share, chunk=CHUNK).sum(dtype=torch.float64)

    def decode(self, number: int, out: Tensor) -> None:
        """Write a tensor's spread value.

        Args:
            number: Index of the tensor.
            out: (n × m,) float32.
        """
        piece = self._pieces[number]
        signs, magnitudes = piece.signs(self._messages), piece.magnitudes(self._messages)
        for k, values in enumerate(out.view(len(signs), -1)):
            onebit_average(signs[k : k + 1], magnitudes[k : k + 1], values, chunk=CHUNK)


class SignMeans:
    """One-bit means of tensors with fixed sizes, each divisible by the number of ranks."""

    def __init__(self, group: Group, numels: Sequence[int]) -> None:
        self._group, self._pieces, self._numels = group, list[SignPiece](), list(numels)
        end = 0
        for numel in (each // group.size for each in numels):
            middle = end + padded_numel(-(-numel // 8), _WORD)
            self._pieces.append(SignPiece(numel, end, middle, middle + _WORD * -(-numel // CHUNK)))
            end = self._pieces[-1].end
        self._bytes = end

    def prepare(self) -> None:
        """Open connections and load kernels before the first exchange. Collective."""
        self._group.rails()
        if self._group.device.type == "cpu":
            for step in SIGNS:
                step(torch.float32)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends for reduce and spread; to other hosts only, if hosts have several ranks."""
        return 2 * (self._across.size - 1) * self._bytes

    @property
    def float32_bytes(self) -> int:
        """Mean bytes that a rank would send for the same sums and gathers in float32."""
        return 2 * sum(self._numels) * _WORD * (self._across.size - 1) // self._group.size

    @property
    def _across(self) -> Group:
        """The ranks between which signs are sent."""
        rails = self._group.rails()
        return self._group if rails is None else rails.across

    def reduce(self, given: Sequence[Tensor], worker: Sequence[Tensor], *, factor: float = 1.0) -> Reduction:
        """Start the means over the ranks of `factor` · `given` + `worker`. Collective.

        `worker` is never changed, even after an error. `given` becomes the new error.

        Args:
            given: This rank's (n × m,) float32 of each tensor, changed in place.
            worker: Kept error, (n × m,) float32 of each tensor.
            factor: Factor of `given`.
        """
        rails = self._group.rails()
        places = range(self._group.size) if rails is None else rails.places[rails.inside.index]
        under_way = list[tuple[Pieces, Tensor, Transfer]]()
        for pieces in self._messages():
            message = torch.zeros(len(places), pieces[-1][1].end, dtype=torch.uint8, device=self._group.device)
            for number, piece in pieces:  # 1
                if rails is None:
                    self._pack(piece, given[number], worker[number], factor, message)
                else:
                    self._pack_sum(rails, piece, given[number], worker[number], factor, message)
            received = torch.empty_like(message)
            under_way.append((pieces, received, self._across.start_exchange(message, received)))
        return Reduction(under_way)

    def _messages(self) -> list[Pieces]:
        """Distribute the tensors over messages.

        Over a network, first messages are in flight while later ones are packed. Shared memory has nothing to overlap.
        """
        least = self._bytes if self._across.at_hand else max(_LEAST_BYTES, self._bytes // _MOST_MESSAGES)
        found, start = [Pieces()], 0
        for number, piece in enumerate(self._pieces):
            if piece.start - start >= least:
                found.append([])
                start = piece.start
            found[-1].append((number, piece.after(start)))
        return [pieces for pieces in found if pieces]

    def _pack(self, piece: SignPiece, given: Tensor, worker: Tensor, factor: float, message: Tensor) -> None:
        """Pack `factor` · `given` + `worker`; `given` becomes the error."""
        values, kept = (each.view(self._group.size, -1) for each in (given, worker))
        for row, own, before in zip(message, values, kept, strict=True):
            piece.put(row, *onebit_pack(before, own, factor=factor, chunk=CHUNK))

    def _pack_sum(
        self,
        rails: HierarchicalGroups[Group],
        piece: SignPiece,
        given: Tensor,
        worker: Tensor,
        factor: float,
        message: Tensor,
    ) -> None:
        """Pack the sum over this host's ranks of `factor` · `given` + `worker`.

        `given` becomes the error of this rank's rail, and 0 elsewhere.
        """
        inside, size = rails.inside, self._group.size
        order, places = [k for ranks in rails.places for k in ranks], rails.places[inside.index]
        # Always borrow the same size, so that two buffers serve all tensors.
        buffer = inside.borrow(max(self._numels), torch.float32)
        by_place = buffer[: given.numel()]
        values, kept = given.view(size, -1), worker.view(size, -1)
        for into, k in zip(by_place.view(size, -1), order, strict=True):
            torch.add(kept[k], values[k], alpha=factor, out=into)
        summed = given.new_empty(given.numel() // inside.size)
        inside.reduce_scatter(by_place, summed).wait()
        inside.give_back(buffer)
        for k in set(order).difference(places):
            values[k].zero_()
        for row, own, k in zip(message, summed.view(len(places), -1), places, strict=True):
            signs, magnitudes = onebit_pack(None, values[k].copy_(own), chunk=CHUNK)
            # The host sends its mean, while the kept error belongs to its sum.
            piece.put(row, signs, magnitudes.div_(inside.size))

    def spread(self, values: Sequence[Tensor], server: Sequence[Tensor] | None = None) -> Spread:
        """Send this rank's slices, plus their kept errors, to all ranks. Collective.

        `server` is never changed, even after an error. `values` become the new errors.

        Args:
            values: Slices (m,) float32 of this rank, changed in place.
            server: Kept errors (m,), or None.
        """
        rails = self._group.rails()
        answer = torch.zeros(self._bytes, dtype=torch.uint8, device=self._group.device)
        for number, (piece, own) in enumerate(zip(self._pieces, values, strict=True)):
            piece.put(answer, *onebit_pack(None if server is None else server[number], own, chunk=CHUNK))
        messages = self._across.gather_along(answer, 0).view(self._across.size, -1)  # 3
        if rails is not None:
            # Each rank of this host has the messages of its own rail; collect all rails and restore rank order.
            every = rails.inside.gather_along(messages, 0)
            messages = torch.empty_like(every)
            messages[[k for ranks in rails.places for k in ranks]] = every
        return Spread(messages, self._pieces)
