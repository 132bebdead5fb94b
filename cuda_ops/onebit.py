"""One-bit compression with error feedback, as 1-bit Adam sends its momentum (arXiv:2102.02888).

1. `onebit_pack`: each element is sent as its sign, scaled by the mean magnitude of its chunk. The compression error is
   kept and added the next time. A chunk's mean must be known before its first sign is useful, so every element is read
   twice. Chunks fit the cache, which makes the second read free: 12 bytes per element in float32 from and to memory
   (values and error read, error written) and an eighth of a byte of signs. One mean for the whole tensor would cost
   20.
2. `onebit_average`: decode the messages of all ranks and average them.
3. `onebit_take`: finish an exchange on one rank in one pass: decode each rank's slice of the mean, and update what
   this rank keeps for the next exchange. Until all messages have arrived, the buffer of the values holds the
   compression error (`onebit_pack`). Here the mean replaces the error there, and the kept tensor receives the error
   plus a share of the mean. That costs 16 bytes per element in float32, instead of 32 for separate decoding, copying
   and adding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import EXACT, REORDERED, kernel
from cuda_ops.kernel_math import intrinsic, load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register
from cuda_ops.parallel_for import share
from cuda_ops.tensor_checks import FLOATS, array, check

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

CHUNK = 1 << 14
"""Elements that share a scale: 64 KiB of float32, which fit the second-level cache."""

_THREADS = 1024
"""GPU threads per chunk. Many threads, so that few chunks are in progress and their second read hits the cache."""


def onebit_pack_reference(
    values: Tensor | None, error: Tensor, *, factor: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return (packed, scales), computed with torch. This defines `onebit_pack`.

    Args:
        values: (n,) floats or None.
        error: (n,) float32; updated in place.
        factor: Factor of the error.
        chunk: Elements per scale.
    """
    corrected = factor * error if values is None else values.float() + factor * error
    pieces = corrected.split(chunk)
    scales = torch.stack([piece.abs().mean() for piece in pieces]) if len(corrected) else corrected
    positive = corrected >= 0
    sent = torch.where(positive, 1.0, -1.0) * scales.repeat_interleave(chunk)[: len(corrected)]
    error.copy_(corrected - sent)
    bits = torch.nn.functional.pad(positive, (0, -len(positive) % 8)).view(-1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=1, dtype=torch.uint8), scales


def onebit_average_reference(packed: Tensor, scales: Tensor, out: Tensor, *, chunk: int = CHUNK) -> None:
    """Average with torch. This defines `onebit_average`.

    Args:
        packed: (ranks, ceil(n / 8)) uint8.
        scales: (ranks, ceil(n / chunk)) float32.
        out: (n,); overwritten.
        chunk: Elements per scale.
    """
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    signs = bits.flatten(1)[:, : len(out)].float() * 2 - 1
    out.copy_((signs * scales.repeat_interleave(chunk, dim=1)[:, : len(out)]).mean(dim=0))


def onebit_pack(
    values: Tensor | None, error: Tensor, *, factor: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return the signs of `values + factor · error`, eight per byte, and the mean magnitude of each chunk.

    A chunk with a NaN or an infinity has that mean, so that the receiver gets no finite value from it. The error of
    the chunk is then lost: check with `grad_stats` before.

    Args:
        values: (n,) float32, bfloat16 or float16; None for zeros.
        error: (n,) float32; replaced by the compression error of `values + factor · error`.
        factor: Factor of the error.
        chunk: Elements per mean, a multiple of 8. The last chunk may be shorter.

    Returns:
        (ceil(n / 8),) uint8: bit i of byte j is set if element 8j + i is not negative; unused bits are 0.
        (ceil(n / chunk),) float32: the means.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    packed, scales = _onebit_pack(values, error, factor, chunk)
    return packed, scales


def onebit_average(packed: Tensor, scales: Tensor, out: Tensor, *, chunk: int = CHUNK) -> None:
    """Set `out` to the mean over ranks of their messages, added in the order of ranks.

    Args:
        packed: (ranks, ceil(n / 8)) uint8, from `onebit_pack`.
        scales: (ranks, ceil(n / chunk)) float32.
        out: (n,) float32, bfloat16 or float16; overwritten.
        chunk: Elements per scale.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    _onebit_average(packed, scales, out, chunk)


# LLVM does not vectorise loops between comparisons and bits, but vector types have one instruction for each.
_LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_MASK = ir.IntType(_LANES)


@intrinsic
def _store_signs(typingctx: Any, values: Any, i: Any, packed: Any, j: Any) -> Any:
    """Set packed[j : j + 2] (uint8) to the signs of values[i : i + 16] (float32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = builder.bitcast(_element(context, builder, signature, arguments, 0), _VECTOR.as_pointer())
        positive = builder.fcmp_ordered(">=", builder.load(source, align=4), ir.Constant(_VECTOR, [0.0] * _LANES))
        target = builder.bitcast(_element(context, builder, signature, arguments, 2), _MASK.as_pointer())
        builder.store(builder.bitcast(positive, _MASK), target, align=1)
        return context.get_dummy_value()

    return types.void(values, types.intp, packed, types.intp), generate


@intrinsic
def _store_sums(typingctx: Any, out: Any, i: Any, packed: Any, j: Any, weights: Any) -> Any:
    """Set out[i : i + 16] to the sum over rows r of ±weights[r], by the bits of packed[r, j : j + 2].

    A set bit adds weights[r], a clear bit subtracts it. The sum stays in one register: with a scratch array it took
    three times as long.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = context.make_array(signature.args[2])(context, builder, arguments[2])
        count, stride = (cgutils.unpack_tuple(builder, pair)[0] for pair in (rows.shape, rows.strides))
        weights = context.make_array(signature.args[4])(context, builder, arguments[4]).data
        result = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * _LANES))
        with cgutils.for_range(builder, count) as loop:
            offset = builder.add(builder.mul(loop.index, stride), arguments[3])
            source = builder.bitcast(cgutils.gep(builder, rows.data, offset), _MASK.as_pointer())
            mask = builder.bitcast(builder.load(source, align=1), ir.VectorType(ir.IntType(1), _LANES))
            weight = _broadcast(builder, builder.load(cgutils.gep(builder, weights, loop.index)))
            before = builder.load(result)
            builder.store(builder.select(mask, builder.fadd(before, weight), builder.fsub(before, weight)), result)
        rounded = _rounded(builder, builder.load(result), signature.args[0].dtype)
        target = builder.bitcast(_element(context, builder, signature, arguments, 0), rounded.type.as_pointer())
        builder.store(rounded, target, align=2)
        return context.get_dummy_value()

    return types.void(out, types.intp, packed, types.intp, weights), generate


def _rounded(builder: Any, values: Any, dtype: Any) -> Any:
    """Return float32 values as elements of `dtype`, rounded like `kernel_math.store`."""
    if dtype == types.int16:
        return builder.fptrunc(values, ir.VectorType(ir.HalfType(), _LANES))
    if dtype != types.uint16:
        return values
    words = ir.VectorType(ir.IntType(32), _LANES)
    bits = builder.bitcast(values, words)
    sixteen, one, half, quiet = (ir.Constant(words, [number] * _LANES) for number in (16, 1, 0x7FFF, 0x7FC0))
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
    rounded = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.trunc(rounded, ir.VectorType(ir.IntType(16), _LANES))


def _element(context: Any, builder: Any, signature: Any, arguments: Any, k: int) -> Any:
    """Return the address of element k + 1 (an index) of argument k (an array)."""
    data = context.make_array(signature.args[k])(context, builder, arguments[k]).data
    return cgutils.gep(builder, data, arguments[k + 1])


def _broadcast(builder: Any, value: Any) -> Any:
    vector = ir.Constant(_VECTOR, ir.Undefined)
    for lane in range(_LANES):
        vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
    return vector


@kernel(fastmath=REORDERED)
def _correct(values: Any, low: int, high: int, error: Any, factor: Any) -> Any:
    """Set error = values[low:high] + factor · error and return the sum of magnitudes."""
    total = np.float32(0)
    if values is None:
        for i in range(error.shape[0]):
            corrected = factor * error[i]
            error[i] = corrected
            total += abs(corrected)
    else:
        v = values[low:high]
        for i in range(error.shape[0]):
            corrected = load(v, i) + factor * error[i]
            error[i] = corrected
            total += abs(corrected)
    return total


@kernel(fastmath=EXACT)
def _pack(start: int, stop: int, values: Any, error: Any, packed: Any, scales: Any, factor: Any, chunk: int) -> None:
    for low in range(start, stop, chunk):
        high = min(low + chunk, stop)
        e = error[low:high]
        scale = np.float32(_correct(values, low, high, e, factor) / np.float32(high - low))
        scales[low // chunk] = scale
        signs = packed[low // 8 : (high + 7) // 8]
        whole = e.shape[0] // 16
        for j in range(whole):
            _store_signs(e, 16 * j, signs, 2 * j)
        for j in range(2 * whole, signs.shape[0]):
            signs[j] = 0
            for i in range(8 * j, min(8 * j + 8, e.shape[0])):
                signs[j] |= np.uint8(e[i] >= 0) << np.uint8(i - 8 * j)
        for i in range(e.shape[0]):
            e[i] -= scale if e[i] >= 0 else -scale


@kernel()
def average(start: int, stop: int, packed: Any, scales: Any, out: Any, chunk: int) -> None:
    """Average the messages of all ranks for the elements [start, stop). `start` must be a multiple of `chunk`.

    Args:
        start: First element.
        stop: End of the elements.
        packed: (ranks, ceil(n / 8)) uint8.
        scales: (ranks, ceil(n / chunk)) float32.
        out: (n,); overwritten.
        chunk: Elements per scale.
    """
    ranks = packed.shape[0]
    weights = np.empty(ranks, dtype=np.float32)
    for low in range(start, stop, chunk):
        target = out[low : min(low + chunk, stop)]
        for rank in range(ranks):
            weights[rank] = scales[rank, low // chunk] / np.float32(ranks)
        whole = target.shape[0] // 16
        for j in range(whole):
            _store_sums(target, 16 * j, packed, low // 8 + 2 * j, weights)
        for i in range(16 * whole, target.shape[0]):
            total = np.float32(0)
            for rank in range(ranks):
                sign = (packed[rank, (low + i) // 8] >> ((low + i) % 8)) & 1
                total += weights[rank] if sign else -weights[rank]
            store(target, i, total)


def _pack_cuda(values: Any, error: Any, packed: Any, scales: Any, factor: Any, chunk: int) -> None:
    """Pack with one block of threads per chunk. `values` without elements means zeros."""
    t, block = cuda.threadIdx.x, cuda.blockIdx.x
    low = np.int64(block) * chunk
    width = min(chunk, error.shape[0] - low)
    total = np.float32(0)
    for i in range(t, width, _THREADS):
        corrected = factor * error[np.uint64(low + i)]
        if values.shape[0] > 0:
            corrected += load(values, np.uint64(low + i))
        error[np.uint64(low + i)] = corrected
        total += abs(corrected)
    totals = cuda.shared.array(_THREADS, np.float32)
    signs = cuda.shared.array(_THREADS, np.uint8)  # Keep on its own line: the simulator identifies arrays by line.
    totals[t] = total
    half = _THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            totals[t] += totals[t + half]
        half //= 2
    cuda.syncthreads()
    scale = np.float32(totals[0] / np.float32(width))
    if t == 0:
        scales[block] = scale
    for first in range(0, width, _THREADS):
        i = first + t
        signs[t] = 0
        if i < width:
            corrected = error[np.uint64(low + i)]
            signs[t] = corrected >= 0
            error[np.uint64(low + i)] = corrected - (scale if corrected >= 0 else -scale)
        cuda.syncthreads()
        if 8 * t < min(_THREADS, width - first):
            byte = np.uint32(0)
            for k in range(8):
                byte |= np.uint32(signs[8 * t + k]) << np.uint32(k)
            packed[np.uint64((low + first) // 8 + t)] = np.uint8(byte)
        cuda.syncthreads()


def _average_cuda(packed: Any, scales: Any, out: Any, chunk: int) -> None:
    """Average with one block of threads per chunk."""
    low = np.int64(cuda.blockIdx.x) * chunk
    ranks = packed.shape[0]
    for i in range(cuda.threadIdx.x, min(chunk, out.shape[0] - low), _THREADS):
        total = np.float32(0)
        for rank in range(ranks):
            weight = np.float32(scales[np.uint32(rank), cuda.blockIdx.x] / np.float32(ranks))
            signs = packed[np.uint32(rank), np.uint64((low + i) // 8)]
            total += weight if (np.uint32(signs) >> np.uint32(i % 8)) & np.uint32(1) else -weight
        store(out, np.uint64(low + i), total)


def check_chunk(chunk: int) -> None:
    """Raise ValueError if a chunk does not end at a byte of signs.

    Args:
        chunk: Elements per scale.
    """
    if chunk < 8 or chunk % 8:
        raise ValueError(f"chunk: {chunk}, expected a positive multiple of 8, so that no byte of signs has two scales")


def _check_pack(values: Tensor | None, error: Tensor, chunk: int) -> None:
    check_chunk(chunk)
    if values is not None:
        check("values", values, dtypes=FLOATS, shape=[None])
    like = error if values is None else values
    check("error", error, dtypes=[torch.float32], shape=[None] if values is None else values.shape, like=like)


def _check_average(packed: Tensor, scales: Tensor, out: Tensor, chunk: int) -> None:
    check_chunk(chunk)
    check("out", out, dtypes=FLOATS, shape=[None])
    check("packed", packed, dtypes=[torch.uint8], shape=[None, -(-out.shape[0] // 8)], like=out)
    ranks = packed.shape[0]
    if ranks == 0:
        raise ValueError(f"packed: shape is {tuple(packed.shape)}, expected at least one rank")
    check("scales", scales, dtypes=[torch.float32], shape=[ranks, -(-out.shape[0] // chunk)], like=out)


def _pack_outputs(error: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    packed = error.new_empty(-(-error.shape[0] // 8), dtype=torch.uint8)
    return packed, error.new_empty(-(-error.shape[0] // chunk), dtype=torch.float32)


def _pack_nbytes(values: Tensor | None, error: Tensor, packed: Tensor) -> int:
    return (0 if values is None else values.nbytes) + 2 * error.nbytes + packed.nbytes


def _cpu_pack(values: Tensor | None, error: Tensor, factor: float, chunk: int) -> tuple[Tensor, Tensor]:
    _check_pack(values, error, chunk)
    packed, scales = _pack_outputs(error, chunk)
    with meter.record("onebit_pack", _pack_nbytes(values, error, packed), error.device):
        arrays = [None if tensor is None else array(tensor) for tensor in (values, error, packed, scales)]
        share(_pack, error.numel(), *arrays, np.float32(factor), chunk, multiple=chunk)
    return packed, scales


def _cpu_average(packed: Tensor, scales: Tensor, out: Tensor, chunk: int) -> None:
    _check_average(packed, scales, out, chunk)
    with meter.record("onebit_average", packed.nbytes + scales.nbytes + out.nbytes, out.device):
        share(average, out.numel(), array(packed), array(scales), array(out), chunk, multiple=chunk)


def _cuda_pack(values: Tensor | None, error: Tensor, factor: float, chunk: int) -> tuple[Tensor, Tensor]:
    _check_pack(values, error, chunk)
    packed, scales = _pack_outputs(error, chunk)
    with meter.record("onebit_pack", _pack_nbytes(values, error, packed), error.device):
        tensors = (error.narrow(0, 0, 0) if values is None else values, error, packed, scales)
        numbers = (np.float32(factor), chunk)
        if scales.numel():
            gpu.launch(_pack_cuda, scales.numel(), *tensors, *numbers, device=error.device, threads=_THREADS)
    return packed, scales


def _cuda_average(packed: Tensor, scales: Tensor, out: Tensor, chunk: int) -> None:
    _check_average(packed, scales, out, chunk)
    with meter.record("onebit_average", packed.nbytes + scales.nbytes + out.nbytes, out.device):
        if out.numel():
            gpu.launch(_average_cuda, scales.shape[1], packed, scales, out, chunk, device=out.device, threads=_THREADS)


def _fake_pack(values: Tensor | None, error: Tensor, factor: float, chunk: int) -> tuple[Tensor, Tensor]:
    _check_pack(values, error, chunk)
    return _pack_outputs(error, chunk)


_onebit_pack = register(
    "onebit_pack(Tensor? values, Tensor(a!) error, float factor, int chunk) -> (Tensor, Tensor)",
    cpu=_cpu_pack,
    cuda=_cuda_pack,
    fake=_fake_pack,
)
_onebit_average = register(
    "onebit_average(Tensor packed, Tensor scales, Tensor(a!) out, int chunk) -> ()",
    cpu=_cpu_average,
    cuda=_cuda_average,
    fake=_check_average,
)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels of packing and averaging for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run.
    """
    onebit_pack(None, torch.zeros(1))
    for values in {dtype, torch.float32}:
        packed, scales = onebit_pack(torch.zeros(1, dtype=values), torch.zeros(1))
        onebit_average(packed[None], scales[None], torch.zeros(1, dtype=values))


_AVERAGE_THREADS = 256
"""GPU threads per chunk in `onebit_take`."""


def onebit_take_reference(
    packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, *, share: float, chunk: int = CHUNK
) -> Tensor:
    """Take with torch and return the squares. This defines `onebit_take`.

    Args:
        packed: (ranks, ceil(n / 8)) uint8.
        scales: (ranks, ceil(n / chunk)) float32.
        values: (ranks · n,) float32; updated in place.
        kept: (ranks · n,) float32; overwritten.
        share: Factor of the mean in `kept`.
        chunk: Elements per scale.
    """
    squares = []
    rows = zip(packed, scales, values.view(len(packed), -1), kept.view(len(packed), -1), strict=True)
    for bits, means, missed, keeps in rows:
        signs = ((bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[
            : len(missed)
        ].float() * 2 - 1
        squares.append(torch.stack([piece.square().sum() for piece in missed.split(chunk)]))
        keeps.copy_(missed)
        missed.copy_(signs * means.repeat_interleave(chunk)[: len(missed)])
        keeps.add_(missed, alpha=share)
    return torch.stack(squares)


def onebit_take(
    packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, *, share: float, chunk: int = CHUNK
) -> Tensor:
    """Set `kept` = `values` + `share` · mean, then `values` = the mean. Rank r has packed slice r of the mean.

    Args:
        packed: (ranks, ceil(n / 8)) uint8, from `onebit_pack`.
        scales: (ranks, ceil(n / chunk)) float32.
        values: (ranks · n,) float32; before, the compression error of this rank; afterwards, the mean.
        kept: (ranks · n,) float32; overwritten.
        share: Factor of the mean in `kept`.
        chunk: Elements per scale.

    Returns:
        (ranks, ceil(n / chunk)) float32: the sum of squares of the compression error per chunk.

    Raises:
        ValueError: Wrong dtypes, shapes, strides or devices.
    """
    return _onebit_take(packed, scales, values, kept, share, chunk)


@kernel(fastmath=REORDERED)
def _square(values: Any) -> Any:
    total = np.float32(0)
    for i in range(values.shape[0]):
        total += values[i] * values[i]
    return total


@kernel()
def _take(
    start: int, stop: int, packed: Any, scales: Any, values: Any, kept: Any, squares: Any, share: Any, chunk: int
) -> None:
    """Take one slice. `packed` and `scales` have one row."""
    for low in range(start, stop, chunk):
        high = min(low + chunk, stop)
        mean, keeps = values[low:high], kept[low:high]
        squares[low // chunk] = _square(mean)
        for i in range(mean.shape[0]):
            keeps[i] = mean[i]
        average(low, high, packed, scales, values, chunk)
        for i in range(mean.shape[0]):
            keeps[i] += share * mean[i]


def _take_cuda(packed: Any, scales: Any, values: Any, kept: Any, squares: Any, share: Any, chunk: int) -> None:
    """Take with one block of threads per chunk of each slice."""
    t, chunks = cuda.threadIdx.x, scales.shape[1]
    rank, number = cuda.blockIdx.x // chunks, cuda.blockIdx.x % chunks
    numel = values.shape[0] // packed.shape[0]
    low, base = np.int64(number) * chunk, np.int64(rank) * numel
    total = np.float32(0)
    scale = scales[np.uint32(rank), np.uint32(number)]
    for i in range(t, min(chunk, numel - low), _AVERAGE_THREADS):
        place = np.uint64(base + low + i)
        missed = values[place]
        total += missed * missed
        byte = packed[np.uint32(rank), np.uint64((low + i) // 8)]
        mean = scale if (np.uint32(byte) >> np.uint32(i % 8)) & np.uint32(1) else -scale
        kept[place] = missed + share * mean
        values[place] = mean
    totals = cuda.shared.array(_AVERAGE_THREADS, np.float32)
    totals[t] = total
    half = _AVERAGE_THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if t < half:
            totals[t] += totals[t + half]
        half //= 2
    if t == 0:
        squares[np.uint32(rank), np.uint32(number)] = totals[0]


def _check(packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, chunk: int) -> None:
    check_chunk(chunk)
    check("values", values, dtypes=[torch.float32], shape=[None])
    check("kept", kept, dtypes=[torch.float32], shape=values.shape, like=values)
    if packed.ndim != 2 or packed.shape[0] == 0 or values.shape[0] % packed.shape[0]:
        raise ValueError(
            f"packed: shape is {tuple(packed.shape)}, expected a row for each rank, and as many equal slices of the "
            f"{values.shape[0]} values"
        )
    ranks, numel = packed.shape[0], values.shape[0] // packed.shape[0]
    check("packed", packed, dtypes=[torch.uint8], shape=[ranks, -(-numel // 8)], like=values)
    check("scales", scales, dtypes=[torch.float32], shape=[ranks, -(-numel // chunk)], like=values)


def _cpu(packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, part: float, chunk: int) -> Tensor:
    _check(packed, scales, values, kept, chunk)
    squares = torch.empty_like(scales)
    with meter.record("onebit_take", _nbytes(packed, values), values.device):
        rows = zip(*(each.view(len(packed), -1) for each in (values, kept)), squares, strict=True)
        for rank, (means, keeps, own) in enumerate(rows):
            sent = [array(each[rank : rank + 1]) for each in (packed, scales)]
            written = [array(each) for each in (means, keeps, own)]
            share(_take, means.numel(), *sent, *written, np.float32(part), chunk, multiple=chunk)
    return squares


def _cuda(packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, part: float, chunk: int) -> Tensor:
    _check(packed, scales, values, kept, chunk)
    squares = torch.empty_like(scales)
    with meter.record("onebit_take", _nbytes(packed, values), values.device):
        if scales.numel():
            tensors = (packed, scales, values, kept, squares)
            gpu.launch(
                _take_cuda,
                scales.numel(),
                *tensors,
                np.float32(part),
                chunk,
                device=values.device,
                threads=_AVERAGE_THREADS,
            )
    return squares


def _fake(packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, part: float, chunk: int) -> Tensor:
    _check(packed, scales, values, kept, chunk)
    return torch.empty_like(scales)


def _nbytes(packed: Tensor, values: Tensor) -> int:
    return packed.nbytes + 3 * values.nbytes


_onebit_take = register(
    "onebit_take(Tensor packed, Tensor scales, Tensor(a!) values, Tensor(b!) kept, float share, int chunk) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)


def warm_take(dtype: torch.dtype) -> None:  # warm-up steps take a dtype; means are always float32
    """Compile the kernel of `onebit_take`.

    Args:
        dtype: Ignored.
    """
    packed, scales = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1)
    onebit_take(packed, scales, torch.zeros(1), torch.zeros(1), share=0.0)
