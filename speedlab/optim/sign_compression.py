"""What optimizers have in common whose momenta travel as signs with error feedback on both sides (`SignMeans`): the
mean over the ranks, the floor of a variance that signs are divided by, and a look at the angle between what was made
of signs and what was meant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.comm.onebit_allreduce import SignMeans
from speedlab.config import OptimizerConfig
from speedlab.optim.compressed_optimizer import ExchangedState
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.fused import FusedAdamW
from speedlab.parallel.zero import Gradient
from speedlab.placement import StatePlacement

SERVER_ERROR = "server_error"

FAR = 16.0
"""How many times a rate may be another than those at which errors were made, before they follow it, or than those of
other parameters in one message."""

Stays = tuple[Gradient, str, slice, Tensor]
"""What is kept beside a gradient, by name, and some of its values."""


class SignCompressedOptimizer(FusedAdamW):
    """An optimizer that does so in some of its steps. Each of `param_groups` has `updates`, how many there were, so
    that checkpoints have it."""

    kept: ClassVar[Mapping[str, StatePlacement]]
    worker: ClassVar[str]
    """Which of `kept` a rank's own error is in."""

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        """Groups of `params` may have a weight decay and a rate of their own. Raises ValueError where they have betas,
        which one exchange for all cannot have."""
        betas = settings.betas
        super().__init__(params, settings.lr, betas, settings.eps, settings.weight_decay)
        if any(tuple(group["betas"]) != betas for group in self.param_groups):
            raise ValueError(f"betas: all groups of {type(self).__name__} have the same, {betas}; set it for all")
        self._corrects, self._floor = settings.bias_correction, settings.variance_floor
        self._signs, self._angle_every = settings.compression == "signs", settings.angle_every_steps
        self._wires: SignMeans | None = None
        self._told: dict[str, float | Tensor] = {}

    def _phase(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    @property
    def _updates(self) -> int:
        return self.param_groups[0]["updates"]

    def told(self) -> dict[str, float]:
        """compressed (0 or 1), and what else the optimizer tells of its phases; where momenta were exchanged error_norm
        of this rank, sent_bytes and what float32 gradients would have sent, and the angle in degrees where it was
        due."""
        return {name: float(value) for name, value in self._told.items()}

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """Connections between hosts, and kernels, which the first exchange would wait for, in the midst of a run."""
        if flats and self._signs and flats[0].gradient.group.size > 1:
            self._wires_of([each.gradient for each in flats]).prepare()

    # ---- the mean ----------------------------------------------------------------------------------------------------

    def _mean(self, flats: Sequence[ExchangedState], factor: float, share: float, *, look: bool = True) -> None:
        """What stands in `gradient.own`, times `factor`, and the worker's error become their mean over the ranks there;
        the worker keeps its new error plus a `share` of the mean. Figures of it are told, with a `look` the angle where
        it is due. Collective. Raises NonFiniteError, on all ranks alike, where something is not finite: errors are
        those of before then."""
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        assert all(gradient.group is group for gradient in gradients)  # One message for all of them.
        due = look and self._angle_every and (self._updates + 1) % self._angle_every == 0
        terms = [whole_terms(gradient) for gradient in gradients]
        meant = [self._meant(each, term, factor) for each, term in zip(flats, terms, strict=True)] if due else []
        with_signs = self._signs and group.size > 1
        exchange = self._through_signs if with_signs else self._as_they_are
        stays = self._kept_of_unused(flats)
        # Where parts of momenta are elsewhere the look is a message, too, and may fail when errors are new.
        before = [gradient.kept[self.worker].clone() for gradient in gradients] if due and not flats[0].whole else []
        try:
            self._told["error_norm"] = exchange(flats, terms, factor, share)
            put_back(stays)
            if with_signs:
                self._tell_bytes(flats, sent=True)
            if due:
                made = [self._update_of(each, each.gradient.update) for each in flats]
                wanted = [self._update_of(each, moment) for each, moment in zip(flats, meant, strict=True)]
                self._told["angle"] = angle_between(made, wanted, None if flats[0].whole else group)
        except BaseException:
            for gradient, errors in zip(gradients, before, strict=False):  # None without a look.
                gradient.kept[self.worker].copy_(errors)
            raise

    def _kept_of_unused(self, flats: Sequence[ExchangedState]) -> list[Stays]:
        """What is kept of parameters that nobody used, and where: their momenta travel with all others', and stand
        still."""
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
        self._told |= {
            "sent_bytes": wires.sent_bytes if sent else 0.0,
            "float32_bytes": wires.float32_bytes,
        }

    def _through_signs(
        self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float
    ) -> Tensor:
        """The norm of this rank's errors."""
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        worker = [gradient.kept[self.worker] for gradient in gradients]
        server = [gradient.kept[SERVER_ERROR] for gradient in gradients]
        wires = self._wires_of(gradients)
        errors = wires.reduce(terms, worker, factor=factor).means()
        means = wires.spread(errors, server)
        if not means.finite:  # It waits for the device, as nothing that is not a number ever leaves a feedback.
            raise self._not_finite()
        squares = torch.zeros((), dtype=torch.float64, device=group.device)
        for number, (term, kept) in enumerate(zip(terms, worker, strict=True)):
            gradient, served = gradients[number], errors[number]
            # Signs of what is no parameter's are errors that no checkpoint would have.
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
        """The same without compression: nothing is missed."""
        gradients = [each.gradient for each in flats]
        group = gradients[0].group
        for gradient, term in zip(gradients, terms, strict=True):
            term.mul_(factor).add_(gradient.kept[self.worker])
            # Of exchanges of signs before, as of more ranks.
            term[slice(*gradient.own_range)].add_(gradient.kept[SERVER_ERROR], alpha=group.size)
        take_means(group, terms)
        for gradient, moment in zip(gradients, terms, strict=True):
            torch.mul(moment, share, out=gradient.kept[self.worker])
            gradient.kept[SERVER_ERROR].zero_()
        return torch.zeros((), dtype=torch.float64, device=group.device)

    # ---- the variance ------------------------------------------------------------------------------------------------

    def _raise_to_floor(self, each: ExchangedState, variance: Tensor | None) -> list[float]:
        """The least variance of each slot. Collective where the variance is partitioned."""
        gradient = each.gradient
        base = 0 if each.whole else gradient.own_range[0]
        sums = torch.zeros(len(gradient.slots), dtype=torch.float64, device=gradient.group.device)
        pieces: list[Tensor] = []
        for number, slot in enumerate(gradient.slots):
            low, high = slot.offset - base, slot.offset + slot.numel - base
            piece = sums.new_empty(0) if variance is None else variance[max(0, low) : max(0, high)]
            pieces.append(piece)
            sums[number] = piece.sqrt().sum(dtype=torch.float64)
        # Where each rank has all of it, the first one's count: processors that are not alike round them otherwise.
        sums = gradient.group.gather_along(sums[None], 0)[0] if each.whole else gradient.group.sum(sums)
        totals = zip(sums.tolist(), gradient.slots, strict=True)
        floors = [(self._floor * total / max(1, slot.numel)) ** 2 for total, slot in totals]
        for piece, floor in zip(pieces, floors, strict=True):
            piece.clamp_(min=floor)
        if variance is not None:
            variance.masked_fill_(variance == 0, math.inf)
        return floors

    # ---- looking -----------------------------------------------------------------------------------------------------

    def _update_of(self, each: ExchangedState, moment: Tensor) -> Tensor:
        """The direction in which a momentum changes parameters."""
        if "exp_avg_sq" not in each.moments:
            return torch.zeros_like(moment)
        return moment / each.moments["exp_avg_sq"].sqrt().add_(self.param_groups[0]["eps"])

    def _meant(self, each: ExchangedState, terms: Tensor, factor: float) -> Tensor:
        """What signs are sent of, over the state range: the mean momentum and all that feedback would add. It costs a
        whole sum. Collective."""
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
        """To the mean of the slice that this rank serves."""
        mean.add_(each.gradient.kept[SERVER_ERROR])


def lift(rate: float, largest: float) -> float:
    """By what a sum of changes at a `rate` is multiplied while it travels beside others at the `largest`: elements of a
    chunk have one magnitude. A power of two, so that nothing is rounded."""
    return 2.0 ** round(math.log2(largest / rate)) if 0 < FAR * rate < largest else 1.0


def put_back(stays: Sequence[Stays]) -> None:
    for gradient, name, place, values in stays:
        gradient.kept[name][place] = values


def take_means(group: Group, terms: Sequence[Tensor]) -> None:
    """Over the ranks, in place. Collective."""
    for term in terms if group.size > 1 else ():
        group.all_reduce(term).wait()
        group.wait_until_read(term)
        term.div_(group.size)


def whole_terms(gradient: Gradient) -> Tensor:
    """This rank's own terms, over the whole flat."""
    assert gradient.own is not None  # `check_whole_gradients`.
    return gradient.own


def served(gradient: Gradient, place: slice) -> slice:
    """The part of a place in the flat that this rank serves, in its partition."""
    start, end = gradient.own_range
    low, high = max(place.start, start), min(place.stop, end)
    return slice(low - start, max(low, high) - start)


def square(tensor: Tensor) -> Tensor:
    """Of its norm, float64."""
    return torch.linalg.vector_norm(tensor).double().square()


def angle_between(made: Sequence[Tensor], wanted: Sequence[Tensor], group: Group | None) -> float:
    """Degrees between two directions, of each of which there are parts here; over the ranks of `group`, where they have
    others. Collective."""
    sums = torch.zeros(3, dtype=torch.float64, device=made[0].device)
    for one, other in zip((each.double() for each in made), (each.double() for each in wanted), strict=True):
        sums += torch.stack([one @ other, one @ one, other @ other])
    both, of_made, of_wanted = (sums if group is None else group.sum(sums)).tolist()
    lengths = math.sqrt(of_made * of_wanted)
    return math.degrees(math.acos(max(-1.0, min(1.0, both / lengths)))) if lengths else 0.0
