"""As what values travel between ranks: a codec writes a tensor as a message of bytes, and reads or sums messages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cuda_ops.blockquant import block_dequantize, block_dequantize_sum, block_quantize
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
