"""Define the sizes of a micro-batch's tensors on one rank, and a tally of the bytes alive. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from speedlab.layout import share_of
from speedlab.planner.memory.offload import inputs_away
from speedlab.planner.setup import Setup

Device = Literal["cpu", "cuda"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = 4


class Tally:
    """Bytes that are alive now, and their peak."""

    def __init__(self, live: int = 0) -> None:
        self.live = self.peak = live

    def take(self, *sizes: int) -> None:
        """Allocate tensors of these sizes."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def free(self, *sizes: int) -> None:
        """Free tensors of these sizes."""
        self.live -= sum(sizes)

    @contextmanager
    def passing(self, *sizes: int) -> Iterator[None]:
        """Allocate tensors for the duration of the block."""
        self.take(*sizes)
        yield
        self.free(*sizes)

    def touch(self, *sizes: int) -> None:
        """Allocate tensors and free them at once, which may raise the peak."""
        self.take(*sizes)
        self.free(*sizes)


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes of the tensors of one micro-batch on one rank."""

    setup: Setup
    device: Device
    tensor: int = 0
    """Tensor-parallel index: shares of a vocabulary may differ by one row."""

    @cached_property
    def element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPE_BYTES[self.setup.dtype]

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.setup.tokens

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.setup.layout.tp

    @cached_property
    def sequence(self) -> bool:
        """Whether sequence parallelism is used."""
        return self.setup.sequence_parallel and self.tp > 1

    @cached_property
    def hidden(self) -> int:
        """(n, C)."""
        return self.tokens * self.setup.shape.hidden * self.element

    @cached_property
    def local(self) -> int:
        """(n, C), or (n / tp, C) with sequence parallelism: the size for residuals and norms."""
        return self.hidden // self.tp if self.sequence else self.hidden

    @cached_property
    def input_part(self) -> int:
        """Bytes of a block's input that a rank keeps for backward: all of it, or 1/tp."""
        if not self.setup.cuts_inputs:
            return self.local
        return -(-(self.local // self.element) // self.tp) * self.element

    @cached_property
    def input_away(self) -> int:
        """Part of `input_part` that is offloaded to the host: all of it, or nothing."""
        return self.input_part if inputs_away(self.setup, self.device) else 0

    @cached_property
    def input_left(self) -> int:
        """Part of `input_part` that stays on the device as a copy, while the input itself is freed."""
        return self.input_part if self.setup.cuts_inputs and not self.input_away else 0

    @cached_property
    def input_gone(self) -> int:
        """Part of a block's input that is freed between its forward and its backward: all of it, or nothing."""
        return self.local if self.input_left or self.input_away else 0

    @cached_property
    def heads(self) -> int:
        """(n, C / tp): queries of this rank; outputs of attention have the same size."""
        shape = self.setup.shape
        size = shape.head_size or shape.hidden // shape.heads
        return self.tokens * shape.heads * size * self.element // self.tp

    @cached_property
    def pair(self) -> int:
        """Keys and values together; smaller than two `heads` with grouped heads."""
        shape = self.setup.shape
        return 2 * self.heads * (shape.kv_heads or shape.heads) // shape.heads

    @cached_property
    def inner(self) -> int:
        """(n, F / tp) inside the feed-forward layer."""
        return self.tokens * self.setup.shape.ffn_hidden * self.element // self.tp

    @cached_property
    def row(self) -> int:
        """One float32 for each token that a norm works on."""
        return self.tokens * _FLOAT32 // (self.tp if self.sequence else 1)

    @cached_property
    def queries(self) -> int:
        """One float32 for each query of this rank's heads."""
        return self.tokens * self.setup.shape.heads * _FLOAT32 // self.tp

    @cached_property
    def probabilities(self) -> int:
        """(B, H / tp, T, T) in the compute dtype."""
        shape = self.setup.shape
        return self.tokens * shape.sequence_length * shape.heads // self.tp * self.element

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the token table on this rank."""
        start, end = share_of(self.setup.shape.vocab_size, self.tp, self.tensor)
        return end - start

    @cached_property
    def table(self) -> int:
        """Gradient of the token table in the compute dtype."""
        return self.vocabulary * self.setup.shape.hidden * self.element

    def matrix(self, inputs: int, outputs: int) -> int:
        """Return the bytes of a weight's gradient on this rank, for a layer that tensor parallelism partitions.

        Args:
            inputs: input elements of the whole layer.
            outputs: output elements of the whole layer.
        """
        return inputs * outputs * self.element // self.tp

    @cached_property
    def low(self) -> bool:
        """Whether the compute dtype is narrower than float32."""
        return self.element < _FLOAT32

    @cached_property
    def saves_norm_input(self) -> bool:
        """Whether a norm saves its input itself, rather than a float32 copy."""
        return self.setup.shape.norm == "layer" or not self.low or self.device == "cuda"

    @cached_property
    def mask(self) -> int:
        """Dropout's mask over the residual stream."""
        return self.local // self.element if self.device == "cuda" else self.local

    @cached_property
    def chunk(self) -> int:
        """Tokens for which `cuda_ops.linear_cross_entropy` computes logits at once."""
        widest = -(-self.setup.shape.vocab_size // self.tp)
        cheap = min(256, (16 << 20) // max(1, widest * self.element))
        return min(self.tokens, min(1024, max(self.tokens // 10, cheap, 16)) // 16 * 16)
