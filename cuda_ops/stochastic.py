"""Stochastic rounding of float32 to bfloat16: up or down at random, without bias (arXiv:1502.02551).

An update of a parameter is often smaller than half the spacing of bfloat16, so that rounding to nearest would always
lose the update. Stochastic rounding keeps it on average, so that no float32 master weights are needed.

The random bits of an element depend only on a key and on the element's index in its flat tensor: a hash of the index
(two rounds of multiply and xor-shift, as in the finalizers of MurmurHash3) that uses both parts of the key. The result
does not depend on threads, ranks or the order of work, and checkpoints need no random state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import kernel
from cuda_ops.kernel_math import bits_of_float
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
"""Multipliers of the hash "lowbias32", found by a search: each bit of the index flips half of all bits."""

_CARRY = np.uint32(0x9E3779B9)
"""Added to the second key for each 2**32 elements."""

_NAN = np.uint32(0x7FC0)
_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
_INFINITY, _LARGEST = np.uint32(0x7F800000), np.uint32(0x7F7FFFFF)
_WORD = (1 << 32) - 1

_PIECE = 1 << 20
"""Elements per piece: their random bits use at most two second keys."""


def keys(seed: int, step: int) -> tuple[np.uint32, np.uint32]:
    """Return the two keys of one update. Keys of other seeds or steps are unrelated.

    Args:
        seed: 0 or more.
        step: Number of the update.
    """
    mixed = _mix64(_mix64(seed & (1 << 64) - 1) ^ step)
    return np.uint32(mixed & _WORD), np.uint32(mixed >> 32)


def _mix64(value: int) -> int:
    """Apply the finalizer of SplitMix64, a permutation of 64-bit integers without a visible pattern."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


def random_bits_reference(count: int, seed: int, step: int, offset: int) -> Tensor:
    """Return the 32 random bits of elements `offset` to `offset + count`, (count,) int64.

    Args:
        count: Number of elements.
        seed: As in `round_stochastically`.
        step: As in `round_stochastically`.
        offset: Index of the first element in its flat tensor.
    """
    first, second = (int(key) for key in keys(seed, step))
    index = torch.arange(offset, offset + count)
    x = (index & _WORD) ^ first
    x = _multiplied(x ^ x >> 16, int(_FIRST))
    x = x + second + _multiplied(index >> 32, int(_CARRY)) & _WORD
    x = _multiplied(x ^ x >> 15, int(_SECOND))
    return x ^ x >> 16


def _multiplied(x: Tensor, factor: int) -> Tensor:
    """Return `x` · `factor` modulo 2**32, computed in halves because products of 32-bit numbers may not fit int64."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & _WORD


def round_stochastically_reference(values: Tensor, seed: int, step: int, offset: int) -> Tensor:
    """Return `values` as bfloat16, computed with torch. This defines `round_stochastically`.

    Args:
        values: (n,) float32.
        seed: As in `round_stochastically`.
        step: As in `round_stochastically`.
        offset: As in `round_stochastically`.
    """
    bits = values.view(torch.int32).long() & _WORD
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    noise = random_bits_reference(values.shape[0], seed, step, offset) >> 16
    moved = (magnitude + noise).clamp(max=int(_LARGEST))
    magnitude = torch.where(magnitude < int(_INFINITY), moved, magnitude)
    rounded = torch.where(values.isnan(), int(_NAN), (magnitude | sign) >> 16)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def round_stochastically(values: Tensor, out: Tensor, *, seed: int, step: int, offset: int = 0) -> None:
    """Round each value to one of its two bfloat16 neighbours at random, without bias on average.

    The nearer neighbour is more likely. Values that bfloat16 can represent stay unchanged, also NaN and infinities.
    Finite values stay finite.

    Args:
        values: (n,) float32.
        out: (n,) bfloat16; overwritten.
        seed: 0 or more; different for each flat tensor, the same in all steps and on all ranks.
        step: Number of the update, 0 or more; each step rounds differently.
        offset: Index of the first value in its flat tensor, so that a part is rounded as within the whole.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices, or negative numbers.
    """
    _round(values, out, seed, step, offset)


@register_jitable(forceinline=True)
def random_bits(index: Any, first: Any, second: Any) -> Any:
    """Return the 32 random bits of an element.

    Args:
        index: Low 32 bits of its index.
        first: First key.
        second: Second key plus `_CARRY` times the index's upper bits (`upper_key`).
    """
    x = np.uint32(index ^ first)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * _FIRST)
    x = np.uint32(x + second)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * _SECOND)
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@register_jitable(forceinline=True)
def round_one(value: Any, noise: Any) -> Any:
    """Round one value and return the bits of a bfloat16 in a uint32.

    A value that bfloat16 can represent stays unchanged, also NaN and infinities. A finite value never becomes an
    infinity.

    Args:
        value: float32.
        noise: 16 random bits.
    """
    bits = bits_of_float(value)
    magnitude = np.uint32(bits & _MAGNITUDE)
    moved = min(np.uint32(magnitude + noise), _LARGEST)
    moved = moved if magnitude < _INFINITY else magnitude
    rounded = np.uint32(np.uint32(moved | np.uint32(bits & _SIGN)) >> np.uint32(16))
    return _NAN if magnitude > _INFINITY else rounded


@register_jitable
def upper_key(second: Any, index: Any) -> Any:
    """Return the second key for elements with the upper 32 bits of `index`.

    Args:
        second: Second key.
        index: uint64.
    """
    return np.uint32(second + np.uint32(np.uint32(index >> np.uint64(32)) * _CARRY))


@register_jitable
def round_block(values: Any, target: Any, index: Any, first: Any, second: Any) -> None:
    """Round `values` into `target`.

    Args:
        values: float32.
        target: Bits of bfloat16; overwritten.
        index: uint64, index of the first value in its flat tensor.
        first: First key.
        second: Second key.
    """
    low = np.uint32(index & np.uint64(0xFFFFFFFF))
    here = upper_key(second, index)
    beyond = np.uint32(here + _CARRY)  # Key after a wrap-around of the low 32 bits.
    for i in range(values.shape[0]):
        own = np.uint32(low + np.uint32(i))
        noise = np.uint32(random_bits(own, first, here if own >= low else beyond) >> np.uint32(16))
        target[i] = np.uint16(round_one(values[i], noise))


@kernel()
def _round_range(start: int, stop: int, values: Any, out: Any, offset: Any, first: Any, second: Any) -> None:
    for low in range(start, stop, _PIECE):
        high = min(low + _PIECE, stop)
        round_block(values[low:high], out[low:high], np.uint64(offset + np.uint64(low)), first, second)


def _round_cuda(values: Any, out: Any, offset: Any, first: Any, second: Any) -> None:
    """Round with one thread per element."""
    if cuda.grid(1) >= out.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    index = np.uint64(offset + i)
    noise = random_bits(np.uint32(index & np.uint64(0xFFFFFFFF)), first, upper_key(second, index))
    out[i] = round_one(values[i], np.uint32(noise >> np.uint32(16)))


def _check(values: Tensor, out: Tensor, seed: int, step: int, offset: int) -> None:
    check("values", values, dtypes=[torch.float32], shape=[None])
    check("out", out, dtypes=[torch.bfloat16], shape=values.shape, like=values)
    if seed < 0:
        raise ValueError(f"seed: {seed}, expected 0 or more")
    if step < 0:
        raise ValueError(f"step: {step}, expected the number of an update, 0 or more")
    if offset < 0:
        raise ValueError(f"offset: {offset}, expected the place of the first element in its flat, 0 or more")


def _cpu(values: Tensor, out: Tensor, seed: int, step: int, offset: int) -> None:
    _check(values, out, seed, step, offset)
    with meter.record("round_stochastically", values.nbytes + out.nbytes, values.device):
        share(_round_range, values.numel(), array(values), array(out), np.uint64(offset), *keys(seed, step))


def _cuda(values: Tensor, out: Tensor, seed: int, step: int, offset: int) -> None:
    _check(values, out, seed, step, offset)
    with meter.record("round_stochastically", values.nbytes + out.nbytes, values.device):
        numbers = (np.uint64(offset), *keys(seed, step))
        gpu.launch(_round_cuda, gpu.blocks_for(values.numel()), values, out, *numbers, device=values.device)


_round = register(
    "round_stochastically(Tensor values, Tensor(a!) out, int seed, int step, int offset) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_check,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype` without float32 master weights.

    Args:
        dtype: The dtype of the run.
    """
    if dtype is torch.bfloat16:
        round_stochastically(torch.zeros(1), torch.zeros(1, dtype=dtype), seed=0, step=0)
