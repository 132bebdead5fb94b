"""First pass of LAMB over a parameter (arXiv:1904.00962, algorithm 2): the moments, and the squares of its two norms.

The step size of an element depends on the norms of its whole parameter and of its whole update. A second pass
therefore makes the update: `adam_frozen`, with the new moments. The update is not stored in between: 24 bytes per
element in float32 here and 16 there, instead of 52 with a tensor for the update.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.adamw import constants, moments_one
from cuda_ops.compile import REORDERED, kernel
from cuda_ops.kernel_math import load
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_BLOCK = 4096
"""Elements whose squares are summed in float32, from the first-level cache; on a GPU, elements per block of threads."""

_THREADS = 256


def lamb_moments_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
) -> Tensor:
    """Return the result of `lamb_moments`, computed with torch. This defines `lamb_moments`, which documents the
    arguments.
    """
    grad = grad.float() * factor
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    update = exp_avg / denominator / (1 - beta1**step) + weight_decay * param
    return torch.stack([param.double().square().sum(), update.double().square().sum()])


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
) -> Tensor:
    """Update the moments of `param` in place, as AdamW does, and return the squares of LAMB's norms.

    Args:
        param: (n,) float32, read only.
        grad: (n,) float32, bfloat16 or float16; multiplied by `factor` first.
        exp_avg: (n,) float32, first moment; updated in place.
        exp_avg_sq: (n,) float32, second moment; updated in place.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of `param` in the update.
        step: Number of this update, from 1, for the bias corrections.
        factor: 1 / loss scale, times the clipping factor.

    Returns:
        (2,) float64: the sums of squares of `param` and of the update. The update is m / (√v + eps) with
        bias-corrected moments, plus weight_decay · param.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices, or a step below 1.
    """
    return _lamb_moments(param, grad, exp_avg, exp_avg_sq, beta1, beta2, eps, weight_decay, step, factor)


@register_jitable
def direction_one(param: Any, exp_avg: Any, exp_avg_sq: Any, numbers: Any) -> Any:
    """Return one element of the update.

    Args:
        param: Parameter.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        numbers: Result of `adamw.constants` for a learning rate of 1.
    """
    return (
        numbers[7] * exp_avg / (math.sqrt(exp_avg_sq) * numbers[5] + numbers[6]) + (np.float32(1) - numbers[1]) * param
    )


@kernel(fastmath=REORDERED)
def _squares(param: Any, exp_avg: Any, exp_avg_sq: Any, numbers: Any) -> tuple[Any, Any]:
    of_param, of_update = np.float32(0), np.float32(0)
    for i in range(param.shape[0]):
        update = direction_one(param[i], exp_avg[i], exp_avg_sq[i], numbers)
        of_param += param[i] * param[i]
        of_update += update * update
    return of_param, of_update


@kernel()
def _moments(
    start: int, stop: int, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, numbers: Any
) -> tuple[Any, Any]:
    of_param, of_update = np.float64(0), np.float64(0)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        p, g, m, v = param[low:high], grad[low:high], exp_avg[low:high], exp_avg_sq[low:high]
        for i in range(p.shape[0]):
            m[i], v[i] = moments_one(load(g, i), m[i], v[i], numbers)
        one, two = _squares(p, m, v, numbers)
        of_param += np.float64(one)
        of_update += np.float64(two)
    return of_param, of_update


def _moments_cuda(
    param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, squares: Any, factor: Any, decay: Any, first: Any, keep: Any,
    second: Any, correction: Any, eps: Any, size: Any,
) -> None:  # fmt: skip  # numbers come one by one
    """Update moments with one block of threads per _BLOCK elements. `squares` has two numbers per block."""
    numbers = (factor, decay, first, keep, second, correction, eps, size)
    t, low = cuda.threadIdx.x, np.int64(cuda.blockIdx.x) * _BLOCK
    of_param, of_update = np.float32(0), np.float32(0)
    for k in range(t, min(_BLOCK, param.shape[0] - low), _THREADS):
        i = np.uint64(low + k)
        m, v = moments_one(load(grad, i), exp_avg[i], exp_avg_sq[i], numbers)
        exp_avg[i], exp_avg_sq[i] = m, v
        update = direction_one(param[i], m, v, numbers)
        of_param += param[i] * param[i]
        of_update += update * update
    params = cuda.shared.array(_THREADS, np.float32)
    updates = cuda.shared.array(_THREADS, np.float32)
    params[t] = of_param
    updates[t] = of_update
    half = _THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            params[t] += params[t + half]
            updates[t] += updates[t + half]
        half //= 2
    if t == 0:
        squares[np.uint64(2 * cuda.blockIdx.x)] = params[0]
        squares[np.uint64(2 * cuda.blockIdx.x + 1)] = updates[0]


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
    check("param", param, dtypes=[torch.float32], shape=[None])
    check("grad", grad, dtypes=FLOATS, shape=param.shape, like=param)
    check("exp_avg", exp_avg, dtypes=[torch.float32], shape=param.shape, like=param)
    check("exp_avg_sq", exp_avg_sq, dtypes=[torch.float32], shape=param.shape, like=param)
    if step < 1:
        raise ValueError(f"step: {step}, expected 1 or more: the first update has number 1")


def _cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
) -> Tensor:
    _check(param, grad, exp_avg, exp_avg_sq, step)
    numbers = constants(1.0, beta1, beta2, eps, weight_decay, step, factor)
    with meter.record("lamb_moments", _nbytes(param, grad), param.device):
        arrays = [array(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq)]
        found = share(_moments, param.numel(), *arrays, numbers, multiple=_BLOCK)
    return torch.tensor(found, dtype=torch.float64).sum(0)


def _cuda(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
) -> Tensor:
    _check(param, grad, exp_avg, exp_avg_sq, step)
    numbers = constants(1.0, beta1, beta2, eps, weight_decay, step, factor)
    blocks = gpu.blocks_for(param.numel(), _BLOCK)
    squares = param.new_empty(2 * blocks)
    with meter.record("lamb_moments", _nbytes(param, grad), param.device):
        tensors = (param, grad, exp_avg, exp_avg_sq, squares)
        gpu.launch(_moments_cuda, blocks, *tensors, *numbers, device=param.device, threads=_THREADS)
    return squares.view(blocks, 2).sum(0, dtype=torch.float64)


def _fake(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *numbers: Any) -> Tensor:
    _check(param, grad, exp_avg, exp_avg_sq, step=int(numbers[4]))
    return param.new_empty(2, dtype=torch.float64)


def _nbytes(param: Tensor, grad: Tensor) -> int:
    return 5 * param.nbytes + grad.nbytes


_lamb_moments = register(
    "lamb_moments(Tensor param, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, float beta1, float beta2, "
    "float eps, float weight_decay, int step, float factor) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    param, exp_avg, exp_avg_sq = (torch.zeros(1) for _ in range(3))
    numbers = {"beta1": 0.9, "beta2": 0.9, "eps": 1.0, "weight_decay": 0.0, "step": 1}
    for gradient in {dtype, torch.float32}:
        lamb_moments(param, torch.zeros(1, dtype=gradient), exp_avg, exp_avg_sq, **numbers)
