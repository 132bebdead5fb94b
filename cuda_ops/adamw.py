"""AdamW (arXiv:1711.05101) in one pass over flat tensors: unscale, clip, decay, update, and the low-precision copy.

Memory-bound: 28 bytes per element in float32, each read or written once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import kernel
from cuda_ops.kernel_math import load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_BLOCK = 4096
"""Elements that are updated before their copy is written, so that the copy reads the first-level cache. (One loop over
five arrays needs more overlap checks than LLVM accepts, so that it would not vectorise.)
"""


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
) -> None:
    """Update with torch. This defines `adamw`, which documents the arguments."""
    grad = grad.float() * factor
    param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    if copy is not None:
        copy.copy_(param)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
) -> None:
    """Update `param` and its moments in place, as torch.optim.AdamW does.

    Args:
        param: (n,) float32; updated in place.
        grad: (n,) float32, bfloat16 or float16; multiplied by `factor` first.
        exp_avg: (n,) float32, first moment; updated in place.
        exp_avg_sq: (n,) float32, second moment; updated in place.
        copy: (n,) bfloat16, float16 or float32, receives the updated parameter; None for no copy.
        lr: Learning rate.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        step: Number of this update, from 1, for the bias corrections.
        factor: 1 / loss scale, times the clipping factor.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices, or a step below 1.
    """
    _adamw(param, grad, exp_avg, exp_avg_sq, copy, lr, beta1, beta2, eps, weight_decay, step, factor)


def constants(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, factor: float
) -> np.ndarray:
    """Return the numbers of one update, (8,) float32.

    They are: factor, decay, 1 - beta1, beta2, 1 - beta2, 1 / root of the second bias correction, eps, step size.

    Args:
        lr: Learning rate.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        step: Number of this update, from 1.
        factor: Factor of the gradient.
    """
    second = 1 / math.sqrt(1 - beta2**step)
    size = lr / (1 - beta1**step)
    values = [factor, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, second, eps, size]
    return np.array(values, dtype=np.float32)


@register_jitable
def moments_one(grad: Any, exp_avg: Any, exp_avg_sq: Any, numbers: Any) -> tuple[Any, Any]:
    """Return the new moments of one element.

    Args:
        grad: Gradient.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        numbers: Result of `constants`.
    """
    scaled = grad * numbers[0]
    return exp_avg + (scaled - exp_avg) * numbers[2], exp_avg_sq * numbers[3] + scaled * scaled * numbers[4]


@register_jitable
def update_one(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, numbers: Any) -> tuple[Any, Any, Any]:
    """Return the new parameter and moments of one element.

    Args:
        param: Parameter.
        grad: Gradient.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        numbers: Result of `constants`.
    """
    decay, correction, eps, size = numbers[1], numbers[5], numbers[6], numbers[7]
    average, square = moments_one(grad, exp_avg, exp_avg_sq, numbers)
    return param * decay - size * average / (math.sqrt(square) * correction + eps), average, square


@kernel()
def _update(
    start: int, stop: int, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any, numbers: Any
) -> None:
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        # Slice, so that indices start at 0: otherwise Numba handles negative indices, and the loop does not vectorise.
        p, g, m, v = param[low:high], grad[low:high], exp_avg[low:high], exp_avg_sq[low:high]
        for i in range(p.shape[0]):
            p[i], m[i], v[i] = update_one(p[i], load(g, i), m[i], v[i], numbers)
        if copy is not None:
            target = copy[low:high]
            for i in range(p.shape[0]):
                store(target, i, p[i])


def _update_cuda(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, copy: Any, numbers: Any) -> None:
    """Update with one thread per element. `copy` without elements means None."""
    if cuda.grid(1) >= param.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    p, m, v = update_one(param[i], load(grad, i), exp_avg[i], exp_avg_sq[i], numbers)
    param[i], exp_avg[i], exp_avg_sq[i] = p, m, v
    if copy.shape[0] > 0:
        store(copy, i, p)


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None, step: int) -> None:
    check("param", param, dtypes=[torch.float32], shape=[None])
    check("grad", grad, dtypes=FLOATS, shape=param.shape, like=param)
    check("exp_avg", exp_avg, dtypes=[torch.float32], shape=param.shape, like=param)
    check("exp_avg_sq", exp_avg_sq, dtypes=[torch.float32], shape=param.shape, like=param)
    if copy is not None:
        check("copy", copy, dtypes=FLOATS, shape=param.shape, like=param)
    if step < 1:
        raise ValueError(f"step: {step}, expected 1 or more: the first update has number 1")


def _cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
) -> None:
    _check(param, grad, exp_avg, exp_avg_sq, copy, step)
    numbers = constants(lr, beta1, beta2, eps, weight_decay, step, factor)
    with meter.record("adamw", _nbytes(param, grad, copy), param.device):
        arrays = [array(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq)]
        share(_update, param.numel(), *arrays, None if copy is None else array(copy), numbers)


def _cuda(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
) -> None:
    _check(param, grad, exp_avg, exp_avg_sq, copy, step)
    with meter.record("adamw", _nbytes(param, grad, copy), param.device):
        if not gpu.available():
            _by_torch(param, grad, exp_avg, exp_avg_sq, copy, lr, beta1, beta2, eps, weight_decay, step, factor)
            return
        numbers = tuple(constants(lr, beta1, beta2, eps, weight_decay, step, factor))
        tensors = (param, grad, exp_avg, exp_avg_sq, param.narrow(0, 0, 0) if copy is None else copy)
        gpu.launch(_update_cuda, gpu.blocks_for(param.numel()), *tensors, numbers, device=param.device)


def _by_torch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
) -> None:
    """Update with torch's fused kernel."""
    count = torch.full((), float(step), device=param.device)  # The kernel reads the step on its device.
    for p, g, m, v in gpu.pieces(param, grad, exp_avg, exp_avg_sq):
        torch._fused_adamw_(
            [p],
            [gpu.widened(g, factor)],
            [m],
            [v],
            [],
            [count],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    if copy is not None:
        torch._foreach_copy_([copy], [param])


def _fake(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None, *numbers: Any) -> None:
    _check(param, grad, exp_avg, exp_avg_sq, copy, step=int(numbers[5]))


def _nbytes(param: Tensor, grad: Tensor, copy: Tensor | None) -> int:
    return 6 * param.nbytes + grad.nbytes + (0 if copy is None else copy.nbytes)


_adamw = register(
    "adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? copy, float lr, "
    "float beta1, float beta2, float eps, float weight_decay, int step, float factor) -> ()",
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
    numbers = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 1.0, "weight_decay": 0.0, "step": 1}
    copy = None if dtype is torch.float32 else torch.zeros(1, dtype=dtype)
    for gradient in {dtype, torch.float32}:
        adamw(param, torch.zeros(1, dtype=gradient), exp_avg, exp_avg_sq, copy, **numbers)
