"""CUDA kernels in Numba's simulator, against their references: run by test_cuda_simulated.py in a process of its own.

The simulator runs kernels as plain Python, a thread for each thread, and knows no intrinsics: what reads and writes
bits is replaced by numpy here. Everything else is what a GPU runs, grids and arguments included.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import config
from torch import Tensor

from cuda_ops import (
    adam_frozen_variance,
    adamw,
    blockquant,
    blockwise8,
    gpu,
    grad_stats,
    lamb,
    onebit,
    sgd_momentum,
    stochastic,
)
from cuda_ops.tensor_checks import array

_TORCH = {np.dtype(np.uint16): torch.bfloat16, np.dtype(np.int16): torch.float16}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -1.0]


def launch(
    function: Callable[..., Any], blocks: int, *arguments: Any, device: torch.device, threads: int = gpu.THREADS
) -> None:
    kernel = gpu.compiled(function)
    kernel[blocks, threads](*(array(value) if isinstance(value, Tensor) else value for value in arguments))


def load(values: Any, i: Any) -> np.float32:
    dtype = _TORCH.get(values.dtype)
    bits = np.asarray([values[i]])
    return np.float32(values[i] if dtype is None else torch.from_numpy(bits).view(dtype).float().item())


def store(values: Any, i: Any, value: Any) -> None:
    dtype = _TORCH.get(values.dtype)
    values[i] = value if dtype is None else array(torch.tensor([float(value)]).to(dtype))[0]


def float_of_bits(bits: Any) -> np.float32:
    return np.uint32(bits).view(np.float32)


def bits_of_float(value: Any) -> np.uint32:
    return np.float32(value).view(np.uint32)


def install() -> None:
    for module in (
        adam_frozen_variance,
        adamw,
        lamb,
        sgd_momentum,
        grad_stats,
        onebit,
        onebit,
        blockquant,
        blockwise8,
        stochastic,
    ):
        replaced = {"load": load, "store": store, "float_of_bits": float_of_bits, "bits_of_float": bits_of_float}
        for name in replaced.keys() & vars(module).keys():
            setattr(module, name, replaced[name])
    gpu.launch = launch


def same(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 16 * 2**-24) -> None:
    """Sixteen roundings in float32 at most, of values about 1."""
    torch.testing.assert_close(list(got), list(expected), rtol=tolerance, atol=tolerance, equal_nan=True)


def values_of(size: int, dtype: torch.dtype, special: bool = False) -> Tensor:
    values = torch.randn(size)
    if special:
        values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values.to(dtype)


def check_updates() -> None:
    for size in (1, gpu.THREADS, gpu.THREADS + 1):
        for dtype in FLOATS:
            copy = None if dtype is torch.float32 else torch.zeros(size, dtype=dtype)
            grad = values_of(size, dtype, special=size > 1)
            mine = [torch.randn(size), torch.randn(size), torch.rand(size)]
            expected = [tensor.clone() for tensor in mine]
            numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
            adamw._cuda(mine[0], grad, mine[1], mine[2], copy, *numbers.values(), 0.5)
            adamw.adamw_reference(expected[0], grad, *expected[1:], **numbers, factor=0.5)
            same(mine, expected)
            if copy is not None:
                same([copy], [mine[0].to(dtype)], 0)
            for first, nesterov in [(True, False), (False, False), (False, True)]:
                mine = [torch.randn(size), torch.full((size,), math.nan) if first else torch.randn(size)]
                expected = [tensor.clone() for tensor in mine]
                sgd_momentum._cuda(mine[0], grad, mine[1], copy, 0.1, 0.9, 0.0, 0.1, nesterov, first, 0.5)
                numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "first": first}
                sgd_momentum.sgd_momentum_reference(expected[0], grad, expected[1], **numbers, factor=0.5)
                same(mine, expected)
            mine = [torch.randn(size), torch.randn(size), torch.rand(size)]
            expected = [tensor.clone() for tensor in mine]
            squares = lamb._cuda(mine[0], grad, *mine[1:], 0.9, 0.99, 1e-8, 0.1, 3, 0.5)
            numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "factor": 0.5}
            right = lamb.lamb_moments_reference(expected[0], grad, *expected[1:], **numbers)
            same([*mine, squares], [*expected, right])
            mine = [torch.randn(size), torch.full((size,), math.nan)]
            expected, variance = [tensor.clone() for tensor in mine], torch.rand(size) + 0.1
            adam_frozen_variance._cuda(mine[0], grad, mine[1], variance, copy, 0.01, 0.1, 1e-8)
            numbers = {"size": 0.01, "decay": 0.1, "eps": 1e-8}
            adam_frozen_variance.adam_frozen_reference(expected[0], grad, expected[1], variance, **numbers)
            same(mine, expected)


def check_grad_stats() -> None:
    grad_stats._MOST_BLOCKS = 3  # So that threads go round.
    for size in (1, 5 * gpu.THREADS + 3):
        for dtype in FLOATS:
            grad = values_of(size, dtype)
            same([grad_stats._cuda(grad)], [grad_stats.grad_stats_reference(grad)])
    grad = torch.ones(700)
    grad[::100] = math.inf
    assert grad_stats._cuda(grad).tolist() == [math.inf, 7]
    grad[699] = math.nan
    squares, not_finite = grad_stats._cuda(grad).tolist()
    assert math.isnan(squares)
    assert not_finite == 8


def check_onebit() -> None:
    onebit._THREADS = onebit._AVERAGE_THREADS = (
        64  # The simulator's threads are threads; so few go round within a chunk.
    )
    for size, chunk in [(0, 64), (1, 64), (150, 128), (75, 24)]:
        values, error = values_of(size, torch.bfloat16), torch.randn(size)
        expected_error = error.clone()
        packed, scales = onebit._cuda_pack(values, error, 0.5, chunk)
        expected = onebit.onebit_pack_reference(values, expected_error, factor=0.5, chunk=chunk)
        same([packed, scales, error], [*expected, expected_error])
        for dtype in (torch.float32, torch.bfloat16):
            out, expected_out = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
            rows, weights = torch.stack([packed, ~packed, packed]), torch.stack([scales, 2 * scales, 4 * scales])
            onebit._cuda_average(rows, weights, out, chunk)
            onebit.onebit_average_reference(rows, weights, expected_out, chunk=chunk)
            same([out], [expected_out])
        mine = [torch.randn(3 * size), torch.zeros(3 * size)]
        taken = [each.clone() for each in mine]
        squares = onebit._cuda(rows, weights, *mine, 0.9, chunk)
        if size:
            right = onebit.onebit_take_reference(rows, weights, *taken, share=0.9, chunk=chunk)
            same([squares, *mine], [right, *taken], 64 * 2**-24)


def check_blockquant() -> None:
    for size, block in [(0, 32), (1, 32), (65, 32), (515, 256)]:
        for bits in (8, 4):
            values = values_of(size, torch.bfloat16, special=size > 100)
            quantized, scales = blockquant._cuda_quantize(values, bits, block)
            expected = blockquant.block_quantize_reference(values, bits=bits, block=block)
            # The simulator has no fused multiply-add: ties may go to the other integer.
            close = quantized.int() - expected[0].int()
            assert (close == 0).float().mean() > 0.97 or size < 2
            same([scales], [expected[1]])
            for dtype in (torch.float32, torch.float16):
                rows, weights = torch.stack([quantized, quantized]), torch.stack([scales, 3 * scales])
                out, expected_out = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
                blockquant._cuda_dequantize(rows, weights, out, block, True)
                blockquant.block_dequantize_reference(rows, weights, expected_out, block=block, average=True)
                same([out], [expected_out])


def close_codes(got: Tensor, expected: Tensor) -> None:
    """The simulator has no fused multiply-add: what lies on the edge of two bins may go to either."""
    separate = (got.int() - expected.int()).abs()
    assert (separate <= 1).all()
    assert (separate == 0).float().mean() > 0.98 or len(got) < 2


def check_blockwise8() -> None:
    for size in (0, 1, 256, 515):
        for signed in (True, False):
            values = values_of(size, torch.bfloat16, special=size > 256)
            codes, scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(-(-size // blockwise8.BLOCK))
            blockwise8._cuda_encode(values, codes, scales, signed)
            expected, expected_scales = blockwise8.blockwise8_encode_reference(values, signed=signed)
            same([scales], [expected_scales], 0)
            close_codes(codes, expected)
            for dtype in (torch.float32, torch.float16):
                out, right = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
                blockwise8._cuda_decode(codes, scales, out, signed)
                blockwise8.blockwise8_decode_reference(codes, scales, right, signed=signed)
                same([out], [right])


def check_stochastic() -> None:
    for size, offset in [(0, 0), (1, 3), (515, 2**32 - 300), (300, 2**33 + 7)]:
        values, out = values_of(size, torch.float32, special=size > 1), torch.zeros(size, dtype=torch.bfloat16)
        stochastic._cuda(values, out, 2**63 - 1, 3, offset)
        expected = stochastic.round_stochastically_reference(values, 2**63 - 1, 3, offset)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


if __name__ == "__main__":
    assert config.ENABLE_CUDASIM, "run with NUMBA_ENABLE_CUDASIM=1"
    warnings.simplefilter("ignore", RuntimeWarning)  # Overflows and NaN are what is tried.
    torch.manual_seed(0)
    install()
    {
        "updates": check_updates,
        "grad_stats": check_grad_stats,
        "onebit": check_onebit,
        "blockquant": check_blockquant,
        "blockwise8": check_blockwise8,
        "stochastic": check_stochastic,
    }[sys.argv[1]]()
    print("as defined")
