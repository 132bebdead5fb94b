"""1-bit LAMB (arXiv:2104.06069): LAMB in the warm-up, then momenta as signs with scaled trust ratios.

The trust ratios follow a second variance, which every rank can compute.

1. Warm-up: LAMB. `coeff` of each parameter is the running mean, by `coeff_beta`, of its trust ratio.
2. At the freeze of the variance: `scale` of each parameter brings the root mean square of its momentum to the mean of
   all parameters during exchanges, so that signs have even magnitudes.
3. Later, with the mean momentum m of this step and m' of the last one: the implied gradient
   g = (m - beta1 m') / (1 - beta1) updates a variance w that starts as the frozen v. Let
   u = m / (1 - beta1ᵗ) / (√v + eps), and let f = max (√v + eps) / (√w + eps) over the parameter (w not below the floor
   of v). f is drawn towards 1 by the share of decay in the update, and limited to [`factor_min`, `factor_max`] and to
   1 ± `factor_threshold` times its last value. Then p -= lr coeff f (u + weight_decay p).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from speedlab.comm import Group
from speedlab.config import OptimizerConfig
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.optim.fused import FusedAdamW, UpdateInput
from speedlab.optim.lamb import Lamb
from speedlab.optim.onebit_adam import WarmupThenCompressed
from speedlab.optim.sign_compression import SERVER_ERROR
from speedlab.parallel.zero import Gradient
from speedlab.placement import Replication, StatePlacement

SCALED = "carried_scaled"
"""As "carried" of 1-bit Adam (`onebit_adam.py`), times each parameter's scale. The two are not interchangeable."""

_BORN: Mapping[str, float] = {"coeff": 0.0, "factor": 1.0, "scale": 1.0, "floor": 0.0}
"""Initial per-parameter numbers. `factor` is f of the last step, `floor` the floor of v."""


class OneBitLamb(WarmupThenCompressed, Lamb):
    """LAMB that exchanges momenta as signs after the variance is frozen."""

    kept: ClassVar[Mapping[str, StatePlacement]] = {
        SCALED: StatePlacement(holders=Replication.OWN, form="float32"),
        SERVER_ERROR: StatePlacement(holders=Replication.OWN_PART, form="float32"),
    }
    worker: ClassVar[str] = SCALED
    sums: ClassVar[int] = 3
    needs: ClassVar[frozenset[str]] = FusedAdamW.needs | {"exp_avg_sq_fresh"}
    """States without which an updated element cannot continue."""

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self._bounds = settings.min_coeff, settings.max_coeff
        self._coeff_beta, self._threshold = settings.coeff_beta, settings.factor_threshold
        self._factors = settings.factor_min, settings.factor_max
        self._looks: list[list[float]] = []
        """Per parameter in a compressed step: squares of u, squares of the whole update, and the largest ratio."""
        self._scales: dict[Gradient, list[float]] = {}
        """Scale of each slot in this exchange."""

    # ---- freeze of the variance --------------------------------------------------------------------------------------

    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        """Count an update; when the variance freezes, compute the scales of momenta.

        Args:
            flats: The flat parameters.
            everyone: All ranks.
        """
        before = self.communicates
        super().updated(flats, everyone)
        if self.communicates and not before:
            self._take_scales(flats, everyone)

    def _frozen(self, each: ExchangedState, floors: Sequence[float]) -> None:
        for index, segment in each.segments:
            if state := self.state.get(segment):
                state["floor"].fill_(floors[index])
                state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])

    def _take_scales(self, flats: Sequence[ExchangedState], everyone: Group) -> None:  # 2
        """Compute the scales. Collective."""
        roots = [self._root_mean_squares(each) for each in flats]
        own = [root for each in roots for root in each if root]
        total, count = everyone.sum_scalars(torch.tensor([math.fsum(own), len(own)], dtype=torch.float64)).tolist()
        for each, means in zip(flats, roots, strict=True):
            scales = [total / count / root if root else 1.0 for root in means]
            for index, segment in each.segments:
                if state := self.state.get(segment):
                    state["scale"].fill_(scales[index])
        for each, scales in zip(flats, self._scales_of(flats), strict=True):
            for slot, scale in zip(each.gradient.slots, scales, strict=True):
                each.gradient.kept[self.worker][slot.range].mul_(scale)

    @staticmethod
    def _root_mean_squares(each: ExchangedState) -> list[float]:
        """Return the root mean square of the momentum of each slot. Collective if it is partitioned."""
        gradient, moment = each.gradient, each.moments.get("exp_avg")
        sums = torch.zeros(len(gradient.slots), dtype=torch.float64, device=gradient.group.device)
        for number, here in _parts(each):
            if moment is not None:
                sums[number] = moment[here].square().sum(dtype=torch.float64)
        # As for the floors of the variance.
        sums = gradient.group.gather_along(sums[None], 0)[0] if each.whole else gradient.group.sum(sums)
        totals = zip(sums.tolist(), gradient.slots, strict=True)
        return [math.sqrt(total / max(1, slot.numel)) for total, slot in totals]

    def _scales_of(self, flats: Sequence[ExchangedState]) -> list[list[float]]:
        """Return the scales of each slot.

        With partitioned states, the rank with the first element sends it, in one message.
        """
        if not flats:
            return []
        known = [torch.zeros(len(each.gradient.slots), dtype=torch.float64) for each in flats]
        for each, scales in zip(flats, known, strict=True):
            low, high = (0, math.inf) if each.whole else each.gradient.own_range
            for index, segment in each.segments:
                if low <= each.gradient.slots[index].offset < high:
                    state = self.state.get(segment)
                    scales[index] = state["scale"] if state else 1.0
        every = torch.cat(known)
        if not flats[0].whole:
            group = flats[0].gradient.group
            every = group.sum(every.to(group.device)).cpu()
        return [scales.tolist() for scales in every.split([len(scales) for scales in known])]

    # ---- the exchange ------------------------------------------------------------------------------------------------

    def _learn_weights(self, flats: Sequence[ExchangedState]) -> None:
        self._scales = {each.gradient: own for each, own in zip(flats, self._scales_of(flats), strict=True)}

    def _add_lasting(self, each: ExchangedState, values: Tensor) -> Tensor:
        beta1 = self.param_groups[0]["betas"][0]
        if "exp_avg" in each.moments:
            moment, scales = each.moments["exp_avg"], self._scales[each.gradient]
            for number, here in _parts(each):
                values[here].add_(moment[here], alpha=beta1 * scales[number])
        return values

    def _weigh(self, flats: Sequence[ExchangedState]) -> None:
        self._learn_weights(flats)
        for gradient, scales in self._scales.items():
            assert gradient.own is not None  # `check_whole_gradients`.
            for slot, scale in zip(gradient.slots, scales, strict=True):
                gradient.own[slot.range].mul_(scale)

    def _update_of(self, each: ExchangedState, moment: Tensor) -> Tensor:
        direction = super()._update_of(each, moment)
        for number, here in _parts(each):
            direction[here].div_(self._scales[each.gradient][number])
        return direction

    # ---- the update --------------------------------------------------------------------------------------------------

    def _state_of(self, segment: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        born = not self.state[segment]
        state = super()._state_of(segment, group)
        if born:
            state["exp_avg_sq_fresh"] = torch.zeros_like(segment)
            state.update({name: torch.full((), value) for name, value in _BORN.items()})
            if self.communicates:  # The parameter was never used in the warm-up.
                state["exp_avg_sq"].fill_(math.inf)
        return state

    def measure(self, given: UpdateInput, group: dict[str, Any]) -> Tensor:
        """Compute momenta and this rank's terms of the sums.

        Args:
            given: Inputs of the update.
            group: The parameter group.

        Returns:
            (3,) float64. Warm-up: LAMB's two squares and 0. Later: squares of u and of the whole update, and the
            largest ratio.
        """
        if not self.communicates:
            squares = super().measure(given, group)
            return torch.cat([squares, squares.new_zeros(1)])
        state = self._state_of(given.segment, group)
        state["step"] += 1
        (first, second), eps = group["betas"], group["eps"]
        variance, fresh, moment = state["exp_avg_sq"], state["exp_avg_sq_fresh"], state["exp_avg"]
        now = given.gradient.float().div_(float(state["scale"]))
        reported = (now - first * moment).div_(1 - first)
        fresh.mul_(second).addcmul_(reported, reported, value=1 - second)
        moment.copy_(now)
        root = variance.sqrt().add_(eps)
        ratio = root / fresh.clamp(min=float(state["floor"])).sqrt().add_(eps)
        # Elements with an infinite variance never move, so they do not count.
        largest = torch.where(variance.isinf(), 0.0, ratio).max().double()
        update = now.div_(root).div_(1 - first ** self._counted(int(state["step"])))
        squares = torch.linalg.vector_norm(update).double().square()
        update.add_(given.segment, alpha=group["weight_decay"])
        return torch.stack([squares, torch.linalg.vector_norm(update).double().square(), largest])

    def combine(self, every: Tensor) -> Tensor:
        """Combine terms: two sums and one maximum.

        Args:
            every: (ranks, parameters, 3) float64.
        """
        return torch.cat([every[..., :2].sum(0), every[..., 2:].amax(0)], dim=-1)

    def learn(self, totals: Tensor) -> None:
        """Store the totals for the update.

        Args:
            totals: (parameters, 3) float64.
        """
        if self.communicates:
            self._looks = totals.tolist()
        else:
            super().learn(totals[:, :2])

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        state = self.state[segment]
        if not self.communicates:
            super()._update(segment, group, given)
            state["coeff"].mul_(self._coeff_beta).add_((1 - self._coeff_beta) * self._ratios[given.parameter])  # 1
            return
        state["factor"].fill_(self._factor_of(given.parameter, float(state["factor"]), group["weight_decay"]))
        rate = float(group["lr"]) * float(state["coeff"]) * float(state["factor"])
        adam_frozen(  # 3
            segment,
            state["exp_avg"],
            None,
            state["exp_avg_sq"],
            given.copy,
            size=rate / (1 - group["betas"][0] ** self._counted(int(state["step"]))),
            decay=rate * group["weight_decay"],
            eps=group["eps"],
        )

    def _factor_of(self, parameter: int, before: float, decay: float) -> float:
        """Return f of this step."""
        of_moment, of_update, largest = self._looks[parameter]
        factor = largest or 1.0
        if decay and of_update:
            share = min(1.0, math.sqrt(of_moment / of_update))
            factor = factor * share + 1 - share
        low, high = self._factors
        factor = min(high, max(low, factor))
        return min(before * (1 + self._threshold), max(before * (1 - self._threshold), factor))


def _parts(each: ExchangedState) -> Iterator[tuple[int, slice]]:
    """Yield the slots with elements in the state range, and their slices in it."""
    base, end = (0, math.inf) if each.whole else each.gradient.own_range
    for number, slot in enumerate(each.gradient.slots):
        low, high = max(slot.offset, base), min(slot.offset + slot.numel, end)
        if low < high:
            yield number, slice(int(low - base), int(high - base))
