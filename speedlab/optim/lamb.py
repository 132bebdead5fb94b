"""LAMB (arXiv:1904.00962, algorithm 2): Adam with a trust ratio per parameter, and sums over whole parameters.

`Lamb`:

1. Bias-corrected moments of all elements: u = m / (1 - beta1ᵗ) / (√(v / (1 - beta2ᵗ)) + eps) + weight_decay p. The
   norms of u and p are summed over whole parameters.
2. p -= lr r u with the trust ratio r = |p| / |u|, between `min_coeff` and `max_coeff`; 1 if either norm is 0.

`ParameterSums` reduces sums over whole parameters, of which ranks hold parts:

1. A rank sums over its elements of each parameter, in float64.
2. If optimizer states are partitioned, the sums of the dp ranks are added. Otherwise rank 0's sums are used, because
   different processors round differently.
3. Sums of a tensor-parallel parameter are added over the tensor ranks.
4. Copies of a parameter (tied embeddings in the first and last pipeline stage) take the mean of their sums, so that the
   copies stay equal bit for bit.

Each step is one message for all parameters. In place of sums an optimizer may `combine` other numbers, such as a
maximum.
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
        """Make the optimizer.

        Args:
            params: Parameters or groups.
            lr: Learning rate.
            betas: Decay rates of the two moments.
            eps: Added to the root of the variance.
            weight_decay: Weight decay, inside the trust ratio.
            bias_correction: False replaces the factors 1 - betaᵗ by 1.
            max_coeff: Largest trust ratio.
            min_coeff: Smallest trust ratio.
        """
        super().__init__(params, lr, betas, eps, weight_decay)
        self._corrects, self._bounds = bias_correction, (min_coeff, max_coeff)
        self._ratios: Sequence[float] = ()

    def measure(self, given: UpdateInput, group: dict[str, Any]) -> Tensor:  # 1
        """Update the moments, and return this rank's squares.

        Args:
            given: Inputs of the update.
            group: The parameter group.

        Returns:
            (2,) float64: squares of the parameter's elements on this rank, and of their update.
        """
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
        """Sum the terms of all ranks.

        Args:
            every: (ranks, parameters, 2) float64.
        """
        return every.sum(0)

    def learn(self, totals: Tensor) -> None:
        """Compute the trust ratios. On a GPU this is a sync, because the host computes arguments of the kernels.

        Args:
            totals: (parameters, 2) float64.
        """
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
    """The numbered parameters of a rank's flat parameters, and the reduction of sums over them."""

    def __init__(self, flats: Sequence[FlatParam], placement: Placement, axes: Mapping[str, Group]) -> None:
        """Number the parameters.

        Args:
            flats: The trained flat parameters of this rank.
            placement: The placement table of this rank.
            axes: Groups by the names that the placement table uses.
        """
        self._flats = list(flats)
        self.first: dict[str, int] = {}
        """By name of a flat parameter, the number of its first parameter."""
        self._cut: dict[Group, list[int]] = {}
        self._copies: dict[Group, list[int]] = {}
        self.count = 0
        for flat in flats:
            self.first[flat.name] = self.count
            for number, slot in enumerate(flat.slots, self.count):
                row = placement[slot.name]
                for axis in row.cut_over:
                    self._cut.setdefault(axes[axis], []).append(number)
                # The last axis is the dp group of the flat parameter; the others hold copies.
                for axis in row.summed_over[:-1]:
                    self._copies.setdefault(axes[axis], []).append(number)
            self.count += len(flat.slots)

    def zeros(self, each: int) -> Tensor:
        """Return zeros for the sums.

        Args:
            each: Number of sums per parameter.

        Returns:
            (count, each) float64, on the device of the masters.
        """
        device = self._flats[0].master.device if self._flats else None
        return torch.zeros(self.count, each, dtype=torch.float64, device=device)

    def over_ranks(self, own: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce sums over whole parameters. Collective over the ranks of a model part.

        Args:
            own: (count, k) float64, sums over the elements whose state is on this rank.
            combine: Maps (ranks, parameters, k) to (parameters, k).

        Returns:
            (count, k) float64 over whole parameters.
        """
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
    """Return the tensors of all ranks of the group, (ranks, …)."""
    return group.gather_along(own[None], 0)
