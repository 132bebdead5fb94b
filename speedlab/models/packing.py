"""Several documents in one sequence: none sees another.

`positions` (B, T) say where each token stands in its document. A document begins where they do not go on by one from
the token before, as in Hugging Face's packed batches (`DataCollatorWithFlattening`). B sequences, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cuda_ops.block_layout import whole_layout
from cuda_ops.block_sparse_attention import block_sparse_attention, takes_heads
from cuda_ops.tensor_checks import FLOATS

IGNORED = -100
"""A target that does not count."""


def check_positions(positions: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless there is a whole number for each token."""
    wrong_kind = positions.dtype.is_floating_point or positions.dtype == torch.bool
    if positions.shape != tokens.shape or wrong_kind:
        raise ValueError(
            f"positions: {positions.dtype} of shape {tuple(positions.shape)}, expected int64 of the tokens' shape "
            f"{tuple(tokens.shape)}: where each token stands in its document, from 0"
        )


def check_documents(positions: Tensor) -> None:
    """Raise ValueError, where values are at hand without waiting for a device, unless every document begins at 0, but
    for one that began before its sequence: a mask in the place of positions would make a document of each token."""
    if not positions.is_cpu or isinstance(positions, FakeTensor):
        return
    begins = document_begins(positions)[:, 1:]
    if (positions < 0).any() or (positions[:, 1:][begins] != 0).any():
        raise ValueError(
            "positions: they do not count from 0 in each document; of a batch the third is where each token stands in "
            "its document, and nothing else"
        )


def document_begins(positions: Tensor) -> Tensor:
    """(B, T) bool: which tokens are the first of a document; the first of a sequence always is."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def document_starts(positions: Tensor) -> Tensor:
    """(B, T) int32: the place in its sequence at which each token's document begins."""
    places = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
    return torch.where(document_begins(positions), places, 0).cummax(1).values


def starts_for(starts: Tensor, length: int) -> Tensor:
    """`starts` for sequences padded to `length` tokens: what pads them comes behind, and may see anything."""
    return F.pad(starts, (0, length - starts.shape[1])).contiguous()


def document_mask(starts: Tensor, length: int) -> Tensor:
    """(B, 1, T, T) bool: which query sees which key, causally, of sequences of `length` tokens."""
    places = torch.arange(length, device=starts.device)
    own = places >= starts_for(starts, length)[:, None, :, None]
    return own & (places <= places[:, None])


def attend_within(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Causal attention within documents that begin at `starts` (B, T): q, k, v (B, H, T, D) each -> the same.

    Through the kernel for blocks, which skips those of other documents; heads that it does not take go through torch's
    attention with a mask, (B, 1, T, T).
    """
    length = q.shape[2]
    if q.dtype not in FLOATS or not takes_heads(q.shape[3]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(starts, length))
    layout = whole_layout(length, length, causal=True)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return block_sparse_attention(q, k, v, layout, starts=starts_for(starts, length))
