"""Which tokens count in the loss: as the batch says, and as the gradient of the output head's input shows.

A position counts if the loss has a gradient with respect to what the head reads there. That is measured in a real
backward, so it sees a loss that drops -100, or a model that reads other targets than it was given.
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
"""Tokens of the sequence that is shown."""
_MAY_VANISH = 0.02
"""Share of the counted positions whose gradient may be zero: a prediction that is certain has none in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of one micro-batch on one rank. `measured` is None if the head's gradient was not seen."""

    positions: int
    given: int
    """Positions whose target counts, as the batch says."""
    measured: int | None = None
    masked_but_trained: int = 0
    """Positions with the target -100 at which the loss has a gradient."""
    counted_but_untrained: int = 0
    """Positions with a target at which it has none."""
    reason: str = ""
    """Why the gradient was not seen."""

    def to_data(self) -> dict[str, Any]:
        return asdict(self)


def counts_of(batch: TokenBatch, measured: Tensor | None, *, reason: str = "") -> Counts:
    """`measured` (B, T) bool: at which positions the head's input has a gradient."""
    given = batch.counted
    positions, count = given.numel(), int(given.sum())
    if measured is not None and measured.dim() == 2 and measured.shape[1] == given.shape[1] + 1:
        measured = measured[:, :-1]  # A model that only shifts its labels is given one token more.
    if measured is not None and measured.shape != given.shape:
        reason = f"the head reads {tuple(measured.shape)} positions of {tuple(given.shape)} tokens"
        measured = None
    if measured is None:
        return Counts(positions=positions, given=count, reason=reason)
    measured = measured.to(given.device)
    missing = given & ~measured
    missing[:, -1] = False  # A model that shifts its labels has no target for the last position.
    return Counts(
        positions=positions,
        given=count,
        measured=int(measured.sum()),
        masked_but_trained=int((measured & ~given).sum()),
        counted_but_untrained=int(missing.sum()),
    )


def finding_of(ranks: Sequence[Counts]) -> Finding:
    """From the counts of all ranks that see other data, rank 0 first."""
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
    """The first sequence as (text, whether it counts) in turn; token ids if there is no tokenizer.

    A token counts if the position before it is asked for it. Targets that are not the following tokens are shown in
    the place of the tokens, where they count.
    """
    tokens, targets = batch.tokens[0].cpu(), batch.targets[0].cpu()
    counts = batch.counted[0].cpu() if measured is None else measured[0].cpu()
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
