"""`python -m tests.benchmarks exact`: loss and every gradient of a very long sequence, beside one rank's, under a limit
on memory.

1. Dense attention of one rank, by torch's own kernel, is what rings, shared heads and both together have to equal.
2. One rank whose dense attention hides by a mask over tokens what a sparse pattern does not see is what the kernel for
   blocks has to equal, alone and in a ring.

All sides start with the same weights and get the same tokens. Sides train one after another, each in processes of its
own, which together may take no more memory than the limit once they have imported and compiled everything.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

from speedlab.calibrate.rank_processes import RankSet
from speedlab.config.command_line import read_options
from tests.benchmarks import exact_sides as sides
from tests.benchmarks.exact_sides import Case, Side, Step
from tests.benchmarks.memory_limit import NoLimitError, memory_limit

GOAL = 1e-5
"""At most, in float32: the loss's difference over the loss, and of every parameter the norm of its gradient's
difference over the norm of its gradient."""

_DENSE, _MASKED = "dense, one rank", "dense under the pattern's mask, one rank"
_SIDES = {
    _DENSE: (Side(threads=2), None),
    "ring of 2": (Side(cp=2, heads_shared=1), _DENSE),
    "heads over 2": (Side(cp=2, heads_shared=2), _DENSE),
    "heads over 2, ring of 2": (Side(cp=4, heads_shared=2), _DENSE),
    _MASKED: (Side(threads=2, masked=True), None),
    "sparse, one rank": (Side(threads=2, sparse=True), _MASKED),
    "sparse in a ring of 2": (Side(cp=2, heads_shared=1, sparse=True), _MASKED),
}
"""By name: how it trains, and which one it has to equal; None: the others equal it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss and gradients of one long sequence: cut over ranks, and block-sparse, beside dense attention of one rank."""

    length: int = 65536
    """Tokens of the sequence, whole blocks of 64 for each of four ranks."""
    layers: int = 2
    """Blocks of the GPT."""
    heads: int = 2
    """Of 64 elements."""
    limit_gib: float = 2.0
    """Memory that all processes of a side together may take beyond what they hold before they train. 0: no limit."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks exact")
    case = Case(length=options.length, layers=options.layers, heads=options.heads)
    found: dict[str, Step] = {}
    missed = []
    print(f"{options.length:,} tokens, float32, {options.layers} layers of {options.heads} heads; goal {GOAL:g}")
    for name, (side, peer) in _SIDES.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            found[name] = step = _trained(case, side, round(options.limit_gib * 2**30))
        except NoLimitError as error:
            sys.exit(f"bench exact: {error}, or set --limit-gib 0")
        reported = f"{name}: loss {step.loss:.7f}, {step.seconds:.0f} s, {step.peak_bytes / 2**30:.2f} GiB"
        if peer is not None:
            loss, gradient, worst = step.alongside(found[peer])
            met = max(loss, gradient) <= GOAL
            missed += [] if met else [name]
            reported += f"; off by {loss:.1e} in the loss, {gradient:.1e} in the gradient furthest off ({worst})"
            reported += f": {'met' if met else 'MISSED'}"
        print(reported, flush=True)
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")
    print("every one met")


def _trained(case: Case, side: Side, limit: int) -> Step:
    """A step of `side`. Raises NoLimitError where there can be no limit, RuntimeError where it was too little."""
    with ExitStack() as stack:
        group = stack.enter_context(memory_limit("speedlab-exact")) if limit else None
        ranks = stack.enter_context(RankSet(side.cp))
        ranks.call(sides.warm, case, side)
        if group is not None:
            group.set(limit)
            group.take_in(ranks.pids)
        return ranks.call(sides.step, case, side)
