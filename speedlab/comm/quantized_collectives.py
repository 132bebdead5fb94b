"""Gathers and sums whose values travel as messages of a codec: ZeRO++ (arXiv:2306.10209, sections 4.1 and 4.3).

*Gathers.* A rank encodes its shard once; all ranks, its own among them, hold what is decoded of the messages, so that
they hold the same bits.

*Sums* of H hosts with L ranks each, which this rank takes of its own slice of every rank's tensor:

1. Each rank encodes its slices, and sends to every rank of its own host those of the ranks that stand at that one's
   place on all hosts: one exchange inside the host.
2. Each rank sums what came, host by host of whose slices they are: H sums over L terms.
3. It encodes these sums, and sends each to the rank at its own place on that host: one exchange between hosts, of an
   L-th of the tensor.
4. It sums what came, in the order of hosts.

So a value is encoded twice, and no rank sends more than 1 / L of the tensor to other hosts. Where either H or L is 1
one of the two falls away. Terms are added in rank order within a host, then in the order of hosts, as a group over
several hosts adds them without a codec (`shared/hierarchy.py`).

As what values travel between ranks: a codec writes a tensor as a message of bytes, and reads or sums messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuda_ops.blockquant import block_dequantize, block_dequantize_sum, block_quantize
from speedlab.comm.group import Group
from speedlab.comm.process_groups import HierarchicalGroups
from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.transfers import Transfer
from speedlab.layout import MESSAGE_BLOCKS, message_bytes

_SCALE_BYTES = 4


class Codec(Protocol):
    """Values (n,) as a message of bytes, the same at every rank that reads it. What is not finite stays so."""

    def message_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Of so many values."""
        ...

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write `values` (n,) to `message` (bytes,) uint8."""
        ...

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read `message` (bytes,) into `out` (n,)."""
        ...

    def sum(self, messages: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """`out` (n,) = the sum of `messages` (ranks, bytes), in their order; `accumulate` adds it to what is there."""
        ...


class Blocks:
    """Blocks of integers of `bits` bits with a scale each (arXiv:2306.10209, section 4.1). A block in which a value is
    not finite comes out as NaN."""

    def __init__(self, bits: int) -> None:
        self._bits, self._block = bits, MESSAGE_BLOCKS[bits]
        self._dtype = torch.int8 if bits == 8 else torch.uint8

    def message_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return message_bytes(numel, self._bits)

    def encode(self, values: Tensor, message: Tensor) -> None:
        integers, scales = block_quantize(values, bits=self._bits, block=self._block)
        message[: integers.numel()] = integers.view(torch.uint8)
        message[message.numel() - scales.nbytes :] = scales.view(torch.uint8)

    def decode(self, message: Tensor, out: Tensor) -> None:
        integers, scales = self._parts(message.unsqueeze(0), out.numel())
        block_dequantize(integers[0], scales[0], out, block=self._block)

    def sum(self, messages: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        summed = torch.empty_like(out) if accumulate else out
        block_dequantize_sum(*self._parts(messages, out.numel()), summed, block=self._block)
        if accumulate:
            out.add_(summed)

    def _parts(self, messages: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The integers and scales of messages (ranks, bytes)."""
        scales = messages[:, messages.shape[1] - _SCALE_BYTES * -(-numel // self._block) :]
        integers = messages[:, : -(-numel * self._bits // 8)]
        return integers.contiguous().view(self._dtype), scales.contiguous().view(torch.float32)


_FLOAT32 = 4


class CodedGathers:
    """The gathers of one flat, as `Group` has them for flats as they are."""

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group, self._codec = group, codec
        self._offered: Tensor | None = None
        """The message of the shard, for as long as peers may read it; the shard does not change meanwhile."""

    def offer(self, shards: Sequence[Tensor]) -> None:
        """As `Group.offer`, of one shard."""
        (shard,) = shards
        if self._offered is None:
            self._offered = self._encoded(shard)
        self._group.offer([self._offered])

    def all_read(self) -> None:
        """The peers need nothing more of what was offered."""
        if self._offered is not None:
            self._group.traffic.buffers.add(-self._offered.nbytes)
            self._offered = None

    def all_gather(self, full: Tensor, shard: Tensor) -> CodedGather:
        """As `Group.all_gather`; this rank's own slice of `full` is decoded, too."""
        message = self._offered if self._offered is not None else self._encoded(shard)
        with self._group.traffic.communicating():
            received = torch.empty(self._group.size * message.numel(), dtype=torch.uint8, device=full.device)
        self._group.traffic.buffers.add(received.nbytes)
        arriving = self._group.all_gather(received, message)
        others = self._group.size - 1
        self._group.traffic.compressed(others * message.nbytes, others * _FLOAT32 * shard.numel())
        return CodedGather(self, arriving, message if self._offered is None else None, received, full)

    def finish(self, message: Tensor | None, received: Tensor, full: Tensor) -> None:
        """Decode what has arrived. `message`: made for this gather alone, so that it is of no use any more."""
        size, buffers = self._group.size, self._group.traffic.buffers
        with self._group.traffic.communicating():
            for each, values in zip(received.view(size, -1), full.view(size, -1), strict=True):
                self._codec.decode(each, values)
        buffers.add(-received.nbytes)
        if message is not None:
            self._group.wait_until_read(message)
            buffers.add(-message.nbytes)

    @staticmethod
    def shown(codec: Codec, values: Tensor) -> Tensor:
        """What ranks hold of a shard of these `values` (n,) once it has been gathered."""
        message = torch.empty(
            codec.message_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device
        )
        codec.encode(values, message)
        shown = torch.empty_like(values)
        codec.decode(message, shown)
        return shown

    def _encoded(self, shard: Tensor) -> Tensor:
        with self._group.traffic.communicating():
            message = self._group.empty(self._codec.message_bytes(shard.numel(), shard.dtype), torch.uint8)
            self._codec.encode(shard, message)
        self._group.traffic.buffers.add(message.nbytes)
        return message


@dataclass
class CodedGather:
    """One of them, under way."""

    _gathers: CodedGathers
    _arriving: Transfer
    _message: Tensor | None
    _received: Tensor
    _full: Tensor

    @torch.no_grad()
    def wait(self) -> None:
        """As `Transfer.wait`."""
        self._arriving.wait()
        self._gathers.finish(self._message, self._received, self._full)


class CodedSums:
    """Reduce-scatters over the ranks of `whole`, which `HierarchicalGroups` has in groups inside and between hosts."""

    def __init__(self, whole: Group, hosts: HierarchicalGroups[Group], codec: Codec) -> None:
        self._whole, self._hosts, self._codec = whole, hosts, codec

    @torch.no_grad()
    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> CodedSum | Transfer:
        """As `Group.reduce_scatter`; `full` may be written again at once."""
        if self._whole.size == 1:
            return self._whole.reduce_scatter(full, into, accumulate=accumulate)
        return CodedSum(self._hosts, self._codec, full, into, accumulate)


class CodedSum:
    """One of them, under way. `wait` carries out all but the first exchange."""

    def __init__(
        self, hosts: HierarchicalGroups[Group], codec: Codec, full: Tensor, into: Tensor, accumulate: bool
    ) -> None:
        self._hosts, self._codec, self._into, self._accumulate = hosts, codec, into, accumulate
        slices = full.view(hosts.inside.size * hosts.across.size, -1)
        self._numel, self._dtype = slices.shape[1], full.dtype
        own = [[slices[index] for index in column] for column in hosts.places]
        # Without a second rank on this host, there is nothing to sum before slices go to the others.
        alone = hosts.inside.size == 1
        self._first = self._to_hosts(own[0]) if alone else _TensorExchange(hosts.inside, codec, own)  # 1
        self._is_last = alone or hosts.across.size == 1
        hosts.inside.traffic.compressed(0, (len(slices) - 1) * _FLOAT32 * self._numel)

    @torch.no_grad()
    def wait(self) -> None:
        """The sum is in its place when this returns."""
        with self._hosts.inside.traffic.communicating():
            messages = self._first.wait()
            if not self._is_last:
                sums = [self._summed(messages[:, host]) for host in range(self._hosts.across.size)]  # 2
                messages = self._to_hosts(sums).wait()  # 3
            self._codec.sum(messages[:, 0], self._into, accumulate=self._accumulate)  # 4

    def _to_hosts(self, terms: Sequence[Tensor]) -> _TensorExchange:
        return _TensorExchange(self._hosts.across, self._codec, [[term] for term in terms])

    def _summed(self, messages: Tensor) -> Tensor:
        total = torch.empty(self._numel, dtype=self._dtype, device=messages.device)
        self._codec.sum(messages, total)
        return total


class _TensorExchange:
    """Messages to every rank of a group, of as many tensors each, and those that come from them."""

    def __init__(self, group: Group, codec: Codec, tensors: Sequence[Sequence[Tensor]]) -> None:
        """`tensors`: [rank][which], all of one size."""
        first = tensors[0][0]
        shape = len(tensors), len(tensors[0]), codec.message_bytes(first.numel(), first.dtype)
        with group.traffic.communicating():
            self._sent = torch.empty(shape, dtype=torch.uint8, device=first.device)
            self._received = torch.empty_like(self._sent)
            for messages, values in zip(self._sent, tensors, strict=True):
                for message, each in zip(messages, values, strict=True):
                    codec.encode(each, message)
        group.traffic.compressed((group.size - 1) * self._sent[0].nbytes, 0)
        self._buffers = group.traffic.buffers
        self._buffers.add(2 * self._sent.nbytes)
        self._transfer = group.start_exchange(self._sent, self._received)

    def wait(self) -> Tensor:
        """What came: (ranks, which, bytes)."""
        self._transfer.wait()
        self._buffers.add(-2 * self._sent.nbytes)
        return self._received


def hosts_of(group: Group) -> list[list[int]]:
    """The ranks of each host, as indices in `group`, the host of the lowest first. Collective."""
    found: dict[str, list[int]] = {}
    for index, host in enumerate(group.collect(host_identity())):
        found.setdefault(host, []).append(index)
    return list(found.values())
