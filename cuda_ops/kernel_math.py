"""Arithmetic inside CPU kernels: load and store elements of any float dtype, bit casts, and a fast power of two.

Elements are read as float32 (float64 stays float64) and written rounded to nearest. Numba has no 16-bit floats on
CPUs, so a kernel sees their bits: uint16 for bfloat16, int16 for float16 (see `tensor_checks.array`).

`exp2` vectorises, which `np.exp` and `np.exp2` do not. e to the power of x is `exp2(x * LOG2_E)`. A kernel that
computes a difference first multiplies both terms by `LOG2_E`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic
from numba.extending import overload

from cuda_ops.compile import kernel

intrinsic: Any = _intrinsic  # Any: callers omit the typing context, which type checkers do not know.


@intrinsic
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """Return the float32 with the given uint32 bits.

    Args:
        typingctx: Passed by Numba.
        bits: uint32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32.

    Args:
        typingctx: Passed by Numba.
        value: float32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _widen_half(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _narrow_half(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def array_at(typingctx: Any, address: Any) -> Any:
    """Return an integer address as a pointer for `numba.carray`.

    Args:
        typingctx: Passed by Numba.
        address: The address.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


def load(array: Any, i: Any) -> Any:
    """Return `array[i]` as float32; float64 stays float64. Only inside kernels.

    Args:
        array: An array of floats, or of the bits of 16-bit floats.
        i: Index.
    """
    raise NotImplementedError("only inside kernels")


@overload(load, strict=False)
def _load(array: Any, i: Any) -> Any:
    if array.dtype == types.uint16:
        return lambda array, i: float_of_bits(np.uint32(np.uint32(array[i]) << np.uint32(16)))
    if array.dtype == types.int16:
        return lambda array, i: _widen_half(array[i])
    if array.dtype in (types.float32, types.float64):
        return lambda array, i: array[i]
    return None


def store(array: Any, i: Any, value: Any) -> None:
    """Set `array[i] = value`, rounded to nearest, ties to even. Only inside kernels.

    Args:
        array: An array of floats, or of the bits of 16-bit floats.
        i: Index.
        value: A float.
    """
    raise NotImplementedError("only inside kernels")


@overload(store, strict=False)
def _store(array: Any, i: Any, value: Any) -> Any:
    if array.dtype == types.uint16:

        def bfloat16(array: Any, i: Any, value: Any) -> None:
            bits = bits_of_float(np.float32(value))
            odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
            # For a NaN, the rounding could overflow into the sign bit.
            is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            array[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)

        return bfloat16
    if array.dtype == types.int16:

        def float16(array: Any, i: Any, value: Any) -> None:
            array[i] = _narrow_half(np.float32(value))

        return float16
    if array.dtype in (types.float32, types.float64):

        def same(array: Any, i: Any, value: Any) -> None:
            array[i] = value

        return same
    return None


def sums_like(array: Any, count: int) -> Any:
    """Return a new array for sums of elements of `array`: float64 for float64, otherwise float32. Only inside kernels.

    Args:
        array: An array of floats, or of the bits of 16-bit floats.
        count: Number of elements.
    """
    raise NotImplementedError("only inside kernels")


@overload(sums_like, strict=False)
def _sums_like(array: Any, count: Any) -> Any:
    if array.dtype == types.float64:
        return lambda array, count: np.empty(count, dtype=np.float64)
    return lambda array, count: np.empty(count, dtype=np.float32)


LOG2_E = np.float32(1.4426950408889634)

_TO_INTEGER = np.float32(1.5 * 2**23)  # adding it rounds to an integer in the last bits

# 2ʳ = 1 + c₁ r + c₂ r² + …, fitted for the smallest relative error (9e-8) over |r| ≤ 1/2.
_C1 = np.float32(0.6931469776)
_C2 = np.float32(0.24022242084)
_C3 = np.float32(0.055507337438)
_C4 = np.float32(0.0096715127195)
_C5 = np.float32(0.0013264727267)


@kernel()
def exp2(x: Any) -> Any:
    """Return 2 to the power of x, within 2 ulp for x from -126.5 to 127.5.

    Zero below (denormal results are zero), infinity above; NaN stays NaN.

    Args:
        x: float32.
    """
    # In this form a NaN fails both comparisons and passes through.
    x = np.float32(-127) if np.float32(-127) > x else x
    x = np.float32(128) if np.float32(128) < x else x
    shifted = x + _TO_INTEGER
    r = x - (shifted - _TO_INTEGER)
    mantissa = np.float32(1) + r * (_C1 + r * (_C2 + r * (_C3 + r * (_C4 + r * _C5))))
    # Build 2ⁿ from its exponent bits; n = -127 gives zero, n = 128 infinity.
    power = np.uint32(np.uint32(bits_of_float(shifted) << np.uint32(23)) + np.uint32(127 << 23))
    return mantissa * float_of_bits(power)
