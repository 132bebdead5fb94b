"""Build the cases of `speedlab bench kernels`: optimizer kernels, quantization, attention and the loss.

Each `*_rows` function yields rows for one operation. All memory is touched before it is measured, so page faults do not
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen, adam_frozen_reference
from cuda_ops.adamw import adamw
from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_attention import block_sparse_attention
from cuda_ops.blockquant import BLOCK, block_dequantize, block_quantize
from cuda_ops.blockwise8 import BLOCK as CODES
from cuda_ops.blockwise8 import blockwise8_decode, blockwise8_encode
from cuda_ops.cpu_sdpa import install, under_way
from cuda_ops.grad_stats import grad_stats
from cuda_ops.linear_cross_entropy import linear_cross_entropy
from cuda_ops.onebit import CHUNK, onebit_average, onebit_pack, onebit_take
from cuda_ops.sgd_momentum import sgd_momentum
from cuda_ops.stochastic import round_stochastically
from speedlab.calibrate.interleave import interleave, row, rows
from speedlab.calibrate.table import BenchRow, missing
from speedlab.engine.memory_ledger import PeakMemory, release_freed_memory

_MILLION = 1_000_000
_RANKS = 4
_NUMBERS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10}


def update_of(nbytes: float, device: torch.device, *, only_read: float = 0) -> Callable[[], object]:
    """Return a call with the memory traffic of an update, to measure the floor.

    A read costs less than a write, so the two amounts are separate.

    Args:
        nbytes: bytes that a sum in place reads and writes altogether.
        device: where the memory is allocated.
        only_read: bytes of a second sum that only reads.
    """
    memory = torch.ones(int(nbytes) // 8, device=device)
    read = torch.ones(int(only_read) // 4, device=device)
    return lambda: (memory.add_(1.0), read.sum())


def copy_of(nbytes: float, device: torch.device) -> Callable[[], object]:
    """Return a copy that reads and writes `nbytes` altogether.

    This is the floor of operations that write to other memory than they read.

    Args:
        nbytes: bytes read plus bytes written.
        device: where the memory is allocated.
    """
    source = torch.ones(int(nbytes) // 8, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def _threads(device: torch.device) -> str:
    return str(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def _flats(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (param, grad, exp_avg, exp_avg_sq), float32, `count` elements each."""
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(count, generator=generator).to(device) for _ in range(2))
    return param, grad, torch.zeros_like(param), torch.full_like(param, 1e-3)


def adamw_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure AdamW alone, and with unscale, clip and a bfloat16 copy.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    for millions in (10, 100):
        count = millions * _MILLION
        flats = _flats(count, device)
        contestants: dict[str, Callable[[], object]] = {
            "ours": lambda flats=flats: adamw(*flats, **_NUMBERS),
            "floor": update_of(24 * count, device, only_read=4 * count),
            "torch fused": _torch_adamw(*flats[:2]),
        }
        if not missing() and device.type == "cpu":
            contestants["DeepSpeedCPUAdam"] = _deepspeed_adam(*flats[:2])
        times = interleave(contestants, rounds=rounds, device=device)
        yield from rows(f"adamw {millions}M float32, {_threads(device)}", times, floor="floor")
    copy = torch.zeros(count, dtype=torch.bfloat16, device=device)
    times = interleave(
        {
            "ours": lambda: adamw(*flats, copy, factor=0.5, **_NUMBERS),
            "floor": update_of(26 * count, device, only_read=4 * count),
            "torch fused, grad_scale, copy": _torch_adamw(*flats[:2], copy=copy),
        },
        rounds=rounds,
        device=device,
    )
    yield from rows(f"adamw 100M, unscale, clip, bfloat16 copy, {_threads(device)}", times, floor="floor")


def _torch_adamw(param: Tensor, grad: Tensor, copy: Tensor | None = None) -> Callable[[], None]:
    own = torch.nn.Parameter(param.clone())
    own.grad = grad.clone()
    optimizer: Any = torch.optim.AdamW([own], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        if copy is None:
            optimizer.step()
            return
        optimizer.grad_scale = torch.full((), 2.0, device=param.device)  # As torch's GradScaler hands it over.
        optimizer.step()
        copy.copy_(own.detach())

    return step


def _deepspeed_adam(param: Tensor, grad: Tensor) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]  # only where it is installed

    own = torch.nn.Parameter(param.clone())
    own.grad = grad.clone()
    return DeepSpeedCPUAdam([own], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True).step


def blockwise8_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure decoding and encoding of AdamW's moments in 8 bits, signed (exp_avg) and unsigned (exp_avg_sq).

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    count = 100 * _MILLION
    values = _flats(count, device)[0]
    codes = torch.zeros(count, dtype=torch.uint8, device=device)
    scales = torch.zeros(-(-count // CODES), device=device)
    out = torch.zeros_like(values)
    floor = copy_of((4 + 1 + 4 / CODES) * count, device)
    for signed in (True, False):
        calls = {
            "encode": lambda signed=signed: blockwise8_encode(values, codes, scales, signed=signed),
            "decode": lambda signed=signed: blockwise8_decode(codes, scales, out, signed=signed),
        }
        for name, call in calls.items():
            times = interleave({"ours": call, "floor": floor}, rounds=rounds, device=device)
            case = f"blockwise8_{name} 100M float32, {'signed' if signed else 'unsigned'}, {_threads(device)}"
            yield from rows(case, times, floor="floor")


def rounding_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure stochastic rounding of updated parameters to bfloat16. The peer rounds to nearest.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    count = 100 * _MILLION
    values = _flats(count, device)[0]
    out, nearest = (torch.zeros(count, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = interleave(
        {
            "ours": lambda: round_stochastically(values, out, seed=0, step=10),
            "floor": copy_of((4 + 2) * count, device),
            "torch, to nearest": lambda: nearest.copy_(values),
        },
        rounds=rounds,
        device=device,
    )
    yield from rows(f"round_stochastically 100M, {_threads(device)}", times, floor="floor")


def sgd_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure SGD with momentum.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    param, grad, buffer, _ = _flats(10 * _MILLION, device)
    own = torch.nn.Parameter(param.clone())
    own.grad = grad.clone()
    optimizer = torch.optim.SGD([own], lr=1e-3, momentum=0.9, fused=True)
    times = interleave(
        {
            "ours": lambda: sgd_momentum(param, grad, buffer, lr=1e-3, momentum=0.9),
            "floor": update_of(16 * param.numel(), device, only_read=4 * param.numel()),
            "torch fused": optimizer.step,
        },
        rounds=rounds,
        device=device,
    )
    yield from rows(f"sgd_momentum 10M float32, {_threads(device)}", times, floor="floor")


def grad_stats_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure the norm and the finite check of gradients. The peer needs two passes for the same answer.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    for dtype in (torch.float32, torch.bfloat16):
        grad = _flats(10 * _MILLION, device)[1].to(dtype)
        times = interleave(
            {
                "ours": lambda grad=grad: grad_stats(grad),
                "torch norm and isfinite": lambda grad=grad: (torch.linalg.vector_norm(grad), grad.isfinite().all()),
            },
            rounds=rounds,
            device=device,
        )
        yield from rows(f"grad_stats 10M {_short(dtype)}, {_threads(device)}", times)


def onebit_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure sign packing with error feedback, and the mean of the packed values of four ranks.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    count = 1024 * CHUNK
    values = _flats(count, device)[0]
    error, out = torch.zeros_like(values), torch.empty_like(values)
    packed, scales = onebit_pack(values, error)
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: onebit_pack(values, error),
        "floor": update_of(8 * count, device, only_read=4 * count),
        "torch": lambda: _torch_pack(values, error),
    }
    if device.type == "cpu":
        contestants["NumPy"] = lambda: _numpy_pack(values.numpy(), error.numpy())
    times = interleave(contestants, rounds=rounds, device=device)
    yield from rows(f"onebit pack {count / _MILLION:.1f}M float32, {_threads(device)}", times, floor="floor")
    every, means = packed.repeat(_RANKS, 1), scales.repeat(_RANKS, 1)
    contestants = {
        "ours": lambda: onebit_average(every, means, out),
        "floor": copy_of((4 + _RANKS / 8) * count, device),
        "torch": lambda: _torch_average(every, means, out),
    }
    if device.type == "cpu":
        contestants["NumPy"] = lambda: _numpy_average(every.numpy(), means.numpy(), out.numpy())
    times = interleave(contestants, rounds=rounds, device=device)
    yield from rows(f"onebit average of {_RANKS} ranks, {_threads(device)}", times, floor="floor")


def frozen_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure the passes of a step after the exchange of signs, with a frozen variance.

    The passes are: take the mean and keep the error; update the parameters. Peers are AdamW, which the warm-up uses,
    and torch's own operations.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    count = 10_000 * 1024
    param, values, kept, variance = _flats(count, device)
    exp_avg = torch.zeros_like(param)
    numbers: dict[str, Any] = {"size": 1e-3, "decay": 1e-4, "eps": 1e-8}
    packed, scales = onebit_pack(values, kept.clone(), chunk=1024)
    times = interleave(
        {
            "ours": lambda: onebit_take(packed[None], scales[None], values, kept, share=0.9, chunk=1024),
            "floor": update_of(12 * count, device, only_read=4 * count),
        },
        rounds=rounds,
        device=device,
    )
    yield from rows(f"onebit take 10M float32, {_threads(device)}", times, floor="floor")
    times = interleave(
        {
            "ours": lambda: adam_frozen(param, values, exp_avg, variance, **numbers),
            "floor": update_of(12 * count, device, only_read=8 * count),
            "adamw": lambda: adamw(param, values, exp_avg, kept, **_NUMBERS),
            "torch": lambda: adam_frozen_reference(param, values, exp_avg, variance, **numbers),
        },
        rounds=rounds,
        device=device,
    )
    yield from rows(f"adam_frozen 10M float32, {_threads(device)}", times, floor="floor")


def _torch_pack(values: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    corrected = (values + error).view(-1, CHUNK)
    means = corrected.abs().mean(1)
    positive = corrected >= 0
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
    packed = (positive.view(-1, 8).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)
    error.view(-1, CHUNK).copy_(corrected - torch.where(positive, means[:, None], -means[:, None]))
    return packed, means


def _numpy_pack(values: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    corrected = (values + error).reshape(-1, CHUNK)
    means = np.abs(corrected).mean(1, dtype=np.float32)
    positive = corrected >= 0
    packed = np.packbits(positive, bitorder="little")
    np.subtract(corrected, np.where(positive, means[:, None], -means[:, None]), out=error.reshape(-1, CHUNK))
    return packed, means


def _torch_average(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    out.zero_()
    for own, means in zip(packed, scales, strict=True):
        signs = (own[:, None] >> bits & 1).view(-1, CHUNK).float() * 2 - 1
        out += (signs * means[:, None]).view(-1)
    out /= len(packed)


def _numpy_average(packed: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    out[:] = 0
    for own, means in zip(packed, scales, strict=True):
        signs = np.unpackbits(own, bitorder="little").reshape(-1, CHUNK).astype(np.float32) * 2 - 1
        out += (signs * means[:, None]).reshape(-1)
    out /= len(packed)


def blockquant_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure int8 and int4 block quantization next to a plain version compiled by torch.

    The plain version ignores special values. Both allocate their result.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    values = _flats(40_000 * 256, device)[0]  # Whole blocks: the peer does not support padding.
    out = torch.zeros_like(values)
    for bits in (8, 4):
        quantized, scales = block_quantize(values, bits=bits)
        compiled = torch.compile(_torch_quantize8 if bits == 8 else _torch_quantize4)
        times = interleave(
            {
                "ours": lambda bits=bits: block_quantize(values, bits=bits),
                "torch.compile": lambda compiled=compiled: compiled(values),
                "floor": copy_of((4 + bits / 8) * values.numel(), device),
            },
            rounds=rounds,
            device=device,
        )
        case = f"blockquant int{bits} quantize 10M, {_threads(device)}"
        yield row(case, times, peer="torch.compile", floor="floor")
        plain = torch.compile(_torch_dequantize8 if bits == 8 else _torch_dequantize4)
        times = interleave(
            {
                "ours": lambda quantized=quantized, scales=scales: block_dequantize(quantized, scales, out),
                "torch.compile": lambda plain=plain, q=quantized, s=scales: plain(q, s, out),
                "floor": copy_of((4 + bits / 8) * values.numel(), device),
            },
            rounds=rounds,
            device=device,
        )
        case = f"blockquant int{bits} dequantize 10M, {_threads(device)}"
        yield row(case, times, peer="torch.compile", floor="floor")


def _torch_quantize8(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    return (blocks / scales[:, None]).round().to(torch.int8), scales


def _torch_quantize4(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 7
    integers = (blocks / scales[:, None]).round().to(torch.int8).view(torch.uint8)
    return (integers[:, ::2] & 15) | (integers[:, 1::2] << 4), scales


def _torch_dequantize8(quantized: Tensor, scales: Tensor, out: Tensor) -> None:
    out.view(scales.numel(), -1)[:] = quantized.view(scales.numel(), -1).float() * scales[:, None]


def _torch_dequantize4(quantized: Tensor, scales: Tensor, out: Tensor) -> None:
    low, high = (quantized << 4).view(torch.int8) >> 4, quantized.view(torch.int8) >> 4
    both = torch.stack((low, high), dim=1).view(scales.numel(), -1)
    out.view(scales.numel(), -1)[:] = both.float() * scales[:, None]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_HEADS, _WIDTH = 2, 64

_DENSE = ((4, 6, 128, 64), (1, 4, 512, 128), (1, 12, 512, 64), (1, 2, 4096, 64))
"""Batch, heads, tokens, elements of a head."""


def attention_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure causal block-sparse attention next to dense attention, forward and backward.

    The pattern is a window of 4 blocks and 1 global block.

    Args:
        device: the device to measure.
        rounds: interleaved rounds; fewer for long sequences.
    """
    for length in (4096, 16384):
        layout = BlockLayout.local(length, 4, causal=True) | BlockLayout.global_(length, 1, causal=True)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, _HEADS, length, _WIDTH, generator=generator).to(device).requires_grad_() for _ in range(3)
        )
        times = interleave(
            {
                "ours": _attention_step(lambda q=q, k=k, v=v, at=layout: block_sparse_attention(q, k, v, at), q, k, v),
                "dense flash": _attention_step(
                    lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v
                ),
            },
            rounds=rounds if length < 10_000 else max(3, rounds // 3),
            device=device,
        )
        yield from rows(f"block_sparse_attention {length}, window 4 + 1 global", times)


def torch_attention_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure torch's causal attention, forward and backward, with our CPU kernels and with torch's own.

    Yields nothing on other devices than CPUs.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    if device.type != "cpu":
        return
    install()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for batch, heads, length, width in _DENSE:
            generator = torch.Generator().manual_seed(0)
            given = torch.randn(3, batch, length, heads, width, generator=generator).to(dtype).transpose(2, 3)
            q, k, v = (each.requires_grad_() for each in given.unbind())
            theirs = _attention_step(
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v
            )
            times = interleave({"ours": _within(theirs), "torch": theirs}, rounds=rounds, device=device)
            yield from rows(f"torch_attention {batch}x{heads}x{length}x{width} {str(dtype)[6:]}", times)


def _within(step: Callable[[], None]) -> Callable[[], None]:
    def ours() -> None:
        with under_way():
            step()

    return ours


def _attention_step(attend: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        attend().sum().backward()

    return step


_SHAPES = ((512, 384, 16384), (2048, 768, 50257))
"""(tokens, width, vocabulary) of `bench step` and of GPT-2."""

_CHUNK = 256


def loss_rows(device: torch.device, rounds: int) -> Iterator[BenchRow]:
    """Measure the linear cross-entropy, forward and backward, next to the full logits.

    The floor is the three matrix products, in chunks that fit the caches. A separate row shows memory: peak bytes
    beyond those before and after the step, divided by the bytes of the full logits.

    Args:
        device: the device to measure.
        rounds: interleaved rounds.
    """
    for tokens, width, vocabulary in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
            weight = (torch.randn(vocabulary, width, generator=generator) / 30).to(device, dtype).requires_grad_()
            targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
            ours = _loss_step(lambda h=hidden, w=weight, t=targets: linear_cross_entropy(h, w, t), hidden, weight)
            full = _loss_step(
                lambda h=hidden, w=weight, t=targets: F.cross_entropy(F.linear(h, w).float(), t), hidden, weight
            )
            contestants: dict[str, Callable[[], object]] = {
                "ours": ours,
                "floor": _products(hidden.detach(), weight.detach()),
                "full logits": full,
            }
            times = interleave(contestants, rounds=rounds, device=device)
            name = f"linear_cross_entropy {tokens} × {width} × {vocabulary} {str(dtype).removeprefix('torch.')}"
            yield from rows(name, times, floor="floor")
            if vocabulary > 50_000:
                logits = tokens * vocabulary * dtype.itemsize
                yield BenchRow(
                    case=f"{name}: peak extra memory over the logits'",
                    ours=_extra_bytes(ours, device) / logits,
                    unit="share",
                    peer_name="full logits",
                    peer=_extra_bytes(full, device) / logits,
                )


def _loss_step(loss: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        loss().backward()

    return step


def _products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """Return a call of only the matrix products of forward and backward, into memory that exists."""
    logits = torch.zeros(_CHUNK, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

    def run() -> None:
        for low in range(0, hidden.shape[0], _CHUNK):
            part = hidden[low : low + _CHUNK]
            torch.mm(part, weight.t(), out=logits)
            torch.mm(logits, weight, out=grad_hidden[low : low + _CHUNK])
            grad_weight.addmm_(logits.t(), part)

    return run


def _extra_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the peak bytes of a step beyond those allocated after it. Gradients exist before and after."""
    peak = PeakMemory(device)
    step()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
    else:
        # Memory that the allocator keeps for reuse would hide the peak of the step.
        release_freed_memory(device)
        before = PeakMemory.resident()
    peak.take()
    step()
    reported, allocated = peak.take()
    return (reported if allocated is None else allocated) - before
