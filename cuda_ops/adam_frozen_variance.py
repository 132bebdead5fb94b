"""Adam with a frozen variance, as in 1-bit Adam after its warm-up (arXiv:2102.02888).

One pass over flat tensors does the decay, the update, the copy of the moment and the low-precision copy. Memory-bound:
20 bytes per element in float32, each read or written once.
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
"""Elements that are updated before their copy is written, so that the copy reads the first-level cache."""


def adam_frozen_reference(
    param: Tensor,
    moment: Tensor,
    exp_avg: Tensor | None,
    variance: Tensor,
    copy: Tensor | None = None,
    *,
    size: float,
    decay: float,
    eps: float,
) -> None:
    """Update with torch. This defines `adam_frozen`.

    Args:
        param: (n,) float32; updated in place.
        moment: (n,) floats.
        exp_avg: (n,) float32 or None; receives the moment.
        variance: (n,) float32.
        copy: (n,) floats or None; receives the updated parameter.
        size: Step size.
        decay: Weight decay of this step.
        eps: Added to the root of the variance.
    """
    if exp_avg is not None:
        exp_avg.copy_(moment)
    param.mul_(1 - decay).addcdiv_(moment.float(), variance.sqrt().add_(eps), value=-size)
    if copy is not None:
        copy.copy_(param)


def adam_frozen(
    param: Tensor,
    moment: Tensor,
    exp_avg: Tensor | None,
    variance: Tensor,
    copy: Tensor | None = None,
    *,
    size: float,
    decay: float,
    eps: float,
) -> None:
    """Set `param` = (1 - `decay`) param - `size` moment / (√variance + `eps`), in place.

    Args:
        param: (n,) float32; updated in place.
        moment: (n,) float32, bfloat16 or float16: the mean over all ranks.
        exp_avg: (n,) float32, receives the moment; None if it is the same tensor already.
        variance: (n,) float32, read only. For an infinite variance, only the decay changes the parameter.
        copy: (n,) bfloat16, float16 or float32, receives the updated parameter; None for no copy.
        size: Step size.
        decay: Weight decay of this step.
        eps: Added to the root of the variance.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _adam_frozen(param, moment, exp_avg, variance, copy, size, decay, eps)


@register_jitable
def update_one(param: Any, moment: Any, variance: Any, keep: Any, size: Any, eps: Any) -> Any:
    """Return the new value of one parameter.

    Args:
        param: The parameter.
        moment: Its moment.
        variance: Its variance.
        keep: 1 - decay.
        size: Step size.
        eps: Added to the root of the variance.
    """
    return param * keep - size * moment / (math.sqrt(variance) + eps)


@kernel()
def _update(
    start: int, stop: int, param: Any, moment: Any, exp_avg: Any, variance: Any, copy: Any, numbers: Any
) -> None:
    keep, size, eps = numbers[0], numbers[1], numbers[2]
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        p, g, v = param[low:high], moment[low:high], variance[low:high]
        if exp_avg is None:
            for i in range(p.shape[0]):
                p[i] = update_one(p[i], load(g, i), v[i], keep, size, eps)
        else:
            m = exp_avg[low:high]
            for i in range(p.shape[0]):
                m[i] = load(g, i)
                p[i] = update_one(p[i], m[i], v[i], keep, size, eps)
        if copy is not None:
            target = copy[low:high]
            for i in range(p.shape[0]):
                store(target, i, p[i])


def _update_cuda(param: Any, moment: Any, exp_avg: Any, variance: Any, copy: Any, numbers: Any) -> None:
    """Update with one thread per element. `exp_avg` or `copy` without elements means None."""
    if cuda.grid(1) >= param.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    value = load(moment, i)
    p = update_one(param[i], value, variance[i], numbers[0], numbers[1], numbers[2])
    param[i] = p
    if exp_avg.shape[0] > 0:
        exp_avg[i] = value
    if copy.shape[0] > 0:
        store(copy, i, p)


def _check(param: Tensor, moment: Tensor, exp_avg: Tensor | None, variance: Tensor, copy: Tensor | None) -> None:
    check("param", param, dtypes=[torch.float32], shape=[None])
    check("moment", moment, dtypes=FLOATS, shape=param.shape, like=param)
    if exp_avg is not None:
        check("exp_avg", exp_avg, dtypes=[torch.float32], shape=param.shape, like=param)
    check("variance", variance, dtypes=[torch.float32], shape=param.shape, like=param)
    if copy is not None:
        check("copy", copy, dtypes=FLOATS, shape=param.shape, like=param)


def _cpu(
    param: Tensor,
    moment: Tensor,
    exp_avg: Tensor | None,
    variance: Tensor,
    copy: Tensor | None,
    size: float,
    decay: float,
    eps: float,
) -> None:
    _check(param, moment, exp_avg, variance, copy)
    with meter.record("adam_frozen", _nbytes(param, moment, exp_avg, copy), param.device):
        tensors = (param, moment, exp_avg, variance, copy)
        arrays = [None if tensor is None else array(tensor) for tensor in tensors]
        share(_update, param.numel(), *arrays, gpu.float32s(1 - decay, size, eps))


def _cuda(
    param: Tensor,
    moment: Tensor,
    exp_avg: Tensor | None,
    variance: Tensor,
    copy: Tensor | None,
    size: float,
    decay: float,
    eps: float,
) -> None:
    _check(param, moment, exp_avg, variance, copy)
    with meter.record("adam_frozen", _nbytes(param, moment, exp_avg, copy), param.device):
        none = param.narrow(0, 0, 0)
        laid_by, copied = none if exp_avg is None else exp_avg, none if copy is None else copy
        tensors = (param, moment, laid_by, variance, copied)
        numbers = gpu.float32s(1 - decay, size, eps)
        gpu.launch(_update_cuda, gpu.blocks_for(param.numel()), *tensors, numbers, device=param.device)


def _fake(
    param: Tensor, moment: Tensor, exp_avg: Tensor | None, variance: Tensor, copy: Tensor | None, *numbers: Any
) -> None:
    _check(param, moment, exp_avg, variance, copy)


def _nbytes(param: Tensor, moment: Tensor, *others: Tensor | None) -> int:
    return 3 * param.nbytes + moment.nbytes + sum(tensor.nbytes for tensor in others if tensor is not None)


_adam_frozen = register(
    "adam_frozen(Tensor(a!) param, Tensor moment, Tensor(b!)? exp_avg, Tensor variance, Tensor(c!)? copy, float size, "
    "float decay, float eps) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    param, moment, exp_avg, variance = (torch.zeros(1) for _ in range(4))
    copy = None if dtype is torch.float32 else torch.zeros(1, dtype=dtype)
    for laid_by in (exp_avg, None):
        adam_frozen(param, moment, laid_by, variance, copy, size=0.0, decay=0.0, eps=1.0)
