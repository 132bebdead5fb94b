"""Sum of squares of a gradient and the number of its non-finite elements, in one read.

Used for clipping and for the overflow check of mixed precision (arXiv:1710.03740). Memory-bound: the gradient is read
once and nothing is written.
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
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_BLOCK = 1 << 18
"""Elements per block, the unit of work for threads. Each is read as two streams: one alone does not keep
memory busy.
"""

_STRETCH = 2048
"""Elements of a stream whose squares are summed in float32. All other sums are in float64 and in a fixed order, so that
the number of threads changes no bit and the number of elements costs no accuracy.
"""

_MOST_BLOCKS = 1024
"""Maximum number of GPU blocks: the same on all GPUs, so that the sums are the same. It fills every GPU since sm_80."""

_TINY = 1e-30
"""If a block's sum is smaller, squares may have underflowed in float32."""


def grad_stats_reference(grad: Tensor) -> Tensor:
    """Return the result of `grad_stats`, computed with torch. This defines `grad_stats`.

    Args:
        grad: (n,) floats.
    """
    wide = grad.double()
    return torch.stack([wide.square().sum(), (~wide.isfinite()).sum().double()])


def grad_stats(grad: Tensor) -> Tensor:
    """Return (2,) float64 on `grad`'s device: the sum of squares, and the number of elements that are NaN or infinite.

    The relative error of the sum is about 1e-6 for any n. The sum is NaN or infinite if an element is. On CPUs, large
    elements do not overflow the sum, and the bits do not depend on the number of threads.

    Args:
        grad: (n,) float32, bfloat16 or float16.

    Raises:
        ValueError: Wrong dtypes, shapes or strides.
    """
    return _grad_stats(grad)


@kernel(fastmath=REORDERED)
def _look_closer(g: Any) -> Any:
    """Return the sum of squares of a block in float64, and the number of its non-finite elements."""
    total = np.float64(0)
    count = 0
    for i in range(g.shape[0]):
        value = load(g, i)
        total += np.float64(value) * np.float64(value)
        count += not abs(value) < np.float32(np.inf)  # True for NaN, too.
    return total, count


@kernel(fastmath=REORDERED)
def _sum_blocks(start: int, stop: int, grad: Any, squares: Any, not_finite: Any) -> None:
    """Compute squares[b], not_finite[b] (float64) of every block b. `start` must be a multiple of _BLOCK."""
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
        # A finite sum of squares proves that all elements are finite. The second read is rare, and from the cache.
        if total > _TINY and total < np.inf:
            squares[low // _BLOCK], not_finite[low // _BLOCK] = total, 0
        else:
            squares[low // _BLOCK], not_finite[low // _BLOCK] = _look_closer(g)


def _sum_cuda(grad: Any, squares: Any, not_finite: Any) -> None:
    """Write partial sums per GPU block: squares[b] and not_finite[b]."""
    t, step = cuda.threadIdx.x, THREADS * cuda.gridDim.x
    total, count = np.float32(0), np.float32(0)
    for i in range(np.uint64(cuda.grid(1)), np.uint64(grad.shape[0]), np.uint64(step)):
        value = load(grad, i)
        total += value * value
        if not abs(value) < np.float32(np.inf):
            count += np.float32(1)
    totals = cuda.shared.array(THREADS, np.float32)
    counts = cuda.shared.array(THREADS, np.float32)  # Keep on its own line: the simulator identifies arrays by line.
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
    """Compute with torch, in two reads of `grad`, one piece at a time."""
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
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    for gradient in {dtype, torch.float32}:
        grad_stats(torch.zeros(1, dtype=gradient))
