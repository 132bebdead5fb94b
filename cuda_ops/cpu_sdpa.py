"""Replace torch's CPU attention by the block kernels, with all blocks visible, if that is faster.

`torch.nn.functional.scaled_dot_product_attention` ends in one torch operation on CPUs, with another one in backward.
Within `under_way`, these two call our kernels. The autograd graph and the saved tensors stay torch's. Each backward
accepts the saved tensors of either forward.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cuda_ops.block_layout import BLOCK, whole_layout
from cuda_ops.block_sparse_attention import partial_attention, partial_gradients, takes_heads
from cuda_ops.cpu_info import has_avx512, has_matrix_units

Choice = Literal["auto", "torch"]
""""auto" chooses by the processor; "torch" keeps torch's own kernels."""

WORTH = {torch.float32: (128, 1.2), torch.bfloat16: (64, 1.7), torch.float16: (64, 4.0)}
"""By dtype: the minimum number of tokens, and the maximum ratio of scores in whole blocks to requested scores. torch is
slow with 16 bits, and slowest with float16.
"""

MOST_TOKENS = 1 << 16
"""Maximum number of tokens: with more, the list of blocks takes megabytes."""

_FORWARD, _BACKWARD = (f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward"))


class _Thread(threading.local):
    """Whether attention in this thread uses our kernels."""

    ours = False


_thread = _Thread()
_lock = threading.Lock()
_libraries: list[torch.library.Library] = []
"""Keeps our kernels registered, from the first `install` on. Never undone, because other code may hold the registered
kernel.
"""


def in_use(device: torch.device, choice: Choice) -> str:
    """Return the kernels that compute attention: "blocks" for ours, "torch" for torch's own.

    Args:
        device: Device of the tensors.
        choice: "auto" or "torch".
    """
    return "blocks" if device.type == "cpu" and choice == "auto" and is_faster() else "torch"


def is_faster() -> bool:
    """Return whether our kernels are faster on this processor: with AVX-512 and without matrix units, which torch uses.

    False if this torch version has no `torch.library.get_kernel`.
    """
    return has_avx512() and not has_matrix_units() and hasattr(torch.library, "get_kernel")


def install() -> None:
    """Register our kernels in place of torch's. They call torch's kernels outside `under_way`."""
    with _lock:
        if not _libraries:
            _libraries.append(_registered())


@contextmanager
def under_way(ours: bool = True) -> Iterator[None]:
    """Compute attention of this thread with our kernels inside the context, forward and backward.

    Args:
        ours: False for torch's kernels.
    """
    before = _thread.ours
    try:
        _thread.ours = ours
        yield
    finally:
        _thread.ours = before


def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name, own in ((_FORWARD, _attend), (_BACKWARD, _gradients)):
        kernel = torch.library.get_kernel(name, "CPU")  # torch's own kernel, before ours replaces it.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*verrid", category=UserWarning)  # Intended.
            library.impl(name, partial(own, kernel), "CPU", with_keyset=True)
    return library


def _is_wanted(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, mask: Tensor | None) -> bool:
    if not (_thread.ours and dropout == 0 and mask is None and q.dtype in WORTH):
        return False
    if not (q.dtype == k.dtype == v.dtype and takes_heads(q.shape[3]) and k.shape == v.shape):
        return False
    (batch, heads, length, depth), keys = q.shape, k.shape[2]
    if k.shape[0] != batch or k.shape[3] != depth or heads % max(1, k.shape[1]) or (causal and length != keys):
        return False
    least, padding = WORTH[q.dtype]
    padded = _in_blocks(length) * _in_blocks(keys)
    return min(length, keys) >= least and max(length, keys) <= MOST_TOKENS and padded <= padding * length * keys


def _attend(
    torchs: Any,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if not _is_wanted(query, key, value, dropout_p, is_causal, attn_mask):
        rest = {"attn_mask": attn_mask, "scale": scale}
        return torchs.call_boxed(keyset, query, key, value, dropout_p, is_causal, **rest)
    layout = whole_layout(query.shape[2], key.shape[2], causal=is_causal)
    key, value = (_for_each(query, each) for each in (key, value))
    out, logarithm = partial_attention(query, key, value, layout, scale=_factor(query, scale))
    return out, _tokens_first(logarithm)


def _gradients(
    torchs: Any,
    keyset: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if not _is_wanted(query, key, value, dropout_p, is_causal, attn_mask):
        saved = query, key, value, out, logsumexp
        rest = {"attn_mask": attn_mask, "scale": scale}
        return torchs.call_boxed(keyset, grad_out, *saved, dropout_p, is_causal, **rest)
    layout = whole_layout(query.shape[2], key.shape[2], causal=is_causal)
    factor, (keys, values) = _factor(query, scale), (_for_each(query, each) for each in (key, value))
    of_q, *others = partial_gradients(grad_out, query, keys, values, out, logsumexp, layout, scale=factor)
    return tuple(map(_tokens_first, (of_q, *(_summed(each, key) for each in others))))


def _for_each(query: Tensor, given: Tensor) -> Tensor:
    """Return `given` (B, G, S, D) repeated for each head of `query` (B, H, T, D), if several heads share one."""
    shared = query.shape[1] // given.shape[1]
    return given if shared == 1 else given.repeat_interleave(shared, 1)


def _summed(gradient: Tensor, given: Tensor) -> Tensor:
    """Sum `gradient` (B, H, S, D) over the heads that share one of `given` (B, G, S, D)."""
    if gradient.shape == given.shape:
        return gradient
    return gradient.unflatten(1, (given.shape[1], -1)).sum(2, dtype=torch.float32).to(given.dtype)


def _in_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _factor(query: Tensor, scale: float | None) -> float:
    return query.shape[3] ** -0.5 if scale is None else scale


def _tokens_first(given: Tensor) -> Tensor:
    """Return `given` (B, H, T, …) with the memory order (B, T, H, …), as torch's kernels return it."""
    return given.transpose(1, 2).contiguous().transpose(1, 2)
