"""Gathers and sums with quantized messages: ZeRO++ (arXiv:2306.10209, sections 4.1 and 4.3).

*Codec.* Writes a tensor as a message of bytes, and reads or sums messages.

*Gathers.* A rank encodes its shard once. All ranks, including this one, use the decoded message, so all have the same
bits.

*Sums* over H hosts with L ranks each, of this rank's slice of every rank's tensor:

1. Each rank encodes its slices. To each rank of its own host, it sends the slices of all ranks with that rank's place:
   one exchange inside the host.
2. Each rank sums the received slices, one sum per host: H sums of L terms.
3. It encodes these sums and sends each to the rank with its place on that host: one exchange between hosts, of 1 / L of
   the tensor.
4. It sums the received messages in the order of hosts.

A value is encoded twice, and no rank sends more than 1 / L of the tensor to other hosts. If H or L is 1, one of the
exchanges is skipped. Terms are added in rank order inside a host, then in the order of hosts, as a group over several
hosts adds them without a codec (`shared/hierarchical.py`).
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
    """Encodes values (n,) as a message of bytes that all ranks decode to the same bits. Non-finite values stay non-
    finite.
    """

    def message_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of a message.

        Args:
            numel: Number of values.
            dtype: Type of the values.
        """
        ...

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write values to a message.

        Args:
            values: (n,).
            message: (bytes,) uint8.
        """
        ...

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read a message.

        Args:
            message: (bytes,) uint8.
            out: (n,).
        """
        ...

    def sum(self, messages: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """Sum messages in their order.

        Args:
            messages: (ranks, bytes) uint8.
            out: (n,).
            accumulate: Add the sum to `out`.
        """
        ...


class Blocks:
    """Blocks of integers with a scale each (arXiv:2306.10209, section 4.1). A block with a non-finite value decodes to
    NaN.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._block = bits, MESSAGE_BLOCKS[bits]
        self._dtype = torch.int8 if bits == 8 else torch.uint8

    def message_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of a message; see `Codec.message_bytes`."""
        return message_bytes(numel, self._bits)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write values to a message; see `Codec.encode`."""
        integers, scales = block_quantize(values, bits=self._bits, block=self._block)
        message[: integers.numel()] = integers.view(torch.uint8)
        message[message.numel() - scales.nbytes :] = scales.view(torch.uint8)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read a message; see `Codec.decode`."""
        integers, scales = self._parts(message.unsqueeze(0), out.numel())
        block_dequantize(integers[0], scales[0], out, block=self._block)

    def sum(self, messages: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """Sum messages; see `Codec.sum`."""
        summed = torch.empty_like(out) if accumulate else out
        block_dequantize_sum(*self._parts(messages, out.numel()), summed, block=self._block)
        if accumulate:
            out.add_(summed)

    def _parts(self, messages: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return integers and scales of messages (ranks, bytes)."""
        scales = messages[:, messages.shape[1] - _SCALE_BYTES * -(-numel // self._block) :]
        integers = messages[:, : -(-numel * self._bits // 8)]
        return integers.contiguous().view(self._dtype), scales.contiguous().view(torch.float32)


_FLOAT32 = 4


class CodedGathers:
    """Quantized gathers of one flat parameter, with the interface of `Group`."""

    def __init__(self, group: Group, codec: Codec) -> None:
        self._group, self._codec = group, codec
        self._offered: Tensor | None = None
        """Message of the shard while peers may read it; the shard does not change in that time."""

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Encode and offer one shard; see `Group.offer`.

        Args:
            shards: A list with one shard.
        """
        (shard,) = shards
        if self._offered is None:
            self._offered = self._encoded(shard)
        self._group.offer([self._offered])

    def all_read(self) -> None:
        """Free the offered message, which peers no longer need."""
        if self._offered is not None:
            self._group.traffic.buffers.add(-self._offered.nbytes)
            self._offered = None

    def all_gather(self, full: Tensor, shard: Tensor) -> CodedGather:
        """Start a gather; see `Group.all_gather`. This rank's own slice is decoded, too.

        Args:
            full: (n × m,).
            shard: (m,).
        """
        message = self._offered if self._offered is not None else self._encoded(shard)
        with self._group.traffic.communicating():
            received = torch.empty(self._group.size * message.numel(), dtype=torch.uint8, device=full.device)
        self._group.traffic.buffers.add(received.nbytes)
        arriving = self._group.all_gather(received, message)
        others = self._group.size - 1
        self._group.traffic.compressed(others * message.nbytes, others * _FLOAT32 * shard.numel())
        return CodedGather(self, arriving, message if self._offered is None else None, received, full)

    def finish(self, message: Tensor | None, received: Tensor, full: Tensor) -> None:
        """Decode the received messages.

        Args:
            message: Message that was made only for this gather, or None.
            received: Messages of all ranks.
            full: (n × m,).
        """
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
        """Return the values that ranks get from a gathered shard.

        Args:
            codec: Codec of the gather.
            values: (n,).
        """
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
    """A quantized gather in flight."""

    _gathers: CodedGathers
    _arriving: Transfer
    _message: Tensor | None
    _received: Tensor
    _full: Tensor

    @torch.no_grad()
    def wait(self) -> None:
        """Wait and decode; see `Transfer.wait`."""
        self._arriving.wait()
        self._gathers.finish(self._message, self._received, self._full)


class CodedSums:
    """Quantized reduce-scatters over the ranks of `whole`, which `hosts` splits into groups inside and between
    hosts.
    """

    def __init__(self, whole: Group, hosts: HierarchicalGroups[Group], codec: Codec) -> None:
        self._whole, self._hosts, self._codec = whole, hosts, codec

    @torch.no_grad()
    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> CodedSum | Transfer:
        """Start a sum; see `Group.reduce_scatter`. `full` may be written again immediately.

        Args:
            full: (n × m,).
            into: (m,).
            accumulate: Add the sum to `into`.
        """
        if self._whole.size == 1:
            return self._whole.reduce_scatter(full, into, accumulate=accumulate)
        return CodedSum(self._hosts, self._codec, full, into, accumulate)


class CodedSum:
    """A quantized sum in flight. `wait` runs all but the first exchange."""

    def __init__(
        self, hosts: HierarchicalGroups[Group], codec: Codec, full: Tensor, into: Tensor, accumulate: bool
    ) -> None:
        self._hosts, self._codec, self._into, self._accumulate = hosts, codec, into, accumulate
        slices = full.view(hosts.inside.size * hosts.across.size, -1)
        self._numel, self._dtype = slices.shape[1], full.dtype
        # For each rank of this host: the slices of all ranks with its place.
        own = [[slices[index] for index in column] for column in hosts.places]
        # With one rank per host, skip the exchange inside the host.
        alone = hosts.inside.size == 1
        self._first = self._to_hosts(own[0]) if alone else _TensorExchange(hosts.inside, codec, own)  # 1
        self._is_last = alone or hosts.across.size == 1
        hosts.inside.traffic.compressed(0, (len(slices) - 1) * _FLOAT32 * self._numel)

    @torch.no_grad()
    def wait(self) -> None:
        """Finish the exchanges; then the sum is in `into`."""
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
    """An all-to-all of messages: an equal number of tensors for every rank of a group."""

    def __init__(self, group: Group, codec: Codec, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Encode and start to send.

        `tensors`: [rank][which], all of one size.
        """
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
        """Return the received messages, (ranks, which, bytes)."""
        self._transfer.wait()
        self._buffers.add(-2 * self._sent.nbytes)
        return self._received


def hosts_of(group: Group) -> list[list[int]]:
    """Return the ranks of each host, as indices in `group`, the host of the lowest rank first. Collective.

    Args:
        group: Group of any ranks.
    """
    found: dict[str, list[int]] = {}
    for index, host in enumerate(group.collect(host_identity())):
        found.setdefault(host, []).append(index)
    return list(found.values())
