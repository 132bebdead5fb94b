"""Rounding float32 to bfloat16 up or down at random, so that on average nothing is lost (arXiv:1502.02551).

An update of a parameter is often smaller than half the spacing of bfloat16; rounded to nearest it would be lost every
time. Rounded up with the probability that it deserves, it arrives on average, and no float32 master is needed.

The random bits of an element are a function of a key and of the element's index in its flat, nothing else: a hash of
the index (two rounds of multiply and xor-shift, as in the finalizers of MurmurHash3), into which the key enters twice.
So a result depends neither on threads nor on ranks nor on the order of work, and needs no state in checkpoints.
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
from cuda_ops.library import register
from cuda_ops.meter import meter
from cuda_ops.tensor_checks import array, check
from cuda_ops.threads import share

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
"""Multipliers of the hash "lowbias32", which were searched for: each bit of the index turns half of all bits."""

_CARRY = np.uint32(0x9E3779B9)
"""What each 2**32 elements add to the second key."""

_NAN = np.uint32(0x7FC0)
_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
_INFINITY, _LARGEST = np.uint32(0x7F800000), np.uint32(0x7F7FFFFF)
_WORD = (1 << 32) - 1

_PIECE = 1 << 20
"""Elements whose random bits have one second key, or two."""


def keys(seed: int, step: int) -> tuple[np.uint32, np.uint32]:
    """The two keys of one update: of another seed or another step, they have nothing in common with these."""
    mixed = _mix64(_mix64(seed & (1 << 64) - 1) ^ step)
    return np.uint32(mixed & _WORD), np.uint32(mixed >> 32)


def _mix64(value: int) -> int:
    """The finalizer of SplitMix64: a permutation of 64-bit integers without a pattern."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
    return value ^ value >> 31


def random_bits_reference(count: int, seed: int, step: int, offset: int) -> Tensor:
    """The 32 random bits of elements `offset` to `offset + count` of a flat, (count,) int64."""
    first, second = (int(key) for key in keys(seed, step))
    index = torch.arange(offset, offset + count)
    x = (index & _WORD) ^ first
    x = _multiplied(x ^ x >> 16, int(_FIRST))
    x = x + second + _multiplied(index >> 32, int(_CARRY)) & _WORD
    x = _multiplied(x ^ x >> 15, int(_SECOND))
    return x ^ x >> 16


def _multiplied(x: Tensor, factor: int) -> Tensor:
    """`x` · `factor` modulo 2**32, in halves: products of 32-bit numbers may not fit into an int64."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & _WORD


def round_stochastically_reference(values: Tensor, seed: int, step: int, offset: int) -> Tensor:
    """The definition, in torch: `values` (n,) float32 as bfloat16."""
    bits = values.view(torch.int32).long() & _WORD
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    noise = random_bits_reference(values.shape[0], seed, step, offset) >> 16
    moved = (magnitude + noise).clamp(max=int(_LARGEST))
    magnitude = torch.where(magnitude < int(_INFINITY), moved, magnitude)
    rounded = torch.where(values.isnan(), int(_NAN), (magnitude | sign) >> 16)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def round_stochastically(values: Tensor, out: Tensor, *, seed: int, step: int, offset: int = 0) -> None:
    """`out` (n,) bfloat16 = `values` (n,) float32, each rounded to one of its two neighbours at random, to the nearer
    one more often: on average nothing is lost.

    Args:
        seed: another one for each flat, the same in all steps and on all ranks; 0 or more.
        step: of which update these values are, 0 or more: another one rounds otherwise.
        offset: which element of its flat the first one of `values` is: a part of a flat is then rounded as within the
            whole.

    A value that bfloat16 holds stays, a NaN and an infinity too, and what is finite stays finite. Raises ValueError for
    wrong dtypes, shapes, strides or devices, and for negative numbers.
    """
    _round(values, out, seed, step, offset)


@register_jitable(forceinline=True)
def random_bits(index: Any, first: Any, second: Any) -> Any:
    """The 32 random bits of the element with these low 32 bits of its index, under `keys`; `second` plus `_CARRY` times
    the index's upper bits."""
    x = np.uint32(index ^ first)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * _FIRST)
    x = np.uint32(x + second)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * _SECOND)
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@register_jitable(forceinline=True)
def round_one(value: Any, noise: Any) -> Any:
    """`value` (float32) as the bits of a bfloat16, in a uint32. `noise`: 16 random bits.

    A value that bfloat16 holds stays, also if it is NaN or an infinity; a finite one never becomes an infinity.
    """
    bits = bits_of_float(value)
    magnitude = np.uint32(bits & _MAGNITUDE)
    moved = min(np.uint32(magnitude + noise), _LARGEST)
    moved = moved if magnitude < _INFINITY else magnitude
    rounded = np.uint32(np.uint32(moved | np.uint32(bits & _SIGN)) >> np.uint32(16))
    return _NAN if magnitude > _INFINITY else rounded


@register_jitable
def upper_key(second: Any, index: Any) -> Any:
    """The second key for elements with the upper 32 bits of `index` (uint64)."""
    return np.uint32(second + np.uint32(np.uint32(index >> np.uint64(32)) * _CARRY))


@register_jitable
def round_block(values: Any, target: Any, index: Any, first: Any, second: Any) -> None:
    """Round `values` (float32) into `target` (bits of bfloat16). `index` (uint64): of the first one in its flat."""
    low = np.uint32(index & np.uint64(0xFFFFFFFF))
    here = upper_key(second, index)
    beyond = np.uint32(here + _CARRY)  # For those after which the low 32 bits began anew.
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
    """A thread for each element."""
    if cuda.grid(1) >= out.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: a signed index might count from the end, which Numba would look at.
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
    """Compile what a run that computes in `dtype` and keeps no float32 masters needs."""
    if dtype is torch.bfloat16:
        round_stochastically(torch.zeros(1), torch.zeros(1, dtype=dtype), seed=0, step=0)
