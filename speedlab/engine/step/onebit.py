"""1-bit Adam (arXiv:2102.02888): AdamW in the warm-up, then, with the mean momentum m and the frozen variance v,
p -= lr (weight_decay p + m / (1 - beta1ᵗ) / (√v + eps))."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from speedlab.engine.step.fused import Given, step_device
from speedlab.engine.step.two_phases import TwoPhases


class OneBitAdam(TwoPhases):
    """AdamW whose momenta travel as signs once the variance is frozen."""

    def _update(self, segment: Tensor, group: dict[str, Any], given: Given) -> None:
        if not self.communicates:
            super()._update(segment, group, given)
            return
        state = self.state[segment]
        if not state:  # Never used in the warm-up.
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
