"""States in eight bits: a code an element, and a scale for each block of 256 (8-bit optimizers, arXiv:2110.02861).

Both maps are the paper's dynamic tree. The magnitude of an element, as a share of the largest of its block, lies in a
decade i, which has 2**i bins of one width: bin 2**i + j of decade i is

    10**(i - top) * (0.1 + 0.9 * (j .. j + 1) / 2**i),    j < 2**i,    i <= top,

so that large magnitudes are told apart finely, and seven (eight) powers of ten are told apart at all. A code is the
number of a bin, and stands for its middle; the map is stretched so that the last one's middle is 1, and the largest
magnitude comes back as it was.

- Signed, for the first moment: top = 6, bins 0 to 127, the sign in bit 7. Bin 0 lies around 0, and code 0 is 0.
- Unsigned, for the second moment: top = 7, bins 0 to 255. Bin 0 reaches from 0 to 1e-8, and its middle is not 0: a
  second moment that became 0 beside a first one that did not would make an update as large as 1 / eps allows
  (arXiv:2309.01507 leaves 0 out of its map for that reason).

Where a magnitude lies in its decade's bins is a line, and each decade's line is half as steep or less than the line
before, so that of all lines the lowest one counts: a code is the minimum of eight lines, and what it stands for is the
maximum of eight. That needs no table, no search and no branch, so it goes through vector registers.
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
from cuda_ops.library import register
from cuda_ops.meter import meter
from cuda_ops.tensor_checks import FLOATS, array, check
from cuda_ops.threads import share

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

BLOCK = 256
"""Elements that share a scale; the first block begins where the tensor does."""

SMALLEST_SCALE = 2.0**-100
"""Blocks whose largest magnitude is smaller become zeros: below, what codes stand for would be denormal."""

_INFINITY_BITS = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)

_LINES = 8
_FRACTION_BITS = 12
_UNIT = 2.0 ** (23 - _FRACTION_BITS)
"""Added to a bin's number, it leaves the number with twelve binary places in a float's last twenty bits."""

Lines = tuple[np.float32, ...]
"""(slope, offset) of eight lines, one after the other."""


def _middles(decades: int) -> list[float]:
    """What the bins stand for, in double precision, before the map is stretched."""
    tree = [10.0 ** (i + 1 - decades) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(decades) for j in range(2**i)]
    return [0.5 * 10.0**-decades if decades == _LINES else 0.0, *tree]


def _lines(decades: int) -> tuple[Lines, Lines]:
    """The lines from magnitudes to numbers of bins (whole and binary places, plus `_UNIT`), and from these to
    magnitudes. A map of fewer decades than eight has its last line several times."""
    middles, last = _middles(decades), _middles(decades)[-1]
    to_bins: list[float] = []
    to_values: list[float] = []
    for i in (min(line, decades - 1) for line in range(_LINES)):
        to_bins += [2**i * 10.0 ** (decades - 1 - i) / 0.9 * last, 2**i * 0.8 / 0.9 + _UNIT]
        # Of the first decade, which has one bin, and bin 0 beside it; of each other, its first bin and its last.
        low, high = (0, 1) if i == 0 else (2**i, 2 ** (i + 1) - 1)
        slope = float(np.float32((middles[high] - middles[low]) / (high - low) / last))
        through = 0 if i == 0 else high  # So that bin 0 is exactly what it should be, and the last one exactly 1.
        to_values += [slope, middles[through] / last - slope * through]
    return tuple(map(np.float32, to_bins)), tuple(map(np.float32, to_values))


SIGNED, SIGNED_VALUES = _lines(7)
UNSIGNED, UNSIGNED_VALUES = _lines(8)


def dynamic_map(*, signed: bool) -> Tensor:
    """(256,) float32: what each code stands for, as a share of its block's scale. Signed code 128 is -0."""
    codes = torch.arange(256)
    numbers = codes & 127 if signed else codes
    lines = np.array(SIGNED_VALUES if signed else UNSIGNED_VALUES, dtype=np.float64).reshape(_LINES, 2)
    # In double precision products are exact, so that what is rounded is the sum, as in a fused multiply-add.
    values = torch.stack([(numbers.double() * slope + offset).float() for slope, offset in lines]).amax(0)
    return torch.where(codes < 128, values, -values) if signed else values


def blockwise8_encode_reference(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The definition, in torch."""
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
    """The definition, in torch."""
    values = dynamic_map(signed=signed).to(codes.device)[codes.long()]
    out.copy_(values * scales.repeat_interleave(BLOCK)[: codes.shape[0]])


def blockwise8_encode(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """`codes` and `scales` = `values` (n,) float32, bfloat16 or float16 in blocks of 256.

    Args:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32, the largest magnitude of each block.
        signed: which of the two maps; the unsigned one takes magnitudes.

    What `blockwise8_decode` makes of them, encoded again, gives the same codes and scales. A block with a NaN or an
    infinity has the scale NaN and codes 0: all of it comes out NaN. A block without a magnitude of 2**-100 or more
    becomes zeros. Raises ValueError for wrong dtypes, shapes, strides or devices.
    """
    _encode(values, codes, scales, signed)


def blockwise8_decode(codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
    """`out` (n,) float32, bfloat16 or float16 = what the codes stand for, times scales, as `blockwise8_encode` wrote
    them.

    Raises ValueError for wrong dtypes, shapes, strides or devices.
    """
    _decode(codes, scales, out, signed)


@register_jitable(forceinline=True)
def line(x: Any, slope: Any, offset: Any) -> Any:
    """The bits of a line at `x`."""
    return bits_of_float(np.float32(x * slope + offset))


@register_jitable(forceinline=True)
def code_of(value: Any, factor: Any, lines: Any) -> Any:
    """The number of the bin of `value`, whose block has the inverse scale `factor`: uint32, some number for NaN.

    All lines are positive here, so that their bits are in the order of their values; and unlike floats the minimum of
    integers vectorises.
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
    """What bin `number` stands for. One line at least is not negative, and such bits are the greatest as integers."""
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
    """The code of an element of the first moment, as uint32."""
    sign = np.uint32(np.uint32(bits_of_float(value) & _SIGN) >> np.uint32(24))
    return np.uint32(code_of(value, factor, SIGNED) | sign)


@register_jitable(forceinline=True)
def unsigned_code(value: Any, factor: Any) -> Any:
    """The code of an element of the second moment, as uint32."""
    return code_of(value, factor, UNSIGNED)


@register_jitable(forceinline=True)
def signed_share(code: Any) -> Any:
    """What a code (uint32) of the first moment stands for."""
    value = bits_of_float(share_of(np.uint32(code & np.uint32(127)), SIGNED_VALUES))
    return float_of_bits(np.uint32(value | np.uint32(np.uint32(code & np.uint32(128)) << np.uint32(24))))


@register_jitable(forceinline=True)
def unsigned_share(code: Any) -> Any:
    """What a code (uint32) of the second moment stands for."""
    return share_of(code, UNSIGNED_VALUES)


@register_jitable
def scale_of(largest: Any) -> tuple[Any, Any]:
    """The scale of a block and what elements are multiplied by, from the bits of its largest magnitude."""
    if largest >= _INFINITY_BITS:
        return np.float32(np.nan), np.float32(0)
    scale = float_of_bits(largest)
    if scale < np.float32(SMALLEST_SCALE):
        return np.float32(0), np.float32(0)
    return scale, np.float32(np.float32(1) / scale)


@register_jitable
def _block_scale(values: Any) -> tuple[Any, Any, Any]:
    """A block's scale, the factor of its elements, and a mask that makes codes 0 where there is no number."""
    largest = np.uint32(0)
    for i in range(values.shape[0]):
        largest = max(largest, magnitude_bits(load(values, i)))
    scale, factor = scale_of(largest)
    return scale, factor, np.uint32(0) if largest >= _INFINITY_BITS else np.uint32(255)


@register_jitable
def encode_signed(values: Any, codes: Any) -> Any:
    """Write the codes of a block (at most 256 elements) and return its scale."""
    scale, factor, mask = _block_scale(values)
    for i in range(values.shape[0]):
        codes[i] = np.uint8(signed_code(load(values, i), factor) & mask)
    return scale


@register_jitable
def encode_unsigned(values: Any, codes: Any) -> Any:
    """Write the codes of a block (at most 256 elements) and return its scale."""
    scale, factor, mask = _block_scale(values)
    for i in range(values.shape[0]):
        codes[i] = np.uint8(unsigned_code(load(values, i), factor) & mask)
    return scale


@register_jitable
def decode_signed(codes: Any, scale: Any, out: Any) -> None:
    """Write what a block's codes stand for."""
    for i in range(codes.shape[0]):
        store(out, i, signed_share(np.uint32(codes[i])) * scale)


@register_jitable
def decode_unsigned(codes: Any, scale: Any, out: Any) -> None:
    """Write what a block's codes stand for."""
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
    """A thread for each element, and a block of threads for each block of elements."""
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
    """A thread for each element."""
    if cuda.grid(1) >= out.shape[0]:
        return
    i = np.uint64(cuda.grid(1))  # Unsigned: a signed index might count from the end, which Numba would look at.
    code = np.uint32(codes[i])
    value = signed_share(code) if signed else unsigned_share(code)
    store(out, i, value * scales[i // np.uint64(BLOCK)])


def check_codes(codes: Tensor, scales: Tensor, *, like: Tensor) -> None:
    """Raise ValueError unless these are codes and scales for the elements of `like`, where it is."""
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
    """Compile what a run that keeps states in eight bits needs: in whatever `dtype` it computes, they are float32."""
    codes, scales, values = torch.zeros(1, dtype=torch.uint8), torch.zeros(1), torch.zeros(1)
    blockwise8_encode(values, codes, scales, signed=True)
    blockwise8_decode(codes, scales, values, signed=True)
