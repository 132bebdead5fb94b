"""Optimizers that sum gradients over the data-parallel ranks themselves, in their own step: compressed, or seldom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch.optim import Optimizer

from speedlab.parallel.zero import Gradient
from speedlab.placement import Residency


@runtime_checkable
class Communicating(Protocol):
    """What a torch optimizer has that does so, beside its `step` over segments.

    While `communicates`, the engine leaves every rank with its own terms of a gradient (its tensor-parallel peers' and
    its copies' are in them), and asks for the exchange before the update. Then nothing is clipped, and the norm that
    the engine tells is that of unsummed terms: exact where all ranks have the same, else larger than the sum's.
    """

    kept: ClassVar[Mapping[str, str]]
    """Tensors that it keeps beside each gradient, over the whole flat, different on each rank (an error feedback):
    name → dtype. They are `gradient.kept[name]`, zero at first, and again after a load."""

    @property
    def communicates(self) -> bool:
        """Whether it sums the gradients of the next step; asked when the step's first backward begins. The same on all
        ranks."""
        ...

    def exchange(self, gradient: Gradient, factor: float) -> None:
        """Fill `gradient.update`, this rank's state range, with what `step` shall see as gradient.

        Called on all ranks for one flat after the other. `gradient.own` are this rank's terms of the whole flat, which
        may be written over: summed over `gradient.group` and multiplied by `factor` they are the gradient.
        """
        ...


def kept_by(kind: type[Any]) -> Mapping[str, str] | None:
    """What optimizers of this class keep beside gradients; None when they do not communicate."""
    return kind.kept if hasattr(kind, "exchange") else None


def sums_itself(optimizer: Optimizer) -> bool:
    """Whether the gradients of the next step are the optimizer's to sum."""
    return isinstance(optimizer, Communicating) and optimizer.communicates


def check_whole_gradients(kind: type[Any], residency: Residency, stage: int) -> None:
    """Raises ValueError where the optimizer communicates and gradients would be partitioned."""
    if kept_by(kind) is not None and residency.gradients_go:
        raise ValueError(
            f"zero.stage {stage}: {kind.__name__} sums gradients itself and needs all of them on every rank; use stage "
            "0 or 1, and no offload.optimizer"
        )
    if kept_by(kind) is not None and residency.gradients_wait:
        raise ValueError(
            f"offload.delayed_update: {kind.__name__} sums gradients itself, in its update, and ranks would exchange "
            "beside a step that does so, too; set it to null"
        )
