"""Micro-batches of a pipeline: tokens, targets, and positions if a sequence packs several documents.

A dict of keyword arguments is split here, because no pipeline rank has the whole forward. Arguments that a stage cannot
use are refused by name before any rank computes.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedlab.config import ConfigError
from speedlab.models.hf_attention import hides_nothing_more, packing_problem
from speedlab.models.packing import IGNORED, check_documents, check_positions, document_begins
from speedlab.parallel.pipeline import DecoderStage, StageModule

_WITHOUT_EFFECT = ("use_cache", "return_dict", "num_items_in_batch")
"""Keyword arguments that do not change the loss, or that `train_batch` computes itself."""


def pipeline_parts(batch: Any, stage: StageModule, layout: object) -> tuple[Tensor, ...]:
    """Return tokens and targets (B, T), target t for output t, and optionally positions (B, T).

    Args:
        batch: (tokens, targets), (tokens, targets, positions), or a dict of the model's keyword arguments.
        stage: One of this rank's stages.
        layout: For messages.

    Raises:
        TypeError: For another kind of batch.
        ValueError: For wrong positions.
        ConfigError: For arguments that a pipeline does not support; it names them. All ranks of a pipeline get the same
            batch, so all raise the same error.
    """
    if isinstance(batch, Mapping):
        parts = _parts_of_arguments(batch, stage, layout)
    elif isinstance(batch, list | tuple) and len(batch) in (2, 3) and all(isinstance(each, Tensor) for each in batch):
        parts = tuple(batch)
    else:
        raise TypeError(
            f"under {layout} a micro-batch is (tokens, targets) of tensors (B, T), or a dict of the model's keyword "
            f"arguments, not a {type(batch).__name__}; targets are the tokens one place further on: of rows (B, T + 1) "
            "give (rows[:, :-1], rows[:, 1:]); positions of documents may follow as a third"
        )
    for positions in parts[2:]:
        check_positions(positions, parts[0])
        check_documents(positions)
        # Only several documents in one sequence need more than the model's own positions.
        several = bool(document_begins(positions)[:, 1:].any()) or not isinstance(batch, Mapping)
        if several and isinstance(stage, DecoderStage) and (problem := packing_problem(stage)) is not None:
            raise ConfigError(f"model: {problem}")
    return parts


def _parts_of_arguments(given: Mapping[str, Any], stage: StageModule, layout: object) -> tuple[Tensor, ...]:
    """Split a dict of keyword arguments, as `pipeline_parts`."""
    kind = type(stage).__name__.removesuffix("Stage")
    if isinstance(stage, DecoderStage):
        names = {"tokens": "input_ids", "targets": "labels", "positions": "position_ids"}
    else:
        names = {"tokens": "tokens", "targets": "targets", "positions": "positions"}
    rest = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    tokens, positions = rest.pop(names["tokens"], None), rest.pop(names["positions"], None)
    targets = rest.pop(names["targets"], None)
    mask = None
    if isinstance(stage, DecoderStage):
        mask = rest.pop("attention_mask", None)
        if targets is not None:
            # Hugging Face's models shift labels in their loss: target t is label t + 1.
            targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
        targets = rest.pop("shift_labels", targets)
    for name, value in (("tokens", tokens), ("targets", targets)):
        if not isinstance(value, Tensor) or value.dim() != 2:
            raise ConfigError(
                f"batch: under {layout} a dict for {kind} holds {names['tokens']} and {names['targets']}, tensors of "
                f"(B, T), and {names[name]} is {'missing' if value is None else 'another kind of value'}"
            )
    if others := ", ".join(sorted(map(str, rest))[:3]):
        raise ConfigError(
            f"batch: under {layout} stages of {kind} do not take {others}; leave it out, or set parallel.pp to 1"
        )
    assert tokens is not None
    assert targets is not None
    if positions is not None:
        positions = positions.expand_as(tokens)
    if mask is not None:
        positions = _without_mask(mask, tokens, targets, positions, layout)
    return (tokens, targets) if positions is None else (tokens, targets, positions)


def _without_mask(
    mask: Tensor, tokens: Tensor, targets: Tensor, positions: Tensor | None, layout: object
) -> Tensor | None:
    """Return positions that replace the mask. Raises ConfigError for a mask that hides visible tokens."""
    if mask.shape != tokens.shape:
        raise ConfigError(
            f"attention_mask: under {layout} it is (B, T) of ones and zeros, and its shape is {tuple(mask.shape)} for "
            f"tokens of {tuple(tokens.shape)}; leave it out, or set parallel.pp to 1"
        )
    hidden = mask == 0
    if positions is not None:
        # Positions of padding are arbitrary, so each padding token becomes its own document.
        positions = torch.where(hidden, 0, positions)
    if not hides_nothing_more(mask, positions) or bool((hidden & (targets != IGNORED)).any()):
        raise ConfigError(
            f"attention_mask: under {layout} stages take no mask, and this one hides tokens from later ones, or "
            f"targets of hidden tokens count; pad on the right with labels of {IGNORED}, or set parallel.pp to 1"
        )
    return positions
