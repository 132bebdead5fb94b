"""Block-sparse attention as transformers' models call it, by the name that `registered` gives.

1. A mask is made once in a forward: none where each token may see what the pattern shows it, else one of padding, of
   packed sequences, of keys in a cache.
2. Attention without a mask goes through the kernel, in time and memory by the blocks that are seen.
3. Attention with a mask is dense, under that mask and the pattern: the same numbers without the saving, and said once.
4. What else a model's attention may ask for (dropout, soft caps, sinks, biases) would change the numbers: refused.

Packed documents in the keyword arguments of a model of transformers: `position_ids` that begin at 0 several times.

transformers (5.23) keeps such documents separate only if no cache is filled and no `attention_mask` of two dimensions
is given. So in training

1. caches are off while the model is called, as in transformers' Trainer; the model's own configuration is unchanged
   afterwards;
2. an `attention_mask` next to packed positions is left out if it hides nothing that the documents do not hide. Else
   the batch is refused.

Fake tensors have no values, so transformers would take every traced batch for a packed one: `packed_if_given`.

B sequences, T tokens.
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


_SEPARATE_BY_THEMSELVES = ("cu_seq_lens_q", "seq_idx")
"""Arguments that say in another way where documents begin (`DataCollatorWithFlattening`)."""

_replacing = Lock()
"""One thread at a time replaces a function of transformers, or the wrong one would be put back."""

_configs: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in the configurations of `model` and its modules inside, and on again afterwards."""
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
    """Let transformers take fake positions for packed documents only if they are among the tensors of `batch`.

    transformers reads the values of positions, and cannot read those of fake tensors. Then it makes a mask even for
    positions that the model itself counts from 0. A real batch has no such mask, and another attention kernel.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
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

    Args:
        model: a model of transformers, or a module around one.
        given: its keyword arguments; without `position_ids` (B, T) they are returned as they are.

    Raises ConfigError for a model that does not keep packed documents separate, and for a mask or a cache next to
    packed positions that would mix them. Looks at the values of positions and mask, so waits for a device if they
    are on one.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or given.keys() & set(_SEPARATE_BY_THEMSELVES):
        return given
    owner = owner_of(model)
    if not is_transformers(owner):
        return given  # A module of another kind has its own meaning of these arguments.
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
    """Whether causal attention within documents shows no hidden token to one that is not hidden: `mask` (B, T) of ones
    and zeros may be left out."""
    hidden = ~mask.bool()
    seen = hidden.cumsum(-1)
    if positions is not None:
        starts = document_starts(positions.expand_as(mask)).long()
        before = torch.where(starts > 0, seen.gather(-1, (starts - 1).clamp(min=0)), 0)
        seen = seen - before
    return not bool(((seen > 0) & ~hidden).any())


def _is_packed(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether a document begins inside a sequence, between tokens that are not hidden."""
    begins = document_begins(positions)[:, 1:]
    if mask is not None and mask.shape[-1] == positions.shape[-1]:
        begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(begins.any())


def _problem(model: nn.Module, positions: Tensor, given: Mapping[str, Any]) -> str | None:
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    if "flash" in attention and len(given.get("input_ids", positions)) == 1:
        return None  # Flash attention keeps documents of a single sequence separate.
    return packing_problem(model)
