"""The end of an exchange of signs on one rank (arXiv:2102.02888): each rank's slice of the mean, decoded, and what this
rank keeps for the next exchange, in one pass.

Until all messages have come, what the signs of a rank missed stands in the buffer of what was given (`onebit_pack`).
Here the mean takes its place there, and what is kept takes it in, together with a share of the mean: 16 bytes an
element in float32 where decoding, copying and adding would go over 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.compile import REORDERED, kernel
from cuda_ops.library import register
from cuda_ops.meter import meter
from cuda_ops.onebit import CHUNK, average, check_chunk
from cuda_ops.tensors import array, check
from cuda_ops.threads import share

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_THREADS = 256
"""Threads of a block on a GPU, which takes a chunk."""


def onebit_take_reference(
    packed: Tensor, scales: Tensor, values: Tensor, kept: Tensor, *, share: float, chunk: int = CHUNK
) -> Tensor:
    """The definition, in torch."""
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
    """`kept` = `values` + `share` · mean; `values` = the mean, whose slice r is what rank r has packed of it.

    Args:
        packed: (ranks, ceil(n / 8)) uint8, as from `onebit_pack`.
        scales: (ranks, ceil(n / chunk)) float32.
        values: (ranks · n,) float32, changed in place: before, what this rank's own signs missed.
        kept: (ranks · n,) float32, only written.

    Returns:
        (ranks, ceil(n / chunk)) float32: the sum of squares of what was missed, chunk by chunk.

    Raises ValueError for wrong dtypes, shapes, strides or devices.
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
    """One slice; `packed` and `scales` have one row."""
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
    """A block of threads for each chunk of each slice."""
    t, chunks = cuda.threadIdx.x, scales.shape[1]
    rank, number = cuda.blockIdx.x // chunks, cuda.blockIdx.x % chunks
    numel = values.shape[0] // packed.shape[0]
    low, base = np.int64(number) * chunk, np.int64(rank) * numel
    total = np.float32(0)
    scale = scales[np.uint32(rank), np.uint32(number)]
    for i in range(t, min(chunk, numel - low), _THREADS):
        place = np.uint64(base + low + i)
        missed = values[place]
        total += missed * missed
        byte = packed[np.uint32(rank), np.uint64((low + i) // 8)]
        mean = scale if (np.uint32(byte) >> np.uint32(i % 8)) & np.uint32(1) else -scale
        kept[place] = missed + share * mean
        values[place] = mean
    totals = cuda.shared.array(_THREADS, np.float32)
    totals[t] = total
    half = _THREADS // 2
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
                _take_cuda, scales.numel(), *tensors, np.float32(part), chunk, device=values.device, threads=_THREADS
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


def warm(dtype: torch.dtype) -> None:  # every step of a warm-up is given one; means are in float32
    """Compile what a run that sends signs needs."""
    packed, scales = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1)
    onebit_take(packed, scales, torch.zeros(1), torch.zeros(1), share=0.0)
