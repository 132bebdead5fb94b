"""Powers of two inside CPU kernels, in float32, in a form that vectorises (`np.exp` and `np.exp2` do not).

e to the power of x is `exp2(x * LOG2_E)`; a kernel that subtracts before it multiplies both by `LOG2_E` first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_ops.compile import kernel
from cuda_ops.elements import bits_of_float, float_of_bits

LOG2_E = np.float32(1.4426950408889634)

_TO_INTEGER = np.float32(1.5 * 2**23)  # adding it rounds to an integer, which then stands in the last bits

# 2ʳ = 1 + c₁ r + c₂ r² + …, fitted for the smallest relative error (9e-8) over |r| ≤ 1/2.
_C1 = np.float32(0.6931469776)
_C2 = np.float32(0.24022242084)
_C3 = np.float32(0.055507337438)
_C4 = np.float32(0.0096715127195)
_C5 = np.float32(0.0013264727267)


@kernel()
def exp2(x: Any) -> Any:
    """2 to the power of x, both float32, within 2 ulp for x from -126.5 to 127.5.

    Zero below (denormal results are zero), infinity above; NaN stays NaN.
    """
    # Written so that a NaN fails both comparisons and passes.
    x = np.float32(-127) if np.float32(-127) > x else x
    x = np.float32(128) if np.float32(128) < x else x
    shifted = x + _TO_INTEGER
    r = x - (shifted - _TO_INTEGER)
    mantissa = np.float32(1) + r * (_C1 + r * (_C2 + r * (_C3 + r * (_C4 + r * _C5))))
    # 2ⁿ by its exponent bits; n = -127 gives zero, n = 128 infinity.
    power = np.uint32(np.uint32(bits_of_float(shifted) << np.uint32(23)) + np.uint32(127 << 23))
    return mantissa * float_of_bits(power)
