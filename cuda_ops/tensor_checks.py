"""Convert tensors to arrays for kernels, and check the arguments of operations before they touch memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that kernels accept. Arithmetic is float32 in all of them."""

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def array(tensor: Tensor) -> np.ndarray:
    """Return the memory of a CPU tensor as a numpy array. 16-bit floats become their bits (see `kernel_math`).

    Args:
        tensor: A CPU tensor.
    """
    bits = _BITS.get(tensor.dtype)
    return (tensor.detach() if bits is None else tensor.detach().view(bits)).numpy()


def check(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    like: Tensor | None = None,
    strided: bool = False,
) -> None:
    """Raise ValueError unless an argument is as expected. The message gives the actual and the expected value.

    Args:
        name: Name of the argument.
        tensor: Its value.
        dtypes: Allowed dtypes; None for any.
        shape: Expected shape; None in place of a size allows any size.
        like: A tensor on the expected device.
        strided: Allow memory that is not contiguous.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = " or ".join(_short(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: dtype is {_short(tensor.dtype)}, expected {allowed}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: device is {tensor.device}, expected {like.device}, where the other arguments are")
    if shape is not None:
        fits = len(shape) == tensor.ndim and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, expected ({wanted})")
    if not strided and not tensor.is_contiguous():
        raise ValueError(
            f"{name}: strides are {tensor.stride()} for shape {tuple(tensor.shape)}, expected contiguous memory; call "
            f".contiguous() first"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
