"""LAMB (arXiv:1904.00962, algorithm 2): Adam's update of each parameter, as long as the parameter is.

1. Moments of all elements, corrected for their start at 0: u = m / (1 - beta1ᵗ) / (√(v / (1 - beta2ᵗ)) + eps)
   + weight_decay p, whose norm and p's are summed over whole parameters (`ParameterSums`).
2. p -= lr r u with the trust ratio r = |p| / |u|, between `min_coeff` and `max_coeff`; 1 where either norm is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from cuda_ops.lamb import lamb_moments
from speedlab.engine.step.fused import FusedAdamW, Given, LooksAtParameters


class Lamb(LooksAtParameters, FusedAdamW):
    """Adam with a trust ratio for each parameter."""

    sums: ClassVar[int] = 2

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """Without `bias_correction` 1 stands for the factors 1 - betaᵗ."""
        super().__init__(params, lr, betas, eps, weight_decay)
        self._corrects, self._bounds = bias_correction, (min_coeff, max_coeff)
        self._ratios: Sequence[float] = ()

    def measure(self, given: Given, group: dict[str, Any]) -> Tensor:  # 1
        """Moments; the squares of the parameter's elements here, and of their update."""
        state = self._state_of(given.segment, group)
        state["step"] += 1
        first, second = group["betas"]
        return lamb_moments(
            given.segment,
            given.gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            beta1=first,
            beta2=second,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self._counted(int(state["step"])),
            factor=given.factor,
        )

    def combine(self, every: Tensor) -> Tensor:
        """The sums."""
        return every.sum(0)

    def learn(self, totals: Tensor) -> None:
        """The trust ratios. On a GPU the host waits for the norms, as it makes the kernels' numbers."""
        low, high = self._bounds
        self._ratios = [
            min(high, max(low, math.sqrt(of_param / of_update))) if of_param > 0 and of_update > 0 else 1.0
            for of_param, of_update in totals.tolist()
        ]

    def _update(self, segment: Tensor, group: dict[str, Any], given: Given) -> None:  # 2
        state, (first, second) = self.state[segment], group["betas"]
        step = self._counted(int(state["step"]))
        root = math.sqrt(1 - second**step)
        rate = float(group["lr"]) * self._ratios[given.parameter]
        adam_frozen(
            segment,
            state["exp_avg"],
            None,
            state["exp_avg_sq"],
            given.copy,
            size=rate * root / (1 - first**step),
            decay=rate * group["weight_decay"],
            eps=group["eps"] * root,
        )
