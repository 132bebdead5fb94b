"""Launch kernels on NVIDIA GPUs: compiled at the first use, launched on torch's current stream.

Without numba-cuda, which is an extra, a training step uses torch's fused kernels (`kernels_in_use`).

numba.cuda is imported at the first launch, so that machines without a GPU do not pay for the import. A kernel is a
plain function of its module that uses the module's name `cuda`. The first launch sets this name.
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
"""Default threads per block: a whole number of blocks fills every GPU since sm_80."""

_PIECE = 1 << 24
"""Elements per piece in `pieces`: 64 MiB in float32."""

_BITS = {torch.bfloat16: "<u2", torch.float16: "<i2", torch.float32: "<f4", torch.int8: "|i1", torch.uint8: "|u1"}
"""Array types that kernels see, as in `tensor_checks.array`."""


@cache
def available() -> bool:
    """Return whether the compiler for GPU kernels is installed."""
    return find_spec("numba_cuda") is not None


def kernels_in_use(device: torch.device) -> str:
    """Return the implementation of `adamw`, `sgd_momentum` and `grad_stats`: "numba cpu", "numba-cuda" or "torch
    fused".

    Args:
        device: Device of the tensors. "torch fused" is for CUDA devices without numba-cuda.
    """
    if device.type != "cuda":
        return "numba cpu"
    return "numba-cuda" if available() else "torch fused"


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split flat tensors of one length into pieces, large enough for torch's kernels, small enough for widened copies.

    Args:
        *tensors: (n,) tensors.
    """
    return zip(*(tensor.split(_PIECE) for tensor in tensors), strict=True)


def widened(grad: Tensor, factor: float) -> Tensor:
    """Return `grad` · `factor` in float32, because torch's kernels need parameters and gradients of one dtype.

    Args:
        grad: (n,) floats.
        factor: Factor of the gradient.
    """
    return grad if grad.dtype is torch.float32 and factor == 1 else grad.float() * factor


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """Return the CUDA kernel of a function. It is compiled for each new combination of dtypes.

    Args:
        function: The kernel's function.

    Raises:
        RuntimeError: numba-cuda is not installed.
    """
    if not available():
        raise RuntimeError("kernels for GPUs need numba-cuda; install it with: pip install 'speedlab[cuda]'")
    from numba import cuda

    # The kernel's module declares the name `cuda`; set it now.
    function.__globals__["cuda"] = cuda
    return cuda.jit(function)


def launch(function: Callable[..., Any], blocks: int, *arguments: Any, device: torch.device, threads: int = THREADS):
    """Launch `function` on torch's current stream of `device`, without waiting.

    Args:
        function: The kernel's function.
        blocks: Number of blocks.
        *arguments: Contiguous tensors on `device`, used in place, and numpy float32, int or bool. A Python float would
            lead to float64 arithmetic.
        device: A CUDA device.
        threads: Threads per block.

    Raises:
        RuntimeError: numba-cuda is not installed.
    """
    kernel = compiled(function)
    from numba import cuda

    with cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        kernel[blocks, threads, stream](*(_argument(cuda, value) for value in arguments))


def blocks_for(count: int, each: int = THREADS) -> int:
    """Return the number of blocks for `count` elements; at least one, because CUDA refuses a launch of none.

    Args:
        count: Number of elements.
        each: Elements per block.
    """
    return max(1, -(-count // each))


def float32s(*numbers: float) -> tuple[np.float32, ...]:
    """Return numbers as float32 arguments of a kernel.

    Args:
        *numbers: The numbers.
    """
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
