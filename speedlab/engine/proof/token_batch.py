"""A micro-batch as tokens and targets, from any form, and changed copies in the same form.

Shapes: B sequences, T tokens. `targets[b, t]` is the token that position t predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.models.labels import Labels, label_rule
from speedlab.models.packing import IGNORED, document_starts

_TOKEN_NAMES = ("input_ids", "tokens")
_TARGET_NAMES = ("shift_labels", "targets", "labels")
_POSITION_NAMES = ("position_ids", "positions")
_LEFT_OUT = ("num_items_in_batch",)
"""Counts of the whole batch, which are wrong for a part of it."""


class NoTokensError(ValueError):
    """A micro-batch without tokens and targets; the text describes it."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Tokens (B, T) int64, targets (B, T) int64 with -100 if none counts, and optional positions in documents
    (B, T).
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None
    _make: Callable[[TokenBatch, Tensor], Any]
    rows_given: Tensor
    """(B,) int64: the sequences of the given batch."""

    @property
    def counted(self) -> Tensor:
        """Return (B, T) bool: positions with a counted target."""
        return self.targets != IGNORED

    @property
    def starts(self) -> Tensor | None:
        """Return (B, T) int32: the start of each token's document; None without positions."""
        return None if self.positions is None else document_starts(self.positions)

    def rows(self, first: int, end: int) -> TokenBatch:
        """Return some sequences.

        Args:
            first: The first sequence.
            end: The sequence after the last one.
        """
        here = slice(first, end)
        positions = None if self.positions is None else self.positions[here]
        return self._with(self.tokens[here], self.targets[here], positions, self.rows_given[here])

    def changed(self, *, tokens: Tensor | None = None, targets: Tensor | None = None) -> TokenBatch:
        """Return a copy with other tokens or targets.

        Args:
            tokens: (B, T) int64; None keeps them.
            targets: (B, T) int64; None keeps them.
        """
        return self._with(
            self.tokens if tokens is None else tokens,
            self.targets if targets is None else targets,
            self.positions,
            self.rows_given,
        )

    def as_given(self) -> Any:
        """Return the batch in its given form."""
        return self._make(self, self.rows_given)

    def _with(self, tokens: Tensor, targets: Tensor, positions: Tensor | None, rows: Tensor) -> TokenBatch:
        return TokenBatch(tokens=tokens, targets=targets, positions=positions, _make=self._make, rows_given=rows)


def token_batch(batch: Any, model: nn.Module) -> TokenBatch:
    """Find the tokens and targets of a micro-batch.

    Args:
        batch: The micro-batch in any form.
        model: Shows whether its loss shifts labels.

    Raises:
        NoTokensError: If there are none, with the reason.
    """
    if isinstance(batch, Mapping):
        return _of_mapping(batch, model)
    if isinstance(batch, list | tuple) and len(batch) in (2, 3) and all(isinstance(each, Tensor) for each in batch):
        return _of_pair(batch)
    raise NoTokensError(f"the batch is a {type(batch).__name__}, not (tokens, targets) or a dict with input_ids")


def _of_pair(batch: Any) -> TokenBatch:
    tokens, targets, *more = batch
    _check(tokens, targets)
    kind = type(batch)

    def make(view: TokenBatch, rows: Tensor) -> Any:
        parts = [view.tokens, view.targets, *([] if view.positions is None else [view.positions])]
        return parts if kind is list else tuple(parts)

    positions = more[0] if more else None
    return TokenBatch(
        tokens=tokens, targets=targets, positions=positions, _make=make, rows_given=torch.arange(len(tokens))
    )


def _of_mapping(batch: Mapping[str, Any], model: nn.Module) -> TokenBatch:
    names = [next((name for name in names if name in batch), "") for names in (_TOKEN_NAMES, _TARGET_NAMES)]
    tokens_name, targets_name = names
    if not tokens_name or not targets_name:
        raise NoTokensError("the batch is a dict without input_ids and labels")
    tokens, labels = batch[tokens_name], batch[targets_name]
    _check(tokens, labels)
    shifts = targets_name == "labels" and label_rule(model) is not Labels.ALIGNED
    positions_name = next((name for name in _POSITION_NAMES if isinstance(batch.get(name), Tensor)), "")
    positions = batch[positions_name] if positions_name else None
    if positions is not None and positions.shape != tokens.shape:
        positions = positions.expand_as(tokens) if positions.dim() == 2 and len(positions) == 1 else None

    def make(view: TokenBatch, rows: Tensor) -> dict[str, Any]:
        made = {name: _of_rows(value, rows, len(tokens)) for name, value in batch.items() if name not in _LEFT_OUT}
        made[tokens_name] = view.tokens
        if shifts:
            first = labels[rows.to(labels.device), :1]
            made[targets_name] = torch.cat([first, view.targets[:, :-1]], dim=1)
        else:
            made[targets_name] = view.targets
        return made

    targets = labels
    if shifts:
        # The model shifts labels in its loss: target t is label t + 1.
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
    return TokenBatch(
        tokens=tokens, targets=targets, positions=positions, _make=make, rows_given=torch.arange(len(tokens))
    )


def _check(tokens: Any, targets: Any) -> None:
    for name, value in (("tokens", tokens), ("targets", targets)):
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            what = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise NoTokensError(f"the batch's {name} are {what}, not whole numbers (B, T)")
    if tokens.shape != targets.shape:
        raise NoTokensError(f"tokens are {tuple(tokens.shape)} and targets {tuple(targets.shape)}")


def _of_rows(value: Any, rows: Tensor, count: int) -> Any:
    if isinstance(value, Tensor) and value.dim() and len(value) == count:
        return value[rows.to(value.device)]
    return value
