"""Which models and sequences can be cut over ranks along cp, and how those divide the work of attention."""

from __future__ import annotations

from math import gcd, lcm
from typing import TYPE_CHECKING

from speedlab.layout import Layout, sequence_multiple

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig
    from speedlab.config.parts import ParallelConfig


def heads_shared(model: ModelConfig, layout: Layout, asked: int | None) -> int:
    """How many of the ranks along cp share heads: as asked, or as many as heads allow."""
    if layout.cp == 1:
        return 1
    return asked or gcd(layout.cp, model.heads // layout.tp)


def padded_length(model: ModelConfig, layout: Layout, parallel: ParallelConfig, length: int) -> int:
    """Tokens of a sequence of `length` as a GPT of this `model` computes it: as many, or up to the next length that cp
    divides where `parallel.cp_pad` says so."""
    if layout.cp == 1 or not parallel.cp_pad:
        return length
    multiple = sequence_multiple(layout.cp, heads_shared(model, layout, parallel.cp_heads), ring_block(model))
    if parallel.sequence:
        multiple = lcm(multiple, layout.cp * layout.tp)
    return -(-length // multiple) * multiple


def padding_words(length: int, padded: int) -> str:
    """'sequences of 42 padded to 44, 4.55% of what is computed'; '' where nothing is padded."""
    if padded == length:
        return ""
    return f"sequences of {length:,} padded to {padded:,}, {1 - length / padded:.2%} of what is computed"


def context_problem(
    model: ModelConfig,
    layout: Layout,
    parallel: ParallelConfig,
    length: int | None = None,
) -> str | None:
    """What stands against the layout's cp for a GPT of this `model`, with what would work; None where nothing does.
    `length`: tokens of a sequence, if known."""
    cp, asked = layout.cp, parallel.cp_heads
    if cp == 1:
        return None
    heads, shared = model.heads // layout.tp, heads_shared(model, layout, asked)
    if cp % shared:
        return f"cp_heads {shared} does not divide cp {cp}; {_divisors(cp)} do"
    if heads % shared:
        return (
            f"cp_heads {shared}: the {heads} heads of a tp rank do not divide by it; {_divisors(gcd(cp, heads))} would "
            "(the others of cp form a ring), and left out it is the largest"
        )
    block = ring_block(model)
    multiple = sequence_multiple(cp, shared, block)
    padded = length if length is None else padded_length(model, layout, parallel, length)
    if length is None or padded is None or (length % multiple == 0 and padded == length):
        return None
    if parallel.cp_pad:
        return _padding_problem(model, cp, length, padded, ring=shared != cp)
    ring = cp // shared
    chunks = f", for {2 * ring} chunks of whole blocks of {block} in a ring of {ring}" if block > 1 < ring else ""
    return f"cp {cp}: sequences of {length} tokens do not divide by {multiple}{chunks}; {ways_out(length, multiple)}"


def ways_out(length: int, multiple: int) -> str:
    """What to do about sequences of `length` tokens that do not divide by `multiple`."""
    below = length // multiple * multiple
    above = below + multiple
    fitting = " or ".join(str(each) for each in (below, above) if each)
    return f"{fitting} would, or set parallel.cp_pad to true, which pads them to {above}"


def ring_block(model: ModelConfig) -> int:
    """Tokens that a ring keeps together."""
    return 1 if model.attention.kind == "dense" else model.attention.block


def _padding_problem(model: ModelConfig, cp: int, length: int, padded: int, *, ring: bool) -> str | None:
    """What stands against padding sequences of `length` tokens. A `ring` knows that padding sees nothing."""
    if model.dropout:
        return f"cp {cp}: sequences of {length} tokens would be padded to {padded}, and {dropout_rule(model.dropout)}"
    attention = model.attention
    if attention.mask is not None and not ring and len(attention.mask) * attention.block < padded:
        return (
            f"cp {cp}: sequences of {length} tokens would be padded to {padded}, and the {len(attention.mask)} rows of "
            f"model.attention.mask are for {len(attention.mask) * attention.block}; give a row more"
        )
    return None


def dropout_rule(dropout: float) -> str:
    """Why nothing is padded where something is dropped."""
    return (
        f"dropout {dropout:g} would drop other elements of a longer sequence; set model.dropout to 0, or use lengths "
        "that cp divides"
    )


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
