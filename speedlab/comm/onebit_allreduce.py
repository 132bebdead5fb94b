"""Means over ranks at one bit an element, with error feedback on both sides (arXiv:2102.02888, algorithm 1).

1. Each rank adds what it kept to what is given, and sends to every rank the signs of that rank's slice with the mean
   magnitude of each chunk. What signs times magnitudes miss is kept: the worker's error.
2. Each rank takes the mean over the ranks of its own slice, adds what it kept of the last such mean, and sends signs
   and magnitudes of that to all. What they miss is kept: the server's error.
3. All ranks have the same signs and magnitudes, and so the same bits of the mean.

Of any number of tensors there are few messages: on slow networks each one costs. Over n ranks an element costs
2 (n - 1) / n bits where a float32 costs 2 (n - 1) / n words, and a chunk a word.

1 and 2 up to the mean are `reduce`, 2 from there and 3 are `spread`; between them a rank may make something else of the
mean that it has.

Where hosts have several ranks each (`Group.rails`), the "ranks" above are hosts: what is given and kept is summed
exactly inside a host, through its memory, each of its ranks exchanges the slices of its rail with its peers on other
hosts, and the messages are gathered inside the host. So hosts send each other what they would with one rank each.
What a host misses of a slice is kept by the rank that packed it, times the ranks of a host: in the mean over all ranks
it is the mean over hosts, as the next sum sees it.
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
"""Elements that share a magnitude. A word for 2¹⁰ signs makes 31 of the 32 times fewer bytes; with 2¹⁴ what is missed
was half as much again after some hundred steps of a small GPT: rows of embeddings differ."""

_LEAST_BYTES, _MOST_MESSAGES = 32 << 10, 8
"""Of a message to each peer, and as how many messages tensors travel to be reduced. So many bytes take 3 ms at 100
Mbit/s, many times what a message costs by itself."""

_WORD = 4
"""Bytes of a magnitude. Pieces of a message begin at multiples of it."""


@dataclass(frozen=True)
class SignPiece:
    """Where the signs and magnitudes of a slice of `numel` elements lie in a message, in bytes."""

    numel: int
    start: int
    middle: int
    end: int

    def put(self, message: Tensor, signs: Tensor, magnitudes: Tensor) -> None:
        """Into a message (bytes,)."""
        message[self.start : self.start + signs.numel()] = signs
        message[self.middle : self.end] = magnitudes.view(torch.uint8)

    def signs(self, messages: Tensor) -> Tensor:
        """Of `messages` (ranks, bytes): (ranks, ceil(numel / 8)) uint8."""
        return messages[:, self.start : self.start + -(-self.numel // 8)].contiguous()

    def after(self, start: int) -> SignPiece:
        """The same in a message that begins at `start` of this one."""
        return SignPiece(self.numel, self.start - start, self.middle - start, self.end - start)

    def magnitudes(self, messages: Tensor) -> Tensor:
        """Of `messages` (ranks, bytes): (ranks, chunks) float32."""
        return messages[:, self.middle : self.end].contiguous().view(torch.float32)


Pieces = list[tuple[int, SignPiece]]
"""What travels in one message: the numbers of tensors, and where they lie in it."""


@dataclass(frozen=True)
class Reduction:
    """Messages under way, each with what it is received in."""

    _messages: list[tuple[Pieces, Tensor, Transfer]]

    def means(self) -> list[Tensor]:
        """Wait for them: the slices (m,) that this rank serves of the means. To be called once. Collective."""
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
    """What all ranks have of tensors whose slices each of them has sent as signs: the same bits."""

    _messages: Tensor
    _pieces: list[SignPiece]

    @property
    def finite(self) -> bool:
        """Whether every magnitude is; the same on all ranks. Waits for the device."""
        sums = [piece.magnitudes(self._messages).sum() for piece in self._pieces]
        return bool(torch.stack(sums).isfinite().all()) if sums else True

    def take(self, number: int, given: Tensor, worker: Tensor, *, share: float) -> Tensor:
        """Of tensor `number`, what signs missed of what was `given` to be reduced becomes what was spread (n × m,), and
        what `worker` keeps that error plus a `share` of what was spread. The sum of squares of the error, in
        float64."""
        piece = self._pieces[number]
        signs, magnitudes = piece.signs(self._messages), piece.magnitudes(self._messages)
        return onebit_take(signs, magnitudes, given, worker, share=share, chunk=CHUNK).sum(dtype=torch.float64)

    def decode(self, number: int, out: Tensor) -> None:
        """Tensor `number` into `out` (n × m,)."""
        piece = self._pieces[number]
        signs, magnitudes = piece.signs(self._messages), piece.magnitudes(self._messages)
        for k, values in enumerate(out.view(len(signs), -1)):
            onebit_average(signs[k : k + 1], magnitudes[k : k + 1], values, chunk=CHUNK)


class SignMeans:
    """Such means of tensors of these sizes, each divisible by the number of ranks."""

    def __init__(self, group: Group, numels: Sequence[int]) -> None:
        self._group, self._pieces, self._numels = group, list[SignPiece](), list(numels)
        end = 0
        for numel in (each // group.size for each in numels):
            middle = end + padded_numel(-(-numel // 8), _WORD)
            self._pieces.append(SignPiece(numel, end, middle, middle + _WORD * -(-numel // CHUNK)))
            end = self._pieces[-1].end
        self._bytes = end

    def prepare(self) -> None:
        """Make connections, and bring kernels into memory, before the first exchange does. Collective."""
        self._group.rails()
        if self._group.device.type == "cpu":
            for step in SIGNS:
                step(torch.float32)

    @property
    def sent_bytes(self) -> int:
        """What a rank sends to have tensors reduced and spread; of hosts with several ranks, to other hosts."""
        return 2 * (self._across.size - 1) * self._bytes

    @property
    def float32_bytes(self) -> int:
        """What a rank would send, in the mean, if the same were summed in float32 and gathered."""
        return 2 * sum(self._numels) * _WORD * (self._across.size - 1) // self._group.size

    @property
    def _across(self) -> Group:
        """The ranks that signs travel between."""
        rails = self._group.rails()
        return self._group if rails is None else rails.across

    def reduce(self, given: Sequence[Tensor], worker: Sequence[Tensor], *, factor: float = 1.0) -> Reduction:
        """Begin to take the means over the ranks of `factor` · `given` + `worker`, this rank's (n × m,) float32 of each
        tensor. Collective.

        What was kept, `worker`, stays as it is, whatever is raised: the new errors take the place of what was given.
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
        """Those in which tensors travel to be reduced. Over a network the first ones are under way while others are
        packed; nothing is through memory."""
        least = self._bytes if self._across.at_hand else max(_LEAST_BYTES, self._bytes // _MOST_MESSAGES)
        found, start = [Pieces()], 0
        for number, piece in enumerate(self._pieces):
            if piece.start - start >= least:
                found.append([])
                start = piece.start
            found[-1].append((number, piece.after(start)))
        return [pieces for pieces in found if pieces]

    def _pack(self, piece: SignPiece, given: Tensor, worker: Tensor, factor: float, message: Tensor) -> None:
        """`given` becomes what the sum of both misses."""
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
        """`given` becomes what the sums over this host's ranks of `factor` · `given` + `worker` miss, for the slices of
        this rank's rail; 0 elsewhere."""
        inside, size = rails.inside, self._group.size
        order, places = [k for ranks in rails.places for k in ranks], rails.places[inside.index]
        buffer = inside.borrow(max(self._numels), torch.float32)  # Of one size, so that there are two of them.
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
            # What the host sends is its mean, what is kept is of the sum.
            piece.put(row, signs, magnitudes.div_(inside.size))

    def spread(self, values: Sequence[Tensor], server: Sequence[Tensor] | None = None) -> Spread:
        """Send the slices (m,) that this rank serves, plus what was kept of them, to all. Collective.

        `server` (m,) stays as it is, whatever is raised: the new errors take the place of `values`.
        """
        rails = self._group.rails()
        answer = torch.zeros(self._bytes, dtype=torch.uint8, device=self._group.device)
        for number, (piece, own) in enumerate(zip(self._pieces, values, strict=True)):
            piece.put(answer, *onebit_pack(None if server is None else server[number], own, chunk=CHUNK))
        messages = self._across.gather_along(answer, 0).view(self._across.size, -1)  # 3
        if rails is not None:
            every = rails.inside.gather_along(messages, 0)
            messages = torch.empty_like(every)
            messages[[k for ranks in rails.places for k in ranks]] = every
        return Spread(messages, self._pieces)
