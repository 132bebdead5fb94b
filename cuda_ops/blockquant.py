"""Quantize blocks to int8 or int4 with one scale each, for gathers and reductions with a quarter or an eighth of the
bytes.

Symmetric: an element is an integer in [-127, 127] or [-7, 7] times the scale of its block. The scale is the block's
largest magnitude divided by 127 or 7, as in ZeRO++ (arXiv:2306.10209) and 8-bit optimizers (arXiv:2110.02861).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import kernel
from cuda_ops.gpu import THREADS
from cuda_ops.kernel_math import bits_of_float, float_of_bits, load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

BLOCK = 256
"""Default elements per scale."""

_LEVELS = {8: 127, 4: 7}
"""Bits per element -> largest integer."""

_INFINITY_BITS = np.uint32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)
"""Smaller scales are denormal, and their inverses may be infinite."""
_ROUND = np.float32(1.5 * 2**23)
"""Added to a small number, it puts the nearest integer (ties to even) into the last bits."""
_ROUND_BITS = np.int32(_ROUND.view(np.int32))

_LANES = 32
"""GPU threads per block of elements."""


def block_quantize_reference(values: Tensor, *, bits: int = 8, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return (quantized, scales), computed with torch. This defines `block_quantize`.

    Args:
        values: (n,) floats.
        bits: 8 or 4.
        block: Elements per scale.
    """
    size, levels = values.shape[0], _LEVELS[bits]
    blocks = torch.nn.functional.pad(values.float(), (0, -size % block)).view(-1, block)
    scales = blocks.abs().amax(dim=1) / levels
    scales = torch.where(scales < float(_SMALLEST_SCALE), 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    finite = scales.isfinite()[:, None]
    # In double precision the product is exact, so that it is rounded once, as in a fused multiply-add.
    exact = blocks.double() * factors.double()[:, None]
    integers = torch.where(finite, exact, 0.0).round().to(torch.int8).flatten()[:size]
    if bits == 8:
        return integers, scales
    pairs = torch.nn.functional.pad(integers.view(torch.uint8) & 15, (0, size % 2)).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4), scales


def block_dequantize_reference(
    quantized: Tensor, scales: Tensor, out: Tensor, *, block: int = BLOCK, average: bool = False
) -> None:
    """Dequantize and sum with torch. This defines `block_dequantize_sum`.

    Args:
        quantized: (ranks, n) int8 or (ranks, ceil(n / 2)) uint8.
        scales: (ranks, ceil(n / block)) float32.
        out: (n,); overwritten.
        block: Elements per scale.
        average: Divide by the number of ranks.
    """
    integers = quantized
    if quantized.dtype is torch.uint8:
        nibbles = torch.stack([quantized & 15, quantized >> 4], dim=-1).flatten(1).to(torch.int8)
        integers = torch.where(nibbles > 7, nibbles - 16, nibbles)
    total = torch.zeros(out.shape[0])
    for row, scale in zip(integers, scales, strict=True):
        total += row[: out.shape[0]].float() * scale.repeat_interleave(block)[: out.shape[0]]
    out.copy_(total / len(scales) if average else total)


def block_quantize(values: Tensor, *, bits: int = 8, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return the integers and scales of blocks of `values`.

    A block with a NaN or an infinity gets the scale NaN and integers 0, so that all of it becomes NaN. A block whose
    scale would be denormal becomes zeros.

    Args:
        values: (n,) float32, bfloat16 or float16.
        bits: 8 or 4.
        block: Elements per scale, a power of two from 32 to 2048. The last block may be shorter.

    Returns:
        (n,) int8, or (ceil(n / 2),) uint8 with element 2i in the lower four bits of byte i (two's complement).
        (ceil(n / block),) float32: the scales.

    Raises:
        ValueError: Wrong dtypes, shapes or strides.
    """
    quantized, scales = _block_quantize(values, bits, block)
    return quantized, scales


def block_dequantize(quantized: Tensor, scales: Tensor, out: Tensor, *, block: int = BLOCK) -> None:
    """Set `out` to integers times scales.

    Args:
        quantized: (n,) int8 or (ceil(n / 2),) uint8, from `block_quantize`.
        scales: (ceil(n / block),) float32.
        out: (n,) float32, bfloat16 or float16; overwritten.
        block: Elements per scale.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _block_dequantize(quantized.unsqueeze(0), scales.unsqueeze(0), out, block, False)


def block_dequantize_sum(
    quantized: Tensor, scales: Tensor, out: Tensor, *, block: int = BLOCK, average: bool = False
) -> None:
    """Set `out` to the sum or mean over ranks of their quantized values, added in the order of ranks in float32.

    Args:
        quantized: (ranks, n) int8 or (ranks, ceil(n / 2)) uint8.
        scales: (ranks, ceil(n / block)) float32.
        out: (n,) float32, bfloat16 or float16; overwritten.
        block: Elements per scale.
        average: Divide by the number of ranks.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _block_dequantize(quantized, scales, out, block, average)


@register_jitable
def scale_of(largest: Any, levels: Any) -> tuple[Any, Any]:
    """Return the scale of a block and the factor for its elements.

    Args:
        largest: Bits of the largest magnitude, uint32.
        levels: Largest integer, float32.
    """
    if largest >= _INFINITY_BITS:
        return np.float32(np.nan), np.float32(0)
    scale = np.float32(float_of_bits(largest) / levels)
    if scale < _SMALLEST_SCALE:
        return np.float32(0), np.float32(0)
    return scale, np.float32(1) / scale


@register_jitable
def nearest(value: Any) -> Any:
    """Return the nearest integer as int32, ties to even; an arbitrary integer for NaN and beyond 2**22.

    Args:
        value: float32.
    """
    return np.int32(np.int32(bits_of_float(np.float32(value + _ROUND))) - _ROUND_BITS)


@register_jitable
def magnitude_bits(value: Any) -> Any:
    """Return the bits of |value|. Their order is that of magnitudes, with infinity and then NaN as the greatest.

    Unlike the maximum of floats, the maximum of these integers vectorises.

    Args:
        value: float32.
    """
    return np.uint32(bits_of_float(value) & np.uint32(0x7FFFFFFF))


@register_jitable
def low_nibble(byte: Any) -> Any:
    """Return the lower four bits of a byte, sign-extended, as float32.

    Args:
        byte: An integer.
    """
    return np.float32(np.int32((np.int32(byte) & np.int32(15)) ^ np.int32(8)) - np.int32(8))


@register_jitable
def high_nibble(byte: Any) -> Any:
    """Return the upper four bits of a byte, sign-extended, as float32.

    Args:
        byte: An integer.
    """
    return np.float32(np.int32((np.int32(byte) >> np.int32(4)) ^ np.int32(8)) - np.int32(8))


@kernel()
def _scale_block(values: Any, levels: Any) -> Any:
    """Return a block's scale, the factor of its elements, and a mask that sets integers to 0 if the scale is
    not finite.
    """
    largest = np.uint32(0)
    for i in range(values.shape[0]):
        largest = max(largest, magnitude_bits(load(values, i)))
    scale, factor = scale_of(largest, levels)
    return scale, factor, np.int32(0) if largest >= _INFINITY_BITS else np.int32(-1)


@kernel()
def _quantize_bytes(start: int, stop: int, values: Any, quantized: Any, scales: Any, block: int) -> None:
    for low in range(start, stop, block):
        high = min(low + block, stop)
        v, q = values[low:high], quantized[low:high]
        scale, factor, mask = _scale_block(v, np.float32(127))
        scales[low // block] = scale
        for i in range(v.shape[0]):
            q[i] = np.int8(nearest(load(v, i) * factor) & mask)


@kernel()
def _quantize_nibbles(start: int, stop: int, values: Any, quantized: Any, scales: Any, block: int) -> None:
    for low in range(start, stop, block):
        v = values[low : min(low + block, stop)]
        q = quantized[low // 2 : (low + v.shape[0] + 1) // 2]
        scale, factor, mask = _scale_block(v, np.float32(7))
        scales[low // block] = scale
        for j in range(v.shape[0] // 2):
            lower = nearest(load(v, 2 * j) * factor) & mask
            upper = nearest(load(v, 2 * j + 1) * factor) & mask
            q[j] = np.uint8((lower & np.int32(15)) | (upper << np.int32(4)))
        if v.shape[0] % 2:
            q[v.shape[0] // 2] = np.uint8(nearest(load(v, v.shape[0] - 1) * factor) & mask & np.int32(15))


@kernel()
def _dequantize_bytes(start: int, stop: int, quantized: Any, scales: Any, out: Any, block: int, divisor: Any) -> None:
    last = quantized.shape[0] - 1
    total = np.empty(block, dtype=np.float32)
    for low in range(start, stop, block):
        high = min(low + block, stop)
        target = out[low:high]
        # Divide the scale once instead of every element.
        q, scale = quantized[0, low:high], np.float32(scales[0, low // block] / divisor)
        if last == 0:  # The usual case. Skip `total`: its stores would queue after those to memory.
            for i in range(q.shape[0]):
                store(target, i, np.float32(q[i]) * scale)
            continue
        for i in range(q.shape[0]):
            total[i] = np.float32(q[i]) * scale
        for rank in range(1, last):
            q, scale = quantized[rank, low:high], np.float32(scales[rank, low // block] / divisor)
            for i in range(q.shape[0]):
                total[i] += np.float32(q[i]) * scale
        q, scale = quantized[last, low:high], np.float32(scales[last, low // block] / divisor)
        for i in range(q.shape[0]):
            store(target, i, total[i] + np.float32(q[i]) * scale)


@kernel()
def _dequantize_nibbles(start: int, stop: int, quantized: Any, scales: Any, out: Any, block: int, divisor: Any) -> None:
    last = quantized.shape[0] - 1
    lower, upper = np.zeros(block // 2, dtype=np.float32), np.zeros(block // 2, dtype=np.float32)
    for low in range(start, stop, block):
        target = out[low : min(low + block, stop)]
        width = target.shape[0]
        if last > 0:
            lower[:], upper[:] = 0, 0
        for rank in range(last):
            q = quantized[rank, low // 2 : (low + width + 1) // 2]
            scale = np.float32(scales[rank, low // block] / divisor)
            for j in range(q.shape[0]):
                lower[j] += low_nibble(q[j]) * scale
                upper[j] += high_nibble(q[j]) * scale
        q = quantized[last, low // 2 : (low + width + 1) // 2]
        scale = np.float32(scales[last, low // block] / divisor)
        for j in range(width // 2):
            store(target, 2 * j, lower[j] + low_nibble(q[j]) * scale)
            store(target, 2 * j + 1, upper[j] + high_nibble(q[j]) * scale)
        if width % 2:
            store(target, width - 1, lower[width // 2] + low_nibble(q[width // 2]) * scale)


def _quantize_cuda(values: Any, quantized: Any, scales: Any, block: int, levels: Any) -> None:
    """Quantize with _LANES threads per block. A byte of `quantized` holds one element if `levels` is 127, two
    if it is 7.
    """
    t = cuda.threadIdx.x
    lane = t % _LANES
    number = np.int64(cuda.blockIdx.x) * (THREADS // _LANES) + t // _LANES
    low = number * block
    width = min(block, values.shape[0] - low)  # Negative after the end: these threads only synchronise.
    largest = np.uint32(0)
    for i in range(lane, width, _LANES):
        largest = max(largest, magnitude_bits(load(values, np.uint64(low + i))))
    magnitudes = cuda.shared.array(THREADS, np.uint32)
    magnitudes[t] = largest
    half = _LANES // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            magnitudes[t] = max(magnitudes[t], magnitudes[t + half])
        half //= 2
    cuda.syncthreads()
    largest = magnitudes[t - lane]
    scale, factor = scale_of(largest, levels)
    mask = np.int32(0) if largest >= _INFINITY_BITS else np.int32(-1)
    if lane == 0 and width > 0:
        scales[np.uint64(number)] = scale
    if levels > np.float32(7):
        for i in range(lane, width, _LANES):
            integer = nearest(load(values, np.uint64(low + i)) * factor) & mask
            quantized[np.uint64(low + i)] = integer
        return
    for i in range(2 * lane, width, 2 * _LANES):
        byte = nearest(load(values, np.uint64(low + i)) * factor) & mask & np.int32(15)
        if i + 1 < width:
            upper = nearest(load(values, np.uint64(low + i + 1)) * factor) & mask & np.int32(15)
            byte |= upper << np.int32(4)
        quantized[np.uint64((low + i) // 2)] = byte


def _dequantize_cuda(quantized: Any, scales: Any, out: Any, shift: Any, divisor: Any, two_in_a_byte: bool) -> None:
    """Dequantize with one thread per element. A block has 1 << shift elements."""
    if cuda.grid(1) >= out.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    total = np.float32(0)
    for rank in range(quantized.shape[0]):
        scale = np.float32(scales[np.uint32(rank), i >> shift] / divisor)
        byte = quantized[np.uint32(rank), i >> np.uint64(1) if two_in_a_byte else i]
        value = np.float32(byte)
        if two_in_a_byte:
            value = high_nibble(byte) if i & np.uint64(1) else low_nibble(byte)
        total += value * scale
    store(out, i, total)


def _check_block(block: int) -> None:
    if not 32 <= block <= 2048 or block & (block - 1):
        raise ValueError(f"block: {block}, expected a power of two from 32 to 2048")


def _check_quantize(values: Tensor, bits: int, block: int) -> None:
    _check_block(block)
    if bits not in _LEVELS:
        raise ValueError(f"bits: {bits}, expected 8 or 4")
    check("values", values, dtypes=FLOATS, shape=[None])


def _check_dequantize(quantized: Tensor, scales: Tensor, out: Tensor, block: int, average: bool) -> None:
    _check_block(block)
    check("out", out, dtypes=FLOATS, shape=[None])
    check("quantized", quantized, dtypes=[torch.int8, torch.uint8], shape=[None, None], like=out)
    ranks, width = quantized.shape[0], out.shape[0]
    width = width if quantized.dtype is torch.int8 else -(-width // 2)
    check("quantized", quantized, shape=[None, width])
    if ranks == 0:
        raise ValueError(f"quantized: shape is {tuple(quantized.shape)}, expected at least one rank")
    check("scales", scales, dtypes=[torch.float32], shape=[ranks, -(-out.shape[0] // block)], like=out)


def _quantize_outputs(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    size = values.shape[0]
    scales = values.new_empty(-(-size // block), dtype=torch.float32)
    if bits == 8:
        return values.new_empty(size, dtype=torch.int8), scales
    return values.new_empty(-(-size // 2), dtype=torch.uint8), scales


def _cpu_quantize(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check_quantize(values, bits, block)
    quantized, scales = _quantize_outputs(values, bits, block)
    nbytes = values.nbytes + quantized.nbytes + scales.nbytes
    with meter.record(f"block_quantize_int{bits}", nbytes, values.device):
        arrays = [array(tensor) for tensor in (values, quantized, scales)]
        share(_quantize_bytes if bits == 8 else _quantize_nibbles, values.numel(), *arrays, block, multiple=block)
    return quantized, scales


def _cpu_dequantize(quantized: Tensor, scales: Tensor, out: Tensor, block: int, average: bool) -> None:
    _check_dequantize(quantized, scales, out, block, average)
    divisor = np.float32(quantized.shape[0] if average else 1)
    whole_bytes = quantized.dtype is torch.int8
    nbytes = quantized.nbytes + scales.nbytes + out.nbytes
    with meter.record(f"block_dequantize_int{8 if whole_bytes else 4}", nbytes, out.device):
        arrays = [array(tensor) for tensor in (quantized, scales, out)]
        dequantize = _dequantize_bytes if whole_bytes else _dequantize_nibbles
        share(dequantize, out.numel(), *arrays, block, divisor, multiple=block)


def _cuda_quantize(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check_quantize(values, bits, block)
    quantized, scales = _quantize_outputs(values, bits, block)
    nbytes = values.nbytes + quantized.nbytes + scales.nbytes
    blocks = gpu.blocks_for(scales.numel(), THREADS // _LANES)
    with meter.record(f"block_quantize_int{bits}", nbytes, values.device):
        levels = np.float32(_LEVELS[bits])
        gpu.launch(_quantize_cuda, blocks, values, quantized, scales, block, levels, device=values.device)
    return quantized, scales


def _cuda_dequantize(quantized: Tensor, scales: Tensor, out: Tensor, block: int, average: bool) -> None:
    _check_dequantize(quantized, scales, out, block, average)
    divisor = np.float32(quantized.shape[0] if average else 1)
    two_in_a_byte = quantized.dtype is torch.uint8
    nbytes = quantized.nbytes + scales.nbytes + out.nbytes
    numbers = (np.uint64(block.bit_length() - 1), divisor, two_in_a_byte)
    with meter.record(f"block_dequantize_int{4 if two_in_a_byte else 8}", nbytes, out.device):
        blocks = gpu.blocks_for(out.numel())
        gpu.launch(_dequantize_cuda, blocks, quantized, scales, out, *numbers, device=out.device)


def _fake_quantize(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    _check_quantize(values, bits, block)
    return _quantize_outputs(values, bits, block)


_block_quantize = register(
    "block_quantize(Tensor values, int bits, int block) -> (Tensor, Tensor)",
    cpu=_cpu_quantize,
    cuda=_cuda_quantize,
    fake=_fake_quantize,
)
_block_dequantize = register(
    "block_dequantize(Tensor quantized, Tensor scales, Tensor(a!) out, int block, bool average) -> ()",
    cpu=_cpu_dequantize,
    cuda=_cuda_dequantize,
    fake=_check_dequantize,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    for values in {dtype, torch.float32}:
        for bits in _LEVELS:
            quantized, scales = block_quantize(torch.zeros(1, dtype=values), bits=bits)
            block_dequantize(quantized, scales, torch.zeros(1, dtype=values))
