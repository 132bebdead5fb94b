"""Block-sparse causal attention over a ring of ranks, each with some blocks of every sequence.

1. From the pattern alone, every rank computes which key blocks each other rank needs (`ring_needs`).
2. Queries stay. In turn k, rank r sends the key and value blocks that rank r + k needs directly to that rank. Both
   compute with earlier blocks meanwhile. Nothing else is sent, and turns without any needed block are skipped.
3. Outputs of turns are combined in float32, with the logarithms of their sums of exponentials.
4. In backward, keys and values are sent again, and their gradients are sent directly to the owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_attention import partial_attention, partial_gradients
from speedlab.comm import Group, Rotation
from speedlab.config import AttentionConfig
from speedlab.config.layout_rules import RingNeeds, ring_needs
from speedlab.models.gpt import layout_of
from speedlab.models.packing import starts_for
from speedlab.models.selective_checkpointing import computed_once
from speedlab.parallel.context.attention_masks import local_starts
from speedlab.parallel.context.ring_attention import add_turn


@dataclass(frozen=True, eq=False)
class _RingTurn:
    """A turn of one rank. Block numbers are relative to the rank that owns the blocks."""

    places: int
    """Distance in the ring: keys are received from this many ranks back, and sent to as many ranks further; 0: own
    keys."""
    sent: tuple[int, ...]
    """Own blocks that are sent."""
    layout: BlockLayout
    """Which received blocks this rank's queries see."""

    @property
    def sees(self) -> bool:
        """Whether any query sees any received block."""
        return len(self.layout.columns) > 0

    def starts(self, starts: Tensor | None) -> Tensor | None:
        """Return `starts` of full sequences as positions among the turn's keys.

        Args:
            starts: (B, T · ranks) int32; None: no documents.
        """
        if starts is None:
            return None
        within = torch.arange(self.layout.block)
        queries, keys = ((blocks[:, None] * len(within) + within).flatten() for blocks in self.layout.block_places())
        return local_starts(starts, queries, keys)


def sparse_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: AttentionConfig, ring: Group, *, starts: Tensor | None = None
) -> Tensor:
    """Return attention of this rank's tokens to those of all ranks that the pattern sees, (B, H, T, D). Collective, on
    CPUs.

    Args:
        q: (B, H, T, D) queries of this rank.
        k: (B, H, T, D) keys of this rank.
        v: (B, H, T, D) values of this rank.
        attention: The block-sparse pattern.
        ring: The ranks.
        starts: (B, T · ranks) int32, first visible key of each query, in full sequences; None: no documents.
    """
    length = q.shape[2] * ring.size
    turns = _turns(attention, length, ring.size, ring.index)
    starts = None if starts is None else starts_for(starts, length)
    return _SparseRing.apply(q.contiguous(), torch.stack((k, v)), q.shape[3] ** -0.5, turns, ring, starts)


@lru_cache(maxsize=64)
def _turns(attention: AttentionConfig, length: int, ranks: int, index: int) -> tuple[_RingTurn, ...]:
    """Return the turns of rank `index`, its own keys first."""
    needs = ring_needs(attention, length, ranks)
    whole = _whole(attention, length)
    return tuple(_turn(needs, whole, places, index) for places in (0, *needs.turns))


def _whole(attention: AttentionConfig, length: int) -> BlockLayout:
    """Return the block layout of `length` tokens. Padding after the rows of a custom mask sees nothing and is not
    seen.
    """
    count = length // attention.block
    known = count if attention.mask is None else min(count, len(attention.mask))
    layout: BlockLayout = layout_of(attention, known * attention.block)  # pyright: ignore[reportCallIssue]  # disable() loses its types
    if known == count:
        return layout
    mask = torch.zeros(count, count, dtype=torch.bool)
    mask[:known, :known] = layout.mask
    return BlockLayout(mask, causal=True, block=attention.block, window=layout.window)


def _turn(needs: RingNeeds, whole: BlockLayout, places: int, index: int) -> _RingTurn:
    size, own = len(needs.blocks), needs.blocks[index]
    if not places:
        return _RingTurn(0, (), whole.part(own, own))
    number = {block: n for n, block in enumerate(own)}
    wanted = needs.needed[(index + places) % size][index]
    coming = needs.needed[index][(index - places) % size]
    return _RingTurn(places, tuple(number[block] for block in wanted), whole.part(own, coming))


class _SparseRing(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        both: Tensor,
        scale: float,
        turns: tuple[_RingTurn, ...],
        ring: Group,
        starts: Tensor | None,
    ) -> Tensor:
        result, logarithms = computed_once(lambda: _round(q, both, scale, turns, ring, starts))
        ctx.ring, ctx.scale, ctx.turns = ring, scale, turns
        ctx.save_for_backward(q, both, result, logarithms, starts)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ring, turns, gradient = ctx.ring, ctx.turns, gradient.contiguous()
        q, both, result, logarithms, starts = ctx.saved_tensors
        tag = ring.take_tags(2 * len(turns))
        of_queries = torch.zeros_like(q, dtype=logarithms.dtype)
        sums, going_home = torch.zeros_like(both, dtype=logarithms.dtype), None
        for number, (turn, here) in enumerate(_arriving(both, turns, ring, tag)):
            of_here = here  # If no query sees a block of this turn, none was received.
            if turn.sees:
                seen, scale = (q, here[0], here[1], result, logarithms, turn.layout), ctx.scale
                of_turn, of_keys, of_values = partial_gradients(
                    gradient, *seen, scale=scale, starts=turn.starts(starts)
                )
                of_queries += of_turn
                of_here = torch.stack((of_keys, of_values))
            if going_home is not None:
                _add_blocks(sums, *going_home)
            if turn.places:  # 4
                into = _empty_blocks(both, len(turn.sent), turn.layout.block)
                going_home = turn, ring.shift(of_here, into, -turn.places, tag + len(turns) + number)
            elif turn.sees:
                sums += of_here
        if going_home is not None:
            _add_blocks(sums, *going_home)
        return of_queries.to(q.dtype), sums.to(both.dtype), None, None, None, None


def _round(
    q: Tensor, both: Tensor, scale: float, turns: tuple[_RingTurn, ...], ring: Group, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (output, logarithms of its sums) after all turns."""
    wide = torch.promote_types(q.dtype, torch.float32)
    whole = torch.zeros_like(q, dtype=wide)
    logarithms = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    for turn, here in _arriving(both, turns, ring, ring.take_tags(len(turns))):
        if turn.sees:
            seen = partial_attention(q, here[0], here[1], turn.layout, scale=scale, starts=turn.starts(starts))
            add_turn(whole, logarithms, *seen)  # 3
    return whole.to(q.dtype), logarithms


def _arriving(both: Tensor, turns: tuple[_RingTurn, ...], ring: Group, tag: int) -> Iterator[tuple[_RingTurn, Tensor]]:
    """Yield each turn with its received keys and values (2, B, H, …, D), while those of the next turn are
    transferred.
    """
    here, coming = both, None
    for number, turn in enumerate(turns):
        if coming is not None:
            here = coming.wait()
        if number + 1 < len(turns):
            following = turns[number + 1]
            block = following.layout.block
            sent = _blocks(both, block).index_select(3, torch.tensor(following.sent, dtype=torch.int64))
            into = _empty_blocks(both, following.layout.mask.shape[1], block)
            coming = ring.shift(sent, into, following.places, tag + number)
        yield turn, here


def _add_blocks(sums: Tensor, turn: _RingTurn, coming: Rotation) -> None:
    """Add the returned gradients of the blocks that were sent in `turn` to this rank's `sums`."""
    gradients, block = coming.wait().to(sums.dtype), turn.layout.block
    _blocks(sums, block).index_add_(3, torch.tensor(turn.sent, dtype=torch.int64), _blocks(gradients, block))


def _blocks(x: Tensor, block: int) -> Tensor:
    """Reshape (2, B, H, T, D) to (2, B, H, T / block, block, D)."""
    return x.unflatten(3, (-1, block))


def _empty_blocks(like: Tensor, count: int, block: int) -> Tensor:
    """Return memory for `count` blocks of keys and values, (2, B, H, count · block, D)."""
    return like.new_empty(*like.shape[:3], count * block, like.shape[4])
