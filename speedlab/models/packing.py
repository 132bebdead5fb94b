"""Several documents in one sequence, where no document sees another.

`positions` (B, T) hold the position of each token in its document. A document begins at each token whose position is
not one more than the position before, as in Hugging Face's packed batches (`DataCollatorWithFlattening`). B sequences,
T tokens.
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
    """Raise ValueError unless `positions` hold one integer for each token.

    Args:
        positions: (B, T).
        tokens: (B, T).

    Raises:
        ValueError: If shapes differ, or positions are floats or bools.
    """
    wrong_kind = positions.dtype.is_floating_point or positions.dtype == torch.bool
    if positions.shape != tokens.shape or wrong_kind:
        raise ValueError(
            f"positions: {positions.dtype} of shape {tuple(positions.shape)}, expected int64 of the tokens' shape "
            f"{tuple(tokens.shape)}: the position of each token in its document, from 0"
        )


def check_documents(positions: Tensor) -> None:
    """Check that every document begins at 0, except one that began before its sequence.

    Otherwise a mask in place of positions would make a document of each token. Positions on a device and fake tensors
    are not checked, to avoid a sync.

    Args:
        positions: (B, T) int64.

    Raises:
        ValueError: If a document does not count from 0.
    """
    if not positions.is_cpu or isinstance(positions, FakeTensor):
        return
    begins = document_begins(positions)[:, 1:]
    if (positions < 0).any() or (positions[:, 1:][begins] != 0).any():
        raise ValueError(
            "positions: they do not count from 0 in each document; of a batch the third is where each token stands in "
            "its document, and nothing else"
        )


def document_begins(positions: Tensor) -> Tensor:
    """Return which tokens are the first of a document, (B, T) bool. The first token of a sequence always is.

    Args:
        positions: (B, T) int64.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def document_starts(positions: Tensor) -> Tensor:
    """Return the index in its sequence at which each token's document begins, (B, T) int32.

    Args:
        positions: (B, T) int64.
    """
    places = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
    # The running maximum is the latest document start before or at each token.
    return torch.where(document_begins(positions), places, 0).cummax(1).values


def starts_for(starts: Tensor, length: int) -> Tensor:
    """Return `starts` for sequences padded to `length` tokens. Padding at the end may see everything.

    Args:
        starts: (B, T) int32.
        length: Number of tokens after padding.
    """
    return F.pad(starts, (0, length - starts.shape[1])).contiguous()


def document_mask(starts: Tensor, length: int) -> Tensor:
    """Return which query sees which key, causally and within documents, (B, 1, length, length) bool.

    Args:
        starts: (B, T) int32.
        length: Number of tokens after padding.
    """
    places = torch.arange(length, device=starts.device)
    own = places >= starts_for(starts, length)[:, None, :, None]
    return own & (places <= places[:, None])


def attend_within(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attend causally within documents.

    The block kernel skips blocks of other documents. Head sizes and dtypes that the kernel does not support use torch's
    attention with a mask (B, 1, T, T).

    Args:
        q: (B, H, T, D); `k` and `v` have the same shape.
        k: Keys.
        v: Values.
        starts: (B, T) int32, first token of each token's document.

    Returns:
        (B, H, T, D).
    """
    length = q.shape[2]
    if q.dtype not in FLOATS or not takes_heads(q.shape[3]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(starts, length))
    layout = whole_layout(length, length, causal=True)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return block_sparse_attention(q, k, v, layout, starts=starts_for(starts, length))
