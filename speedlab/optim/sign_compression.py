"""Base of optimizers that exchange momenta as signs with error feedback on both sides (`SignMeans`).

It has three parts:

1. The mean of momenta over the ranks.
2. The floor of a frozen variance, because updates divide signs by its root.
3. A check of the angle between the compressed and the exact update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.comm.onebit_allreduce import SignMeans
from speedlab.config import OptimizerConfig
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.fused import FusedAdamW
from speedlab.parallel.zero import Gradient
from speedlab.placement import StatePlacement

SERVER_ERROR = "server_error"

FAR = 16.0
"""Largest ratio of rates without rescaling: between two intervals of errors, or between parameters of one message."""

Stays = tuple[Gradient, str, slice, Tensor]
"""(gradient, name of an extra tensor, range, values of that range)."""


class SignCompressedOptimizer(FusedAdamW):
    """An optimizer that exchanges momenta as signs in some of its steps.

    Each parameter group has `updates`, the number of updates so far, so that checkpoints contain it.
    """

    kept: ClassVar[Mapping[str, StatePlacement]]
    worker: ClassVar[str]
    """Name in `kept` of the rank's own error."""

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        """Make the optimizer.

        Args:
            params: Parameters or groups. Groups may have their own weight decay and learning rate.
            settings: The `optimizer` section of the configuration.

        Raises:
            ValueError: If a group has its own betas, because one exchange serves all groups.
        """
        betas = settings.betas
        super().__init__(params, settings.lr, betas, settings.eps, settings.weight_decay)
        if any(tuple(group["betas"]) != betas for group in self.param_groups):
            raise ValueError(f"betas: all groups of {type(self).__name__} have the same, {betas}; set it for all")
        self._corrects, self._floor = settings.bias_correction, settings.variance_floor
        self._signs, self._angle_every = settings.compression == "signs", settings.angle_every_steps
        self._wires: SignMeans | None = None
        self._reported: dict[str, float | Tensor] = {}

    def _phase(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    @property
    def _updates(self) -> int:
        return self.param_groups[0]["updates"]

    def reported(self) -> dict[str, float]:
        """Return figures of the exchange for the step's record.

        - compressed: 0 or 1; an optimizer adds figures of its phases.
        - error_norm: compression error of this rank, after an exchange of momenta.
        - sent_bytes, float32_bytes: bytes sent, and bytes that float32 gradients would have sent.
        - angle: degrees between the compressed and the exact update, in steps that measure it.
        """
        return {name: float(value) for name, value in self._reported.items()}

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """Open connections between hosts and compile kernels, so that the first exchange need not.

        Args:
            flats: The flat parameters.
        """
        if flats and self._signs and flats[0].gradient.group.size > 1:
            self._wires_of([each.gradient for each in flats]).prepare()

    # ---- the mean ----------------------------------------------------------------------------------------------------

    def _mean(self, flats: Sequence[ExchangedState], factor: float, share: float, *, look: bool = True) -> None:
        """Replace `gradient.own` by the mean over ranks of (`gradient.own` times `factor` plus the worker's error).

        Collective.

        The worker keeps its new error plus `share` times the mean. With `look`, measure the angle if it is due. Raises
        NonFiniteError, on all ranks, if a value is not finite; errors are unchanged then.
        """
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        assert all(gradient.group is group for gradient in gradients)  # All flat parameters share one message.
        due = look and self._angle_every and (self._updates + 1) % self._angle_every == 0
        terms = [whole_terms(gradient) for gradient in gradients]
        meant = [self._meant(each, term, factor) for each, term in zip(flats, terms, strict=True)] if due else []
        with_signs = self._signs and group.size > 1
        exchange = self._through_signs if with_signs else self._as_they_are
        stays = self._kept_of_unused(flats)
        # With partitioned momenta the angle needs a message, which may fail after the errors have changed.
        before = [gradient.kept[self.worker].clone() for gradient in gradients] if due and not flats[0].whole else []
        try:
            self._reported["error_norm"] = exchange(flats, terms, factor, share)
            put_back(stays)
            if with_signs:
                self._tell_bytes(flats, sent=True)
            if due:
                made = [self._update_of(each, each.gradient.update) for each in flats]
                wanted = [self._update_of(each, moment) for each, moment in zip(flats, meant, strict=True)]
                self._reported["angle"] = angle_between(made, wanted, None if flats[0].whole else group)
        except BaseException:
            for gradient, errors in zip(gradients, before, strict=False):  # Empty without an angle measurement.
                gradient.kept[self.worker].copy_(errors)
            raise

    def _kept_of_unused(self, flats: Sequence[ExchangedState]) -> list[Stays]:
        """Return extra values of unused parameters.

        Their momenta are exchanged with all others, but must not change.
        """
        found = []
        for gradient, slot in ((each.gradient, each.gradient.slots[index]) for each in flats for index in each.unused):
            for name, place in ((self.worker, slot.range), (SERVER_ERROR, served(gradient, slot.range))):
                found.append((gradient, name, place, gradient.kept[name][place].clone()))
        return found

    def _wires_of(self, gradients: Sequence[Gradient]) -> SignMeans:
        if self._wires is None:
            sizes = [whole_terms(gradient).numel() for gradient in gradients]
            self._wires = SignMeans(gradients[0].group, sizes)
        return self._wires

    def _tell_bytes(self, flats: Sequence[ExchangedState], *, sent: bool) -> None:
        wires = self._wires_of([each.gradient for each in flats])
        self._reported |= {
            "sent_bytes": wires.sent_bytes if sent else 0.0,
            "float32_bytes": wires.float32_bytes,
        }

    def _through_signs(
        self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float
    ) -> Tensor:
        """Exchange as signs; return the norm of this rank's errors."""
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        worker = [gradient.kept[self.worker] for gradient in gradients]
        server = [gradient.kept[SERVER_ERROR] for gradient in gradients]
        wires = self._wires_of(gradients)
        errors = wires.reduce(terms, worker, factor=factor).means()
        # `spread` turns `errors` into the new errors of the means.
        means = wires.spread(errors, server)
        if not means.finite:  # A device sync, because a NaN would remain in the feedback.
            raise self._not_finite()
        squares = torch.zeros((), dtype=torch.float64, device=group.device)
        for number, (term, kept) in enumerate(zip(terms, worker, strict=True)):
            gradient, served = gradients[number], errors[number]
            # Padding must have no error: checkpoints do not store values of padding.
            gradient.zero_gaps(term)
            gradient.zero_gaps(served, gradient.own_range[0])
            squares += square(served) + means.take(number, term, kept, share=share)
            gradient.kept[SERVER_ERROR] = served
            gradient.zero_gaps(term)
            gradient.zero_gaps(kept)
        return squares.sqrt()

    def _not_finite(self) -> NonFiniteError:
        step = self._updates + 1
        return NonFiniteError(
            f"step {step}: a momentum is not finite. The update was not made: parameters and error feedback are "
            f"those of step {step - 1}. Lower optimizer.lr, or go back to a checkpoint",
            step=step,
            ranks=[],
            tensors=[],
        )

    def _as_they_are(self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float) -> Tensor:
        """Exchange without compression: there is no error."""
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        for gradient, term in zip(gradients, terms, strict=True):
            term.mul_(factor).add_(gradient.kept[self.worker])
            # The error of earlier sign exchanges, with more ranks.
            term[slice(*gradient.own_range)].add_(gradient.kept[SERVER_ERROR], alpha=group.size)
        take_means(group, terms)
        for gradient, moment in zip(gradients, terms, strict=True):
            torch.mul(moment, share, out=gradient.kept[self.worker])
            gradient.kept[SERVER_ERROR].zero_()
        return torch.zeros((), dtype=torch.float64, device=group.device)

    # ---- the variance ------------------------------------------------------------------------------------------------

    def _raise_to_floor(self, each: ExchangedState, variance: Tensor | None) -> list[float]:
        """Return the variance floor of each slot, after raising the variance to it. Collective if it is partitioned.

        Elements with variance 0 get infinity, which means rate 0.
        """
        gradient = each.gradient
        base = 0 if each.whole else gradient.own_range[0]
        sums = torch.zeros(len(gradient.slots), dtype=torch.float64, device=gradient.group.device)
        pieces: list[Tensor] = []
        for number, slot in enumerate(gradient.slots):
            low, high = slot.offset - base, slot.offset + slot.numel - base
            piece = sums.new_empty(0) if variance is None else variance[max(0, low) : max(0, high)]
            pieces.append(piece)
            sums[number] = piece.sqrt().sum(dtype=torch.float64)
        # With whole states, rank 0's sums are used, because different processors round differently.
        sums = gradient.group.gather_along(sums[None], 0)[0] if each.whole else gradient.group.sum(sums)
        totals = zip(sums.tolist(), gradient.slots, strict=True)
        floors = [(self._floor * total / max(1, slot.numel)) ** 2 for total, slot in totals]
        for piece, floor in zip(pieces, floors, strict=True):
            piece.clamp_(min=floor)
        if variance is not None:
            variance.masked_fill_(variance == 0, math.inf)
        return floors

    # ---- the angle ---------------------------------------------------------------------------------------------------

    def _update_of(self, each: ExchangedState, moment: Tensor) -> Tensor:
        """Return the direction in which a momentum changes parameters."""
        if "exp_avg_sq" not in each.moments:
            return torch.zeros_like(moment)
        return moment / each.moments["exp_avg_sq"].sqrt().add_(self.param_groups[0]["eps"])

    def _meant(self, each: ExchangedState, terms: Tensor, factor: float) -> Tensor:
        """Return the exact mean momentum plus all error feedback, over the state range.

        This costs a full float32 reduction. Collective.
        """
        gradient = each.gradient
        group, (low, high) = gradient.group, gradient.own_range
        mean = torch.add(gradient.kept[self.worker], terms, alpha=factor)
        if group.size > 1:
            whole = group.sum(mean)
            mean = whole.div_(group.size)
        self._add_by_owner(each, mean[low:high])
        if not each.whole:
            return mean[low:high]
        group.all_gather(mean, mean[low:high].clone()).wait()
        return mean

    def _add_by_owner(self, each: ExchangedState, mean: Tensor) -> None:
        """Add the server's error to the mean of the slice that this rank serves."""
        mean.add_(each.gradient.kept[SERVER_ERROR])


def lift(rate: float, largest: float) -> float:
    """Return the factor for a sum of changes in a message with changes at a larger rate.

    Elements of a chunk share one magnitude, so small changes are scaled up. A power of two rounds nothing.

    Args:
        rate: Rate of the changes.
        largest: Largest rate in the message.

    Returns:
        A power of two, or 1 if the rates are within `FAR`.
    """
    return 2.0 ** round(math.log2(largest / rate)) if 0 < FAR * rate < largest else 1.0


def put_back(stays: Sequence[Stays]) -> None:
    """Restore values that `_kept_of_unused` returned.

    Args:
        stays: The ranges and their values.
    """
    for gradient, name, place, values in stays:
        gradient.kept[name][place] = values


def take_means(group: Group, terms: Sequence[Tensor]) -> None:
    """Replace tensors by their means over the ranks, in place. Collective.

    Args:
        group: The ranks.
        terms: (n,) tensors.
    """
    for term in terms if group.size > 1 else ():
        group.all_reduce(term).wait()
        group.wait_until_read(term)
        term.div_(group.size)


def whole_terms(gradient: Gradient) -> Tensor:
    """Return this rank's unreduced terms over the whole flat parameter.

    Args:
        gradient: The gradient.
    """
    assert gradient.own is not None  # `check_whole_gradients`.
    return gradient.own


def served(gradient: Gradient, place: slice) -> slice:
    """Return the part of a range that this rank serves, relative to its partition.

    Args:
        gradient: The gradient.
        place: A range of the whole flat parameter.
    """
    start, end = gradient.own_range
    low, high = max(place.start, start), min(place.stop, end)
    return slice(low - start, max(low, high) - start)


def square(tensor: Tensor) -> Tensor:
    """Return the squared norm, () float64.

    Args:
        tensor: Any tensor.
    """
    return torch.linalg.vector_norm(tensor).double().square()


def angle_between(made: Sequence[Tensor], wanted: Sequence[Tensor], group: Group | None) -> float:
    """Return the angle between two directions, in degrees. Collective with a group.

    Args:
        made: (n,) parts of the first direction.
        wanted: (n,) parts of the second direction.
        group: Ranks with other parts; None if this rank has all parts.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=made[0].device)
    for one, other in zip((each.double() for each in made), (each.double() for each in wanted), strict=True):
        sums += torch.stack([one @ other, one @ one, other @ other])
    both, of_made, of_wanted = (sums if group is None else group.sum(sums)).tolist()
    lengths = math.sqrt(of_made * of_wanted)
    return math.degrees(math.acos(max(-1.0, min(1.0, both / lengths)))) if lengths else 0.0
