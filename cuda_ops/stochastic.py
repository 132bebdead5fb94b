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

from cuda_ops.elements import bits_of_float

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
"""Multipliers of the hash "lowbias32", which were searched for: each bit of the index turns half of all bits."""

_CARRY = np.uint32(0x9E3779B9)
"""What each 2**32 elements add to the second key."""

_NAN = np.uint32(0x7FC0)
_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
_INFINITY, _LARGEST = np.uint32(0x7F800000), np.uint32(0x7F7FFFFF)
_WORD = (1 << 32) - 1


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
