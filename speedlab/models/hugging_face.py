"""Block-sparse attention as transformers' models call it, by the name that `registered` gives.

1. A mask is made once in a forward: none where each token may see what the pattern shows it, else one of padding, of
   packed sequences, of keys in a cache.
2. Attention without a mask goes through the kernel, in time and memory by the blocks that are seen.
3. Attention with a mask is dense, under that mask and the pattern: the same numbers without the saving, and said once.
4. What else a model's attention may ask for (dropout, soft caps, sinks, biases) would change the numbers: refused.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from hashlib import sha256
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cuda_ops.block_sparse_attention import block_sparse_attention, token_mask
from speedlab.config import AttentionConfig
from speedlab.models.attention_layout import layout_of

log = logging.getLogger("speedlab.models")

_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}
"""What transformers' models pass on to their attention, and scores do not depend on: masks are made of positions."""

PACKED_FAMILIES = (
    "gemma",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Models that keep documents apart where `position_ids` begin anew, without a mask or a cache: known from tests."""

_PACKED_ATTENTION = ("sdpa", "eager", "flex_attention", "speedlab_block_sparse")
"""What makes a mask of positions. (Flash attention does so for batches of a single sequence only.)"""


@cache
def registered(attention: AttentionConfig) -> str:
    """The name under which transformers' `AttentionInterface` has this attention: what a model's
    `config._attn_implementation` is to be. Registered by the first call, for the life of the process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"speedlab_block_sparse_{sha256(attention.model_dump_json().encode()).hexdigest()[:8]}"
    AttentionInterface.register(name, InterfaceAttention(attention))
    AttentionMaskInterface.register(name, _mask)
    return name


class InterfaceAttention:
    """Attention over a pattern's blocks, with the arguments and the answer of transformers' attention functions."""

    def __init__(self, attention: AttentionConfig) -> None:
        self.attention = attention

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """(B, T, H, D), and no probabilities.

        Args:
            module: the model's attention; causal unless its `is_causal`, or the argument, says otherwise.
            query: (B, H, T, D).
            key, value: (B, G, S, D) for S ≥ T tokens that end with the queries'; each of the G heads is for H / G.
            attention_mask: (B, 1, T, S) bool, True where a query may see a key, or floats to add to scores.

        Raises ValueError for what would change the numbers and is not computed here.
        """
        self._refuse(dropout=dropout, sliding_window=sliding_window, **others)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        length, keys = query.shape[2], key.shape[2]
        if keys < length or (keys > length and not causal):
            raise ValueError(
                f"model.attention 'block_sparse' is for sequences that attend to themselves, and {length} queries came "
                f"with {keys} keys; set model.attention.kind to 'dense'"
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
        layout = layout_of(self.attention, keys, causal=causal)  # pyright: ignore[reportCallIssue]  # disable() loses its types
        if attention_mask is None and keys == length:  # 2
            q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
            return block_sparse_attention(q, k, v, layout, scale=scaling).transpose(1, 2), None
        seen = token_mask(layout, keys, keys)[keys - length :].to(query.device)  # 3
        if attention_mask is not None:
            _say_dense()
            added = attention_mask.dtype.is_floating_point
            seen = attention_mask.masked_fill(~seen, -math.inf) if added else attention_mask & seen
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2), None

    def _refuse(self, *, dropout: float, sliding_window: int | None, **others: Any) -> None:  # 4
        if dropout:
            raise ValueError(
                f"model.attention 'block_sparse' drops no attention probabilities, and {dropout} came; set the "
                "dropout of attention in the model's configuration to 0"
            )
        if sliding_window is not None and not covers(self.attention, sliding_window):
            raise ValueError(f"model.attention {beyond_window(self.attention, sliding_window)}")
        unknown = {name for name, value in others.items() if value is not None and value is not False}
        if unknown - _WITHOUT_EFFECT:
            raise ValueError(
                f"model.attention 'block_sparse' computes softmax(scale · q kᵀ) v over blocks, and the model asks its "
                f"attention for {', '.join(sorted(unknown - _WITHOUT_EFFECT))} besides; set model.attention.kind to "
                "'dense'"
            )


def packing_problem(model: nn.Module) -> str | None:
    """Why `model` would not keep documents apart that its `position_ids` tell of, and what to do; None where it
    does."""
    instead = (
        "set data.documents to 'joined', or give loss=f, which is called as f(model, (tokens, targets, positions))"
    )
    config: Any = getattr(model, "config", None)
    kind, attention = getattr(config, "model_type", None), getattr(config, "_attn_implementation", None)
    if kind not in PACKED_FAMILIES:
        return (
            f"documents are to be separate, and {type(model).__name__}.forward takes no `positions`, nor is it of a "
            f"type of transformers known to keep them apart ({', '.join(PACKED_FAMILIES)}); {instead}"
        )
    if not str(attention).startswith(_PACKED_ATTENTION):
        return (
            f"documents are to be separate, and {type(model).__name__} with attention {attention!r} does not keep "
            "those of several sequences apart; load it by from_pretrained(..., attn_implementation='sdpa'), or set "
            "data.documents to 'joined'"
        )
    return None


def covers(attention: AttentionConfig, sliding_window: int) -> bool:
    """Whether a model's own window of so many tokens hides nothing that the pattern shows."""
    return attention.pattern == "sliding" and attention.window <= sliding_window


def beyond_window(attention: AttentionConfig, sliding_window: int) -> str:
    """What is to be said where it does hide something."""
    return (
        f"'block_sparse' with pattern {attention.pattern!r} would show keys beyond the model's own sliding_window of "
        f"{sliding_window} tokens; set sliding_window to None in the model's configuration, or pattern to 'sliding' "
        f"with a window of at most {sliding_window}"
    )


def _mask(
    *, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, local_size: int | None = None, **given: Any
) -> Tensor | None:
    """(B, 1, T, S) bool, where a token may see another whatever the pattern; None where only causality says so. As
    transformers makes it, but for a model's own window, `local_size`, which the pattern lies within (see `covers`)."""
    from transformers.masking_utils import sdpa_mask

    offset = int(q_offset)
    if offset + q_length != kv_length or kv_offset:
        raise ValueError(
            f"model.attention 'block_sparse' takes keys that end with the queries, and a cache gave keys {kv_offset} "
            f"to {kv_offset + kv_length} for queries {offset} to {offset + q_length}; use a DynamicCache without "
            "windows, or set use_cache to False"
        )
    return sdpa_mask(q_length=q_length, kv_length=kv_length, q_offset=offset, local_size=None, **given)


@cache
def _say_dense() -> None:
    log.warning(
        "model.attention: a batch came with a mask (of padding, or of several sequences in one): such batches go "
        "through dense attention that hides the same blocks, which is exact and saves nothing"
    )
