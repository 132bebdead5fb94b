"""Attention over the blocks of a `BlockLayout` alone: time and memory in proportion to its density.

On CPUs a pair of kernels (`block_sparse_kernels.py`), on CUDA devices FlexAttention with the same blocks
(`block_sparse_flex.py`). The choice is made by the device alone.

Where several documents stand in one sequence, `starts` says of each query which key is the first that it may see: that
of its own document. Blocks of keys before those of all queries of a block cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_flex import attend_flex
from cuda_ops.block_sparse_kernels import backward, forward
from cuda_ops.library import register, register_autograd
from cuda_ops.meter import meter
from cuda_ops.tensors import FLOATS, array, check
from cuda_ops.threads import share

_LN_2 = math.log(2)


def takes_heads(size: int) -> bool:
    """Whether the kernels take heads of `size` elements."""
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
    """The definition, in torch: dense attention in float32 with a mask; a query that sees no key gives zeros."""
    mask = token_mask(layout, q.shape[2], k.shape[2]).to(q.device)
    if starts is not None:
        mask = mask & (torch.arange(k.shape[2], device=q.device) >= starts[:, None, :, None])  # (B, 1, T, S)
    scores = q.float() @ k.float().mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf)  # (B, H, T, S)
    blind = ~mask.any(-1, keepdim=True)
    probabilities = F.softmax(scores.masked_fill(blind, 0), dim=-1).masked_fill(blind, 0)
    return (probabilities @ v.float()).to(q.dtype)


def token_mask(layout: BlockLayout, queries: int, keys: int) -> Tensor:
    """(queries, keys) bool: which query sees which key."""
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
    """softmax(q kᵀ scale) v over the blocks of `layout`: (B, H, T, D) of q's dtype, differentiable once.

    Args:
        q: (B, H, T, D) float32, bfloat16 or float16; D a multiple of 8 from 16 to 256. On CPUs in any order of memory,
            of which the kernels make copies for as long as they work; the result has that of q.
        k, v: (B, H, S, D) of the same dtype.
        layout: of as many blocks as T and S need; where they are no multiples of the block, the last ones are partial.
        scale: 1 / √D when left out.
        starts: (B, T) int32, the first key that each query may see, in all heads; every one when left out.

    A query that sees no key gives zeros. Raises ValueError for wrong dtypes, shapes, strides, devices, or a layout of
    another size.
    """
    _check(q, k, v, layout.mask.shape, layout.block, starts, strided=q.device.type == "cpu")
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if q.device.type == "cuda":
        return attend_flex(q, k, v, layout, factor, starts)
    return _attend(q, k, v, *_arguments(layout, starts), factor)[0]


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, scale: float, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`block_sparse_attention` to some of the keys that there are, and what joins it with that to the others: (output,
    natural logarithm (B, H, T) float32 of the sum of exponentials, -inf where a query sees no key). `starts` are places
    among these keys. On CPUs, in any order of memory; without gradients."""
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
    """Gradients of q, k and v of `partial_attention`, where `grad`, `out` and `logarithm` are those of attention to all
    keys together."""
    _check(q, k, v, layout.mask.shape, layout.block, starts, strided=True)
    lse = (logarithm / _LN_2).masked_fill_(logarithm == -math.inf, math.inf)
    return _gradients(grad, q, k, v, out, lse, *_arguments(layout, starts), scale)


def _arguments(
    layout: BlockLayout, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, bool, int]:
    """What kernels take of `layout` and of documents."""
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
    """(B, H, …) → (B · H, …), as kernels see it: a copy where heads do not lie one after the other."""
    return array(tensor.flatten(0, 1).contiguous())


def _blocks(q: Tensor, lists: Sequence[Tensor], starts: Tensor | None) -> tuple[np.ndarray, ...]:
    """What kernels know of the blocks, by `lists`, and of documents: without `starts`, every one begins at 0."""
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
    """`found`, contiguous, in the order of memory of `given`."""
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
    """Compile what a run that computes in `dtype` needs."""
    q, k, v = (torch.zeros(1, 1, 1, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    block_sparse_attention(q, k, v, BlockLayout.local(1, 1)).sum().backward()
