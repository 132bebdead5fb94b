"""Causal attention over a ring of ranks, each with a part of every sequence (ring attention, arXiv:2310.01889).

1. Queries stay; keys and values go round, on their way to the next rank while this one computes with them.
2. With the chunks of `positions` rank i sees of rank j's keys: its own under the causal mask; where j is before i, the
   first chunk, from all its queries; where j is behind, both, from its second chunk of queries. That is half of the
   scores in every turn.
3. Outputs of turns are put together by the logarithms of their sums, in float32.
4. In backward the sums of keys' and values' gradients travel with them, and are home after a whole round.
5. Documents that are kept apart, and dropout, are masks of the scores of a turn (`masks`).
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
"""On GPUs, kernels take heads of a multiple of so many elements."""

_LARGEST_FLASH_HEAD = 256

_EFFICIENT_ROWS = 32
"""torch's memory-efficient attention keeps logarithms for a multiple of so many queries."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ring: Group, *, attend: CausalAttention | None = None, starts: Tensor | None = None
) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks of `ring`: q, k, v (B, H, T, D) each -> the same.
    Collective.

    `attend` says what is dropped in training; `starts` (B, T · ranks) int32, the first key of whole sequences that each
    of all queries may see."""
    size, length = q.shape[-1], q.shape[2] * ring.size
    kept = None if attend is None else kept_of(attend, q, length, _own(length, ring, ring.index, q.device))
    if starts is not None:
        starts = starts_for(starts, length)
    missing = -size % _HEAD_MULTIPLE if q.is_cuda else 0
    if missing:  # Zeros change no score.
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
        both, tag = torch.stack((k, v)), ring.take_tags(2 * ring.size)
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
    """(output, logarithms of its sums) of all turns."""
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
    """Of this rank's queries and of the keys that are here in a turn: those between which there are scores."""  # 2
    source, everything = (ring.index - turn) % ring.size, slice(None)
    if turn == 0:
        return everything, everything
    return (everything, slice(length // 2)) if source < ring.index else (slice(length // 2, None), everything)


def _masks(starts: Tensor | None, kept: Tensor | None, dropout: float) -> Masks | None:
    return None if starts is None and kept is None else Masks(starts=starts, kept=kept, dropout=dropout)


def _places(ring: Group, turn: int, rows: slice, columns: slice, q: Tensor) -> TokenPositions:
    """Where the queries and keys of a turn stand in whole sequences."""
    own, come = (_own(q.shape[2] * ring.size, ring, ring.index - each, q.device) for each in (0, turn))
    return TokenPositions(rows=rows, queries=own[rows], keys=come[columns], causal=turn == 0)


def _own(length: int, ring: Group, index: int, device: torch.device) -> Tensor:
    """Which tokens of whole sequences the rank `index` has, ascending."""
    parts = own_positions(length, ring.size, 1, index % ring.size)
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])


def add_turn(whole: Tensor, logarithms: Tensor, out: Tensor, logarithm: Tensor) -> None:
    """Add a turn's output to that of earlier ones, whose sums of exponentials have these `logarithms`, in place; -inf
    where a query has seen no key."""
    # 3
    together = torch.logaddexp(logarithms, logarithm)
    finite = together.masked_fill(together == float("-inf"), 0)  # Else -inf would be taken from -inf.
    whole.mul_((logarithms - finite).exp_().unsqueeze(-1))
    whole.addcmul_(out.to(whole.dtype), (logarithm - finite).exp_().unsqueeze(-1))
    logarithms.copy_(together)


# ---- torch's kernels, which also tell the logarithms -----------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, logarithm of the sum of exponentials (B, H, T) float32, of float64 float64)."""
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
    """Gradients of q, k and v, where `out` and `logarithm` are those of all turns together."""
    aten, given = torch.ops.aten, (gradient, q, k, v)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*given, out, logarithm, 0.0, causal, scale=scale)
    # Nothing is dropped: what the forwards drew does not count.
    random = [torch.empty((), dtype=torch.int64) for _ in range(2)]
    if _flash(q):
        backward, lengths = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        return backward(*given, out, logarithm.contiguous(), None, None, *lengths, 0.0, causal, *random, scale=scale)
    padded = F.pad(logarithm, (0, -q.shape[2] % _EFFICIENT_ROWS), value=float("inf"))
    backward, needed = aten._scaled_dot_product_efficient_attention_backward, (True, True, True, False)
    return backward(*given, None, out, padded, *random, 0.0, needed, causal, scale=scale)[:3]


def _flash(q: Tensor) -> bool:
    """Whether torch's flash attention takes this on a GPU; the memory-efficient one takes the rest."""
    capable = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return capable and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _LARGEST_FLASH_HEAD
