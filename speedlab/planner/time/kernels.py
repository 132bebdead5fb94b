"""Predict seconds of a block's and a head's kernels on one tensor-parallel rank, for one micro-batch. No torch.

A product of (m, k) by (k, n) takes its FLOPs at the rate of large products, plus the time to read its operands and
write its result once. The second term makes small and narrow products slow, as with many tensor-parallel ranks.
Everything else is memory-bound and counted in bytes. Sums, norms and dropout between the layers are replicated on each
tensor-parallel rank, unless sequence parallelism partitions them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speedlab.planner.hardware.devices import DeviceSpec
from speedlab.planner.layer_shapes import head_size, kv_heads
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency

_FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward: five products instead of two (arXiv:2205.14135)."""


@dataclass(frozen=True, kw_only=True)
class KernelSeconds:
    """Seconds of forward and backward; `again` is the part of forward that selective checkpointing recomputes."""

    forward: float
    backward: float
    again: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Reached rates of a device in one dtype."""

    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    element_bytes: int
    kernel_seconds: float
    drawn_seconds: float = 0.0
    """Seconds of a random number for dropout, in addition to its kernel's bytes; 0 on GPUs."""
    unaligned_share: float = 1.0
    """Share of `matmul_flops` for products over heads of a size that matrix units do not take."""

    @classmethod
    def of(cls, device: DeviceSpec, efficiency: Efficiency, dtype: str) -> Rates:
        """Return the rates of a device.

        Args:
            device: the data sheet.
            efficiency: reached shares of its peaks.
            dtype: the compute dtype.

        Raises:
            ValueError: the device does not support the dtype.
        """
        peak = device.peak(dtype)
        return cls(
            matmul_flops=peak * efficiency.matmul,
            attention_flops=peak * efficiency.attention,
            memory_bytes=device.memory_bytes_per_second * efficiency.memory,
            element_bytes=4 if dtype == "float32" else 2,
            kernel_seconds=efficiency.kernel_seconds,
            drawn_seconds=efficiency.drawn_seconds,
            unaligned_share=1.0 if dtype == "float32" else device.unaligned_share,
        )

    def for_heads(self, size: int) -> Rates:
        """Return the rates for products over heads of `size` elements.

        Matrix units read 16 bytes at a time, 8 elements.
        """
        return self if size % 8 == 0 else replace(self, matmul_flops=self.matmul_flops * self.unaligned_share)

    def matmul(self, m: float, n: float, k: float, count: float = 1) -> float:
        """Return the seconds of products of (m, k) by (k, n) in one kernel.

        Args:
            m: rows of the result.
            n: columns of the result.
            k: inner size.
            count: number of products.
        """
        moved = self.element_bytes * (m * k + k * n + m * n)
        return count * (2 * m * n * k / self.matmul_flops + moved / self.memory_bytes) + self.kernel_seconds

    def elementwise(self, nbytes: float, kernels: int) -> float:
        """Return the seconds of elementwise kernels.

        Args:
            nbytes: bytes read and written altogether.
            kernels: number of kernel launches.
        """
        return nbytes / self.memory_bytes + kernels * self.kernel_seconds


def block_pass(setup: Setup, rates: Rates, *, cross: bool = False) -> KernelSeconds:
    """Return the seconds of one block.

    Args:
        setup: the training.
        rates: rates of the device.
        cross: whether this is a decoder block, which also attends to the encoder.
    """
    shape, tp, tokens = setup.shape, setup.layout.tp, setup.tokens
    hidden, ffn = shape.hidden, shape.ffn_hidden / tp
    queries = shape.heads * head_size(shape) / tp
    values = kv_heads(shape) * head_size(shape) / tp
    inputs = ffn * (2 if shape.gated else 1)
    products = [
        (tokens, queries + 2 * values, hidden),
        (tokens, hidden, queries),
        (tokens, inputs, hidden),
        (tokens, hidden, ffn),
    ]
    if cross:
        products += [(tokens, queries + 2 * values, hidden), (tokens, hidden, queries)]
    forward = sum(rates.matmul(*product) for product in products)
    # Gradients of inputs (m, n) x (n, k) and of weights (k, m) x (m, n).
    backward = sum(rates.matmul(m, k, n) + rates.matmul(k, n, m) for m, n, k in products)
    core = _attention(setup, rates)
    between = _between_layers(setup, rates, tokens, ffn, queries + values)
    drawn = 2 * _whole_tokens(setup) * hidden * rates.drawn_seconds if shape.dropout else 0.0
    times = 2 if cross else 1
    return KernelSeconds(
        forward=forward + times * core.forward + between + drawn,
        backward=backward + times * core.backward + 2 * between,
        again=times * core.forward if setup.attention == "plain" else between + drawn,
    )


def _attention(setup: Setup, rates: Rates) -> KernelSeconds:
    """Return the seconds of scores, softmax and the weighted sum of one block."""
    shape = setup.shape
    heads = setup.micro_size * shape.heads / setup.layout.tp / setup.layout.cp  # In a ring: a share of all heads.
    length, size = shape.sequence_length, head_size(shape)
    if setup.attention != "plain":
        # Fused kernels skip the masked half.
        causal = 0.5 if shape.causal else 1.0
        flops = 4 * heads * length * length * size * causal * setup.attention_share
        seconds = flops / rates.attention_flops
        return KernelSeconds(
            forward=seconds + rates.kernel_seconds, backward=_FUSED_BACKWARD * seconds + 2 * rates.kernel_seconds
        )
    scores, element = heads * length * length, rates.element_bytes
    products = rates.for_heads(size)
    two = products.matmul(length, length, size, heads) + products.matmul(length, size, length, heads)
    mask = 1 if shape.dropout else 0
    # Softmax reads and writes; so does dropout, with its mask. Their backwards also read the saved tensors.
    forward = scores * (2 * element + (2 * element + mask if mask else 0))
    backward = scores * (3 * element + (2 * element + mask if mask else 0))
    kernels = 2 if mask else 1
    drawn = scores * mask * rates.drawn_seconds
    return KernelSeconds(
        forward=two + rates.elementwise(forward, kernels) + drawn,
        backward=2 * two + rates.elementwise(backward, kernels),
    )


def _between_layers(setup: Setup, rates: Rates, tokens: float, ffn: float, rotated: float) -> float:
    """Return the seconds of norms, sums, dropout, activation function and rotary positions of one block's forward."""
    shape, element = setup.shape, rates.element_bytes
    whole = _whole_tokens(setup)
    mask = 1 if shape.dropout else 0
    # Two norms, each reads and writes.
    norms = 2 * 2 * element * whole * shape.hidden
    # Two residual sums, each reads two tensors and writes one.
    sums = 2 * (3 * element + mask) * whole * shape.hidden
    activation = (3 if shape.gated else 2) * element * tokens * ffn
    rotary = 2 * element * tokens * rotated if shape.position == "rotary" else 0
    return rates.elementwise(norms + sums + activation + rotary, 6 if rotary else 5)


def _whole_tokens(setup: Setup) -> float:
    """Return the tokens between the layers on one tensor-parallel rank."""
    return setup.tokens / setup.layout.tp if setup.sequence_parallel else setup.tokens


def head_pass(setup: Setup, rates: Rates) -> KernelSeconds:
    """Return the seconds of logits and loss.

    The loss is in float32: logits are converted, read twice, and read and written in backward.

    Args:
        setup: the training.
        rates: rates of the device.
    """
    tokens = setup.tokens
    vocabulary = setup.shape.vocab_size / setup.layout.tp
    product = rates.matmul(tokens, vocabulary, setup.shape.hidden)
    logits, element = tokens * vocabulary, rates.element_bytes
    return KernelSeconds(
        forward=product + rates.elementwise(logits * (element + 3 * 4), 3),
        backward=2 * product + rates.elementwise(logits * (4 + 4 + element), 2),
    )
