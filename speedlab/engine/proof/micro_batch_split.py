"""Proof check: the loss does not depend on the split into micro-batches.

Two sequences run together and one by one. If the losses differ under a mean over tokens, an optimizer step depends on
the micro-batch size. Both sequences get different numbers of counted targets; otherwise a mean over sequences would
look like a mean over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speedlab.engine.proof.token_batch import TokenBatch
from speedlab.models.packing import IGNORED
from speedlab.telemetry.proof import Finding, Severity

KIND = "batch cut"
SECTION = "cut"

_TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
_NARROW_TOLERANCE = 5e-3
"""Tolerated relative difference of two losses in 16-bit models."""


def parts_of(batch: TokenBatch) -> list[TokenBatch]:
    """Choose the sequences.

    Args:
        batch: The micro-batch.

    Returns:
        [both sequences, the first, the second]; [] without two sequences with targets.
    """
    if len(batch.tokens) < 2:
        return []
    two = batch.rows(0, 2)
    first, second = (int(each.sum()) for each in two.counted)
    # Equal counts would hide the difference of the two means, so mask half of the second sequence's targets.
    if first == second and second > 1:
        targets = two.targets.clone()
        places = two.counted[1].nonzero().flatten()
        targets[1, places[: max(1, len(places) // 2)]] = IGNORED
        two = two.changed(targets=targets)
    if not bool(two.counted.any(dim=1).all()):
        return []
    return [two, two.rows(0, 1), two.rows(1, 2)]


@dataclass(frozen=True, kw_only=True)
class SplitLosses:
    """Losses on one rank: of both sequences, of each, and the counted targets of each."""

    together: float
    alone: tuple[float, float]
    counted: tuple[int, int]


def finding_of(
    ranks: Sequence[SplitLosses], *, dtype: str, weighted_by_tokens: bool, given: Sequence[Sequence[int]]
) -> Finding:
    """Return the finding.

    Args:
        ranks: Losses of all ranks with two sequences.
        dtype: The compute dtype, which sets the tolerance.
        weighted_by_tokens: Whether a step weights micro-batches by counted tokens.
        given: Counted targets of the micro-batches of each rank.
    """

    def found(severity: Severity, text: str) -> Finding:
        return Finding(kind=KIND, severity=severity, text=text, section=SECTION)

    counts = {count for rank in given for count in rank}
    uneven = len(counts) > 1 and not weighted_by_tokens
    reported = (
        f"; micro-batches have {min(counts):,} to {max(counts):,} targets, and a step is a mean of their means"
        if uneven
        else ""
    )
    if not ranks:
        if uneven:
            return found(Severity.SUSPICIOUS, f"the update depends on the cut{reported}")
        return found(Severity.NOT_CHECKED, "the first micro-batch has not two sequences with targets to cut")
    if not all(abs(value) < float("inf") for each in ranks for value in (each.together, *each.alone)):
        return found(Severity.NOT_CHECKED, "a loss is not finite")
    tolerance = _TOLERANCE.get(dtype, _NARROW_TOLERANCE)
    by_tokens = max(_difference(each, each.counted) for each in ranks)
    if by_tokens <= tolerance:
        if uneven:
            return found(Severity.SUSPICIOUS, f"the loss is a mean over tokens{reported}")
        return found(
            Severity.OK,
            f"two sequences give the same loss together and one by one, weighted by their targets (relative "
            f"difference {by_tokens:.1g})",
        )
    if max(_difference(each, (1, 1)) for each in ranks) <= tolerance:
        text = "the loss is a mean over sequences, not over tokens"
        if weighted_by_tokens:
            return found(Severity.SUSPICIOUS, f"{text}: weighted by tokens, a step depends on the micro-batch size")
        return found(Severity.OK, f"{text}: micro-batches of equally many sequences give the same step")
    if max(abs(each.together - sum(each.alone)) / _scale(each) for each in ranks) <= tolerance:
        return found(
            Severity.WRONG, "the loss is a sum over the micro-batch: the gradient grows with its size; return a mean"
        )
    return found(
        Severity.SUSPICIOUS,
        f"two sequences have another loss together than one by one (relative difference {by_tokens:.2g}): it depends "
        "on the micro-batch, as contrastive losses, BatchNorm and balancing losses of experts do",
    )


def _difference(losses: SplitLosses, weights: tuple[int, int]) -> float:
    mean = sum(weight * loss for weight, loss in zip(weights, losses.alone, strict=True)) / sum(weights)
    return abs(losses.together - mean) / _scale(losses)


def _scale(losses: SplitLosses) -> float:
    return max(abs(losses.together), *map(abs, losses.alone), 1e-6)


def counted_in(batches: Sequence[TokenBatch]) -> list[int]:
    """Return the counted targets of each micro-batch.

    Args:
        batches: The micro-batches.
    """
    return torch.stack([batch.counted.sum() for batch in batches]).tolist() if batches else []
