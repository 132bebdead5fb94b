"""Every launch of every CUDA kernel, made from CPU tensors: what runs is decided by who replaces `gpu.launch`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_ops import (
    adam_frozen_variance,
    adamw,
    blockquant,
    blockwise8,
    grad_stats,
    lamb,
    onebit,
    sgd_momentum,
    stochastic,
)

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _adamw(grad: torch.dtype, copy: torch.dtype | None) -> None:
    tensors = [torch.ones(9), torch.ones(9, dtype=grad), torch.ones(9), torch.ones(9)]
    copied = None if copy is None else torch.ones(9, dtype=copy)
    adamw._cuda(*tensors, copied, 0.1, 0.9, 0.99, 1e-8, 0.1, 1, 1.0)


def _sgd_momentum(grad: torch.dtype, copy: torch.dtype | None) -> None:
    tensors = [torch.ones(9), torch.ones(9, dtype=grad), torch.ones(9)]
    copied = None if copy is None else torch.ones(9, dtype=copy)
    sgd_momentum._cuda(*tensors, copied, 0.1, 0.9, 0.0, 0.1, True, False, 1.0)


def _adam_frozen(dtype: torch.dtype) -> None:
    copy = torch.ones(9, dtype=dtype)
    adam_frozen_variance._cuda(torch.ones(9), copy.clone(), torch.ones(9), torch.ones(9), copy, 0.1, 0.1, 1e-8)


def _lamb_moments(dtype: torch.dtype) -> None:
    lamb._cuda(torch.ones(9), torch.ones(9, dtype=dtype), torch.ones(9), torch.ones(9), 0.9, 0.99, 1e-8, 0.1, 1, 1.0)


def _onebit_take() -> None:
    packed, scales = torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2, 1)
    onebit._cuda(packed, scales, torch.ones(18), torch.ones(18), 0.9, 16)


def _onebit_average(dtype: torch.dtype) -> None:
    onebit._cuda_average(torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2, 1), torch.ones(9, dtype=dtype), 16)


def _dequantize(dtype: torch.dtype, bits: int) -> None:
    quantized = torch.zeros(2, 9, dtype=torch.int8) if bits == 8 else torch.zeros(2, 5, dtype=torch.uint8)
    blockquant._cuda_dequantize(quantized, torch.ones(2, 1), torch.ones(9, dtype=dtype), 32, True)


def _encode8(dtype: torch.dtype, signed: bool) -> None:
    blockwise8._cuda_encode(torch.ones(9, dtype=dtype), torch.zeros(9, dtype=torch.uint8), torch.ones(1), signed)


def _decode8(dtype: torch.dtype, signed: bool) -> None:
    blockwise8._cuda_decode(torch.zeros(9, dtype=torch.uint8), torch.ones(1), torch.ones(9, dtype=dtype), signed)


LAUNCHES: dict[str, Callable[[], object]] = {
    "round_stochastically": lambda: stochastic._cuda(torch.ones(9), torch.ones(9, dtype=torch.bfloat16), 3, 1, 5),
    "onebit_take": _onebit_take,
}
for name, dtype in FLOATS.items():
    LAUNCHES |= {
        f"adamw-{name}": lambda dtype=dtype: _adamw(dtype, None),
        f"adamw-{name}-copy": lambda dtype=dtype: _adamw(torch.float32, dtype),
        f"sgd_momentum-{name}": lambda dtype=dtype: _sgd_momentum(dtype, None),
        f"sgd_momentum-{name}-copy": lambda dtype=dtype: _sgd_momentum(torch.float32, dtype),
        f"grad_stats-{name}": lambda dtype=dtype: grad_stats._cuda(torch.ones(9, dtype=dtype)),
        f"onebit_pack-{name}": lambda dtype=dtype: onebit._cuda_pack(
            torch.ones(9, dtype=dtype), torch.ones(9), 1.0, 16
        ),
        f"lamb_moments-{name}": lambda dtype=dtype: _lamb_moments(dtype),
        f"adam_frozen-{name}": lambda dtype=dtype: _adam_frozen(dtype),
        f"onebit_average-{name}": lambda dtype=dtype: _onebit_average(dtype),
    }
    for bits in (8, 4):
        LAUNCHES |= {
            f"quantize-int{bits}-{name}": lambda dtype=dtype, bits=bits: blockquant._cuda_quantize(
                torch.ones(9, dtype=dtype), bits, 32
            ),
            f"dequantize-int{bits}-{name}": lambda dtype=dtype, bits=bits: _dequantize(dtype, bits),
        }
    for signed in (True, False):
        LAUNCHES |= {
            f"encode8-{signed}-{name}": lambda dtype=dtype, signed=signed: _encode8(dtype, signed),
            f"decode8-{signed}-{name}": lambda dtype=dtype, signed=signed: _decode8(dtype, signed),
        }
