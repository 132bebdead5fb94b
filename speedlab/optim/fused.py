"""Fused optimizers: AdamW and SGD in one pass over memory, and optimizers that torch does not have.

- `FusedAdamW`, `FusedSGD`: unscale, clip, decay, update, and copy to 16 bits in one kernel.
- `Lion`, and `UncorrectedAdamW`, AdamW without bias correction: plain torch operations.
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
"""Options of torch's classes that the kernels do not support."""

_LONG = 2**40
"""After this many updates the factors 1 - betaᵗ are 1 in float64, for every beta below 1 in float32."""


class UpdateInput(NamedTuple):
    """The inputs of the update of a `segment`.

    `gradient` has any floating dtype and is multiplied by `factor`. `copy` gets the new values in the compute dtype if
    that is narrower than float32.
    """

    segment: Tensor
    gradient: Tensor
    copy: Tensor | None
    factor: float
    parameter: int = 0
    """Number of the first parameter in the segment."""


class FusedOptimizer(Optimizer):
    """An optimizer over float32 segments, fed by an iterator.

    `given` yields the inputs of each update. Gradients may be narrower than the segments. Code between two yields runs
    between the two updates.
    """

    given: Iterable[UpdateInput]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group without torch's wrapper.

        Args:
            param_group: As in torch.
        """
        # torch's wrapper of this method imports the compiler, which costs every rank half a second.
        inner = Optimizer.add_param_group
        getattr(inner, "__wrapped__", inner)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every segment that `given` yields, in that order.

        Args:
            closure: Ignored; torch's signature has it.
        """
        group_of = {segment: group for group in self.param_groups for segment in group["params"]}
        for given in self.given:
            self._update(given.segment, group_of[given.segment], given)

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        raise NotImplementedError


class LayerwiseOptimizer(FusedOptimizer):
    """A fused optimizer whose update uses sums over the whole parameter, of which this rank may hold a part.

    Each segment holds one parameter.
    """

    sums: ClassVar[int]
    """Number of sums per parameter."""

    def measure(self, given: UpdateInput, group: dict[str, Any]) -> Tensor:
        """Do the first half of an update, and return this rank's terms of the sums.

        Args:
            given: Inputs of the update.
            group: The parameter group.

        Returns:
            (sums,) float64 over the elements on this rank.
        """
        raise NotImplementedError

    def combine(self, every: Tensor) -> Tensor:
        """Combine the terms of all ranks.

        Args:
            every: (ranks, parameters, sums) float64.

        Returns:
            (parameters, sums) float64.
        """
        raise NotImplementedError

    def learn(self, totals: Tensor) -> None:
        """Receive the sums before `step`.

        Args:
            totals: (parameters, sums) float64 over whole parameters, equal on all ranks.
        """
        raise NotImplementedError


class FusedAdamW(FusedOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW in one pass."""

    needs: ClassVar[frozenset[str]] = frozenset({"step", "exp_avg", "exp_avg_sq"})
    """States without which an updated element cannot continue."""

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
        """Return the states of the segment; zeros before its first update."""
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
            step=self._counted(int(state["step"])),  # On the host, to avoid a sync; see `step_device`.
            factor=given.factor,
        )

    def _counted(self, step: int) -> int:
        """Return the update count for the bias correction."""
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
    """Return the device of the optimizer's update count ("step"), also after a load.

    The count is on the parameter's device if a kernel reads it there (torch's `fused` or `capturable`), else on the
    host.

    Args:
        optimizer: The optimizer.
        group: The parameter group.
        parameter: The parameter.
    """
    alongside = not isinstance(optimizer, FusedOptimizer) and (group.get("fused") or group.get("capturable"))
    return parameter.device if alongside else torch.device("cpu")


def fused_kind(kind: type[Optimizer], options: Iterable[Mapping[str, Any]]) -> Callable[..., Optimizer] | None:
    """Return the fused class that computes the same as a torch class.

    Args:
        kind: The torch class.
        options: Options of each group.

    Returns:
        The fused class; None if there is none for these options.
    """
    options = list(options)
    if any(group.get(name) for group in options for name in _NOT_FUSED):
        return None
    if kind is torch.optim.AdamW:
        return FusedAdamW
    if kind is torch.optim.SGD and all(group.get("momentum") for group in options):
        return FusedSGD
    return None


class _PerTensor(Optimizer):
    """A base that updates one parameter after the other, elementwise."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            closure: Not called, because the engine has computed the gradients.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_PerTensor):
    """Lion: the sign of a momentum, with decoupled decay (arXiv:2302.06675, algorithm 2). One state, "exp_avg"."""

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
    """AdamW (arXiv:1711.05101) without bias correction, as in DeepSpeed's `bias_correction: false` and in the
    first BERT.
    """

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
