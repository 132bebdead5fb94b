"""AdamW over states that take fewer bytes: bfloat16 parameters without a master beside them, moments in eight bits.

Between two steps a parameter takes 14 bytes as `adamw` keeps it (bfloat16, float32 master, two float32 moments), and
4.03 with everything small: 2 for the parameter, which is rounded at random (`stochastic`), and 1 + 1/64 for each moment
(`blockwise8`).

One pass over memory: a few blocks at a time are decoded into the first-level cache, updated there, and encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.adamw import adamw_reference, constants, update_one
from cuda_ops.blockquant import magnitude_bits
from cuda_ops.blockwise8 import (
    BLOCK,
    blockwise8_decode_reference,
    blockwise8_encode_reference,
    check_codes,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    scale_of,
    signed_code,
    signed_share,
    unsigned_code,
    unsigned_share,
)
from cuda_ops.compile import kernel
from cuda_ops.elements import load, store
from cuda_ops.gpu import THREADS
from cuda_ops.library import register
from cuda_ops.meter import meter
from cuda_ops.stochastic import keys, random_bits, round_block, round_one, round_stochastically_reference, upper_key
from cuda_ops.tensors import FLOATS, array, check
from cuda_ops.threads import share

cuda: Any = None  # numba.cuda, from the first launch on (see gpu).

_PIECE = 4 * BLOCK
"""Elements that are worked on together: their value and moments in float32 take 12 KiB of the first-level cache."""

_INFINITY_BITS = np.uint32(0x7F800000)


def adamw_compact_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    copy: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    bias_correction: bool = True,
    seed: int | None = None,
    offset: int = 0,
) -> None:
    """The definition, in torch."""
    value = param.clone() if param.dtype is torch.float32 else param.float()
    moments = [exp_avg, exp_avg_sq]
    if scales is not None:
        moments = [torch.empty_like(value), torch.empty_like(value)]
        blockwise8_decode_reference(exp_avg, scales[0], moments[0], signed=True)
        blockwise8_decode_reference(exp_avg_sq, scales[1], moments[1], signed=False)
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "step": step}
    adamw_reference(value, grad, *moments, **numbers, factor=factor, bias_correction=bias_correction)
    if scales is not None:
        for codes, scale, moment, signed in zip((exp_avg, exp_avg_sq), scales, moments, (True, False), strict=True):
            new_codes, new_scales = blockwise8_encode_reference(moment, signed=signed)
            codes.copy_(new_codes)
            scale.copy_(new_scales)
    if seed is not None and param.dtype is torch.bfloat16:
        value = round_stochastically_reference(value, seed, step, offset)
    param.copy_(value)
    if copy is not None:
        copy.copy_(param)


def adamw_compact(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    copy: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    bias_correction: bool = True,
    seed: int | None = None,
    offset: int = 0,
) -> None:
    """Update `param` (n,) and its moments in place, as torch.optim.AdamW does in float32.

    Args:
        param: (n,) float32, or bfloat16, which is rounded stochastically and needs a `seed`.
        grad: (n,) float32, bfloat16 or float16; multiplied by `factor` first (1 / loss scale, times clipping).
        exp_avg, exp_avg_sq: (n,) float32; or with `scales` uint8, as `blockwise8_encode` returns them, signed and
            unsigned.
        scales: two of (ceil(n / 256),) float32, of `exp_avg` and of `exp_avg_sq`. Blocks begin where `param` does.
        copy: (n,) bfloat16, float16 or float32, takes the updated parameter as `param` holds it; may be left out.
        step: number of this update, from 1, for the bias corrections and for what is rounded at random.
        bias_correction: whether moments are corrected for their start at 0.
        seed: of a bfloat16 parameter: another one for each flat, the same in all steps and on all ranks.
        offset: which element of its flat the first one of `param` is: a part of a flat is then rounded as within the
            whole.

    All codes and scales begin as 0. Raises ValueError for wrong dtypes, shapes, strides or devices, and for a bfloat16
    parameter without a seed.
    """
    first, second = (None, None) if scales is None else scales
    numbers = (lr, beta1, beta2, eps, weight_decay, step, factor, bias_correction)
    _adamw_compact(param, grad, exp_avg, exp_avg_sq, first, second, copy, *numbers, seed, offset)


@register_jitable
def _convert(source: Any, target: Any) -> None:
    """From one floating dtype to another."""
    for i in range(source.shape[0]):
        store(target, i, load(source, i))


@register_jitable
def _copy(source: Any, target: Any) -> None:
    """As `target[:] = source`, which would not use vector registers."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel()
def _update(
    start: int,
    stop: int,
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    first_scales: Any,
    second_scales: Any,
    copy: Any,
    numbers: Any,
    keys: Any,
    offset: Any,
) -> None:
    values = np.empty(_PIECE, dtype=np.float32)
    firsts = np.empty(_PIECE, dtype=np.float32)
    seconds = np.empty(_PIECE, dtype=np.float32)
    for low in range(start, stop, _PIECE):
        width = min(_PIECE, stop - low)
        p, g = param[low : low + width], grad[low : low + width]
        w, m, v = values[:width], firsts[:width], seconds[:width]
        _convert(p, w)
        if first_scales is None:
            _copy(exp_avg[low : low + width], m)
            _copy(exp_avg_sq[low : low + width], v)
        else:
            for begin in range(0, width, BLOCK):
                end = min(begin + BLOCK, width)
                block = (low + begin) // BLOCK
                decode_signed(exp_avg[low + begin : low + end], first_scales[block], m[begin:end])
                decode_unsigned(exp_avg_sq[low + begin : low + end], second_scales[block], v[begin:end])
        for i in range(w.shape[0]):
            w[i], m[i], v[i] = update_one(w[i], load(g, i), m[i], v[i], numbers)
        if first_scales is None:
            _copy(m, exp_avg[low : low + width])
            _copy(v, exp_avg_sq[low : low + width])
        else:
            for begin in range(0, width, BLOCK):
                end = min(begin + BLOCK, width)
                block = (low + begin) // BLOCK
                first_scales[block] = encode_signed(m[begin:end], exp_avg[low + begin : low + end])
                second_scales[block] = encode_unsigned(v[begin:end], exp_avg_sq[low + begin : low + end])
        if keys is None:
            _copy(w, p)
        else:
            round_block(w, p, np.uint64(offset + np.uint64(low)), keys[0], keys[1])
        if copy is not None:
            _convert(p, copy[low : low + width])


def _update_cuda(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    first_scales: Any,
    second_scales: Any,
    copy: Any,
    numbers: Any,
    keys: Any,
    offset: Any,
    coded: bool,
    rounded: bool,
) -> None:
    """A thread for each element, and a block of threads for each block of elements. `copy` without elements: none is
    wanted. `coded`: moments are codes; `rounded`: the parameter is bfloat16."""
    t = cuda.threadIdx.x
    block = np.uint64(cuda.blockIdx.x)
    place = np.int64(cuda.blockIdx.x) * THREADS + t
    inside = place < param.shape[0]
    i = np.uint64(place)  # Unsigned: a signed index might count from the end, which Numba would look at.
    p, m, v = np.float32(0), np.float32(0), np.float32(0)
    if inside:
        if coded:
            m = signed_share(np.uint32(exp_avg[i])) * first_scales[block]
            v = unsigned_share(np.uint32(exp_avg_sq[i])) * second_scales[block]
        else:
            m, v = np.float32(exp_avg[i]), np.float32(exp_avg_sq[i])
        p, m, v = update_one(load(param, i), load(grad, i), m, v, numbers)
    if coded:
        firsts = cuda.shared.array(THREADS, np.uint32)
        seconds = cuda.shared.array(THREADS, np.uint32)
        firsts[t], seconds[t] = magnitude_bits(m), magnitude_bits(v)
        half = THREADS // 2
        while half > 0:
            cuda.syncthreads()
            if t < half:
                firsts[t] = max(firsts[t], firsts[t + half])
                seconds[t] = max(seconds[t], seconds[t + half])
            half //= 2
        cuda.syncthreads()  # Also: every thread has read the old scales.
        first_scale, first_factor = scale_of(firsts[0])
        second_scale, second_factor = scale_of(seconds[0])
        if inside:
            exp_avg[i] = signed_code(m, first_factor) if firsts[0] < _INFINITY_BITS else np.uint32(0)
            exp_avg_sq[i] = unsigned_code(v, second_factor) if seconds[0] < _INFINITY_BITS else np.uint32(0)
            if t == 0:
                first_scales[block], second_scales[block] = first_scale, second_scale
    elif inside:
        exp_avg[i], exp_avg_sq[i] = m, v
    if inside:
        if rounded:
            index = np.uint64(offset + i)
            noise = random_bits(np.uint32(index & np.uint64(0xFFFFFFFF)), keys[0], upper_key(keys[1], index))
            param[i] = round_one(p, np.uint32(noise >> np.uint32(16)))
        else:
            store(param, i, p)
        if copy.shape[0] > 0:
            store(copy, i, load(param, i))


def _check(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    copy: Tensor | None,
    step: int,
    seed: int | None,
    offset: int,
) -> None:
    check("param", param, dtypes=[torch.float32, torch.bfloat16], shape=[None])
    check("grad", grad, dtypes=FLOATS, shape=param.shape, like=param)
    if first_scales is None or second_scales is None:
        if first_scales is not second_scales:
            raise ValueError("scales: expected two tensors, of exp_avg and of exp_avg_sq, or none")
        check("exp_avg", exp_avg, dtypes=[torch.float32], shape=param.shape, like=param)
        check("exp_avg_sq", exp_avg_sq, dtypes=[torch.float32], shape=param.shape, like=param)
    else:
        check_codes(exp_avg, first_scales, like=param)
        check_codes(exp_avg_sq, second_scales, like=param)
    if copy is not None:
        check("copy", copy, dtypes=FLOATS, shape=param.shape, like=param)
    if step < 1:
        raise ValueError(f"step: {step}, expected 1 or more: the first update has number 1")
    if param.dtype is torch.bfloat16 and seed is None:
        raise ValueError("seed: None, expected an integer: a bfloat16 parameter is rounded at random")
    if offset < 0:
        raise ValueError(f"offset: {offset}, expected the place of the first element in its flat, 0 or more")


def _cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
    bias_correction: bool,
    seed: int | None,
    offset: int,
) -> None:
    states = (param, grad, exp_avg, exp_avg_sq, first_scales, second_scales, copy)
    _check(*states, step, seed, offset)
    numbers = tuple(constants(lr, beta1, beta2, eps, weight_decay, step, factor, bias_correction))
    two_keys = keys(seed, step) if seed is not None and param.dtype is torch.bfloat16 else None
    with meter.record("adamw_compact", _nbytes(*states), param.device):
        arrays = [None if tensor is None else array(tensor) for tensor in states]
        share(_update, param.numel(), *arrays, numbers, two_keys, np.uint64(offset), multiple=BLOCK)


def _cuda(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float,
    bias_correction: bool,
    seed: int | None,
    offset: int,
) -> None:
    states = (param, grad, exp_avg, exp_avg_sq, first_scales, second_scales, copy)
    _check(*states, step, seed, offset)
    numbers = tuple(constants(lr, beta1, beta2, eps, weight_decay, step, factor, bias_correction))
    rounded = param.dtype is torch.bfloat16
    two_keys = keys(seed or 0, step)
    nothing = param.new_empty(0, dtype=torch.float32)
    with meter.record("adamw_compact", _nbytes(*states), param.device):
        blocks = gpu.blocks_for(param.numel())
        tensors = (nothing if tensor is None else tensor for tensor in states)
        flags = (np.uint64(offset), first_scales is not None, rounded)
        gpu.launch(_update_cuda, blocks, *tensors, numbers, two_keys, *flags, device=param.device)


def _fake(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    copy: Tensor | None,
    *numbers: Any,
) -> None:
    step, seed, offset = int(numbers[5]), numbers[8], int(numbers[9])
    _check(param, grad, exp_avg, exp_avg_sq, first_scales, second_scales, copy, step, seed, offset)


def _nbytes(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    copy: Tensor | None,
) -> int:
    twice = [param, exp_avg, exp_avg_sq, first_scales, second_scales]
    once = [grad, copy]
    return sum(times * each.nbytes for times, those in ((2, twice), (1, once)) for each in those if each is not None)


_adamw_compact = register(
    "adamw_compact(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)? exp_avg_scales, Tensor(e!)? exp_avg_sq_scales, Tensor(f!)? copy, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, int step, float factor, bool bias_correction, int? seed, int offset) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)


def warm(dtype: torch.dtype) -> None:
    """Compile what a run that computes in `dtype` and keeps small states may need."""
    numbers: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 1.0, "weight_decay": 0.0, "step": 1}
    first, second = torch.zeros(1), torch.zeros(1)
    codes, scales = torch.zeros(1, dtype=torch.uint8), torch.zeros(1)
    copy = None if dtype is torch.float32 else torch.zeros(1, dtype=dtype)
    for gradient in (torch.zeros(1, dtype=each) for each in {dtype, torch.float32}):
        coded = {"exp_avg": codes, "exp_avg_sq": codes.clone(), "scales": (scales, scales.clone())}
        adamw_compact(torch.zeros(1), gradient, **coded, copy=copy, **numbers)
        if dtype is torch.bfloat16:
            adamw_compact(torch.zeros(1, dtype=dtype), gradient, **coded, **numbers, seed=0)
            adamw_compact(torch.zeros(1, dtype=dtype), gradient, first, second, **numbers, seed=0)
