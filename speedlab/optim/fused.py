"""torch's AdamW and SGD with a step that goes over memory once: unscale, clip, decay, update, copy to 16 bits.

Optimizers that torch does not have: Lion, and AdamW whose moments are not corrected for their start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from cuda_ops.adamw import adamw
from cuda_ops.sgd_momentum import sgd_momentum

_NOT_FUSED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Options of torch's classes that the kernels do not have."""

_LONG = 2**40
"""After so many updates the factors 1 - betaᵗ are 1, in float64, for every beta that is less than 1 in float32."""


class UpdateInput(NamedTuple):
    """What the update of a `segment` uses: `gradient` in any floating dtype, multiplied by `factor`; `copy` takes the
    new values in the compute dtype, where that is narrower."""

    segment: Tensor
    gradient: Tensor
    copy: Tensor | None
    factor: float
    parameter: int = 0
    """The number of the first parameter that lies in the segment."""


class FusedOptimizer(Optimizer):
    """An optimizer over float32 segments. `given` says which to update, and with what, whose gradients may be narrower
    than the segments; what it does between two of them is done between their updates."""

    given: Iterable[UpdateInput]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch wraps this method into one that imports its compiler, which takes every rank half a second.
        inner = Optimizer.add_param_group
        getattr(inner, "__wrapped__", inner)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every segment that something is given for, in that order."""
        group_of = {segment: group for group in self.param_groups for segment in group["params"]}
        for given in self.given:
            self._update(given.segment, group_of[given.segment], given)

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        raise NotImplementedError


class LayerwiseOptimizer(FusedOptimizer):
    """One whose update of an element looks at sums over its whole parameter, of which this rank may have a part. Each
    of its segments is of one parameter."""

    sums: ClassVar[int]
    """How many there are of each parameter."""

    def measure(self, given: UpdateInput, group: dict[str, Any]) -> Tensor:
        """What comes before an update of these elements, and (sums,) float64: what is to be summed over their
        parameter, as far as it lies here."""
        raise NotImplementedError

    def combine(self, every: Tensor) -> Tensor:
        """What ranks (ranks, parameters, sums) have measured of the parts of parameters as that of their whole."""
        raise NotImplementedError

    def learn(self, totals: Tensor) -> None:
        """The sums (parameters, sums) float64 over whole parameters, on all ranks the same; `step` comes next."""
        raise NotImplementedError


class FusedAdamW(FusedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW in one pass."""

    needs: ClassVar[frozenset[str]] = frozenset({"step", "exp_avg", "exp_avg_sq"})
    """What it has of an element that was ever updated, without which it cannot go on."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.given = ()
        self._corrects = True

    def _state_of(self, segment: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The segment's states; zeros before its first update."""
        state = self.state[segment]
        if not state:
            state["step"] = torch.zeros((), device=step_device(self, group, segment))
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(segment), torch.zeros_like(segment)
        return state

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        state = self._state_of(segment, group)
        state["step"] += 1
        adamw(
            segment,
            given.gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            given.copy,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self._counted(int(state["step"])),  # On the host, so that nothing waits: `step_device`.
            factor=given.factor,
        )

    def _counted(self, step: int) -> int:
        """The number of updates by which moments are corrected for their start at 0."""
        return step if self._corrects else _LONG


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """torch.optim.SGD with momentum in one pass."""

    needs: ClassVar[frozenset[str]] = frozenset({"momentum_buffer"})

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.given = ()

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        state = self.state[segment]
        first = "momentum_buffer" not in state
        if first:
            state["momentum_buffer"] = torch.empty_like(segment)
        sgd_momentum(
            segment,
            given.gradient,
            state["momentum_buffer"],
            given.copy,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            first=first,
            factor=given.factor,
        )


def step_device(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where `optimizer` keeps its count of updates ("step") of a `parameter` in its `group`, also after a load: beside
    the parameter where a kernel reads it there (torch's own `fused` or `capturable`), else on the host."""
    beside = not isinstance(optimizer, FusedOptimizer) and (group.get("fused") or group.get("capturable"))
    return parameter.device if beside else torch.device("cpu")


def fused_kind(kind: type[Optimizer], options: Iterable[Mapping[str, Any]]) -> Callable[..., Optimizer] | None:
    """The fused class that computes what `kind` computes with these options of its groups; None when there is none."""
    options = list(options)
    if any(group.get(name) for group in options for name in _NOT_FUSED):
        return None
    if kind is torch.optim.AdamW:
        return FusedAdamW
    if kind is torch.optim.SGD and all(group.get("momentum") for group in options):
        return FusedSGD
    return None


class _PerTensor(Optimizer):
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


class Lion(_PerTensor):
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


class UncorrectedAdamW(_PerTensor):
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
