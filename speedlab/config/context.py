"""Which models and sequences can be cut over ranks along cp, and how those divide the work of attention."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from speedlab.layout import Layout, sequence_multiple

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig


def heads_shared(model: ModelConfig, layout: Layout, asked: int | None) -> int:
    """How many of the ranks along cp share heads: as asked, or as many as heads allow."""
    if layout.cp == 1:
        return 1
    return asked or gcd(layout.cp, model.heads // layout.tp)


def context_problem(model: ModelConfig, layout: Layout, asked: int | None, length: int | None = None) -> str | None:
    """What stands against the layout's cp for a GPT of this `model`, with what would work; None where nothing does.

    `asked`: of the cp ranks so many shall share heads; None: as many as can. `length`: tokens of a sequence, if known.
    """
    cp = layout.cp
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
    if shared != cp and model.dropout:
        return _dropout_problem(model, cp, heads, asked)
    block = ring_block(model)
    multiple = sequence_multiple(cp, shared, block)
    if length is not None and length % multiple:
        below = length // multiple * multiple
        fitting = " or ".join(str(each) for each in (below, below + multiple) if each)
        ring = cp // shared
        chunks = f", for {2 * ring} chunks of whole blocks of {block} in a ring of {ring}" if block > 1 < ring else ""
        return f"cp {cp}: sequences of {length} tokens do not divide by {multiple}{chunks}; {fitting} would"
    return None


def ring_block(model: ModelConfig) -> int:
    """Tokens that a ring keeps together."""
    return 1 if model.attention.kind == "dense" else model.attention.block


def _dropout_problem(model: ModelConfig, cp: int, heads: int, asked: int | None) -> str:
    """Around a ring go scores of which none is dropped."""
    rule = f"cp {cp} with model.dropout {model.dropout:g}: all cp ranks have to share heads"
    if asked is not None and heads % cp == 0:
        return f"{rule}, and cp_heads is {asked}; leave it out"
    return (
        f"{rule}, and the {heads} heads of a tp rank do not divide by {cp}; cp {gcd(cp, heads)} would do, or no dropout"
    )


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
