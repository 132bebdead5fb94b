"""SGD with momentum in one pass over flat tensors: unscale, clip, decay, update, and the low-precision copy.

Same results as torch.optim.SGD (Sutskever et al., 2013, with Nesterov's variant). Memory-bound: 20 bytes per element
in float32, each read or written once.
"""

from __future__ import annotations

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


def sgd_momentum_reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    factor: float = 1.0,
) -> None:
    """Update with torch. This defines `sgd_momentum`, which documents the arguments."""
    grad = grad.float() * factor + weight_decay * param
    if first:
        momentum_buffer.copy_(grad)
    else:
        momentum_buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
    param.sub_(grad + momentum * momentum_buffer if nesterov else momentum_buffer, alpha=lr)
    if copy is not None:
        copy.copy_(param)


def sgd_momentum(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    factor: float = 1.0,
) -> None:
    """Update `param` and its momentum in place, as torch.optim.SGD does.

    Args:
        param: (n,) float32; updated in place.
        grad: (n,) float32, bfloat16 or float16; multiplied by `factor` first.
        momentum_buffer: (n,) float32; updated in place.
        copy: (n,) bfloat16, float16 or float32, receives the updated parameter; None for no copy.
        lr: Learning rate.
        momentum: Decay rate of the momentum.
        dampening: Reduces the gradient's share in the momentum.
        weight_decay: Coupled: weight_decay · param is added to the gradient.
        nesterov: Use Nesterov's variant.
        first: Start the momentum with the undamped gradient and ignore the buffer, as in torch's first update.
        factor: 1 / loss scale, times the clipping factor.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _sgd_momentum(param, grad, momentum_buffer, copy, lr, momentum, dampening, weight_decay, nesterov, first, factor)


@register_jitable
def update_one(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    numbers: tuple[Any, Any, Any, Any, Any],
    first: bool,
    nesterov: bool,
) -> tuple[Any, Any]:
    """Return the new parameter and momentum of one element.

    Args:
        param: Parameter.
        grad: Gradient.
        momentum_buffer: Momentum.
        numbers: Factor, weight decay, momentum, 1 - dampening, lr.
        first: Start the momentum with the gradient.
        nesterov: Use Nesterov's variant.
    """
    factor, decay, momentum, undamped, lr = numbers
    gradient = grad * factor + decay * param
    average = gradient if first else momentum_buffer * momentum + gradient * undamped
    direction = gradient + momentum * average if nesterov else average
    return param - lr * direction, average


@kernel()
def _update(
    start: int,
    stop: int,
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    copy: Any,
    numbers: Any,
    first: bool,
    nesterov: bool,
) -> None:
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        p, g, m = param[low:high], grad[low:high], momentum_buffer[low:high]
        for i in range(p.shape[0]):
            p[i], m[i] = update_one(p[i], load(g, i), m[i], numbers, first, nesterov)
        if copy is not None:
            target = copy[low:high]
            for i in range(p.shape[0]):
                store(target, i, p[i])


def _update_cuda(
    param: Any, grad: Any, momentum_buffer: Any, copy: Any, numbers: Any, first: bool, nesterov: bool
) -> None:
    """Update with one thread per element. `copy` without elements means None."""
    if cuda.grid(1) >= param.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    p, m = update_one(param[i], load(grad, i), momentum_buffer[i], numbers, first, nesterov)
    param[i], momentum_buffer[i] = p, m
    if copy.shape[0] > 0:
        store(copy, i, p)


def _check(param: Tensor, grad: Tensor, momentum_buffer: Tensor, copy: Tensor | None) -> None:
    check("param", param, dtypes=[torch.float32], shape=[None])
    check("grad", grad, dtypes=FLOATS, shape=param.shape, like=param)
    check("momentum_buffer", momentum_buffer, dtypes=[torch.float32], shape=param.shape, like=param)
    if copy is not None:
        check("copy", copy, dtypes=FLOATS, shape=param.shape, like=param)


def _cpu(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    copy: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    factor: float,
) -> None:
    _check(param, grad, momentum_buffer, copy)
    numbers = gpu.float32s(factor, weight_decay, momentum, 1 - dampening, lr)
    with meter.record("sgd_momentum", _nbytes(param, grad, copy), param.device):
        arrays = [array(tensor) for tensor in (param, grad, momentum_buffer)]
        share(_update, param.numel(), *arrays, None if copy is None else array(copy), numbers, first, nesterov)


def _cuda(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    copy: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    factor: float,
) -> None:
    _check(param, grad, momentum_buffer, copy)
    with meter.record("sgd_momentum", _nbytes(param, grad, copy), param.device):
        if not gpu.available():
            numbers = (lr, momentum, dampening, weight_decay, nesterov, first, factor)
            _by_torch(param, grad, momentum_buffer, copy, *numbers)
            return
        numbers = gpu.float32s(factor, weight_decay, momentum, 1 - dampening, lr)
        tensors = (param, grad, momentum_buffer, param.narrow(0, 0, 0) if copy is None else copy)
        blocks = gpu.blocks_for(param.numel())
        gpu.launch(_update_cuda, blocks, *tensors, numbers, first, nesterov, device=param.device)


def _by_torch(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    copy: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    factor: float,
) -> None:
    """Update with torch's fused kernel."""
    for p, g, m in gpu.pieces(param, grad, momentum_buffer):
        torch._fused_sgd_(
            [p],
            [gpu.widened(g, factor)],
            [m],
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=first,
        )
    if copy is not None:
        torch._foreach_copy_([copy], [param])


def _fake(param: Tensor, grad: Tensor, momentum_buffer: Tensor, copy: Tensor | None, *numbers: Any) -> None:
    _check(param, grad, momentum_buffer, copy)


def _nbytes(param: Tensor, grad: Tensor, copy: Tensor | None) -> int:
    return 4 * param.nbytes + grad.nbytes + (0 if copy is None else copy.nbytes)


_sgd_momentum = register(
    "sgd_momentum(Tensor(a!) param, Tensor grad, Tensor(b!) momentum_buffer, Tensor(c!)? copy, float lr, "
    "float momentum, float dampening, float weight_decay, bool nesterov, bool first, float factor) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    param, momentum_buffer = torch.zeros(1), torch.zeros(1)
    copy = None if dtype is torch.float32 else torch.zeros(1, dtype=dtype)
    for gradient in {dtype, torch.float32}:
        sgd_momentum(param, torch.zeros(1, dtype=gradient), momentum_buffer, copy, lr=0.0, momentum=0.9)
