"""Which blocks of keys go from rank to rank where block-sparse attention is computed in a ring. Plain data.

Every rank of a ring has its blocks of the sequence (`layout.own_positions`), computes for its own queries, and is sent
the blocks of keys and values that one of those sees. The pattern tells all of that, to every rank and before a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from speedlab.config.attention import AttentionConfig
from speedlab.config.attention_pattern import seen_blocks
from speedlab.layout import own_positions


@dataclass(frozen=True, kw_only=True)
class RingNeeds:
    """What the ranks of a ring need of each other."""

    blocks: tuple[tuple[int, ...], ...]
    """Of each rank: its blocks of the sequence, ascending."""
    needed: tuple[tuple[tuple[int, ...], ...], ...]
    """needed[rank][source]: of the blocks that rank `source` has, those that a query of `rank` sees, ascending."""

    @property
    def turns(self) -> tuple[int, ...]:
        """How many ranks further on something has to go, ascending: in a turn of k, rank r is sent what it needs of
        rank r - k. Turns in which nobody needs anything there are none of."""
        size = len(self.blocks)
        return tuple(k for k in range(1, size) if any(self.needed[rank][(rank - k) % size] for rank in range(size)))


@lru_cache(maxsize=64)
def ring_needs(attention: AttentionConfig, length: int, ranks: int) -> RingNeeds:
    """What `ranks` ranks need of each other for `attention` over sequences of `length` tokens, which is a multiple of
    2 · `ranks` · block. Past the rows of a custom mask there is padding only, which sees nothing."""
    count = length // attention.block
    known = count if attention.mask is None else min(count, len(attention.mask))
    rows = seen_blocks(attention, known * attention.block)
    blocks = tuple(tuple(place for part in own_positions(count, ranks, 1, r) for place in part) for r in range(ranks))
    owner = {block: rank for rank, own in enumerate(blocks) for block in own}
    found: list[list[set[int]]] = [[set() for _ in blocks] for _ in blocks]
    for row, seen in enumerate(rows):
        of_rank = found[owner[row]]
        for block in seen:
            of_rank[owner[block]].add(block)
    needed = tuple(tuple(tuple(sorted(each)) for each in of_rank) for of_rank in found)
    return RingNeeds(blocks=blocks, needed=needed)
