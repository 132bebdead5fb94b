"""Block-sparse attention, as a case of `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_attention import block_sparse_attention
from speedlab.bench.interleave import interleave, rows
from speedlab.bench.table import Row

_HEADS, _WIDTH = 2, 64


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


def _step(attend: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        for tensor in inputs:
            tensor.grad = None
        attend().sum().backward()

    return step
