"""The linear cross-entropy, as a case of `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops.linear_cross_entropy import linear_cross_entropy
from speedlab.bench.interleave import interleave, rows
from speedlab.bench.table import Row
from speedlab.engine.memory_ledger import PeakMemory, release_freed_memory

_SHAPES = ((512, 384, 16384), (2048, 768, 50257))
"""(tokens, width, vocabulary): of `bench step`, and of GPT-2."""

_CHUNK = 256


def loss_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """Forward and backward beside the full logits; the floor is the three products, in chunks that fit the caches.

    A row of its own tells the memory: bytes at the peak beyond what stands before and after, over the full logits'.
    """
    for tokens, width, vocabulary in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
            weight = (torch.randn(vocabulary, width, generator=generator) / 30).to(device, dtype).requires_grad_()
            targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
            ours = _step(lambda h=hidden, w=weight, t=targets: linear_cross_entropy(h, w, t), hidden, weight)
            full = _step(
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
                yield Row(
                    case=f"{name}: peak extra memory over the logits'",
                    ours=_extra_bytes(ours, device) / logits,
                    unit="share",
                    peer_name="full logits",
                    peer=_extra_bytes(full, device) / logits,
                )


def _step(loss: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        loss().backward()

    return step


def _products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The matrix products of forward and backward, and nothing else, into memory that exists."""
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
    """Bytes at the peak of a step beyond those that stand after it: gradients are there before and after."""
    peak = PeakMemory(device)
    step()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
    else:
        # What stays with the process until it is needed again would hide what a step takes.
        release_freed_memory(device)
        before = PeakMemory.resident()
    peak.take()
    step()
    reported, allocated = peak.take()
    return (reported if allocated is None else allocated) - before
