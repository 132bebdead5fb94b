"""Packed documents in the keyword arguments of a model of transformers: `position_ids` that begin at 0 several times.

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

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from speedlab.config import ConfigError
from speedlab.models.documents import document_begins, document_starts
from speedlab.models.hugging_face import packing_problem
from speedlab.models.labels import is_transformers, owner_of

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
