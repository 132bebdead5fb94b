"""Two phases of a training on slow networks (arXiv:2102.02888): Adam's moments for a while, then momenta as signs over
a variance that stays as it is. What is made of them is the optimizer's (`onebit`, `onebit_lamb`).

1. Warm-up: the plain optimizer to the bit; the engine sums gradients, and clips them. It ends after `freeze_step`
   updates, or when the variance is steady: its sum, corrected for its start at 0, changes by less than 1 - `steady`
   within 1 / (1 - beta2) updates in which the learning rate did not rise (section 7.1 has .96 and the same distance).
2. The variance is frozen: corrected for its start, and not below `variance_floor`² of what its parameter has in the
   mean, because an element that was hardly used would be thrown about by signs that are its neighbours'. What had no
   gradient at all in the warm-up has no rate, and is not trained from then on: its variance is infinite.
3. From then on, with n ranks, gradients gᵢ of each, moment m and frozen variance v:
   mᵢ = beta1 m + (1 - beta1) gᵢ;  m = the mean of mᵢ, as signs with error feedback on both sides (`SignMeans`).
   Nothing is clipped: the norm of the sum is known to nobody. Of one rank, and with compression "none", m is exact.

Between two steps a rank keeps its own error plus beta1 m ("carried", the whole flat), which is all that the next
exchange wants of both, and the error of the mean that it serves ("server_error", its partition).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.comm.signs import SignMeans
from speedlab.engine.step.communicating import Exchanged
from speedlab.engine.step.errors import NonFiniteError
from speedlab.engine.step.fused import FusedAdamW
from speedlab.parallel.zero import Gradient
from speedlab.placement import Holders, Home

CARRIED, SERVER_ERROR = "carried", "server_error"


class TwoPhases(FusedAdamW):
    """An optimizer whose momenta travel as signs once the variance is frozen. The phase is in each of `param_groups`,
    so that checkpoints have it: `updates` so far, `frozen_at` (None: warm-up), and `variance` and `rate` of the last
    look."""

    kept: ClassVar[Mapping[str, Home]] = {
        CARRIED: Home(holders=Holders.OWN, form="float32"),
        SERVER_ERROR: Home(holders=Holders.OWN_PART, form="float32"),
    }

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        freeze_step: int | None = None,
        steady: float = 0.96,
        compression: str = "signs",
        variance_floor: float = 0.1,
        angle_every_steps: int = 0,
    ) -> None:
        """Without `bias_correction` 1 stands for the factors 1 - betaᵗ. `angle_every_steps`: between two looks at what
        compression changes of an update; 0: never. Raises ValueError where groups have betas of their own, which one
        exchange for all cannot have."""
        super().__init__(params, lr, betas, eps, weight_decay)
        if any(tuple(group["betas"]) != tuple(betas) for group in self.param_groups):
            raise ValueError(f"betas: all groups of {type(self).__name__} have the same, {betas}; set it for all")
        self._corrects = bias_correction
        self._freeze_step, self._steady, self._floor = freeze_step, steady, variance_floor
        self._signs, self._angle_every = compression == "signs", angle_every_steps
        self._wires: SignMeans | None = None
        self._told: dict[str, float | Tensor] = {}
        self.begin_anew()

    # ---- the phase ---------------------------------------------------------------------------------------------------

    @property
    def communicates(self) -> bool:
        """Whether the variance is frozen."""
        return self.param_groups[0]["frozen_at"] is not None

    def begin_anew(self) -> None:
        """The warm-up begins."""
        self._phase(updates=0, frozen_at=None, variance=None, rate=None)

    def _phase(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    def updated(self, flats: Sequence[Exchanged], everyone: Group) -> None:
        """Count an update, and freeze the variance where the warm-up is over."""
        self._phase(updates=self.param_groups[0]["updates"] + 1)
        if self.communicates:
            return
        self._told = {"compressed": 0.0}
        if self._warm(flats, everyone):
            self._freeze(flats)  # 2
            self._phase(frozen_at=self.param_groups[0]["updates"])

    def _warm(self, flats: Sequence[Exchanged], everyone: Group) -> bool:
        """Whether the warm-up is over; the same on all ranks."""
        first = self.param_groups[0]
        updates, beta2 = first["updates"], first["betas"][1]
        if self._freeze_step is not None:
            return updates >= self._freeze_step
        if updates % max(1, round(1 / (1 - beta2))):
            return False
        sums = [each.moments["exp_avg_sq"].sum(dtype=torch.float64) for each in flats if "exp_avg_sq" in each.moments]
        total = torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.float64)
        # Corrected for its start at 0 in any case: else it would seem to grow.
        now = float(everyone.sum_scalars(total.view(1))) / (1 - beta2**updates)
        before, rate = first["variance"], first["rate"]
        self._phase(variance=now, rate=float(first["lr"]))
        if not before or not now:
            return False
        self._told["steadiness"] = min(now / before, before / now)
        return self._told["steadiness"] >= self._steady and float(first["lr"]) <= rate

    @torch.no_grad()
    def _freeze(self, flats: Sequence[Exchanged]) -> None:
        beta1, beta2 = self.param_groups[0]["betas"]
        for group in self.param_groups:
            for segment in group["params"]:
                if state := self.state.get(segment):
                    state["exp_avg_sq"].div_(1 - beta2 ** self._counted(int(state["step"])))
        for each in flats:
            gradient = each.gradient
            variance = each.moments.get("exp_avg_sq")
            floors = self._raise_to_floor(each, variance)
            carried = gradient.kept[CARRIED]
            moment = each.moments.get("exp_avg")
            if each.whole:
                carried.copy_(torch.zeros_like(carried) if moment is None else moment)
            else:
                low, high = gradient.own_range
                own = carried.new_zeros(high - low) if moment is None else moment.contiguous()
                gradient.group.all_gather(carried, own).wait()
            carried.mul_(beta1)
            gradient.kept[SERVER_ERROR].zero_()
            self._frozen(each, floors)

    def _frozen(self, each: Exchanged, floors: Sequence[float]) -> None:
        """The variance of this flat is frozen, and for each of its slots not below one of `floors`."""

    def _raise_to_floor(self, each: Exchanged, variance: Tensor | None) -> list[float]:
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

    # ---- the exchange ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, flats: Sequence[Exchanged], factor: float) -> None:
        """The mean momentum of all ranks, from their own gradients."""
        if not flats:
            return
        gradients = [each.gradient for each in flats]
        group, beta1 = gradients[0].group, self.param_groups[0]["betas"][0]
        assert all(gradient.group is group for gradient in gradients)  # One message for all of them.
        due = self._angle_every and (self.param_groups[0]["updates"] + 1) % self._angle_every == 0
        self._weigh(flats)
        terms, factor = [_whole(gradient) for gradient in gradients], (1 - beta1) * factor * group.size
        meant = [_meant(each, term, factor) for each, term in zip(flats, terms, strict=True)] if due else []
        with_signs = self._signs and group.size > 1
        exchange = self._through_signs if with_signs else self._as_they_are
        norm = exchange(gradients, terms, factor, beta1)
        self._told = {"compressed": 1.0, "error_norm": norm}
        if with_signs and self._wires is not None:
            self._told |= {
                "sent_bytes": self._wires.sent_bytes,
                "float32_bytes": self._wires.float32_bytes // (1 if flats[0].whole else 2),
            }
        if due:
            self._told["angle"] = _angle(flats, meant, self._update_of)

    def _weigh(self, flats: Sequence[Exchanged]) -> None:
        """Before an exchange: change the terms of gradients as momenta are changed while they travel. Collective."""

    def _through_signs(self, gradients: list[Gradient], terms: list[Tensor], factor: float, beta1: float) -> Tensor:
        """`terms` become the mean momenta, of which beta1 is carried; the norm of this rank's errors. Raises
        NonFiniteError, on all ranks alike, where something is not finite: errors are those of the last step then."""
        group = gradients[0].group
        if self._wires is None:
            self._wires = SignMeans(group, [term.numel() for term in terms])
        worker = [gradient.kept[CARRIED] for gradient in gradients]
        server = [gradient.kept[SERVER_ERROR] for gradient in gradients]
        means = self._wires.exchange(terms, worker, server, factor=factor)
        if not means.finite:  # It waits for the device, as nothing that is not a number ever leaves a feedback.
            step = self.param_groups[0]["updates"] + 1
            raise NonFiniteError(
                f"step {step}: a momentum is not finite. The update was not made: parameters and error feedback are "
                f"those of step {step - 1}. Lower optimizer.lr, or go back to a checkpoint",
                step=step,
                ranks=[],
                tensors=[],
            )
        squares = torch.zeros((), dtype=torch.float64, device=group.device)
        for number, (term, kept) in enumerate(zip(terms, worker, strict=True)):
            gradient, served = gradients[number], means.server_errors[number]
            # Signs of what is no parameter's are errors that no checkpoint would have.
            gradient.zero_gaps(term)
            gradient.zero_gaps(served, gradient.own_range[0])
            squares += _square(served) + means.take(number, term, kept, share=beta1)
            gradient.kept[SERVER_ERROR] = served
            gradient.zero_gaps(term)
            gradient.zero_gaps(kept)
        return squares.sqrt()

    @staticmethod
    def _as_they_are(gradients: list[Gradient], terms: list[Tensor], factor: float, beta1: float) -> Tensor:
        """The same without compression: nothing is missed."""
        group = gradients[0].group
        for gradient, term in zip(gradients, terms, strict=True):
            term.mul_(factor).add_(gradient.kept[CARRIED])
        for term in terms if group.size > 1 else ():
            group.all_reduce(term).wait()
            group.wait_until_read(term)
            term.div_(group.size)
        for gradient, moment in zip(gradients, terms, strict=True):
            torch.mul(moment, beta1, out=gradient.kept[CARRIED])
        return torch.zeros((), dtype=torch.float64, device=group.device)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def told(self) -> dict[str, float]:
        """compressed (0 or 1); steadiness of the variance, where it was looked at; in the compressed phase error_norm
        of this rank, sent_bytes and what float32 gradients would have sent, and the angle in degrees where it was
        due."""
        return {name: float(value) for name, value in self._told.items()}

    def _update_of(self, each: Exchanged, moment: Tensor) -> Tensor:
        """The direction in which a momentum changes parameters."""
        if "exp_avg_sq" not in each.moments:
            return torch.zeros_like(moment)
        return moment / each.moments["exp_avg_sq"].sqrt().add_(self.param_groups[0]["eps"])


def _whole(gradient: Gradient) -> Tensor:
    assert gradient.own is not None  # `check_whole_gradients`.
    return gradient.own


def _square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor).double().square()


def _meant(each: Exchanged, terms: Tensor, factor: float) -> Tensor:
    """What signs are sent of, over the state range: the mean momentum and all that feedback would add. It costs a whole
    sum. Collective."""
    gradient = each.gradient
    group, (low, high) = gradient.group, gradient.own_range
    mean = torch.add(gradient.kept[CARRIED], terms, alpha=factor)
    if group.size > 1:
        whole = group.sum(mean)
        mean = whole.div_(group.size)
    mean[low:high] += gradient.kept[SERVER_ERROR]
    if not each.whole:
        return mean[low:high]
    group.all_gather(mean, mean[low:high].clone()).wait()
    return mean


def _angle(
    flats: Sequence[Exchanged], meant: Sequence[Tensor], update_of: Callable[[Exchanged, Tensor], Tensor]
) -> float:
    """Degrees between the update that is made and the one of the momenta that are `meant`, over the dp ranks.
    Collective."""
    group = flats[0].gradient.group
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)
    for each, moment in zip(flats, meant, strict=True):
        made, wanted = update_of(each, each.gradient.update).double(), update_of(each, moment).double()
        sums += torch.stack([made @ wanted, made @ made, wanted @ wanted])
    both, of_made, of_wanted = (sums if flats[0].whole else group.sum(sums)).tolist()
    lengths = math.sqrt(of_made * of_wanted)
    return math.degrees(math.acos(max(-1.0, min(1.0, both / lengths)))) if lengths else 0.0
