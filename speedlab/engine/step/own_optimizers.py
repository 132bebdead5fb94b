"""Optimizers that torch does not have: Lion, and AdamW whose moments are not corrected for their start at 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class _EachByItself(Optimizer):
    """Updates one parameter after the other, each element by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient. `closure` is not called: the engine has made the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_EachByItself):
    """The sign of a moment, with decoupled decay (arXiv:2302.06675, algorithm 2). One state, "exp_avg"."""

    needs: ClassVar[frozenset[str]] = frozenset({"exp_avg"})

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment, (now, kept) = state["exp_avg"], group["betas"]
        parameter.add_(torch.lerp(gradient, moment, now).sign_(), alpha=-group["lr"])
        moment.lerp_(gradient, 1 - kept)


class UncorrectedAdamW(_EachByItself):
    """AdamW (arXiv:1711.05101) without the factors 1 / (1 - betaᵗ), as DeepSpeed's `bias_correction: false` and the
    first BERT have it."""

    needs: ClassVar[frozenset[str]] = frozenset({"exp_avg", "exp_avg_sq"})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"])
