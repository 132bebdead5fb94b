"""Causal attention to every token before, by whichever kernel is faster."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from cuda_ops.block_sparse_attention import block_sparse_attention, is_faster_dense
from cuda_ops.tensors import FLOATS
from speedlab.config.attention import head_fits
from speedlab.models.attention_layout import causal_layout

Kernel = Literal["auto", "torch"]

LEAST_TOKENS = 64
"""A block of the kernel: of shorter sequences it would compute as much."""


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, *, kernel: Kernel) -> Tensor:
    """Causal attention: q, k, v (B, H, T, D) each -> the same. By the kernel for blocks, which sees all of them, or by
    torch's `scaled_dot_product_attention`, which `kernel` may ask for."""
    if not (takes_own(kernel, q.device) and _is_plain(q) and q.shape[2] >= LEAST_TOKENS and kernel_takes(q)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend_in_blocks(q, k, v)


def _is_plain(q: Tensor) -> bool:
    """Whether there is nothing about `q` that the kernel does not know: no fake or wrapped tensor, no transform."""
    forward_mode = forward_ad._current_level >= 0
    return type(q) is Tensor and not forward_mode and not torch._C._are_functorch_transforms_active()


def takes_own(kernel: Kernel, device: torch.device) -> bool:
    """Whether sequences and heads that it takes go through our kernel on `device`. Not where a block is compiled: its
    graph would break."""
    # First: what is kept about the processor is not for a compiler to trace.
    return not torch.compiler.is_compiling() and kernel == "auto" and is_faster_dense(device)


def kernel_takes(q: Tensor) -> bool:
    """Whether the kernel for blocks takes heads as those of `q` (B, H, T, D)."""
    return q.dtype in FLOATS and head_fits(q.shape[3])


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
    """Causal attention by the kernel for blocks: q, k, v (B, H, T, D) each -> the same. `starts` (B, T) int32: the
    first key that each query sees."""
    layout: Any = causal_layout(q.shape[2])  # pyright: ignore[reportArgumentType]  # disable() loses its types
    return block_sparse_attention(q, k, v, layout, starts=starts)
