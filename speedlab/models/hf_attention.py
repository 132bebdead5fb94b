"""Attention and packed documents of Hugging Face transformers models: block-sparse kernels, and documents kept
separate.

Shapes: B sequences, T tokens.

Block-sparse attention, under the name that `registered` returns:

1. transformers makes a mask once in a forward pass. `_mask` returns None if only the pattern and causality restrict
   attention; otherwise a mask for padding, packed sequences, or keys of a cache.
2. Without a mask, attention uses the kernel: time and memory are proportional to the number of visible blocks.
3. With a mask, attention is dense under mask and pattern: the numbers are the same, nothing is saved, and a warning
   says so once.
4. Dropout, soft caps, sinks and biases would change the numbers and are refused.

Packed documents, marked by `position_ids` that restart at 0:

1. transformers (5.23) keeps them separate only if no cache is filled and no two-dimensional `attention_mask` is given.
   So caches are off while the model is called, as in transformers' Trainer; the model's configuration is restored.
2. An `attention_mask` next to packed positions is dropped if it hides nothing that the documents do not hide. Otherwise
   the batch is refused.
3. Fake tensors have no values, so transformers would take every traced batch for a packed one; see `packed_if_given`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from cuda_ops.block_sparse_attention import block_sparse_attention, token_mask
from speedlab.config import AttentionConfig, ConfigError
from speedlab.models.gpt import layout_of
from speedlab.models.labels import is_transformers, owner_of
from speedlab.models.packing import document_begins, document_starts

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
"""Arguments that transformers models pass to their attention without effect on the scores; positions already are part
of the mask.
"""

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
"""Models that keep documents separate if `position_ids` restart, without a mask or a cache. Tests cover each of
them.
"""

_PACKED_ATTENTION = ("sdpa", "eager", "flex_attention", "speedlab_block_sparse")
"""Attention implementations that make a mask from positions. Flash attention does this only for batches of one
sequence.
"""


@cache
def registered(attention: AttentionConfig) -> str:
    """Register this attention with transformers' `AttentionInterface` and return its name.

    Set a model's `config._attn_implementation` to this name. The first call registers for the life of the process.

    Args:
        attention: Pattern, block size and window.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"speedlab_block_sparse_{sha256(attention.model_dump_json().encode()).hexdigest()[:8]}"
    AttentionInterface.register(name, InterfaceAttention(attention))
    AttentionMaskInterface.register(name, _mask)
    return name


class InterfaceAttention:
    """Attention over the blocks of a pattern, with the interface of transformers' attention functions."""

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
        """Return the attention output (B, T, H, D), and None in place of probabilities.

        Args:
            module: The model's attention; causal unless its `is_causal`, or the argument, says otherwise.
            query: (B, H, T, D).
            key: (B, G, S, D) for S ≥ T tokens that end with the queries; each of the G heads serves H / G query heads.
            value: Same shape as `key`.
            attention_mask: (B, 1, T, S) bool, True where a query may see a key, or floats that are added to the scores.
            scaling: Factor of the scores; None for 1 / sqrt(D).
            dropout: Must be 0.
            is_causal: Overrides the attribute of `module`.
            sliding_window: The model's own window in tokens.
            others: Further arguments of the model, see `_WITHOUT_EFFECT`.

        Raises:
            ValueError: For arguments that would change the numbers.
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
    """Return why `model` would not keep packed documents separate, and what to do; None if it does.

    Args:
        model: A model of the user.
    """
    instead = (
        "set data.documents to 'joined', or give loss=f, which is called as f(model, (tokens, targets, positions))"
    )
    config: Any = getattr(model, "config", None)
    kind, attention = getattr(config, "model_type", None), getattr(config, "_attn_implementation", None)
    if kind not in PACKED_FAMILIES:
        return (
            f"documents are to be separate, and {type(model).__name__}.forward takes no `positions`, nor is it of a "
            f"type of transformers known to keep them separate ({', '.join(PACKED_FAMILIES)}); {instead}"
        )
    if not str(attention).startswith(_PACKED_ATTENTION):
        return (
            f"documents are to be separate, and {type(model).__name__} with attention {attention!r} does not keep "
            "those of several sequences separate; load it by from_pretrained(..., attn_implementation='sdpa'), or set "
            "data.documents to 'joined'"
        )
    return None


def covers(attention: AttentionConfig, sliding_window: int) -> bool:
    """Return whether a model's own window hides nothing that the pattern shows.

    Args:
        attention: Pattern and window.
        sliding_window: The model's window in tokens.
    """
    return attention.pattern == "sliding" and attention.window <= sliding_window


def beyond_window(attention: AttentionConfig, sliding_window: int) -> str:
    """Return the message for a model's window that hides part of the pattern.

    Args:
        attention: Pattern and window.
        sliding_window: The model's window in tokens.
    """
    return (
        f"'block_sparse' with pattern {attention.pattern!r} would show keys beyond the model's own sliding_window of "
        f"{sliding_window} tokens; set sliding_window to None in the model's configuration, or pattern to 'sliding' "
        f"with a window of at most {sliding_window}"
    )


def _mask(
    *, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, local_size: int | None = None, **given: Any
) -> Tensor | None:
    """Return which tokens may see each other under any pattern, (B, 1, T, S) bool; None if only causality restricts
    them.

    This is transformers' mask without the model's own window, `local_size`, because the pattern is inside that window
    (see `covers`).
    """
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


_SEPARATE_BY_THEMSELVES = ("cu_seq_lens_q", "seq_idx")
"""Other arguments that mark document boundaries (`DataCollatorWithFlattening`)."""

_replacing = Lock()
"""Only one thread at a time may replace a function of transformers; otherwise the wrong one would be restored."""

_configs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in the configurations of `model` and its modules inside this context, and restore it
    afterwards.

    Args:
        model: A model of transformers, or a module around one.
    """
    if model not in _configs:
        found = (getattr(module, "config", None) for module in model.modules())
        _configs[model] = list({id(config): config for config in found if hasattr(config, "use_cache")}.values())
    on = [config for config in _configs[model] if config.use_cache]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


@contextmanager
def packed_if_given(batch: Any) -> Iterator[None]:
    """Treat fake positions as packed documents only if they are among the tensors of `batch`.

    transformers reads the values of positions, which fake tensors do not have. So transformers would make a mask even
    for positions that the model itself counts from 0. A real batch would have no such mask, and use another attention
    kernel.

    Args:
        batch: Any structure of tensors.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    # Compare storages, because a model may pass on a view of its positions.
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    with _replacing:
        find = masks.find_packed_sequence_indices

        def found(position_ids: Tensor) -> Tensor | None:
            if isinstance(position_ids, FakeTensor) and position_ids.untyped_storage()._cdata not in given:
                return None
            return find(position_ids)

        masks.find_packed_sequence_indices = found
        try:
            yield
        finally:
            masks.find_packed_sequence_indices = find


def keep_separate(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with which the model keeps packed documents separate.

    This reads the values of positions and mask, which is a sync if they are on a device.

    Args:
        model: A model of transformers, or a module around one.
        given: Its keyword arguments; returned unchanged without `position_ids` (B, T).

    Raises:
        ConfigError: If the model does not keep packed documents separate, or a mask or a cache would mix them.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or given.keys() & set(_SEPARATE_BY_THEMSELVES):
        return given
    owner = owner_of(model)
    if not is_transformers(owner):
        return given  # A module outside transformers gives these arguments its own meaning.
    problem = _problem(owner, positions, given)
    flat_mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    if problem is None and flat_mask is None and not given.get("use_cache"):
        return given
    if not _is_packed(positions, flat_mask):
        return given
    if problem is not None:
        raise ConfigError(f"position_ids: {problem}")
    if given.get("use_cache"):
        raise ConfigError(
            "use_cache: with a cache the documents of packed position_ids see each other; leave use_cache out"
        )
    if flat_mask is None or flat_mask.shape[-1] != positions.shape[-1]:
        return given  # The model itself refuses a mask of another length.
    if not hides_nothing_more(flat_mask, positions):
        raise ConfigError(
            "attention_mask: next to packed position_ids it would let documents see each other, and leaving it out "
            "would show tokens that it hides; begin a new document (position 0) after hidden tokens, and pass no mask"
        )
    return {name: value for name, value in given.items() if name != "attention_mask"}


def hides_nothing_more(mask: Tensor, positions: Tensor | None = None) -> bool:
    """Return whether `mask` may be dropped: causal attention within documents already hides what the mask hides.

    Args:
        mask: (B, T) of ones and zeros.
        positions: (B, T) int64; None for one document per sequence.
    """
    hidden = ~mask.bool()
    seen = hidden.cumsum(-1)
    if positions is not None:
        starts = document_starts(positions.expand_as(mask)).long()
        before = torch.where(starts > 0, seen.gather(-1, (starts - 1).clamp(min=0)), 0)
        seen = seen - before
    return not bool(((seen > 0) & ~hidden).any())


def _is_packed(positions: Tensor, mask: Tensor | None) -> bool:
    """Return whether a document begins inside a sequence, between tokens that are not hidden."""
    begins = document_begins(positions)[:, 1:]
    if mask is not None and mask.shape[-1] == positions.shape[-1]:
        begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(begins.any())


def _problem(model: nn.Module, positions: Tensor, given: Mapping[str, Any]) -> str | None:
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    if "flash" in attention and len(given.get("input_ids", positions)) == 1:
        return None  # Flash attention keeps documents of a single sequence separate.
    return packing_problem(model)
