"""Block-sparse attention, and torch's by the same kernels, as cases of `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_attention import block_sparse_attention
from cuda_ops.cpu_sdpa import install, under_way
from speedlab.bench.interleave import interleave, rows
from speedlab.bench.table import Row

_HEADS, _WIDTH = 2, 64

_DENSE = ((4, 6, 128, 64), (1, 4, 512, 128), (1, 12, 512, 64), (1, 2, 4096, 64))
"""Batch, heads, tokens, elements of a head."""


def attention_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """Forward and backward, causal, a window of 4 blocks and 1 global block, beside dense attention."""
    for length in (4096, 16384):
        layout = BlockLayout.local(length, 4, causal=True) | BlockLayout.global_(length, 1, causal=True)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, _HEADS, length, _WIDTH, generator=generator).to(device).requires_grad_() for _ in range(3)
        )
        times = interleave(
            {
                "ours": _step(lambda q=q, k=k, v=v, at=layout: block_sparse_attention(q, k, v, at), q, k, v),
                "dense flash": _step(
                    lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v
                ),
            },
            rounds=rounds if length < 10_000 else max(3, rounds // 3),
            device=device,
        )
        yield from rows(f"block_sparse_attention {length}, window 4 + 1 global", times)


def torch_attention_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """torch's causal attention, forward and backward, by our kernels and by its own. On CPUs."""
    if device.type != "cpu":
        return
    install()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for batch, heads, length, width in _DENSE:
            generator = torch.Generator().manual_seed(0)
            given = torch.randn(3, batch, length, heads, width, generator=generator).to(dtype).transpose(2, 3)
            q, k, v = (each.requires_grad_() for each in given.unbind())
            theirs = _step(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
            times = interleave({"ours": _within(theirs), "torch": theirs}, rounds=rounds, device=device)
            yield from rows(f"torch_attention {batch}x{heads}x{length}x{width} {str(dtype)[6:]}", times)


def _within(step: Callable[[], None]) -> Callable[[], None]:
    def ours() -> None:
        with under_way():
            step()

    return ours


def _step(attend: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        attend().sum().backward()

    return step
