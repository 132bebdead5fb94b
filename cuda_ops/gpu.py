"""Kernels on NVIDIA GPUs: compiled when the first tensor on one comes, launched on torch's current stream.

Without numba-cuda, which is an extra, what a training step needs goes through torch's fused kernels: `kernels_in_use`.

Nothing here is imported from numba.cuda before a launch, so that a machine without it pays nothing. A kernel is a plain
function of its module that uses the module's name `cuda`, which the first launch fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

THREADS = 256
"""Threads of a block, unless a kernel says otherwise: a whole number of blocks fills every GPU since sm_80."""

_PIECE = 1 << 24
"""Elements of `pieces`: 64 MiB in float32."""

_BITS = {torch.bfloat16: "<u2", torch.float16: "<i2", torch.float32: "<f4", torch.int8: "|i1", torch.uint8: "|u1"}
"""Elements as kernels see them, as in `tensors.array`."""


@cache
def available() -> bool:
    """Whether the compiler for GPU kernels is installed."""
    return find_spec("numba_cuda") is not None


def kernels_in_use(device: torch.device) -> str:
    """By whose kernels `adamw`, `sgd_momentum` and `grad_stats` work on `device`: "numba cpu", "numba-cuda", or, where
    that is not installed, "torch fused"."""
    if device.type != "cuda":
        return "numba cpu"
    return "numba-cuda" if available() else "torch fused"


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flats of one length in pieces that are worth a kernel of torch's, and whose widened copies take little memory."""
    return zip(*(tensor.split(_PIECE) for tensor in tensors), strict=True)


def widened(grad: Tensor, factor: float) -> Tensor:
    """`grad` · `factor` in float32, for kernels of torch's, which want parameters and gradients of one dtype."""
    return grad if grad.dtype is torch.float32 and factor == 1 else grad.float() * factor


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """The kernel of this function, which gets machine code for each new combination of dtypes."""
    if not available():
        raise RuntimeError("kernels for GPUs need numba-cuda; install it with: pip install 'speedlab[cuda]'")
    from numba import cuda

    function.__globals__["cuda"] = cuda
    return cuda.jit(function)


def launch(function: Callable[..., Any], blocks: int, *arguments: Any, device: torch.device, threads: int = THREADS):
    """Run `function` on `blocks` blocks of `threads`, on torch's current stream of `device`, and do not wait for it.

    Tensors are contiguous and on `device`: their memory is used in place. Numbers are numpy float32, int or bool: a
    Python float would bring arithmetic in float64.
    """
    kernel = compiled(function)
    from numba import cuda

    with cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        kernel[blocks, threads, stream](*(_argument(cuda, value) for value in arguments))


def blocks_for(count: int, each: int = THREADS) -> int:
    """Blocks for `count` elements at `each` a block; at least one, since a launch of none is an error."""
    return max(1, -(-count // each))


def float32s(*numbers: float) -> tuple[np.float32, ...]:
    """The numbers as arguments of a kernel."""
    return tuple(np.float32(number) for number in numbers)


def _argument(cuda: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    description = {
        "shape": tuple(value.shape),
        "strides": None,
        "typestr": _BITS[value.dtype],
        "data": (value.data_ptr() if value.numel() else 0, False),
        "version": 2,
    }
    return cuda.from_cuda_array_interface(description, owner=value, sync=False)
