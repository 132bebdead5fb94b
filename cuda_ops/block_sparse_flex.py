"""Block-sparse attention on CUDA devices: FlexAttention (torch.nn.attention) with the blocks of a `BlockLayout`."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cuda_ops.block_layout import BlockLayout


def attend_flex(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, starts: Tensor | None) -> Tensor:
    """`block_sparse_attention` of checked arguments, compiled once for a layout."""
    blocks = flex_blocks(layout, q.shape[2], k.shape[2], q.device)
    blocks = blocks if starts is None else documents_of(blocks, starts)
    return _compiled_flex()(q, k, v, block_mask=blocks, scale=scale)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)  # Uncompiled, it computes all scores.


@lru_cache(maxsize=64)
def flex_blocks(layout: BlockLayout, queries: int, keys: int, device: torch.device) -> BlockMask:
    """`layout` for FlexAttention: blocks of which it needs to look at every score (on the diagonal of a causal layout,
    at the far end of a window, or partial ones at the end of the keys), and the others."""
    with unset_fake_temporarily():  # It is kept: also for those who come with real tensors.
        return _flex_blocks(layout, queries, keys, device)


def _flex_blocks(layout: BlockLayout, queries: int, keys: int, device: torch.device) -> BlockMask:
    partial = torch.zeros_like(layout.mask)
    block, causal, window = layout.block, layout.causal, layout.limit
    rows, columns = layout.block_places()
    if causal:
        distance = (rows[:, None] - columns) * block
        partial |= (distance == 0) | (distance + block > window)  # From the last query of a block to its first key.
    if keys % block:
        partial[:, -1] = True
    # Of a part: how far each block is from where it stands here.
    shifts = None if layout.places is None else [(each - torch.arange(len(each))) * block for each in (rows, columns)]
    of_rows, of_columns = (each.to(device) for each in shifts) if shifts is not None else (None, None)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = key < keys
        if not causal:
            return within
        if of_rows is not None and of_columns is not None:
            query, key = query + of_rows[query // block], key + of_columns[key // block]
        return within & (query >= key) & (query - key < window)

    lists = []
    for mask in (layout.mask & partial, layout.mask & ~partial):
        order = mask.int().argsort(dim=1, descending=True, stable=True)  # The blocks seen come first, ascending.
        lists += [each[None, None].int().to(device) for each in (mask.sum(1), order)]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=layout.block, mask_mod=seen, seq_lengths=(queries, keys))


def documents_of(blocks: BlockMask, starts: Tensor) -> BlockMask:
    """`blocks` for queries that see no key before their `starts` (B, T) int32: in each block every score is looked at,
    and blocks before all starts of their queries are left out. Made on the device, for which nobody waits.

    Not run on a GPU yet: there, FlexAttention's compiled kernels take the lists; on CPUs tests compare them and the
    mask with the definition.
    """
    queries, keys = blocks.seq_lengths
    size, _ = blocks.BLOCK_SIZE
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    within = blocks.mask_mod
    rows = blocks.kv_indices.shape[2]
    seen = _listed(blocks.kv_num_blocks, blocks.kv_indices) | _listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    last = torch.iinfo(starts.dtype).max
    earliest = F.pad(starts, (0, rows * size - queries), value=last).unflatten(1, (rows, size)).amin(2)
    ends = torch.arange(1, seen.shape[-1] + 1, device=starts.device) * size
    seen = seen & (ends > earliest[:, None, :, None])  # (B, 1, Q, K)
    order = seen.int().argsort(dim=-1, descending=True, stable=True)

    def own(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # A block that is padded asks for queries behind the last one, too.
        return within(batch, head, query, key) & (key >= starts[batch, query.clamp(max=queries - 1)])

    return BlockMask.from_kv_blocks(
        seen.sum(-1).int(), order.int(), BLOCK_SIZE=size, mask_mod=own, seq_lengths=(queries, keys)
    )


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks of keys are in lists (1, 1, Q, K) of which the first `counts` (1, 1, Q) count: (1, 1, Q, K) bool."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    return torch.zeros_like(indices, dtype=torch.bool).scatter_(-1, indices.long(), places < counts[..., None])
