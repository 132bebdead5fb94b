"""Causal attention over a ring of ranks, each with a part of every sequence (ring attention, arXiv:2310.01889).

1. Queries stay. Keys and values rotate: they are sent to the next rank while this rank computes with them.
2. With the chunks of `own_positions`, half of the scores are needed in every turn. Rank i sees these keys of rank j:
   - its own keys, under the causal mask;
   - if j < i: the first chunk of keys, from all queries;
   - if j > i: both chunks of keys, from the second chunk of queries.
3. Outputs of turns are combined in float32, with the logarithms of their sums of exponentials.
4. In backward, the gradient sums of keys and values rotate with them, and are back at their owner after a full round.
5. Document boundaries and dropout are masks on the scores of a turn (`attention_masks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from speedlab.comm import Group
from speedlab.layout import own_positions
from speedlab.models.gpt import CausalAttention
from speedlab.models.packing import starts_for
from speedlab.models.selective_checkpointing import computed_once
from speedlab.parallel.context.attention_masks import Masks, TokenPositions, kept_of

_HEAD_MULTIPLE = 8
"""On GPUs, the kernels need head sizes that are multiples of this."""

_LARGEST_FLASH_HEAD = 256

_EFFICIENT_ROWS = 32
"""torch's memory-efficient attention pads its logarithms to a multiple of this many queries."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ring: Group, *, attend: CausalAttention | None = None, starts: Tensor | None = None
) -> Tensor:
    """Return causal attention of this rank's tokens to the tokens of all ranks of the ring, (B, H, T, D). Collective.

    Args:
        q: (B, H, T, D) queries of this rank.
        k: (B, H, T, D) keys of this rank.
        v: (B, H, T, D) values of this rank.
        ring: The ranks.
        attend: The attention module, for its dropout in training; None: no dropout.
        starts: (B, T · ranks) int32, first visible key of each query, in full sequences; None: no documents.
    """
    size, length = q.shape[-1], q.shape[2] * ring.size
    kept = None if attend is None else kept_of(attend, q, length, _own(length, ring, ring.index, q.device))
    if starts is not None:
        starts = starts_for(starts, length)
    missing = -size % _HEAD_MULTIPLE if q.is_cuda else 0
    if missing:  # Padding with zeros changes no score.
        q, k, v = (F.pad(each, (0, missing)) for each in (q, k, v))
    y = _Ring.apply(q, k, v, size**-0.5, ring, starts, kept, 0.0 if attend is None else attend.dropout)
    return y[..., :size] if missing else y


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        ring: Group,
        starts: Tensor | None,
        kept: Tensor | None,
        dropout: float,
    ) -> Tensor:
        masks = _masks(starts, kept, dropout)
        result, logarithms = computed_once(lambda: _round(q, k, v, scale, ring, masks))
        ctx.ring, ctx.scale, ctx.dropout = ring, scale, dropout
        ctx.save_for_backward(q, k, v, result, logarithms, starts, kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ring: Group = ctx.ring
        q, k, v, result, logarithms, starts, kept = ctx.saved_tensors
        masks = _masks(starts, kept, ctx.dropout)
        # One message for keys and values. Twice the tags: for keys and values, and for their gradients.
        both, tag = torch.stack((k, v)), ring.take_tags(2 * ring.size)
        # Gradients are summed over the turns in float32 (float64 for float64 inputs).
        of_queries = torch.zeros_like(q, dtype=logarithms.dtype)
        sums, on_their_way = torch.zeros_like(both, dtype=logarithms.dtype), None
        for turn in range(ring.size):
            coming = ring.rotate(both, tag + turn) if turn + 1 < ring.size else None
            rows, columns = _seen(ring, turn, q.shape[2])
            keys, values = both[:, :, :, columns]
            here = gradient[:, :, rows], q[:, :, rows], keys, values, result[:, :, rows], logarithms[:, :, rows]
            if masks is None:
                gradients = _attend_backward(*here, ctx.scale, causal=turn == 0)
            else:
                gradients = masks.gradients(*here, ctx.scale, _places(ring, turn, rows, columns, q))
            of_queries[:, :, rows] += gradients[0]
            if on_their_way is not None:
                sums = on_their_way.wait()
            sums[0, :, :, columns] += gradients[1]
            sums[1, :, :, columns] += gradients[2]
            on_their_way = ring.rotate(sums, tag + ring.size + turn)  # 4
            if coming is not None:
                both = coming.wait()
        assert on_their_way is not None  # There is at least one turn.
        of_keys, of_values = on_their_way.wait().to(k.dtype)
        return of_queries.to(q.dtype), of_keys, of_values, None, None, None, None, None


def _round(q: Tensor, k: Tensor, v: Tensor, scale: float, ring: Group, masks: Masks | None) -> tuple[Tensor, Tensor]:
    """Return (output, logarithms of its sums) after all turns."""
    wide = torch.promote_types(q.dtype, torch.float32)
    whole = torch.zeros_like(q, dtype=wide)
    logarithms = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    both, tag = torch.stack((k, v)), ring.take_tags(ring.size)
    for turn in range(ring.size):
        coming = ring.rotate(both, tag + turn) if turn + 1 < ring.size else None  # 1
        rows, columns = _seen(ring, turn, q.shape[2])
        keys, values = both[:, :, :, columns]
        if masks is None:
            out, logarithm = _attend(q[:, :, rows], keys, values, scale, causal=turn == 0)
        else:
            places = _places(ring, turn, rows, columns, q)
            out, logarithm = masks.attend(q[:, :, rows], keys, values, scale, places)  # 5
        add_turn(whole[:, :, rows], logarithms[:, :, rows], out, logarithm)
        if coming is not None:
            both = coming.wait()
    return whole.to(q.dtype), logarithms


def _seen(ring: Group, turn: int, length: int) -> tuple[slice, slice]:
    """Return the queries of this rank, and the keys present in a turn, between which there are scores."""
    source, everything = (ring.index - turn) % ring.size, slice(None)
    if turn == 0:
        return everything, everything
    return (everything, slice(length // 2)) if source < ring.index else (slice(length // 2, None), everything)


def _masks(starts: Tensor | None, kept: Tensor | None, dropout: float) -> Masks | None:
    return None if starts is None and kept is None else Masks(starts=starts, kept=kept, dropout=dropout)


def _places(ring: Group, turn: int, rows: slice, columns: slice, q: Tensor) -> TokenPositions:
    """Return the positions of a turn's queries and keys in full sequences."""
    own, come = (_own(q.shape[2] * ring.size, ring, ring.index - each, q.device) for each in (0, turn))
    return TokenPositions(rows=rows, queries=own[rows], keys=come[columns], causal=turn == 0)


def _own(length: int, ring: Group, index: int, device: torch.device) -> Tensor:
    """Return the token positions of rank `index`, ascending."""
    parts = own_positions(length, ring.size, 1, index % ring.size)
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])


def add_turn(whole: Tensor, logarithms: Tensor, out: Tensor, logarithm: Tensor) -> None:
    """Add the output of a turn to that of earlier turns, in place.

    Args:
        whole: (B, H, T, D), sum so far.
        logarithms: (B, H, T), logarithms of the sums of exponentials so far; -inf for a query that has seen no key.
        out: Output of the turn.
        logarithm: Its logarithms.
    """
    # 3
    together = torch.logaddexp(logarithms, logarithm)
    finite = together.masked_fill(together == float("-inf"), 0)  # Otherwise -inf - (-inf) gives NaN.
    whole.mul_((logarithms - finite).exp_().unsqueeze(-1))
    whole.addcmul_(out.to(whole.dtype), (logarithm - finite).exp_().unsqueeze(-1))
    logarithms.copy_(together)


# ---- torch's kernels that return the logarithms ---------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (output, logarithm of the sum of exponentials (B, H, T); float64 for float64 inputs, else float32)."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if _flash(q):
        out, logarithm, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, logarithm
    out, logarithm, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, logarithm[:, :, : q.shape[2]]


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logarithm: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given `out` and `logarithm` of all turns combined."""
    aten, given = torch.ops.aten, (gradient, q, k, v)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*given, out, logarithm, 0.0, causal, scale=scale)
    # Without dropout, the random state of the forward does not matter.
    random = [torch.empty((), dtype=torch.int64) for _ in range(2)]
    if _flash(q):
        backward, lengths = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        return backward(*given, out, logarithm.contiguous(), None, None, *lengths, 0.0, causal, *random, scale=scale)
    padded = F.pad(logarithm, (0, -q.shape[2] % _EFFICIENT_ROWS), value=float("inf"))
    backward, needed = aten._scaled_dot_product_efficient_attention_backward, (True, True, True, False)
    return backward(*given, None, out, padded, *random, 0.0, needed, causal, scale=scale)[:3]


def _flash(q: Tensor) -> bool:
    """Return whether torch's flash attention supports this on a GPU. The memory-efficient kernel supports the rest."""
    capable = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return capable and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _LARGEST_FLASH_HEAD
