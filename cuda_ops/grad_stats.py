"""The sum of squares of a gradient and how many of its elements are not finite, in one read of it.

What clipping and the overflow decision of mixed precision (arXiv:1710.03740) need. Bound by memory: the gradient is
read once and nothing is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import REORDERED, kernel
from cuda_ops.gpu import THREADS
from cuda_ops.kernel_math import load
from cuda_ops.library import register
from cuda_ops.meter import meter
from cuda_ops.tensor_checks import FLOATS, array, check
from cuda_ops.threads import share

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_BLOCK = 1 << 18
"""Elements between two places where threads may part, read as two streams: one alone does not keep memory busy."""

_STRETCH = 2048
"""Elements of a stream whose squares are summed in float32. All else is summed in float64 and in one order, so that
neither the number of threads changes a bit nor that of elements costs accuracy."""

_MOST_BLOCKS = 1024
"""Blocks of threads on a GPU: the same on all, so that sums are. It fills every GPU since sm_80."""

_TINY = 1e-30
"""A block's sum below which squares may have fallen under the range of float32."""


def grad_stats_reference(grad: Tensor) -> Tensor:
    """The definition, in torch."""
    wide = grad.double()
    return torch.stack([wide.square().sum(), (~wide.isfinite()).sum().double()])


def grad_stats(grad: Tensor) -> Tensor:
    """(2,) float64 on `grad`'s device: the sum of squares of `grad`, and how many of its elements are NaN or infinite.

    Args:
        grad: (n,) float32, bfloat16 or float16.

    The sum is right to about 1e-6 of itself for any n, and NaN or infinite as soon as an element is. On CPUs large
    elements do not overflow it, and the same gradient gives the same bits on any number of threads. Raises ValueError
    for wrong dtypes, shapes or strides.
    """
    return _grad_stats(grad)


@kernel(fastmath=REORDERED)
def _look_closer(g: Any) -> Any:
    """The sum of squares of a block in float64, and how many of its elements are not finite."""
    total = np.float64(0)
    count = 0
    for i in range(g.shape[0]):
        value = load(g, i)
        total += np.float64(value) * np.float64(value)
        count += not abs(value) < np.float32(np.inf)  # A NaN is not.
    return total, count


@kernel(fastmath=REORDERED)
def _sum_blocks(start: int, stop: int, grad: Any, squares: Any, not_finite: Any) -> None:
    """squares[b], not_finite[b] (float64) of every block b of _BLOCK elements; `start` is a multiple of _BLOCK."""
    for low in range(start, stop, _BLOCK):
        g = grad[low : min(low + _BLOCK, stop)]
        half = g.shape[0] // 2
        total = np.float64(0)
        for part in range(0, half, _STRETCH):
            one, other = g[part : min(part + _STRETCH, half)], g[half + part : min(half + part + _STRETCH, 2 * half)]
            stretch = np.float32(0)
            for i in range(one.shape[0]):
                value, another = load(one, i), load(other, i)
                stretch += value * value + another * another
            total += stretch
        if 2 * half < g.shape[0]:
            total += load(g, 2 * half) * load(g, 2 * half)
        # No NaN or infinity can leave a sum of squares that is finite. The second look is rare, and from the cache.
        if total > _TINY and total < np.inf:
            squares[low // _BLOCK], not_finite[low // _BLOCK] = total, 0
        else:
            squares[low // _BLOCK], not_finite[low // _BLOCK] = _look_closer(g)


def _sum_cuda(grad: Any, squares: Any, not_finite: Any) -> None:
    """squares[b], not_finite[b] (float32) of what the threads of block b read."""
    t, step = cuda.threadIdx.x, THREADS * cuda.gridDim.x
    total, count = np.float32(0), np.float32(0)
    for i in range(np.uint64(cuda.grid(1)), np.uint64(grad.shape[0]), np.uint64(step)):
        value = load(grad, i)
        total += value * value
        if not abs(value) < np.float32(np.inf):
            count += np.float32(1)
    totals = cuda.shared.array(THREADS, np.float32)
    counts = cuda.shared.array(THREADS, np.float32)  # On a line of its own: the simulator knows arrays by their lines.
    totals[t], counts[t] = total, count
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            totals[t] += totals[t + half]
            counts[t] += counts[t + half]
        half //= 2
    if t == 0:
        squares[cuda.blockIdx.x], not_finite[cuda.blockIdx.x] = totals[0], counts[0]


def _check(grad: Tensor) -> None:
    check("grad", grad, dtypes=FLOATS, shape=[None])


def _cpu(grad: Tensor) -> Tensor:
    _check(grad)
    with meter.record("grad_stats", grad.nbytes, grad.device):
        partial = np.empty((2, -(-grad.numel() // _BLOCK)))
        share(_sum_blocks, grad.numel(), array(grad), partial[0], partial[1], multiple=_BLOCK)
        return torch.from_numpy(partial.sum(axis=1))


def _cuda(grad: Tensor) -> Tensor:
    _check(grad)
    with meter.record("grad_stats", grad.nbytes, grad.device):
        if not gpu.available():
            return _by_torch(grad)
        blocks = min(gpu.blocks_for(grad.numel()), _MOST_BLOCKS)
        partial = grad.new_empty((2, blocks), dtype=torch.float32)
        gpu.launch(_sum_cuda, blocks, grad, *partial.unbind(), device=grad.device)
        return partial.sum(dim=1, dtype=torch.float64)


def _by_torch(grad: Tensor) -> Tensor:
    """In two reads of `grad`, a piece at a time."""
    norms, counts = [], []
    for (piece,) in gpu.pieces(grad):
        norms.append(torch.linalg.vector_norm(piece, dtype=torch.float32))
        counts.append(piece.isfinite().logical_not().sum())
    return torch.stack([torch.stack(norms).double().square().sum(), torch.stack(counts).sum().double()])


def _fake(grad: Tensor) -> Tensor:
    _check(grad)
    return grad.new_empty(2, dtype=torch.float64)


_grad_stats = register("grad_stats(Tensor grad) -> Tensor", cpu=_cpu, cuda=_cuda, fake=_fake)


def warm(dtype: torch.dtype) -> None:
    """Compile what a run that computes in `dtype` needs."""
    for gradient in {dtype, torch.float32}:
        grad_stats(torch.zeros(1, dtype=gradient))
