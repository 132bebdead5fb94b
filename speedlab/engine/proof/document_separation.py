"""Proof check: packed documents are separate. One document is changed, and losses of the others are compared.

1. `base`: one sequence whose first document has no counted targets.
2. `changed`: the same with other tokens in the first document. Separate documents give the same loss, bit for bit.
3. `control`: tokens of a later document are changed, which must change the loss of its own later targets. Otherwise (a
   model whose attention starts at zero) an equal loss proves nothing.

Without positions of documents, two sequences of a micro-batch are compared: they must not see each other either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedlab.engine.proof.token_batch import TokenBatch
from speedlab.models.packing import IGNORED
from speedlab.telemetry.proof import Finding, Severity

KIND = "documents"
SECTION = "documents"

_LEAK = 1e-3
"""An outside change counts as visible if its effect is this share of the effect of an inside change."""
_ROUNDING = 1e-6
"""Without a control: relative difference of two losses that may be rounding."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Micro-batches to compare. `control_base` and `control` are None if no document is long enough for a control."""

    unit: str
    """What is changed: "document" or "sequence"."""
    base: TokenBatch
    changed: TokenBatch
    control_base: TokenBatch | None = None
    control: TokenBatch | None = None

    @property
    def batches(self) -> list[TokenBatch]:
        """Return all forwards of the trial, in order."""
        return [each for each in (self.base, self.changed, self.control_base, self.control) if each is not None]


def trial_of(batches: Sequence[TokenBatch], later: Iterable[TokenBatch] = ()) -> Trial | None:
    """Choose what to compare.

    Args:
        batches: The micro-batches of a step.
        later: More micro-batches, searched for documents if the first ones have positions.

    Returns:
        The trial; None without two documents in a sequence and without two sequences.
    """
    has_positions = any(batch.positions is not None for batch in batches)
    for batch in itertools.chain(batches, later if has_positions else ()):
        starts = batch.starts
        for row in range(0 if starts is None else len(batch.tokens)):
            assert starts is not None
            bounds = _bounds(starts[row])
            if len(bounds) > 1 and bounds[0][1] > 1 and bool(batch.counted[row, bounds[1][0] :].any()):
                return _of_documents(batch.rows(row, row + 1), bounds)
    for batch in batches:
        if len(batch.tokens) > 1 and bool(batch.counted[1].any()):
            return _of_sequences(batch.rows(0, 2))
    return None


def _of_documents(one: TokenBatch, bounds: Sequence[tuple[int, int]]) -> Trial:
    first, end = bounds[0]
    targets = one.targets.clone()
    targets[:, first:end] = IGNORED
    base = one.changed(targets=targets)
    # A model may find the end of a document by its last token.
    changed = base.changed(tokens=_exchanged(one.tokens, 0, first, end - 1))
    longest = max(bounds[1:], key=lambda bound: bound[1] - bound[0])
    control = _control(base, 0, *longest)
    return Trial(unit="document", base=base, changed=changed, control_base=control[0], control=control[1])


def _of_sequences(two: TokenBatch) -> Trial:
    length = two.tokens.shape[1]
    targets = two.targets.clone()
    targets[0] = IGNORED
    base = two.changed(targets=targets)
    changed = base.changed(tokens=_exchanged(two.tokens, 0, 0, length))
    control = _control(base, 1, 0, length)
    return Trial(unit="sequence", base=base, changed=changed, control_base=control[0], control=control[1])


def _control(base: TokenBatch, row: int, first: int, end: int) -> tuple[TokenBatch | None, TokenBatch | None]:
    """Return two batches that differ in the first half of a document; only targets of its last quarter count."""
    half, late = first + (end - first) // 2, end - max(1, (end - first) // 4)
    targets = torch.full_like(base.targets, IGNORED)
    targets[row, late:end] = base.targets[row, late:end]
    if half <= first or late <= half or not bool((targets != IGNORED).any()):
        return None, None
    inside = base.changed(targets=targets)
    return inside, inside.changed(tokens=_exchanged(base.tokens, row, first, half))


def _exchanged(tokens: Tensor, row: int, first: int, end: int) -> Tensor:
    """Return `tokens` with another token of the batch at each position from `first` to `end` of a sequence."""
    low, high = tokens.min(), tokens.max()
    made = tokens.clone()
    here = made[row, first:end]
    made[row, first:end] = torch.where(here == high, low, high)
    return made


def _bounds(starts: Tensor) -> list[tuple[int, int]]:
    """Return (first, end) of each document of a sequence."""
    firsts = sorted(set(starts.tolist()))
    return list(zip(firsts, [*firsts[1:], len(starts)], strict=True))


@dataclass(frozen=True, kw_only=True)
class TrialLosses:
    """Losses of a trial's forwards on one rank."""

    unit: str
    base: float
    changed: float
    control_base: float | None = None
    control: float | None = None


def finding_of(ranks: Sequence[TrialLosses], *, has_positions: bool = False) -> Finding:
    """Return the finding. Documents take precedence over sequences.

    Args:
        ranks: Losses of all ranks with a comparison.
        has_positions: Whether the batch has positions of documents.
    """
    ranks = [each for each in ranks if each.unit == "document"] or ranks

    def found(severity: Severity, text: str) -> Finding:
        return Finding(kind=KIND, severity=severity, text=text, section=SECTION)

    if not ranks:
        return found(
            Severity.NOT_CHECKED,
            "no sequence of the first micro-batch has two documents, and there are not two sequences to compare",
        )
    unit = ranks[0].unit
    if not all(map(_is_finite, ranks)):
        return found(Severity.NOT_CHECKED, "a loss is not finite")
    blind = [each for each in ranks if each.control is not None and each.control == each.control_base]
    if len(blind) == len(ranks):
        return found(
            Severity.NOT_CHECKED,
            f"no token changes the loss of later tokens of its own {unit} yet, so an equal loss proves nothing",
        )
    only = "no sequence looked at has two documents; " if has_positions and unit == "sequence" else ""
    effect, inside = max((_effects(each) for each in ranks), key=lambda pair: pair[0])
    seen = [each for each in ranks if _leaks(each)]
    if not seen:
        return found(
            Severity.OK,
            f"{only}changing the first {unit} leaves the loss of the other {unit}s as it is ({_change(effect)}"
            + (f"; a change inside moves it by {inside:.2g})" if inside is not None else ")"),
        )
    advice = (
        "tokens see other documents of their sequence"
        if unit == "document"
        else "sequences of a micro-batch see each other (a mask of the wrong shape, experts of limited capacity)"
    )
    severity = Severity.WRONG if unit == "document" else Severity.SUSPICIOUS
    return found(severity, f"changing the first {unit} moves the loss of the other {unit}s by {effect:.2g}: {advice}")


def _effects(losses: TrialLosses) -> tuple[float, float | None]:
    inside = None
    if losses.control is not None and losses.control_base is not None:
        inside = abs(losses.control - losses.control_base)
    return abs(losses.changed - losses.base), inside


def _leaks(losses: TrialLosses) -> bool:
    effect, inside = _effects(losses)
    if inside:
        return effect > _LEAK * inside and effect > 1e-9
    return effect > _ROUNDING * abs(losses.base)


def _is_finite(losses: TrialLosses) -> bool:
    values = (losses.base, losses.changed, losses.control_base, losses.control)
    return all(value is None or abs(value) < float("inf") for value in values)


def _change(effect: float) -> str:
    return "the same bits" if effect == 0 else f"a difference of {effect:.2g}, which is rounding"
