"""Proof check: which tokens count in the loss, by the batch and by the gradient at the output head.

A position counts if the loss has a gradient with respect to the head's input there. A real backward measures this, so
it finds a loss that ignores -100, or a model that reads other targets than given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.proof.token_batch import TokenBatch
from speedlab.models.packing import IGNORED
from speedlab.telemetry.proof import Finding, Severity

KIND = "counted tokens"
SECTION = "counted"

_MOST_SHOWN = 1024
"""Largest number of displayed tokens."""
_MAY_VANISH = 0.02
"""Share of counted positions whose gradient may be 0: a certain prediction has no gradient in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counted positions of one micro-batch on one rank. `measured` is None if the head's gradient was not seen."""

    positions: int
    given: int
    """Positions with a counted target, by the batch."""
    measured: int | None = None
    masked_but_trained: int = 0
    """Positions with target -100 where the loss has a gradient."""
    counted_but_untrained: int = 0
    """Positions with a target where the loss has no gradient."""
    reason: str = ""
    """Why the gradient was not seen."""

    def to_data(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON."""
        return asdict(self)


def counts_of(batch: TokenBatch, measured: Tensor | None, *, reason: str = "") -> Counts:
    """Count positions by batch and by gradient.

    Args:
        batch: The micro-batch.
        measured: (B, T) bool: positions where the head's input has a gradient; None if not seen.
        reason: Why it was not seen.
    """
    given = batch.counted
    positions, count = given.numel(), int(given.sum())
    if measured is not None and measured.dim() == 2 and measured.shape[1] == given.shape[1] + 1:
        measured = measured[:, :-1]  # A model that only shifts labels gets one more token.
    if measured is not None and measured.shape != given.shape:
        reason = f"the head reads {tuple(measured.shape)} positions of {tuple(given.shape)} tokens"
        measured = None
    if measured is None:
        return Counts(positions=positions, given=count, reason=reason)
    measured = measured.to(given.device)
    missing = given & ~measured
    missing[:, -1] = False  # A model that shifts labels has no target for the last position.
    return Counts(
        positions=positions,
        given=count,
        measured=int(measured.sum()),
        masked_but_trained=int((measured & ~given).sum()),
        counted_but_untrained=int(missing.sum()),
    )


def finding_of(ranks: Sequence[Counts]) -> Finding:
    """Return the finding.

    Args:
        ranks: Counts of all ranks with different data, rank 0 first.
    """
    given, positions = sum(each.given for each in ranks), sum(each.positions for each in ranks)
    text = f"{given:,} of {positions:,} targets count in the first micro-batch of {_ranks(len(ranks))}"

    def found(severity: Severity, more: str) -> Finding:
        return Finding(kind=KIND, severity=severity, text=f"{text}; {more}", section=SECTION)

    if not given:
        return found(Severity.WRONG, "no target counts, so nothing is trained")
    empty = sum(not each.given for each in ranks)
    if any(each.measured is None for each in ranks):
        reason = next(each.reason for each in ranks if each.measured is None)
        return found(Severity.NOT_CHECKED, f"the gradient was not measured: {reason}")
    trained = sum(each.masked_but_trained for each in ranks)
    untrained = sum(each.counted_but_untrained for each in ranks)
    if trained:
        return found(
            Severity.WRONG,
            f"the loss trains {trained:,} positions whose target is {IGNORED}: the model or the loss function does not "
            "read these targets",
        )
    if untrained > _MAY_VANISH * given:
        return found(
            Severity.WRONG,
            f"the loss has no gradient at {untrained:,} positions that have a target: the loss masks more than the "
            "batch says",
        )
    if empty:
        return found(Severity.SUSPICIOUS, f"{empty} of {len(ranks)} ranks have no target that counts")
    return found(Severity.OK, "the gradient of the head's input shows the same positions")


def marked_text(
    batch: TokenBatch, measured: Tensor | None, decode: Callable[[list[int]], str] | None
) -> tuple[tuple[str, bool], ...]:
    """Return the first sequence as pieces of text.

    A token counts if the position before predicts it. Targets other than the following tokens replace the tokens at
    counted positions.

    Args:
        batch: The micro-batch.
        measured: (B, T) bool from the gradient; None uses the batch.
        decode: Decodes token ids; None shows ids.

    Returns:
        (text, whether it counts) of each piece.
    """
    tokens, targets = batch.tokens[0].cpu(), batch.targets[0].cpu()
    counts = batch.counted[0].cpu() if measured is None else measured[0].cpu()
    # Usual language models: each target is the next token.
    follow = (targets[:-1] == tokens[1:]) | (targets[:-1] == IGNORED)
    if bool(follow.all()):
        ids = tokens.tolist()
        marks = [False, *counts[:-1].tolist()]
        if int(targets[-1]) != IGNORED:
            ids, marks = [*ids, int(targets[-1])], [*marks, bool(counts[-1])]
    else:
        ids, marks = torch.where(targets == IGNORED, tokens, targets).tolist(), counts.tolist()
    return _pieces(ids[:_MOST_SHOWN], marks[:_MOST_SHOWN], decode)


def _pieces(
    ids: Sequence[int], marks: Sequence[bool], decode: Callable[[list[int]], str] | None
) -> tuple[tuple[str, bool], ...]:
    pieces: list[tuple[list[int], bool]] = []
    for token, mark in zip(ids, marks, strict=True):
        if not pieces or pieces[-1][1] != mark:
            pieces.append(([], mark))
        pieces[-1][0].append(token)
    if decode is not None:
        return tuple((decode(part), mark) for part, mark in pieces)
    texts = [" ".join(map(str, part)) for part, _ in pieces]
    spaced = [text + (" " if number < len(texts) - 1 else "") for number, text in enumerate(texts)]
    return tuple((text, mark) for text, (_, mark) in zip(spaced, pieces, strict=True))


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"
