"""Sum n buffers into one in a fixed order: the arithmetic of a reduction between ranks. CPU only; NCCL has its own.

Sums of 16-bit floats are computed in float32 and rounded once; float64 is summed and divided in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cuda_ops.compile import kernel
from cuda_ops.kernel_math import array_at, load, store, sums_like
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

_BLOCK = 2048
"""Elements summed at a time, so that they stay in the first-level cache."""

_SUMMED = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def reduce_reference(
    sources: Sequence[Tensor], out: Tensor, *, average: bool = False, accumulate: bool = False
) -> None:
    """Reduce with torch. This defines `reduce`.

    Args:
        sources: (n,) tensors of one dtype.
        out: (n,); overwritten or updated.
        average: Divide by the number of sources.
        accumulate: Add to `out`.
    """
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    total = out.to(wide) if accumulate else torch.zeros_like(out, dtype=wide)
    term = sources[0].to(wide).clone()
    for source in sources[1:]:
        term += source.to(wide)
    if average:
        term = term / len(sources) if wide.is_floating_point else term // len(sources)
    out.copy_(total + term)


def reduce(sources: Sequence[Tensor], out: Tensor, *, average: bool = False, accumulate: bool = False) -> None:
    """Set `out` to the sum or mean of `sources`, added in their order.

    Integers wrap around; their mean is rounded down.

    Args:
        sources: (n,) tensors of one dtype.
        out: (n,), of the same dtype, or float32 for 16-bit floats. May be one of the sources.
        average: Divide by the number of sources.
        accumulate: Add the result to `out`.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _reduce(list(sources), out, average, accumulate)


@kernel()
def sum_floats(
    start: int, stop: int, addresses: Any, like: Any, out: Any, divisor: float, accumulate: bool, direct: bool
) -> None:
    """Set out[start:stop] to the sum of float arrays, divided by `divisor`.

    Args:
        start: First element.
        stop: End of the elements.
        addresses: (n,) int64, the address of element 0 of each array.
        like: An array of their dtype.
        out: The result.
        divisor: Divisor of the sum.
        accumulate: Add to `out`.
        direct: There are exactly two arrays, neither is `out`, and nothing is divided or accumulated. One loop is
            enough then; if memory overlapped, LLVM would not vectorise the loop.
    """
    number = addresses.shape[0]
    total = sums_like(like, _BLOCK)
    for low in range(start, stop, _BLOCK):
        width = min(_BLOCK, stop - low)
        target = out[low : low + width]
        first = numba.carray(array_at(addresses[0]), stop, like.dtype)[low : low + width]
        second = numba.carray(array_at(addresses[min(1, number - 1)]), stop, like.dtype)[low : low + width]
        if direct:
            for i in range(width):
                store(target, i, load(first, i) + load(second, i))
            continue
        if number == 1:
            for i in range(width):
                total[i] = load(first, i)
        else:
            for i in range(width):
                total[i] = load(first, i) + load(second, i)
        for k in range(2, number):
            other = numba.carray(array_at(addresses[k]), stop, like.dtype)[low : low + width]
            for i in range(width):
                total[i] += load(other, i)
        if divisor != 1:
            for i in range(width):
                total[i] /= np.float32(divisor)  # The divisor is exact in float32, and a float64 sum stays float64.
        if accumulate:
            for i in range(width):
                total[i] += load(target, i)
        for i in range(width):
            store(target, i, total[i])


@kernel()
def sum_integers(start: int, stop: int, addresses: Any, like: Any, out: Any, divisor: int, accumulate: bool) -> None:
    """Set out[start:stop] to the sum of integer arrays. Integers wrap around, and a mean is rounded down.

    Args:
        start: First element.
        stop: End of the elements.
        addresses: (n,) int64, the address of element 0 of each array.
        like: An array of their dtype.
        out: The result.
        divisor: Divisor of the sum.
        accumulate: Add to `out`.
    """
    number = addresses.shape[0]
    for i in range(start, stop):
        total = np.int64(0)
        for k in range(number):
            total += numba.carray(array_at(addresses[k]), stop, like.dtype)[i]
        if divisor != 1:
            total //= divisor
        if accumulate:
            total += out[i]
        out[i] = total


def sum_at(
    addresses: np.ndarray, like: np.ndarray, out: np.ndarray, *, divisor: int, accumulate: bool, floating: bool
) -> None:
    """Run the kernels on memory that need not belong to tensors. Nothing is checked.

    Args:
        addresses: (n,) int64, the addresses of arrays at least as long as `out`.
        like: An array of their dtype. 16-bit floats are given as bits (`tensor_checks.array`).
        out: The result.
        divisor: Divisor of the sum.
        accumulate: Add to `out`.
        floating: The elements are floats.
    """
    if floating:
        separate = out.ctypes.data not in addresses
        direct = separate and len(addresses) == 2 and divisor == 1 and not accumulate
        share(sum_floats, out.shape[0], addresses, like, out, float(divisor), accumulate, direct)
    else:
        share(sum_integers, out.shape[0], addresses, like, out, divisor, accumulate)


def _check(sources: Sequence[Tensor], out: Tensor) -> None:
    if not sources:
        raise ValueError("sources: an empty list, expected at least one tensor")
    check("sources[0]", sources[0], dtypes=_SUMMED, shape=[None])
    for k, source in enumerate(sources[1:], 1):
        check(f"sources[{k}]", source, dtypes=[sources[0].dtype], shape=sources[0].shape, like=sources[0])
    own = sources[0].dtype
    check("out", out, dtypes=(own, torch.float32) if own in FLOATS else (own,), shape=sources[0].shape, like=sources[0])


def _cpu(sources: list[Tensor], out: Tensor, average: bool, accumulate: bool) -> None:
    _check(sources, out)
    nbytes = sum(source.nbytes for source in sources) + (2 if accumulate else 1) * out.nbytes
    with meter.record("reduce", nbytes, out.device):
        addresses = np.array([source.data_ptr() for source in sources], dtype=np.int64)
        sum_at(
            addresses,
            array(sources[0][:0]),
            array(out),
            divisor=len(sources) if average else 1,
            accumulate=accumulate,
            floating=out.dtype.is_floating_point,
        )


def _fake(sources: list[Tensor], out: Tensor, average: bool, accumulate: bool) -> None:
    _check(sources, out)


_reduce = register(
    "reduce(Tensor[] sources, Tensor(a!) out, bool average, bool accumulate) -> ()", cpu=_cpu, fake=_fake
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`: sums into `dtype` and into float32.

    Args:
        dtype: The dtype of the run.
    """
    for target in {dtype, torch.float32}:
        sources = [torch.zeros(1, dtype=dtype) for _ in range(2)]
        reduce(sources, torch.zeros(1, dtype=target))
