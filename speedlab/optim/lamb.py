"""LAMB (arXiv:1904.00962, algorithm 2): Adam's update of each parameter, as long as the parameter is.

1. Moments of all elements, corrected for their start at 0: u = m / (1 - beta1ᵗ) / (√(v / (1 - beta2ᵗ)) + eps)
   + weight_decay p, whose norm and p's are summed over whole parameters (`ParameterSums`).
2. p -= lr r u with the trust ratio r = |p| / |u|, between `min_coeff` and `max_coeff`; 1 where either norm is 0.

Sums over whole parameters, of which a rank has parts: what an update needs that looks at norms of parameters.

1. A rank sums over the elements that it has of each parameter, in float64.
2. Where optimizer states are partitioned, the dp ranks' sums are added up; where each has all of them, those of the
   first rank count: processors that are not alike round them otherwise.
3. Those of a parameter that is cut over the tensor ranks are added up over these.
4. Copies of a parameter that lie in different flats (tied embeddings in the first and last pipeline stage) take the
   mean of their sums, which differ in how they were rounded: all go on with the same bits, or the copies would part.

Each is one message for all parameters, however many there are. What stands here for sums may be any number that the
optimizer knows how to `combine` (a largest one, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from cuda_ops.lamb import lamb_moments
from speedlab.comm import Group
from speedlab.optim.fused import FusedAdamW, LayerwiseOptimizer, UpdateInput
from speedlab.parallel.zero import FlatParam
from speedlab.placement import Placement, Replication


class Lamb(LayerwiseOptimizer, FusedAdamW):
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

    def measure(self, given: UpdateInput, group: dict[str, Any]) -> Tensor:  # 1
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

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:  # 2
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


class ParameterSums:
    """The parameters of a rank's flats, numbered, and how sums over them come together."""

    def __init__(self, flats: Sequence[FlatParam], placement: Placement, axes: Mapping[str, Group]) -> None:
        """`axes`: groups by the names that rows of the table have for them."""
        self._flats = list(flats)
        self.first: dict[str, int] = {}
        """By name of a flat, the number of its first slot's parameter."""
        self._cut: dict[Group, list[int]] = {}
        self._copies: dict[Group, list[int]] = {}
        self.count = 0
        for flat in flats:
            self.first[flat.name] = self.count
            for number, slot in enumerate(flat.slots, self.count):
                row = placement[slot.name]
                for axis in row.cut_over:
                    self._cut.setdefault(axes[axis], []).append(number)
                for axis in row.summed_over[:-1]:
                    self._copies.setdefault(axes[axis], []).append(number)
            self.count += len(flat.slots)

    def zeros(self, each: int) -> Tensor:
        """(count, each) float64, beside the masters."""
        device = self._flats[0].master.device if self._flats else None
        return torch.zeros(self.count, each, dtype=torch.float64, device=device)

    def over_ranks(self, own: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """The sums (count, k) over whole parameters, of this rank's `own`, over the elements that it has the state of.
        Both in float64. `combine`: (ranks, parameters, k) → (parameters, k). Collective over the ranks of a model's
        part."""
        if not self._flats:
            return own
        total, flat = own, self._flats[0]
        every = _of_all(flat.gather_group, total)  # 2
        total = combine(every) if flat.zero_policy.optimizer_states is Replication.PARTITIONED else every[0]
        for group, numbers in self._cut.items():  # 3
            total[numbers] = combine(_of_all(group, total[numbers]))
        for group, numbers in self._copies.items():  # 4
            total[numbers] = _of_all(group, total[numbers]).mean(0)
        return total


def _of_all(group: Group, own: Tensor) -> Tensor:
    """What each rank of the group has, (ranks, …)."""
    return group.gather_along(own[None], 0)
