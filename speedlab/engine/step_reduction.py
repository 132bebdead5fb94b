"""The one reduction over ranks at the end of a step: loss, gradient norm, consistency checks, non-finite values.

`reduce_step` packs all numbers into one vector. The other functions make the errors for values that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedlab.comm import Group, check_peers
from speedlab.config.errors import more_in
from speedlab.engine.consistency_checks import SAME
from speedlab.engine.loss_weights import TargetCount
from speedlab.offload import visit
from speedlab.optim.errors import NonFiniteError
from speedlab.parallel.zero import FlatParam


@dataclass(frozen=True, kw_only=True)
class StepReduction:
    """The reduced numbers of a step, equal on all ranks of an island."""

    loss: float
    """Mean of the losses given to `backward`, over their counted targets, or over micro-batches and ranks."""
    counted: int
    """Counted targets of the step; 0 for a mean over micro-batches."""
    none_counts: bool
    """Whether an island has no counted target in the whole step."""
    some_unknown: bool
    """Whether some losses have a known number of targets and others do not."""
    weight: float
    """Factor that makes the gradient the mean over counted targets."""
    grad_norm: float
    """Global norm of the gradient before clipping; with several islands, of this rank's island."""
    signals: tuple[float, ...]
    """Sums over ranks of the numbers given to `step`."""
    finite: bool
    """Whether the gradient is finite in every island."""
    unused: int
    """Parameters without a gradient, summed over the ranks."""
    written: int
    """Parameters that were changed too early, over all ranks; see `TrainingState.written_too_early`."""
    same_data: bool
    """Whether ranks that compute one batch together got the same batch."""
    differing: int
    """Parameters whose gradients differ between tensor peers but should not; see `GradientConsistencyCheck`."""
    unseen: int
    """Parameters of that check without a gradient so far."""
    lost: int
    """Parameters with writes that are lost; see `UntrackedWriteCheck`."""


def reduce_step(
    everyone: Group,
    losses: Sequence[Tensor],
    squares: Tensor,
    *,
    scale: float,
    signals: Sequence[float],
    island: tuple[int, int],
    unused: int,
    written: int,
    difference: Tensor | None,
    gradients: Tensor | None,
    lost: Tensor | None,
    counted: TargetCount | None,
) -> StepReduction:
    """Reduce the numbers of a step over all ranks, in one call. This is the one host-device sync of a step.

    Args:
        everyone: All ranks.
        losses: Losses of this rank's micro-batches, if this rank counts them.
        squares: () float64: the sum of squares of this rank's gradient elements, still multiplied by the loss scale.
        scale: The loss scale.
        signals: Numbers to sum over the ranks.
        island: (index of this rank's island, number of islands); each island has its own gradient.
        unused: Parameters without a gradient on this rank.
        written: Parameters that were changed too early on this rank.
        difference: From `DataConsistencyCheck.take`.
        gradients: From `GradientConsistencyCheck.take`.
        lost: From `UntrackedWriteCheck.take`.
        counted: From `LossWeights.take`.
    """
    device = squares.device
    own_island, islands = island
    known, targets, weighted = _weighted(losses, counted, squares)
    # All host numbers are copied to the device in one transfer, without a sync.
    numbers = [len(losses), known, unused, written, *signals]
    reported = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    zero = torch.zeros_like(squares)
    # One slot per island, so that a single sum returns the values of every island.
    of_islands = [each if index == own_island else zero for each in (squares, targets) for index in range(islands)]
    looked = [zero if found is None else found for found in (difference, lost)]
    measured = torch.stack([*of_islands, weighted, *looked])
    vector = torch.cat([measured, zero.new_zeros(2) if gradients is None else gradients, reported])
    # The one host-device sync of a step: clipping, the overflow decision and the control
    # commands of the run need these numbers before the update. Ranks sum them over host connections, so that
    # the group of all ranks needs no connections between devices.
    own = vector.cpu()
    check_peers()  # If a peer has left, device transfers may have ended without data.
    every = everyone.sum_scalars(own).tolist()
    totals, counts, rest = every[:islands], every[islands : 2 * islands], every[2 * islands :]
    loss_sum, other_data, lost_writes, differing, unseen, count, known, left_alone, too_early, *summed = rest
    total, own_count = totals[own_island], counts[own_island]
    factor = None if counted is None or not known else counted.factor
    weight = 1.0 if factor is None else factor / max(1.0, own_count)
    return StepReduction(
        loss=loss_sum / max(1.0, sum(counts) if known else count),
        counted=int(sum(counts)),
        none_counts=known == count > 0 and min(counts) == 0,
        some_unknown=0 < known < count,
        weight=weight,
        # NaN fails the comparison.
        grad_norm=math.sqrt(total) * weight / scale if total >= 0 else math.nan,
        signals=tuple(summed),
        finite=math.isfinite(sum(totals)),
        unused=int(left_alone),
        written=int(too_early),
        same_data=difference is None or other_data == SAME,
        differing=int(differing),
        unseen=int(unseen),
        lost=int(lost_writes),
    )


def _weighted(losses: Sequence[Tensor], counted: TargetCount | None, like: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return (losses with known target counts, counted targets, sum of losses times their weights).

    The last two are tensors on the device of `like`.
    """
    if not losses:
        return 0, torch.zeros_like(like), torch.zeros_like(like)
    stacked = torch.stack([loss.double() for loss in losses])
    if counted is None:
        return 0, torch.zeros_like(like), stacked.sum()
    known = [count for count in counted.losses if count is not None]
    if len(known) < len(losses):  # An error if other losses have counts; otherwise all weights are equal.
        return len(known), torch.zeros_like(like), stacked.sum()
    weights, added = _vector(known, like), _vector(counted.added, like)
    return len(known), added.sum(), (stacked * weights).sum()


def _vector(numbers: Sequence[float | Tensor], like: Tensor) -> Tensor:
    if any(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number, dtype=like.dtype, device=like.device) for number in numbers])
    return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)


def find_non_finite(
    everyone: Group, losses: Sequence[Tensor], flats: Iterable[FlatParam], *, step: int
) -> NonFiniteError:
    """Return the error that names the losses and gradients that are not finite. Collective.

    Args:
        everyone: All ranks.
        losses: Losses of this rank in the step.
        flats: Flat parameters of this rank.
        step: Number of the step.
    """
    flats = list(flats)
    # Ranges of the partitions do not overlap, so every bad element is named by the rank that owns it.
    tensors = [name for flat in flats for name in _non_finite_slots(flat)]
    ranks, reports = _whose_loss(everyone, losses, tensors[:5])
    names = list(dict.fromkeys(name for report in reports for name in report))
    where = _where(ranks)
    what = f"the gradient is not finite in {', '.join(names[:3])}" + (" and others" if len(names) > 3 else "")
    return NonFiniteError(
        f"step {step}: {where}; {what}. The update was not made: parameters are those of step {step - 1}. "
        f"Lower optimizer.lr, set clip_norm, or go back to a checkpoint{_read_elsewhere(flats)}; {more_in('loss')}",
        step=step,
        ranks=ranks,
        tensors=names,
    )


def too_large_to_exchange(norm: float, *, step: int) -> NonFiniteError:
    """Return the error for a gradient too large to exchange as signs.

    Its mean might not be finite, and only some ranks would notice.

    Args:
        norm: Norm of the gradient.
        step: Number of the step.
    """
    return NonFiniteError(
        f"step {step}: the gradient's norm is {norm:.3g}; what is that large is not finite where it is summed. The "
        f"update was not made: parameters and error feedback are those of step {step - 1}. Lower optimizer.lr, or go "
        f"back to a checkpoint; {more_in('loss')}",
        step=step,
        ranks=[],
        tensors=[],
    )


def loss_of_no_targets(everyone: Group, losses: Sequence[Tensor], *, step: int, updated: bool) -> NonFiniteError:
    """Return the error for a NaN loss with a finite gradient. Collective.

    Args:
        everyone: All ranks.
        losses: Losses of this rank in the step.
        step: Number of the step.
        updated: Whether backward has already updated parameters.
    """
    ranks, _ = _whose_loss(everyone, losses, [])
    what = "Parameters have changed: go back to a checkpoint" if updated else "No parameter has changed"
    return NonFiniteError(
        f"step {step}: {_where(ranks)}, and the gradient is, as of a micro-batch without any target that counts (all "
        f"-100). {what}. Use engine.train_batch, set loss_over to 'tokens', or leave such micro-batches out",
        step=step,
        ranks=ranks,
        tensors=[],
    )


def updated_non_finite(everyone: Group, losses: Sequence[Tensor], *, step: int) -> NonFiniteError:
    """Return the error for a non-finite gradient that backward already applied. Collective.

    Args:
        everyone: All ranks.
        losses: Losses of this rank in the step.
        step: Number of the step.
    """
    ranks, _ = _whose_loss(everyone, losses, [])
    return NonFiniteError(
        f"step {step}: {_where(ranks)}; a gradient was not finite, and optimizer.in_backward has updated parameters "
        f"with it. Go back with load_checkpoint and lower optimizer.lr; {more_in('loss')}",
        step=step,
        ranks=ranks,
        tensors=[],
    )


def _whose_loss(everyone: Group, losses: Sequence[Tensor], tensors: list[str]) -> tuple[list[int], list[list[str]]]:
    """Return ranks with a loss that is not finite, and the `tensors` of each rank. Collective."""
    own = bool(losses) and not bool(torch.isfinite(torch.stack([loss.float() for loss in losses])).all())
    reports = everyone.collect({"loss": own, "tensors": tensors})
    ranks = [rank for rank, report in zip(everyone.ranks, reports, strict=True) if report["loss"]]
    return ranks, [report["tensors"] for report in reports]


def _read_elsewhere(flats: Sequence[FlatParam]) -> str:
    """Return a hint at another cause, if parameters are gathered on demand."""
    if not any(flat.zero_policy.params_unsharded_on_demand for flat in flats):
        return ""
    return (
        ". A loss that reads parameters itself (a penalty on weights, a weight of a layer that is not called) reads "
        "NaN where they are partitioned: use a stage below 3 for it"
    )


def _where(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the loss is finite on every rank"
    return f"the loss is not finite on rank {', '.join(map(str, ranks))}"


def _non_finite_slots(flat: FlatParam) -> list[str]:
    found: list[str] = []
    if flat.gradient is None:
        return found
    with visit([] if flat.gradient.offloaded is None else [flat.gradient.offloaded]):
        start, gradient = flat.gradient.counted
        if bool(torch.isfinite(gradient).all()):
            return found
        for slot in flat.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, start + gradient.numel())
            if low < high and not bool(torch.isfinite(gradient[low - start : high - start]).all()):
                found.append(slot.name)
    return found
