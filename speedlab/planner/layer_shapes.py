"""Count parameters and matrices of any `ModelShape`, also of shapes that the built-in GPT cannot have. No torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from speedlab.layout import layer_counts
from speedlab.planner.setup import ModelShape, Setup


def check_shape(shape: ModelShape) -> None:
    """Check that a shape is possible.

    Raises:
        ValueError: a size is invalid; the message has the value and what would work.
    """
    for count in ("layers", "hidden", "heads", "ffn_hidden", "vocab_size", "sequence_length", "kv_heads", "head_size"):
        value = getattr(shape, count)
        if value is not None and value < 1:
            raise ValueError(f"{shape.name} has {count} {value}; it must be at least 1")
    if shape.position == "learned" and shape.sequence_length > shape.positions:
        raise ValueError(
            f"{shape.name} has learned {shape.positions:,} positions, and sequences of {shape.sequence_length:,} "
            f"tokens are longer; give at most {shape.positions:,}"
        )
    if shape.head_size is None and shape.hidden % shape.heads:
        divisors = [heads for heads in range(1, shape.hidden + 1) if shape.hidden % heads == 0]
        nearest = min(divisors, key=lambda heads: abs(heads - shape.heads))
        raise ValueError(
            f"{shape.name}: hidden {shape.hidden} does not divide by heads {shape.heads}; use {nearest} heads, or say "
            "how wide a head is: --head-size, in Python the shape's head_size"
        )
    if shape.heads % kv_heads(shape):
        raise ValueError(f"{shape.name}: heads {shape.heads} do not divide by kv_heads {shape.kv_heads}")


def kv_heads(shape: ModelShape) -> int:
    """Return the number of heads of keys and values."""
    return shape.heads if shape.kv_heads is None else shape.kv_heads


def head_size(shape: ModelShape) -> int:
    """Return the elements of an attention head."""
    return shape.hidden // shape.heads if shape.head_size is None else shape.head_size


def is_built_in(shape: ModelShape) -> bool:
    """Return whether the built-in GPT can have this shape.

    Args:
        shape: the model. The built-in GPT has two norms in a block, separate keys and values for each head, and two
            matrices in a feed-forward layer.
    """
    return (
        shape.causal
        and not shape.decoder_layers
        and not shape.gated
        and not shape.stepwise
        and not shape.parallel
        and not shape.head_norms
        and shape.norms == 2
        and kv_heads(shape) == shape.heads
        and head_size(shape) * shape.heads == shape.hidden
    )


def norm_vectors(shape: ModelShape) -> tuple[int, ...]:
    """Return the elements of one norm's weight, and of its bias if it has one."""
    return (shape.hidden,) * _vectors_of_a_norm(shape)


def _vectors_of_a_norm(shape: ModelShape) -> int:
    return 2 if shape.norm == "layer" and "norms" in shape.biases else 1


def position_elements(shape: ModelShape) -> int:
    """Return the elements of the learned position table; 0 without one."""
    return shape.positions * shape.hidden if shape.position == "learned" else 0


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """Elements of a block's matrices and vectors."""

    attention_in: int
    attention_out: int
    feed_forward_in: int
    feed_forward_out: int
    rest: int
    """Vectors: norms and biases."""

    @property
    def matrices(self) -> int:
        """Elements of the four matrices."""
        return self.attention_in + self.attention_out + self.feed_forward_in + self.feed_forward_out

    @property
    def total(self) -> int:
        """Elements of the whole block."""
        return self.matrices + self.rest


def block_weights(shape: ModelShape) -> BlockWeights:
    """Return the elements of one block with self-attention."""
    hidden, ffn, size = shape.hidden, shape.ffn_hidden, head_size(shape)
    queries, values = shape.heads * size, kv_heads(shape) * size
    ups = 2 if shape.gated else 1
    return BlockWeights(
        attention_in=hidden * (queries + 2 * values),
        attention_out=queries * hidden,
        feed_forward_in=ups * hidden * ffn,
        feed_forward_out=ffn * hidden,
        rest=sum(vector.elements for vector in block_vectors(shape)),
    )


@dataclass(frozen=True)
class Vector:
    """A norm's weight or a bias of a block."""

    elements: int
    cut: bool = False
    """Whether tensor-parallel ranks partition it: biases of layers with partitioned outputs.

    Norms, and biases that are added after the sum over the ranks, are replicated.
    """


def block_vectors(shape: ModelShape) -> list[Vector]:
    """Return the vectors of one block with self-attention.

    Args:
        shape: the model.

    Returns:
        Norms and biases, in order of use.
    """
    hidden, size, has = shape.hidden, head_size(shape), shape.biases
    norm = [Vector(elements) for elements in norm_vectors(shape)]
    following = norm if shape.norms == 4 else []
    found = list(norm)
    if "attention in" in has:
        found.append(Vector((shape.heads + 2 * kv_heads(shape)) * size, cut=True))
    if shape.head_norms:
        found += [Vector(size)] * 2 * _vectors_of_a_norm(shape)
    found += [Vector(hidden)] if "attention out" in has else []
    found += [*following, *(norm if shape.norms > 1 else [])]
    if "feed-forward" in has:
        found += [Vector((2 if shape.gated else 1) * shape.ffn_hidden, cut=True), Vector(hidden)]
    return [*found, *following]


def cross_attention(shape: ModelShape) -> int:
    """Return the additional elements of a decoder's layer with cross-attention: four matrices and a norm."""
    inner = shape.heads * head_size(shape)
    return 4 * shape.hidden * inner + shape.hidden


def shape_parameters(shape: ModelShape) -> int:
    """Return the parameters of the whole model.

    Args:
        shape: the model. A tied head counts once. The few biases of relative positions are omitted.
    """
    table = shape.vocab_size * shape.hidden
    blocks = shape.depth * block_weights(shape).total
    blocks += shape.decoder_layers * cross_attention(shape)
    ends = sum(norm_vectors(shape)) * (2 if shape.decoder_layers else 1)
    head = (0 if shape.tied else table) + (shape.vocab_size if "head" in shape.biases else 0)
    return blocks + ends + table + position_elements(shape) + head


@functools.lru_cache(maxsize=4096)
def stage_counts(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, balanced by parameters: the engine's default.

    Args:
        shape: the model.
        stages: number of pipeline stages.

    Raises:
        LayoutError: there are fewer blocks than stages.
    """
    block = block_weights(shape).total
    table = shape.vocab_size * shape.hidden  # Also on the last stage, as the head (tied or not).
    costs = [block] * shape.layers + [block + cross_attention(shape)] * shape.decoder_layers
    return layer_counts(costs, stages, first=table + position_elements(shape), last=sum(norm_vectors(shape)) + table)


def block_cut(setup: Setup) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage.

    Args:
        setup: the training; its `cut`, or a cut balanced by parameters.
    """
    return setup.cut or stage_counts(setup.shape, setup.layout.pp * setup.stages_per_rank)
