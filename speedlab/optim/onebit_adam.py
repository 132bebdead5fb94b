"""1-bit Adam for slow networks (arXiv:2102.02888): a warm-up, then momenta as signs with a frozen variance.

`WarmupThenCompressed` is the base of `OneBitAdam` here and of 1-bit LAMB (`onebit_lamb.py`):

1. Warm-up: the plain optimizer to the bit. The engine reduces and clips gradients. It ends after `freeze_step` updates,
   or when the variance is steady: its bias-corrected sum changes by less than 1 - `steady` within 1 / (1 - beta2)
   updates in which the learning rate did not rise (section 7.1 uses .96 and the same interval).
2. The variance is bias-corrected and frozen. Its floor is `variance_floor`² times the squared mean root of its
   parameter, because a rarely used element would move too far by the magnitude of its neighbours' signs. An element
   without any gradient in the warm-up gets an infinite variance (rate 0) and is not trained later.
3. Later, with n ranks, their gradients gᵢ, momentum m and frozen variance v:
   mᵢ = beta1 m + (1 - beta1) gᵢ;  m = mean of mᵢ, as signs with error feedback on both sides (`SignMeans`).
   Nothing is clipped, because no rank knows the norm of the sum. With one rank, or compression "none", m is exact.

Between two steps a rank keeps two tensors. "carried" (the whole flat parameter) is its own error plus beta1 m: the next
exchange needs only this sum. "server_error" (its partition) is the error of the mean that it serves. With partitioned
states, `sharded_sign_compression.py` replaces step 3 and these tensors.

`OneBitAdam`: AdamW in the warm-up. Then, with the mean momentum m and the frozen variance v,
p -= lr (weight_decay p + m / (1 - beta1ᵗ) / (√v + eps)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from speedlab.comm import Group
from speedlab.config import OptimizerConfig
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.optim.fused import UpdateInput, step_device
from speedlab.optim.sharded_sign_compression import ShardedSignCompression
from speedlab.optim.sign_compression import SERVER_ERROR
from speedlab.placement import Replication, StatePlacement

CARRIED = "carried"


class WarmupThenCompressed(ShardedSignCompression):
    """An optimizer that exchanges momenta as signs after the variance is frozen.

    Each parameter group stores the phase, so that checkpoints contain it: `updates` so far, `frozen_at` (None in the
    warm-up), and `variance` and `rate` of the last check.
    """

    kept: ClassVar[Mapping[str, StatePlacement]] = {
        CARRIED: StatePlacement(holders=Replication.OWN, form="float32"),
        SERVER_ERROR: StatePlacement(holders=Replication.OWN_PART, form="float32"),
    }
    worker: ClassVar[str] = CARRIED

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self._freeze_step, self._steady = settings.freeze_step, settings.steady
        self.begin_again()

    # ---- the phase ---------------------------------------------------------------------------------------------------

    @property
    def communicates(self) -> bool:
        """Return whether the variance is frozen."""
        return self.param_groups[0]["frozen_at"] is not None

    def begin_again(self) -> None:
        """Restart the warm-up."""
        self._phase(updates=0, frozen_at=None, variance=None, rate=None, partitioned=False)

    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        """Count an update, and freeze the variance if the warm-up is over.

        Args:
            flats: The flat parameters.
            everyone: All ranks.
        """
        self._phase(updates=self.param_groups[0]["updates"] + 1)
        if self.communicates:
            return
        self._reported = {"compressed": 0.0}
        if self._warm(flats, everyone):
            self._freeze(flats)  # 2
            self._phase(frozen_at=self.param_groups[0]["updates"])

    def _warm(self, flats: Sequence[ExchangedState], everyone: Group) -> bool:
        """Return whether the warm-up is over; equal on all ranks."""
        first = self.param_groups[0]
        updates, beta2 = first["updates"], first["betas"][1]
        if self._freeze_step is not None:
            return updates >= self._freeze_step
        # Compare the variance only once per 1 / (1 - beta2) updates.
        if updates % max(1, round(1 / (1 - beta2))):
            return False
        sums = [each.moments["exp_avg_sq"].sum(dtype=torch.float64) for each in flats if "exp_avg_sq" in each.moments]
        total = torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.float64)
        # Always bias-corrected: otherwise the variance would seem to grow.
        now = float(everyone.sum_scalars(total.view(1))) / (1 - beta2**updates)
        before, rate = first["variance"], first["rate"]
        self._phase(variance=now, rate=float(first["lr"]))
        if not before or not now:
            return False
        self._reported["steadiness"] = min(now / before, before / now)
        return self._reported["steadiness"] >= self._steady and float(first["lr"]) <= rate

    @torch.no_grad()
    def _freeze(self, flats: Sequence[ExchangedState]) -> None:
        beta1, beta2 = self.param_groups[0]["betas"]
        for group in self.param_groups:
            for segment in group["params"]:
                if state := self.state.get(segment):
                    state["exp_avg_sq"].div_(1 - beta2 ** self._counted(int(state["step"])))
        for each in flats:
            gradient = each.gradient
            variance = each.moments.get("exp_avg_sq")
            floors = self._raise_to_floor(each, variance)
            carried, moment = gradient.kept[self.worker].zero_(), each.moments.get("exp_avg")
            if each.whole and moment is not None:
                torch.mul(moment, beta1, out=carried)
            gradient.kept[SERVER_ERROR].zero_()
            self._frozen(each, floors)

    def _frozen(self, each: ExchangedState, floors: Sequence[float]) -> None:
        """Hook: the variance of this flat parameter is frozen, with these floors per slot."""

    # ---- the exchange ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:
        """Compute the mean momentum of all ranks from their own gradients.

        Args:
            flats: The flat parameters.
            factor: Factor on the summed gradient.
        """
        if not flats:
            return
        beta1 = self.param_groups[0]["betas"][0]
        self._weigh(flats)
        self._reported = {"compressed": 1.0}
        self._hold_masters(flats)
        self._mean(flats, (1 - beta1) * factor * flats[0].gradient.group.size, beta1 if flats[0].whole else 0.0)
        self._add_missed(flats)

    def _weigh(self, flats: Sequence[ExchangedState]) -> None:
        """Hook before an exchange: scale gradient terms as momenta are scaled in the message. Collective."""


class OneBitAdam(WarmupThenCompressed):
    """AdamW that exchanges momenta as signs after the variance is frozen."""

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        if not self.communicates:
            super()._update(segment, group, given)
            return
        state = self.state[segment]
        if not state:  # The parameter was never used in the warm-up.
            state["step"] = torch.zeros((), device=step_device(self, group, segment))
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(segment), torch.full_like(segment, math.inf)
        state["step"] += 1
        lr = float(group["lr"])
        adam_frozen(
            segment,
            given.gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            given.copy,
            size=lr / (1 - group["betas"][0] ** self._counted(int(state["step"]))),
            decay=lr * group["weight_decay"],
            eps=group["eps"],
        )
