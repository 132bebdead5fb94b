"""Block-sparse attention: compute only the blocks of a `BlockLayout`, so that time and memory follow its density.

1. On CPUs, `forward` and `backward` are Numba kernels after FlashAttention-2 (arXiv:2307.08691). They work on
   transposed scores, (keys, queries), of one block each. The softmax then runs along rows, for all queries at once in
   vector registers, and every product has the form c += a b, whose innermost loop vectorises. Arithmetic is float32
   for all dtypes.
2. On CUDA devices, FlexAttention (torch.nn.attention) computes the same blocks. The device alone decides.

If a sequence contains several documents, `starts` gives the first key that each query may see: that of its own
document. Key blocks before the starts of all queries of a block are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from numba.extending import overload, register_jitable
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cuda_ops.block_layout import BlockLayout
from cuda_ops.compile import kernel
from cuda_ops.kernel_math import LOG2_E, exp2, load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register, register_autograd
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check


def attend_flex(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, starts: Tensor | None) -> Tensor:
    """Compute `block_sparse_attention` of checked arguments with FlexAttention, compiled once per layout.

    Args:
        q: (B, H, T, D).
        k: (B, H, S, D).
        v: (B, H, S, D).
        layout: The blocks.
        scale: Factor of the scores.
        starts: (B, T) int32, or None.
    """
    blocks = flex_blocks(layout, q.shape[2], k.shape[2], q.device)
    blocks = blocks if starts is None else documents_of(blocks, starts)
    return _compiled_flex()(q, k, v, block_mask=blocks, scale=scale)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)  # Without compilation, it computes all scores.


@lru_cache(maxsize=64)
def flex_blocks(layout: BlockLayout, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return `layout` for FlexAttention.

    FlexAttention masks single scores only in partial blocks: on the diagonal of a causal layout, at the far end of a
    window, or at the end of the keys.

    Args:
        layout: The blocks.
        queries: Number of queries.
        keys: Number of keys.
        device: Device of the result.
    """
    with unset_fake_temporarily():  # The result is cached, so it must hold real tensors.
        return _flex_blocks(layout, queries, keys, device)


def _flex_blocks(layout: BlockLayout, queries: int, keys: int, device: torch.device) -> BlockMask:
    partial = torch.zeros_like(layout.mask)
    block, causal, window = layout.block, layout.causal, layout.limit
    rows, columns = layout.block_places()
    if causal:
        distance = (rows[:, None] - columns) * block
        # Distance from the block's last query to its first key.
        partial |= (distance == 0) | (distance + block > window)
    if keys % block:
        partial[:, -1] = True
    # For a part of a layout: tokens between a block's place in the whole and its place here.
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
        order = mask.int().argsort(dim=1, descending=True, stable=True)  # Visible blocks first, ascending.
        lists += [each[None, None].int().to(device) for each in (mask.sum(1), order)]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=layout.block, mask_mod=seen, seq_lengths=(queries, keys))


def documents_of(blocks: BlockMask, starts: Tensor) -> BlockMask:
    """Restrict `blocks` to keys from `starts` on. Built on the device, without a synchronisation.

    FlexAttention then masks every score of each block, and skips blocks that end before all starts of their queries.

    Not tested on a GPU yet: there, FlexAttention's compiled kernels use the lists. On CPUs, tests compare the lists
    and the mask with the definition.

    Args:
        blocks: Result of `flex_blocks`.
        starts: (B, T) int32, the first key that each query may see.
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
        # Clamp: padded blocks also evaluate queries after the last one.
        return within(batch, head, query, key) & (key >= starts[batch, query.clamp(max=queries - 1)])

    return BlockMask.from_kv_blocks(
        seen.sum(-1).int(), order.int(), BLOCK_SIZE=size, mask_mod=own, seq_lengths=(queries, keys)
    )


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Return (1, 1, Q, K) bool: the key blocks in the first `counts` (1, 1, Q) entries of each list of `indices`."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    return torch.zeros_like(indices, dtype=torch.bool).scatter_(-1, indices.long(), places < counts[..., None])


_LOWEST = np.float32(-1e30)
"""Less than any score, but finite: its difference from a masked score is -inf, not NaN."""

_UNSEEN = np.float32(-np.inf)
"""Score of a masked key, in the scores' own type: a wider constant would make the loop wider."""


def _rows(source: Any, low: int, scratch: Any) -> Any:
    """Return `scratch.shape[0]` rows of `source` (T, D) from `low` on, as float32, with zeros after the end.

    The result is a view of `source` if possible, else a copy in `scratch` (block, D).
    """
    raise NotImplementedError("only inside kernels")


@overload(_rows, strict=False)
def _rows_of(source: Any, low: Any, scratch: Any) -> Any:
    def copied(source: Any, low: Any, scratch: Any) -> Any:
        rows = source[low : low + scratch.shape[0]]
        for i in range(rows.shape[0]):
            line, target = rows[i], scratch[i]
            for d in range(line.shape[0]):
                target[d] = load(line, d)
        scratch[rows.shape[0] :] = 0
        return scratch

    def in_place(source: Any, low: Any, scratch: Any) -> Any:
        if low + scratch.shape[0] <= source.shape[0]:
            return source[low : low + scratch.shape[0]]
        rows = source[low:]
        scratch[: rows.shape[0]] = rows
        scratch[rows.shape[0] :] = 0
        return scratch

    return in_place if source.dtype == types.float32 else copied


@kernel()
def _transposed(rows: Any, factor: float, out: Any) -> None:
    """Set out (D, block) = rows (block, D)ᵀ · factor."""
    for d in range(out.shape[0]):
        line = out[d]
        for i in range(line.shape[0]):
            line[i] = rows[i, d] * factor


@register_jitable(inline="always")  # Inline, so that LLVM knows a constant width.
def _add_tile(a: Any, b: Any, c: Any, width: int) -> None:
    """Add c (4, width) += a (4, 4) b (4, width).

    `a` stays in registers, and each loaded vector of `b` or `c` serves 4 multiplications. The rows of `b` are views of
    one array, and so are those of `c`. For separate rows, LLVM would check at run time that no row overlaps another,
    which takes as long as the loop.
    """
    w0, w1, w2, w3 = a[0, 0], a[0, 1], a[0, 2], a[0, 3]
    x0, x1, x2, x3 = a[1, 0], a[1, 1], a[1, 2], a[1, 3]
    y0, y1, y2, y3 = a[2, 0], a[2, 1], a[2, 2], a[2, 3]
    z0, z1, z2, z3 = a[3, 0], a[3, 1], a[3, 2], a[3, 3]
    for i in range(width):
        b0, b1, b2, b3 = b[0, i], b[1, i], b[2, i], b[3, i]
        c[0, i] = c[0, i] + w0 * b0 + w1 * b1 + w2 * b2 + w3 * b3
        c[1, i] = c[1, i] + x0 * b0 + x1 * b1 + x2 * b2 + x3 * b3
        c[2, i] = c[2, i] + y0 * b0 + y1 * b1 + y2 * b2 + y3 * b3
        c[3, i] = c[3, i] + z0 * b0 + z1 * b1 + z2 * b2 + z3 * b3


@kernel()
def _add_product(a: Any, b: Any, c: Any) -> None:
    """Add c (m, n) += a (m, k) b (k, n). m and k must be multiples of 4."""
    for r in range(0, c.shape[0], 4):
        rows, target = a[r : r + 4], c[r : r + 4]
        for k in range(0, b.shape[0], 4):
            if c.shape[1] == 64:  # The usual size: a sixth faster with a constant.
                _add_tile(rows[:, k : k + 4], b[k : k + 4], target, 64)
            else:
                _add_tile(rows[:, k : k + 4], b[k : k + 4], target, c.shape[1])


@kernel()
def _scores(
    keys: Any, queries: Any, count: int, diagonal: bool, reach: int, first: int, starts: Any, latest: int, out: Any
) -> None:
    """Set out (block, block) = keys (block, D) queries (D, block), with -inf for masked scores.

    These scores are masked:

    1. keys from `count` on;
    2. on a `diagonal` block, keys after the query;
    3. keys that are `reach` or more places before the query, within their blocks;
    4. keys before the query's `starts` (block). `first` is the number of the first key, and no start is after
       `latest`.
    """
    out[:] = 0
    _add_product(keys, queries, out)
    out[count:] = -np.inf
    if diagonal:
        for j in range(out.shape[0]):
            out[j, :j] = -np.inf
    for j in range(min(out.shape[0], out.shape[0] - reach)):
        out[j, max(0, j + reach) :] = -np.inf
    for j in range(min(out.shape[0], latest - first)):
        line = out[j]
        for i in range(line.shape[0]):
            line[i] = line[i] if first + j >= starts[i] else _UNSEEN


@kernel()
def _starts_of(starts: Any, low: int, out: Any) -> tuple[int, int]:
    """Copy `starts` (T) from `low` on to `out` (block), with 0 after the end. Return (earliest, latest)."""
    count = min(out.shape[0], starts.shape[0] - low)
    out[:] = 0
    out[:count] = starts[low : low + count]
    earliest, latest = out[0], out[0]
    for i in range(1, count):
        earliest, latest = min(earliest, out[i]), max(latest, out[i])
    return earliest, latest


@kernel()
def _softmax_step(scores: Any, greatest: Any, total: Any, out: Any) -> None:
    """Do one step of the online softmax: replace `scores` (block, block) by exponentials and update the sums so far.

    Updated are the `greatest` score (block), the `total` (block) of exponentials, and the sums `out` (D, block).
    """
    before = np.empty_like(greatest)
    before[:] = greatest
    for j in range(scores.shape[0]):
        line = scores[j]
        for i in range(line.shape[0]):
            greatest[i] = line[i] if line[i] > greatest[i] else greatest[i]
    for i in range(before.shape[0]):
        before[i] = exp2(before[i] - greatest[i])
        total[i] *= before[i]
    for d in range(out.shape[0]):
        line = out[d]
        for i in range(line.shape[0]):
            line[i] *= before[i]
    for j in range(scores.shape[0]):
        line = scores[j]
        for i in range(line.shape[0]):
            line[i] = exp2(line[i] - greatest[i])
            total[i] += line[i]


@kernel()
def forward(
    start: int,
    stop: int,
    q: Any,
    k: Any,
    v: Any,
    offsets: Any,
    columns: Any,
    distances: Any,
    starts: Any,
    block: int,
    causal: bool,
    window: int,
    scale: float,
    out: Any,
    lse: Any,
) -> None:
    """Compute the query blocks [start, stop), counted over all heads.

    Args:
        start: First block.
        stop: End of the blocks.
        q: (B · H, T, D).
        k: (B · H, S, D).
        v: (B · H, S, D).
        offsets: (Q + 1,) int64, see `BlockLayout`.
        columns: int64, see `BlockLayout`.
        distances: int64, see `BlockLayout`.
        starts: (B, T) int32, the first key that each query may see.
        block: Tokens per block.
        causal: Mask later keys.
        window: Mask keys that are this many tokens or more before the query.
        scale: Factor of the scores.
        out: (B · H, T, D); overwritten.
        lse: (B · H, T) float32, base-2 logarithm of the sum of exponentials, +inf for queries without keys;
            overwritten.
    """
    length, depth = q.shape[1], q.shape[2]
    heads = q.shape[0] // max(1, starts.shape[0])
    begins = np.empty(block, np.int32)
    blocks = offsets.shape[0] - 1
    queries, sums = np.empty((depth, block), np.float32), np.empty((depth, block), np.float32)
    scores = np.empty((block, block), np.float32)
    scratch = np.empty((2, block, depth), np.float32)
    greatest, total = np.empty(block, np.float32), np.empty(block, np.float32)
    for item in range(start, stop):
        head, row = item // blocks, item % blocks
        # Multiply the queries by log2 e here, so that the softmax can use exp2.
        _transposed(_rows(q[head], row * block, scratch[0]), np.float32(scale) * LOG2_E, queries)
        sums[:] = 0
        total[:] = 0
        greatest[:] = _LOWEST
        earliest, latest = _starts_of(starts[head // heads], row * block, begins)
        for place in range(offsets[row], offsets[row + 1]):
            column = columns[place]
            if (column + 1) * block <= earliest:
                continue
            keys = _rows(k[head], column * block, scratch[0])
            values = _rows(v[head], column * block, scratch[1])
            distance = distances[place]
            count, diagonal = k.shape[1] - column * block, causal and distance == 0
            _scores(keys, queries, count, diagonal, window - distance, column * block, begins, latest, scores)
            _softmax_step(scores, greatest, total, sums)
            _add_product(values.T, scores, sums)
        for i in range(min(block, length - row * block)):
            seen = total[i] != 0
            # +inf makes all probabilities of such a query 0 in backward.
            lse[head, row * block + i] = greatest[i] + np.log2(total[i]) if seen else np.inf
            line, factor = out[head, row * block + i], np.float32(1) / total[i] if seen else np.float32(0)
            for d in range(depth):
                store(line, d, sums[d, i] * factor)


@kernel()
def _gradient_of_scores(scores: Any, products: Any, lse: Any, delta: Any) -> None:
    """Replace `scores` (block, block) by probabilities p, and `products` by p · (products - delta)."""
    for j in range(scores.shape[0]):
        p, line = scores[j], products[j]
        for i in range(p.shape[0]):
            p[i] = exp2(p[i] - lse[i])
        for i in range(p.shape[0]):
            line[i] = p[i] * (line[i] - delta[i])


@kernel()
def _store_rows(sums: Any, factor: Any, out: Any) -> None:
    """Set `out` to the first rows of `sums` times `factor`."""
    for j in range(out.shape[0]):
        line = out[j]
        for d in range(out.shape[1]):
            store(line, d, sums[j, d] * factor)


@kernel()
def backward(
    start: int,
    stop: int,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    offsets: Any,
    columns: Any,
    distances: Any,
    starts: Any,
    block: int,
    causal: bool,
    window: int,
    scale: float,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
) -> None:
    """Compute the gradients of the heads [start, stop).

    One thread computes a whole head, so that the gradients of keys and values are summed in a fixed order.

    Args:
        start: First head.
        stop: End of the heads.
        grad: (B · H, T, D), the gradient of `out`.
        q: (B · H, T, D).
        k: (B · H, S, D).
        v: (B · H, S, D).
        out: (B · H, T, D), from `forward`.
        lse: (B · H, T) float32, from `forward`.
        offsets: As in `forward`.
        columns: As in `forward`.
        distances: As in `forward`.
        starts: As in `forward`.
        block: Tokens per block.
        causal: Mask later keys.
        window: Mask keys that are this many tokens or more before the query.
        scale: Factor of the scores.
        grad_q: (B · H, T, D); overwritten.
        grad_k: (B · H, S, D); overwritten.
        grad_v: (B · H, S, D); overwritten.
    """
    length, depth = q.shape[1], q.shape[2]
    blocks = offsets.shape[0] - 1
    heads = q.shape[0] // max(1, starts.shape[0])
    begins = np.empty(block, np.int32)
    padded = -(-k.shape[1] // block) * block
    sums_k, sums_v = np.empty((padded, depth), np.float32), np.empty((padded, depth), np.float32)
    queries, grads = np.empty((depth, block), np.float32), np.empty((depth, block), np.float32)
    sums_q = np.empty((depth, block), np.float32)
    scores, products = np.empty((block, block), np.float32), np.empty((block, block), np.float32)
    scratch = np.empty((4, block, depth), np.float32)
    sums_lse, delta = np.empty(block, np.float32), np.empty(block, np.float32)
    for head in range(start, stop):
        sums_k[:] = 0
        sums_v[:] = 0
        for row in range(blocks):
            low, count = row * block, min(block, length - row * block)
            own = _rows(q[head], low, scratch[0])
            incoming = _rows(grad[head], low, scratch[1])
            _transposed(own, np.float32(scale) * LOG2_E, queries)
            _transposed(incoming, np.float32(1), grads)
            sums_lse[:count] = lse[head, low : low + count]
            sums_lse[count:] = np.inf
            delta[:] = 0
            for i in range(count):
                for d in range(depth):
                    delta[i] += incoming[i, d] * load(out[head, low + i], d)
            sums_q[:] = 0
            earliest, latest = _starts_of(starts[head // heads], low, begins)
            for place in range(offsets[row], offsets[row + 1]):
                first, distance = columns[place] * block, distances[place]
                if first + block <= earliest:
                    continue
                keys, values = _rows(k[head], first, scratch[2]), _rows(v[head], first, scratch[3])
                left, diagonal, reach = k.shape[1] - first, causal and distance == 0, window - distance
                _scores(keys, queries, left, diagonal, reach, first, begins, latest, scores)
                products[:] = 0
                _add_product(values, grads, products)
                _gradient_of_scores(scores, products, sums_lse, delta)
                _add_product(scores, incoming, sums_v[first : first + block])
                _add_product(products, own, sums_k[first : first + block])
                _add_product(keys.T, products, sums_q)
            for i in range(count):
                line = grad_q[head, low + i]
                for d in range(depth):
                    store(line, d, sums_q[d, i] * np.float32(scale))
        _store_rows(sums_k, np.float32(scale), grad_k[head])
        _store_rows(sums_v, np.float32(1), grad_v[head])


_LN_2 = math.log(2)


def takes_heads(size: int) -> bool:
    """Return whether the kernels support heads of `size` elements.

    Args:
        size: Elements per head.
    """
    return size % 8 == 0 and 16 <= size <= 256


def block_sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return dense attention in float32 with a mask, computed with torch. This defines `block_sparse_attention`.

    Args:
        q: (B, H, T, D).
        k: (B, H, S, D).
        v: (B, H, S, D).
        layout: The blocks.
        scale: Factor of the scores; 1 / √D if None.
        starts: (B, T) int32, or None.
    """
    mask = token_mask(layout, q.shape[2], k.shape[2]).to(q.device)
    if starts is not None:
        mask = mask & (torch.arange(k.shape[2], device=q.device) >= starts[:, None, :, None])  # (B, 1, T, S)
    scores = q.float() @ k.float().mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf)  # (B, H, T, S)
    blind = ~mask.any(-1, keepdim=True)
    probabilities = F.softmax(scores.masked_fill(blind, 0), dim=-1).masked_fill(blind, 0)
    return (probabilities @ v.float()).to(q.dtype)


def token_mask(layout: BlockLayout, queries: int, keys: int) -> Tensor:
    """Return (queries, keys) bool: the keys that each query sees.

    Args:
        layout: The blocks.
        queries: Number of queries.
        keys: Number of keys.
    """
    block, (rows, columns) = layout.block, layout.block_places()
    mask = layout.mask.repeat_interleave(block, 0).repeat_interleave(block, 1)[:queries, :keys]
    places = [(each[:, None] * block + torch.arange(block)).flatten() for each in (rows, columns)]
    distance = places[0][:queries, None] - places[1][:keys]
    mask = mask & (distance >= 0) if layout.causal else mask
    return mask if layout.window is None else mask & (distance < layout.window)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return softmax(q kᵀ scale) v over the blocks of `layout`: (B, H, T, D) of q's dtype, differentiable once.

    A query that sees no key gives zeros.

    Args:
        q: (B, H, T, D) float32, bfloat16 or float16; D a multiple of 8 from 16 to 256. On CPUs any memory order works:
            the kernels use temporary copies, and the result has the memory order of q.
        k: (B, H, S, D) of the same dtype.
        v: (B, H, S, D) of the same dtype.
        layout: As many blocks as T and S need. The last blocks are partial if T or S is no multiple of the block.
        scale: Factor of the scores; 1 / √D if None.
        starts: (B, T) int32, the first key that each query may see, in all heads; None for no limit.

    Raises:
        ValueError: Wrong dtypes, shapes, strides, devices, or a layout of another size.
    """
    _check(q, k, v, layout.mask.shape, layout.block, starts, strided=q.device.type == "cpu")
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if q.device.type == "cuda":
        return attend_flex(q, k, v, layout, factor, starts)
    return _attend(q, k, v, *_arguments(layout, starts), factor)[0]


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention to a part of the keys, with the logarithms that are needed to combine parts. CPU only, no
    gradients.

    Args:
        q: (B, H, T, D), in any memory order.
        k: (B, H, S, D), in any memory order.
        v: (B, H, S, D), in any memory order.
        layout: The blocks.
        scale: Factor of the scores.
        starts: (B, T) int32, as indices into these keys.

    Returns:
        (output, natural logarithm (B, H, T) float32 of the sum of exponentials, -inf for queries without keys).

    Raises:
        ValueError: As for `block_sparse_attention`.
    """
    _check(q, k, v, layout.mask.shape, layout.block, starts, strided=True)
    out, lse = _attend(q, k, v, *_arguments(layout, starts), scale)
    return out, (lse * _LN_2).masked_fill_(lse == math.inf, -math.inf)


def partial_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithm: Tensor,
    layout: BlockLayout,
    *,
    scale: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `partial_attention`.

    Args:
        grad: Gradient of the attention to all keys together.
        q: (B, H, T, D).
        k: (B, H, S, D), a part of the keys.
        v: (B, H, S, D), the same part of the values.
        out: Output of the attention to all keys together.
        logarithm: (B, H, T) float32, natural logarithm of the sum of exponentials over all keys.
        layout: The blocks.
        scale: Factor of the scores.
        starts: (B, T) int32, as indices into these keys.

    Raises:
        ValueError: As for `block_sparse_attention`.
    """
    _check(q, k, v, layout.mask.shape, layout.block, starts, strided=True)
    lse = (logarithm / _LN_2).masked_fill_(logarithm == -math.inf, math.inf)
    return _gradients(grad, q, k, v, out, lse, *_arguments(layout, starts), scale)


def _arguments(
    layout: BlockLayout, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, bool, int]:
    """Return the kernel arguments that describe `layout` and the documents."""
    return layout.offsets, layout.columns, layout.distances, starts, layout.block, layout.causal, layout.limit


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: tuple[int, ...] | torch.Size,
    block: int,
    starts: Tensor | None,
    *,
    strided: bool = False,
) -> None:
    check("q", q, dtypes=FLOATS, shape=[None] * 4, strided=strided)
    batch, heads, _, depth = q.shape
    check("k", k, dtypes=[q.dtype], shape=[batch, heads, None, depth], like=q, strided=strided)
    check("v", v, dtypes=[q.dtype], shape=k.shape, like=q, strided=strided)
    if not takes_heads(depth):
        raise ValueError(f"q: head size is {depth}, expected a multiple of 8 from 16 to 256")
    needed = (-(-q.shape[2] // block), -(-k.shape[2] // block))
    if tuple(blocks) != needed:
        raise ValueError(
            f"layout: {tuple(blocks)} blocks of {block}, expected {needed} for {q.shape[2]} queries, {k.shape[2]} keys"
        )
    if starts is not None:
        check("starts", starts, dtypes=[torch.int32], shape=[q.shape[0], q.shape[2]], like=q)


def _heads(tensor: Tensor) -> np.ndarray:
    """Return (B, H, …) as (B · H, …) for the kernels; a copy if the heads are not contiguous."""
    return array(tensor.flatten(0, 1).contiguous())


def _blocks(q: Tensor, lists: Sequence[Tensor], starts: Tensor | None) -> tuple[np.ndarray, ...]:
    """Return the arrays that describe the blocks and the documents. Without `starts`, every document begins at 0."""
    starts = q.new_zeros(q.shape[0], q.shape[2], dtype=torch.int32) if starts is None else starts
    return (*map(array, lists), array(starts))


def _attend_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    columns: Tensor,
    distances: Tensor,
    starts: Tensor | None,
    block: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    found, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    nbytes = q.nbytes + k.nbytes + v.nbytes + found.nbytes
    with meter.record("block_sparse_attention", nbytes, q.device):
        items = q.shape[0] * q.shape[1] * (len(offsets) - 1)
        blocks = _blocks(q, (offsets, columns, distances), starts)
        arguments = *map(_heads, (q, k, v)), *blocks, block, causal, window, scale
        share(forward, items, *arguments, _heads(found), _heads(lse), multiple=1, worth=4)
        return _laid_as(found, q), lse


def _attend_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    columns: Tensor,
    distances: Tensor,
    starts: Tensor | None,
    block: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients_cpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    columns: Tensor,
    distances: Tensor,
    starts: Tensor | None,
    block: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [each.new_empty(each.shape) for each in (q, k, v)]
    nbytes = 3 * q.nbytes + 2 * (k.nbytes + v.nbytes)
    with meter.record("block_sparse_attention_backward", nbytes, q.device):
        blocks = _blocks(q, (offsets, columns, distances), starts)
        arguments = *map(_heads, (grad, q, k, v, out, lse)), *blocks
        heads = q.shape[0] * q.shape[1]
        share(backward, heads, *arguments, block, causal, window, scale, *map(_heads, gradients), multiple=1, worth=1)
        of_q, of_k, of_v = (_laid_as(found, each) for found, each in zip(gradients, (q, k, v), strict=True))
    return of_q, of_k, of_v


def _laid_as(found: Tensor, given: Tensor) -> Tensor:
    """Return `found`, which is contiguous, in the memory order of `given`."""
    return found if given.is_contiguous() else torch.empty_like(given).copy_(found)


_attend = register(
    "block_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor columns, Tensor distances, "
    "Tensor? starts, int block, bool causal, int window, float scale) -> (Tensor, Tensor)",
    cpu=_attend_cpu,
    fake=_attend_fake,
)

_gradients = register(
    "block_sparse_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor offsets, Tensor columns, Tensor distances, Tensor? starts, int block, bool causal, int window, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    cpu=_gradients_cpu,
    fake=lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:7])
    ctx.rest = inputs[7:]


def _backward_of(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    return *_gradients(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 8


def _refuse_twice(ctx: Any, *_: Tensor | None) -> None:
    raise RuntimeError(
        "block_sparse_attention: differentiable once; for a gradient of its gradients take torch's attention with a "
        "mask of the same blocks, within sdpa_kernel(SDPBackend.MATH)"
    )


register_autograd("block_sparse_attention", _backward_of, _setup_context)
register_autograd("block_sparse_attention_backward", _refuse_twice, lambda ctx, inputs, output: None)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run's activations.
    """
    q, k, v = (torch.zeros(1, 1, 1, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    block_sparse_attention(q, k, v, BlockLayout.local(1, 1)).sum().backward()
