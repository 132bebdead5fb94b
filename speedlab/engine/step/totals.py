"""What one reduction over the ranks tells about a step: its loss, its gradient's norm, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedlab.comm import Group, check_peers
from speedlab.config.errors import more_in
from speedlab.engine.step.errors import NonFiniteError
from speedlab.engine.step.same_data import SAME
from speedlab.offload import visit
from speedlab.parallel.zero import Flat


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What one reduction over the ranks told about a step."""

    loss: float
    """Mean of the losses that were given to `backward`, over micro-batches and ranks."""
    grad_norm: float
    """Global norm of the gradient before clipping; of several islands, this rank's own."""
    signals: tuple[float, ...]
    """Sums over ranks of the numbers that were given to `step`."""
    finite: bool
    """Whether the gradient is, in every island."""
    unused: int
    """Of how many of their parameters the ranks together got no gradient."""
    written: int
    """How many of them were changed too early, over all ranks: `TrainingState.written_too_early`."""
    same_data: bool
    """Whether ranks that compute one batch together were given the same."""
    differing: int
    """In the gradients of how many parameters tensor peers differ that should not: as of `SameGradients`."""
    unseen: int
    """Of how many of those there was no gradient."""
    lost: int
    """How many parameters were written into where the values are lost: as of `UnseenWrites`."""


def sum_totals(
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
) -> Totals:
    """`losses`: of this rank's micro-batches, as far as they count; `squares`: the sum over its own elements of the
    gradient, which is `scale` times too large; `island`: this rank's, and of how many, each with a gradient of its own;
    `unused`, `written`: as of `Totals`, on this rank; `difference`: as `SameData.take` gives it;
    `gradients`: as `SameGradients.take` does; `lost`: as `UnseenWrites.take` does."""
    device = squares.device
    # What the host knows goes to the device in one copy, which does not wait.
    told = torch.tensor([len(losses), unused, written, *signals], dtype=torch.float64).to(device, non_blocking=True)
    zero = torch.zeros_like(squares)
    loss = torch.stack([loss.double() for loss in losses]).sum() if losses else zero
    own_island, islands = island
    of_islands = [squares if index == own_island else zero for index in range(islands)]
    looked = [zero if found is None else found for found in (difference, lost)]
    measured = torch.stack([*of_islands, loss, *looked])
    vector = torch.cat([measured, zero.new_zeros(2) if gradients is None else gradients, told])
    # The one point of a step where the host waits for the device: clipping, the overflow decision and the control
    # words of the run need these numbers before the update. Ranks then sum them over the host's connections, so that
    # the group of all ranks needs none between devices.
    own = vector.cpu()
    check_peers()  # Where a peer has left, what should have come over the device never did.
    every = everyone.sum_scalars(own).tolist()
    totals, (loss_sum, other_data, lost_writes, differing, unseen, *known) = every[:islands], every[islands:]
    count, left_alone, too_early, *summed = known
    total = totals[own_island]
    return Totals(
        loss=loss_sum / max(1.0, count),
        grad_norm=math.sqrt(total) / scale if total >= 0 else math.nan,
        signals=tuple(summed),
        finite=math.isfinite(sum(totals)),
        unused=int(left_alone),
        written=int(too_early),
        same_data=difference is None or other_data == SAME,
        differing=int(differing),
        unseen=int(unseen),
        lost=int(lost_writes),
    )


def find_non_finite(everyone: Group, losses: Sequence[Tensor], flats: Iterable[Flat], *, step: int) -> NonFiniteError:
    """The error that says in which losses and gradients of step `step` it was. Collective."""
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
    """The error of a gradient whose mean as signs may not be finite, which not all ranks would find out."""
    return NonFiniteError(
        f"step {step}: the gradient's norm is {norm:.3g}; what is that large is not finite where it is summed. The "
        f"update was not made: parameters and error feedback are those of step {step - 1}. Lower optimizer.lr, or go "
        f"back to a checkpoint; {more_in('loss')}",
        step=step,
        ranks=[],
        tensors=[],
    )


def updated_non_finite(everyone: Group, losses: Sequence[Tensor], *, step: int) -> NonFiniteError:
    """The error where gradients were used in backward, before anybody could know. Collective."""
    ranks, _ = _whose_loss(everyone, losses, [])
    return NonFiniteError(
        f"step {step}: {_where(ranks)}; a gradient was not finite, and optimizer.in_backward has updated parameters "
        f"with it. Go back with load_checkpoint and lower optimizer.lr; {more_in('loss')}",
        step=step,
        ranks=ranks,
        tensors=[],
    )


def _whose_loss(everyone: Group, losses: Sequence[Tensor], tensors: list[str]) -> tuple[list[int], list[list[str]]]:
    """Ranks that have a loss that is not finite, and the `tensors` that each of all ranks tells of. Collective."""
    own = bool(losses) and not bool(torch.isfinite(torch.stack([loss.float() for loss in losses])).all())
    reports = everyone.collect({"loss": own, "tensors": tensors})
    ranks = [rank for rank, report in zip(everyone.ranks, reports, strict=True) if report["loss"]]
    return ranks, [report["tensors"] for report in reports]


def _read_elsewhere(flats: Sequence[Flat]) -> str:
    """What else it may be, where parameters come and go."""
    if not any(flat.residency.parameters_come for flat in flats):
        return ""
    return (
        ". A loss that reads parameters itself (a penalty on weights, a weight of a layer that is not called) reads "
        "NaN where they are partitioned: use a stage below 3 for it"
    )


def _where(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the loss is finite on every rank"
    return f"the loss is not finite on rank {', '.join(map(str, ranks))}"


def _non_finite_slots(flat: Flat) -> list[str]:
    found: list[str] = []
    if flat.gradient is None:
        return found
    with visit([] if flat.gradient.away is None else [flat.gradient.away]):
        start, gradient = flat.gradient.counted
        if bool(torch.isfinite(gradient).all()):
            return found
        for slot in flat.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, start + gradient.numel())
            if low < high and not bool(torch.isfinite(gradient[low - start : high - start]).all()):
                found.append(slot.name)
    return found
