"""Proof check: every trainable parameter changed in an update.

1. Before the update each rank sums the bits of its partition of the masters, by parameter: 16 bytes each.
2. In the update it records learning rates, and parameters with a nonzero gradient.
3. After the update it sums again. A parameter has moved if a sum differs on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.proof.parameter_groups import listed
from speedlab.parallel.zero import FlatParam, Gradient
from speedlab.placement import MemoryKind
from speedlab.telemetry.proof import Finding, Severity

KIND = "first update"
SECTION = "update"

_CHUNK = 2**20
"""Elements that are widened at a time."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@torch.no_grad()
def bit_sums(flats: Sequence[FlatParam], *, reads_disk: bool) -> dict[str, Tensor]:
    """Sum the bits of this rank's partition of each master.

    Args:
        flats: The flat parameters of this rank.
        reads_disk: Whether to read masters on disk; otherwise they are skipped.

    Returns:
        (slots, 2) int64 by flat parameter.
    """
    found = {}
    for flat in flats:
        if flat.trainable and (
            reads_disk or MemoryKind.DISK not in (flat.zero_policy.states_at, flat.zero_policy.parameters_at)
        ):
            found[flat.name] = _sums_of(flat)
    return found


def _sums_of(flat: FlatParam) -> Tensor:
    kept = flat.kept("master")
    values = flat.lasting_master
    if kept is not None:
        values = torch.empty(kept.numel, dtype=kept.dtype)
        kept.read(values).wait()
    low = flat.state_range[0]
    words = values.view(_WORDS[values.element_size()])
    sums = []
    for slot in flat.slots:
        first, end = max(slot.range.start, flat.start) - low, min(slot.range.stop, flat.end) - low
        sums.append(_sum_bits(words[first:end]) if first < end else torch.zeros(2, dtype=torch.int64))
    return torch.stack([each.to(values.device) for each in sums])


def _sum_bits(words: Tensor) -> Tensor:
    """Return (2,) int64: the sum and the sum of squares, modulo 2⁶⁴. Swapped values are not detected."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        wide = chunk.to(torch.int64)
        total[0] += wide.sum()
        total[1] += (wide * wide).sum()
    return total


def own_slots(flat: FlatParam) -> list[bool]:
    """Return for each slot whether this rank's partition has elements of it.

    Args:
        flat: The flat parameter.
    """
    return [max(slot.range.start, flat.start) < min(slot.range.stop, flat.end) for slot in flat.slots]


def moved(flats: Sequence[FlatParam], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, bool]:
    """Compare bit sums.

    Args:
        flats: The flat parameters of this rank.
        before: Sums before the update.
        after: Sums after the update.

    Returns:
        Whether this rank's part has moved, by name; parameters without a part are absent.
    """
    found: dict[str, bool] = {}
    for flat in flats:
        if flat.name in before and flat.name in after:
            differs = (before[flat.name] != after[flat.name]).any(dim=1).tolist()
            for slot, has_some, is_changed in zip(flat.slots, own_slots(flat), differs, strict=True):
                if has_some:
                    found[slot.name] = found.get(slot.name, False) or is_changed
    return found


@torch.no_grad()
def gradient_facts(flat: FlatParam, gradient: Gradient) -> dict[str, tuple[bool, bool]]:
    """Read facts about gradients.

    Args:
        flat: The flat parameter.
        gradient: Its gradient.

    Returns:
        (whether this rank's backward gave a gradient, whether the local sum is known to be 0), by name.
    """
    # Offloaded gradients are not read: the proof must not move states.
    away = gradient.offloaded is not None or gradient.waiting is not None
    start, values = (0, None) if away else gradient.counted
    facts = {}
    for slot, used in zip(flat.slots, gradient.used, strict=True):
        is_zero = False
        if values is not None:
            low, high = max(slot.range.start, start), min(slot.range.stop, start + values.numel())
            is_zero = low >= high or not bool(values[low - start : high - start].any())
        facts[slot.name] = used, is_zero
    return facts


def finding_of(
    *,
    trainable: int,
    unmoved: Sequence[str],
    no_gradient: Sequence[str],
    zero_gradient: Sequence[str],
    rates: Mapping[str, float],
    update: int,
) -> Finding:
    """Return the finding.

    Args:
        trainable: Number of trainable tensors.
        unmoved: Trainable parameters that moved on no rank.
        no_gradient: Parameters without a gradient.
        zero_gradient: Parameters with a gradient of 0.
        rates: Learning rates in the update, by name of parameter.
        update: Number of the update, from 1.
    """
    which = "the first update" if update == 1 else f"update {update}"

    def found(severity: Severity, text: str) -> Finding:
        return Finding(kind=KIND, severity=severity, text=text, section=SECTION)

    at_rest = [name for name in unmoved if rates.get(name) == 0]
    others = [name for name in unmoved if name not in set(at_rest) and name not in set(no_gradient)]
    zero = [name for name in others if name in set(zero_gradient)]
    stuck = [name for name in others if name not in set(zero)]
    if stuck:
        return found(
            Severity.WRONG,
            f"{len(stuck)} of {trainable:,} trainable tensors did not move in {which}, though their gradient and "
            f"learning rate are not zero: {listed(stuck)}",
        )
    if zero:
        lora = all("lora_" in name for name in zero)
        reason = (
            "the other half of each adapter begins at zero, so they move from the next update on"
            if lora
            else "a factor that is zero stops it; if it stays so, they never train"
        )
        return found(
            Severity.OK if lora else Severity.SUSPICIOUS,
            f"{len(zero)} of {trainable:,} trainable tensors did not move in {which}, because their gradient is zero: "
            f"{listed(zero)}; {reason}",
        )
    if at_rest:
        whole = len(at_rest) >= trainable - len(no_gradient)
        return found(
            Severity.NOT_CHECKED,
            f"the learning rate of {'every parameter' if whole else f'{len(at_rest)} tensors'} was 0 in {which} "
            "(warm-up); run.prove() looks again at a later step",
        )
    count = trainable - len(set(no_gradient))
    return found(Severity.OK, f"all {count:,} trainable tensors with a gradient moved in {which}")


def rates_of(flats: Sequence[FlatParam], options: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the learning rate of each trainable parameter, by name.

    Args:
        flats: The flat parameters of this rank.
        options: The parameter groups.
    """
    return {
        slot.name: float(options[slot.group].get("lr", float("nan")))
        for flat in flats
        if flat.trainable
        for slot in flat.slots
        if slot.group < len(options)
    }
