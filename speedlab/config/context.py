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


def context_problem(
    model: ModelConfig, layout: Layout, asked: int | None, length: int | None = None, *, separate: bool = False
) -> str | None:
    """What stands against the layout's cp for a GPT of this `model`, with what would work; None where nothing does.

    `asked`: of the cp ranks so many shall share heads; None: as many as can. `length`: tokens of a sequence, if known;
    `separate`: whether no token sees another document.
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
    if shared != cp and (model.attention.kind != "dense" or model.dropout or separate):
        return _ring_problem(model, cp, heads, asked, separate=separate)
    multiple = sequence_multiple(cp, shared)
    if length is not None and length % multiple:
        below = length // multiple * multiple
        fitting = " or ".join(str(each) for each in (below, below + multiple) if each)
        return f"cp {cp}: sequences of {length} tokens do not divide by {multiple}; {fitting} would"
    return None


def _ring_problem(model: ModelConfig, cp: int, heads: int, asked: int | None, *, separate: bool) -> str:
    """Around a ring go scores of dense attention over whole sequences, of which none is dropped."""
    if model.attention.kind != "dense":
        what, other = f"{model.attention.kind} attention", "dense attention"
    elif model.dropout:
        what, other = f"model.dropout {model.dropout:g}", "no dropout"
    else:
        assert separate, "asked for a reason that is none"
        what, other = "data.documents 'separate'", "data.documents 'joined'"
    rule = f"cp {cp} with {what}: all cp ranks have to share heads"
    if asked is not None and heads % cp == 0:
        return f"{rule}, and cp_heads is {asked}; leave it out"
    return f"{rule}, and the {heads} heads of a tp rank do not divide by {cp}; cp {gcd(cp, heads)} would do, or {other}"


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
