"""8-bit optimizer states: one code per element and one scale per block of 256 (8-bit optimizers, arXiv:2110.02861).

Both maps are the paper's dynamic tree. The magnitude of an element, divided by the largest of its block, falls into a
decade i. Decade i has 2**i bins of equal width. Bin 2**i + j of decade i is

    10**(i - top) * (0.1 + 0.9 * (j .. j + 1) / 2**i),    j < 2**i,    i <= top,

so that large magnitudes have a fine resolution, and the map covers seven (eight) powers of ten. A code is the number
of a bin and decodes to the middle of the bin. The map is scaled so that the middle of the last bin is 1: the largest
magnitude is exact.

- Signed, for the first moment: top = 6, bins 0 to 127, the sign in bit 7. Bin 0 surrounds 0, and code 0 decodes to 0.
- Unsigned, for the second moment: top = 7, bins 0 to 255. Bin 0 covers 0 to 1e-8, and its middle is not 0. If a second
  moment became 0 while the first did not, the update would be as large as 1 / eps (arXiv:2309.01507 leaves 0 out of
  its map for that reason).

Within a decade, the bin number is a linear function of the magnitude. Each line is at most half as steep as the
previous one, so the lowest line is the valid one: a code is the minimum of eight lines, and a decoded value the
maximum of eight. This needs no table, no search and no branch, so that LLVM vectorises the loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.blockquant import magnitude_bits
from cuda_ops.compile import kernel
from cuda_ops.gpu import THREADS
from cuda_ops.kernel_math import bits_of_float, float_of_bits, load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

BLOCK = 256
"""Elements that share a scale. The first block begins at the start of the tensor."""

SMALLEST_SCALE = 2.0**-100
"""Blocks whose largest magnitude is smaller become zeros, because their decoded values would be denormal."""

_INFINITY_BITS = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)

_LINES = 8
_FRACTION_BITS = 12
_UNIT = 2.0 ** (23 - _FRACTION_BITS)
"""Added to a bin number, it puts the number with twelve binary places into the last twenty bits of a float."""

Lines = tuple[np.float32, ...]
"""(slope, offset) of eight lines, flattened."""


def _middles(decades: int) -> list[float]:
    """Return the middle of each bin in double precision, before the map is scaled."""
    tree = [10.0 ** (i + 1 - decades) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(decades) for j in range(2**i)]
    return [0.5 * 10.0**-decades if decades == _LINES else 0.0, *tree]


def _lines(decades: int) -> tuple[Lines, Lines]:
    """Return the lines from magnitudes to bin numbers (with binary places, plus `_UNIT`), and from these to magnitudes.

    A map with fewer than eight decades repeats its last line.
    """
    middles, last = _middles(decades), _middles(decades)[-1]
    to_bins: list[float] = []
    to_values: list[float] = []
    for i in (min(line, decades - 1) for line in range(_LINES)):
        to_bins += [2**i * 10.0 ** (decades - 1 - i) / 0.9 * last, 2**i * 0.8 / 0.9 + _UNIT]
        # The first decade has one bin: use bins 0 and 1. For the other decades use the first and the last bin.
        low, high = (0, 1) if i == 0 else (2**i, 2 ** (i + 1) - 1)
        slope = float(np.float32((middles[high] - middles[low]) / (high - low) / last))
        through = 0 if i == 0 else high  # Makes bin 0 exact and the last bin exactly 1.
        to_values += [slope, middles[through] / last - slope * through]
    return tuple(map(np.float32, to_bins)), tuple(map(np.float32, to_values))


SIGNED, SIGNED_VALUES = _lines(7)
UNSIGNED, UNSIGNED_VALUES = _lines(8)


def dynamic_map(*, signed: bool) -> Tensor:
    """Return (256,) float32: the decoded value of each code, as a share of the scale. Signed code 128 is -0.

    Args:
        signed: The map of the first moment; otherwise that of the second.
    """
    codes = torch.arange(256)
    numbers = codes & 127 if signed else codes
    lines = np.array(SIGNED_VALUES if signed else UNSIGNED_VALUES, dtype=np.float64).reshape(_LINES, 2)
    # In double precision the products are exact, so that only the sum is rounded, as in a fused multiply-add.
    values = torch.stack([(numbers.double() * slope + offset).float() for slope, offset in lines]).amax(0)
    return torch.where(codes < 128, values, -values) if signed else values


def blockwise8_encode_reference(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes, scales), computed with torch. This defines `blockwise8_encode`.

    Args:
        values: (n,) floats.
        signed: The map of the first moment; otherwise that of the second.
    """
    size = values.shape[0]
    blocks = torch.nn.functional.pad(values.float(), (0, -size % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    shares = blocks.abs() * torch.where(scales > 0, 1 / scales, 0.0)[:, None]
    lines = np.array(SIGNED if signed else UNSIGNED, dtype=np.float64).reshape(_LINES, 2)
    position = torch.stack([(shares.double() * slope + offset).float() for slope, offset in lines]).amin(0)
    codes = torch.where(scales.isfinite()[:, None], position - _UNIT, 0.0).floor().to(torch.uint8)
    if signed:
        codes |= (torch.signbit(blocks) & scales.isfinite()[:, None]).to(torch.uint8) << 7
    return codes.flatten()[:size], scales


def blockwise8_decode_reference(codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
    """Decode into `out`, computed with torch. This defines `blockwise8_decode`.

    Args:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.
        out: (n,) floats.
        signed: The map of the first moment; otherwise that of the second.
    """
    values = dynamic_map(signed=signed).to(codes.device)[codes.long()]
    out.copy_(values * scales.repeat_interleave(BLOCK)[: codes.shape[0]])


def blockwise8_encode(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Encode `values` into `codes` and `scales`, in blocks of 256.

    Encoding the result of `blockwise8_decode` again gives the same codes and scales. A block with a NaN or an infinity
    gets the scale NaN and codes 0, so that it decodes to NaN. A block whose magnitudes are all below 2**-100 becomes
    zeros.

    Args:
        values: (n,) float32, bfloat16 or float16.
        codes: (n,) uint8; overwritten.
        scales: (ceil(n / 256),) float32, the largest magnitude of each block; overwritten.
        signed: The map of the first moment; otherwise that of the second, which encodes magnitudes.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _encode(values, codes, scales, signed)


def blockwise8_decode(codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
    """Decode codes that `blockwise8_encode` wrote.

    Args:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.
        out: (n,) float32, bfloat16 or float16; overwritten.
        signed: As in `blockwise8_encode`.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _decode(codes, scales, out, signed)


@register_jitable(forceinline=True)
def line(x: Any, slope: Any, offset: Any) -> Any:
    """Return the bits of a line at `x`.

    Args:
        x: float32.
        slope: float32.
        offset: float32.
    """
    return bits_of_float(np.float32(x * slope + offset))


@register_jitable(forceinline=True)
def code_of(value: Any, factor: Any, lines: Any) -> Any:
    """Return the bin number of `value` as uint32; an arbitrary number for NaN.

    All lines are positive here, so that their bits have the order of their values. Unlike the minimum of floats, the
    minimum of integers vectorises.

    Args:
        value: float32.
        factor: Inverse scale of the block.
        lines: Lines from magnitudes to bin numbers.
    """
    x = float_of_bits(magnitude_bits(np.float32(value * factor)))
    lowest = min(line(x, lines[0], lines[1]), line(x, lines[2], lines[3]))
    lowest = min(lowest, line(x, lines[4], lines[5]))
    lowest = min(lowest, line(x, lines[6], lines[7]))
    lowest = min(lowest, line(x, lines[8], lines[9]))
    lowest = min(lowest, line(x, lines[10], lines[11]))
    lowest = min(lowest, line(x, lines[12], lines[13]))
    lowest = min(lowest, line(x, lines[14], lines[15]))
    return np.uint32(np.uint32(lowest >> np.uint32(_FRACTION_BITS)) & np.uint32(255))


@register_jitable(forceinline=True)
def share_of(number: Any, lines: Any) -> Any:
    """Return the decoded value of a bin, as a share of the scale.

    At least one line is not negative, and its bits are the greatest as integers.

    Args:
        number: Bin number.
        lines: Lines from bin numbers to magnitudes.
    """
    x = np.float32(np.int32(number))
    highest = max(np.int32(line(x, lines[0], lines[1])), np.int32(line(x, lines[2], lines[3])))
    highest = max(highest, np.int32(line(x, lines[4], lines[5])))
    highest = max(highest, np.int32(line(x, lines[6], lines[7])))
    highest = max(highest, np.int32(line(x, lines[8], lines[9])))
    highest = max(highest, np.int32(line(x, lines[10], lines[11])))
    highest = max(highest, np.int32(line(x, lines[12], lines[13])))
    highest = max(highest, np.int32(line(x, lines[14], lines[15])))
    return float_of_bits(np.uint32(highest))


@register_jitable(forceinline=True)
def signed_code(value: Any, factor: Any) -> Any:
    """Return the code of an element of the first moment, as uint32.

    Args:
        value: float32.
        factor: Inverse scale of the block.
    """
    sign = np.uint32(np.uint32(bits_of_float(value) & _SIGN) >> np.uint32(24))
    return np.uint32(code_of(value, factor, SIGNED) | sign)


@register_jitable(forceinline=True)
def unsigned_code(value: Any, factor: Any) -> Any:
    """Return the code of an element of the second moment, as uint32.

    Args:
        value: float32.
        factor: Inverse scale of the block.
    """
    return code_of(value, factor, UNSIGNED)


@register_jitable(forceinline=True)
def signed_share(code: Any) -> Any:
    """Return the decoded value of a code of the first moment, as a share of the scale.

    Args:
        code: uint32.
    """
    value = bits_of_float(share_of(np.uint32(code & np.uint32(127)), SIGNED_VALUES))
    return float_of_bits(np.uint32(value | np.uint32(np.uint32(code & np.uint32(128)) << np.uint32(24))))


@register_jitable(forceinline=True)
def unsigned_share(code: Any) -> Any:
    """Return the decoded value of a code of the second moment, as a share of the scale.

    Args:
        code: uint32.
    """
    return share_of(code, UNSIGNED_VALUES)


@register_jitable
def scale_of(largest: Any) -> tuple[Any, Any]:
    """Return the scale of a block and the factor for its elements.

    Args:
        largest: Bits of the largest magnitude, uint32.
    """
    if largest >= _INFINITY_BITS:
        return np.float32(np.nan), np.float32(0)
    scale = float_of_bits(largest)
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(0), np.float32(0)
    return scale, np.float32(np.float32(1) / scale)


@register_jitable
def _block_scale(values: Any) -> tuple[Any, Any, Any]:
    """Return a block's scale, the factor of its elements, and a mask that sets codes to 0 if the scale is not
    finite.
    """
    largest = np.uint32(0)
    for i in range(values.shape[0]):
        largest = max(largest, magnitude_bits(load(values, i)))
    scale, factor = scale_of(largest)
    return scale, factor, np.uint32(0) if largest >= _INFINITY_BITS else np.uint32(255)


@register_jitable
def encode_signed(values: Any, codes: Any) -> Any:
    """Write the codes of a block of the first moment and return its scale.

    Args:
        values: At most 256 floats.
        codes: As many uint8.
    """
    scale, factor, mask = _block_scale(values)
    for i in range(values.shape[0]):
        codes[i] = np.uint8(signed_code(load(values, i), factor) & mask)
    return scale


@register_jitable
def encode_unsigned(values: Any, codes: Any) -> Any:
    """Write the codes of a block of the second moment and return its scale.

    Args:
        values: At most 256 floats.
        codes: As many uint8.
    """
    scale, factor, mask = _block_scale(values)
    for i in range(values.shape[0]):
        codes[i] = np.uint8(unsigned_code(load(values, i), factor) & mask)
    return scale


@register_jitable
def decode_signed(codes: Any, scale: Any, out: Any) -> None:
    """Write the decoded values of a block of the first moment.

    Args:
        codes: At most 256 uint8.
        scale: Scale of the block.
        out: As many floats.
    """
    for i in range(codes.shape[0]):
        store(out, i, signed_share(np.uint32(codes[i])) * scale)


@register_jitable
def decode_unsigned(codes: Any, scale: Any, out: Any) -> None:
    """Write the decoded values of a block of the second moment.

    Args:
        codes: At most 256 uint8.
        scale: Scale of the block.
        out: As many floats.
    """
    for i in range(codes.shape[0]):
        store(out, i, unsigned_share(np.uint32(codes[i])) * scale)


@kernel()
def _encode_blocks(start: int, stop: int, values: Any, codes: Any, scales: Any, signed: bool) -> None:
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        if signed:
            scales[low // BLOCK] = encode_signed(values[low:high], codes[low:high])
        else:
            scales[low // BLOCK] = encode_unsigned(values[low:high], codes[low:high])


@kernel()
def _decode_blocks(start: int, stop: int, codes: Any, scales: Any, out: Any, signed: bool) -> None:
    for low in range(start, stop, BLOCK):
        high = min(low + BLOCK, stop)
        if signed:
            decode_signed(codes[low:high], scales[low // BLOCK], out[low:high])
        else:
            decode_unsigned(codes[low:high], scales[low // BLOCK], out[low:high])


def _encode_cuda(values: Any, codes: Any, scales: Any, signed: bool) -> None:
    """Encode with one thread per element and one block of threads per block of elements."""
    t = cuda.threadIdx.x
    i = np.int64(cuda.blockIdx.x) * THREADS + t
    inside = i < values.shape[0]
    value = np.float32(0)
    if inside:
        value = load(values, np.uint64(i))
    magnitudes = cuda.shared.array(THREADS, np.uint32)
    magnitudes[t] = magnitude_bits(value)
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            magnitudes[t] = max(magnitudes[t], magnitudes[t + half])
        half //= 2
    cuda.syncthreads()
    largest = magnitudes[0]
    scale, factor = scale_of(largest)
    if not inside:
        return
    if t == 0:
        scales[np.uint64(cuda.blockIdx.x)] = scale
    code = np.uint32(0)
    if largest < _INFINITY_BITS:
        code = signed_code(value, factor) if signed else unsigned_code(value, factor)
    codes[np.uint64(i)] = code


def _decode_cuda(codes: Any, scales: Any, out: Any, signed: bool) -> None:
    """Decode with one thread per element."""
    if cuda.grid(1) >= out.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: for a signed index, Numba adds a check for negative values.
    code = np.uint32(codes[i])
    value = signed_share(code) if signed else unsigned_share(code)
    store(out, i, value * scales[i // np.uint64(BLOCK)])


def check_codes(codes: Tensor, scales: Tensor, *, like: Tensor) -> None:
    """Raise ValueError unless dtypes, shapes and devices fit the elements of `like`.

    Args:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.
        like: (n,) tensor of the elements.
    """
    check("codes", codes, dtypes=[torch.uint8], shape=like.shape, like=like)
    check("scales", scales, dtypes=[torch.float32], shape=[-(-like.shape[0] // BLOCK)], like=like)


def _check_encode(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    check("values", values, dtypes=FLOATS, shape=[None])
    check_codes(codes, scales, like=values)


def _check_decode(codes: Tensor, scales: Tensor, out: Tensor, signed: bool) -> None:
    check("out", out, dtypes=FLOATS, shape=[None])
    check_codes(codes, scales, like=out)


def _cpu_encode(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    _check_encode(values, codes, scales, signed)
    with meter.record("blockwise8_encode", values.nbytes + codes.nbytes + scales.nbytes, values.device):
        share(_encode_blocks, values.numel(), array(values), array(codes), array(scales), signed, multiple=BLOCK)


def _cpu_decode(codes: Tensor, scales: Tensor, out: Tensor, signed: bool) -> None:
    _check_decode(codes, scales, out, signed)
    with meter.record("blockwise8_decode", codes.nbytes + scales.nbytes + out.nbytes, out.device):
        share(_decode_blocks, out.numel(), array(codes), array(scales), array(out), signed, multiple=BLOCK)


def _cuda_encode(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    _check_encode(values, codes, scales, signed)
    with meter.record("blockwise8_encode", values.nbytes + codes.nbytes + scales.nbytes, values.device):
        blocks = gpu.blocks_for(values.numel())
        gpu.launch(_encode_cuda, blocks, values, codes, scales, signed, device=values.device)


def _cuda_decode(codes: Tensor, scales: Tensor, out: Tensor, signed: bool) -> None:
    _check_decode(codes, scales, out, signed)
    with meter.record("blockwise8_decode", codes.nbytes + scales.nbytes + out.nbytes, out.device):
        gpu.launch(_decode_cuda, gpu.blocks_for(out.numel()), codes, scales, out, signed, device=out.device)


_encode = register(
    "blockwise8_encode(Tensor values, Tensor(a!) codes, Tensor(b!) scales, bool signed) -> ()",
    cpu=_cpu_encode,
    cuda=_cuda_encode,
    fake=_check_encode,
)
_decode = register(
    "blockwise8_decode(Tensor codes, Tensor scales, Tensor(a!) out, bool signed) -> ()",
    cpu=_cpu_decode,
    cuda=_cuda_decode,
    fake=_check_decode,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels that a run with 8-bit states needs.

    Args:
        dtype: Ignored: the states are float32 in every run.
    """
    codes, scales, values = torch.zeros(1, dtype=torch.uint8), torch.zeros(1), torch.zeros(1)
    blockwise8_encode(values, codes, scales, signed=True)
    blockwise8_decode(codes, scales, values, signed=True)
