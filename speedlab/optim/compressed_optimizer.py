"""Optimizers that sum gradients over the data-parallel ranks themselves, in their own step: compressed, or seldom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from speedlab.comm import Group
from speedlab.parallel.zero import Gradient
from speedlab.placement import StatePlacement, ZeroPolicy


@dataclass(frozen=True)
class ExchangedState:
    """What an optimizer is shown of a flat: its gradient, and its moments by name over the state range."""

    gradient: Gradient
    moments: Mapping[str, Tensor]
    whole: bool
    """Whether the state range is the whole flat, rather than this rank's partition."""
    segments: Sequence[tuple[int, Tensor]]
    """The first slot of each segment that the optimizer has of it, and the segment."""
    masters: Tensor
    """Over the state range, on the device: nothing that communicates goes with others (`config.optimizer_rules`)."""
    parameters: Tensor
    """The whole flat, in the compute dtype; it may be the masters' memory."""
    unused: Collection[int] = ()
    """Slots that nobody used in this step, which are not updated: what is kept of them stays."""


@runtime_checkable
class NeedsSetup(Protocol):
    """One that has something to do before the first step."""

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """What takes its time the first time, as new connections do, so that no later step has to. Collective."""
        ...


@runtime_checkable
class CommunicatingOptimizer(Protocol):
    """What a torch optimizer has that does so, beside its `step` over segments.

    While `communicates`, the engine leaves every rank with its own terms of a gradient (its tensor-parallel peers' and
    its copies' are in them), and asks for the exchange before the update. Then nothing is clipped, and the norm that
    the engine tells is that of unsummed terms: exact where all ranks have the same, else larger than the sum's.
    """

    kept: ClassVar[Mapping[str, StatePlacement]]
    """Tensors that it keeps beside each gradient, over the whole flat and different on each rank (`Holders.OWN`: an
    error feedback), or over the partition that a rank sums (`Holders.OWN_PART`). They are `gradient.kept[name]`, zero
    at first. Checkpoints have them while it communicates."""

    @property
    def communicates(self) -> bool:
        """Whether it sums the gradients of the next step; asked when the step's first backward begins. The same on all
        ranks."""
        ...

    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:
        """Fill `gradient.update` of each flat, this rank's state range, with what `step` shall see as gradient.

        Called on all ranks, once a step. `gradient.own` are this rank's terms of the whole flat, which may be written
        over: summed over `gradient.group` and multiplied by `factor` they are the gradient. Whatever it raises, what is
        `kept` is that of the last step then.
        """
        ...

    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        """An update has been made, on all ranks of the world (`everyone`): the place to change what `communicates`
        says."""
        ...

    def begin_anew(self) -> None:
        """Parameters came from elsewhere, without what was kept: begin as on the first step."""
        ...

    def told(self) -> dict[str, float]:
        """What the record of the step that has just ended says of the exchange; {} where there is none."""
        ...


@runtime_checkable
class LocalStepOptimizer(CommunicatingOptimizer, Protocol):
    """One that between two exchanges makes steps of each rank's own, from whose first on parameters differ between
    ranks. While it communicates it updates parameters that nobody used, too, as if their gradient were 0: an exchange
    brings back what other steps have moved. It needs whole masters and states on every rank."""

    @property
    def apart(self) -> bool:
        """Whether parameters differ now."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether what is `kept` counts between these two steps, though the next one may not communicate."""
        ...

    def meet(self, flats: Sequence[ExchangedState]) -> None:
        """Between two steps: make masters and states those of all ranks, by an exchange that comes early.
        Collective."""
        ...


@runtime_checkable
class ParamSyncOptimizer(CommunicatingOptimizer, Protocol):
    """One that may bring the changes of partitioned masters to the parameters of all ranks, in place of a gather."""

    @property
    def publishes(self) -> bool:
        """Whether it does so in the present step; asked behind its exchange."""
        ...

    def restage(self, flats: Sequence[ExchangedState], *, partitioned: bool) -> Callable[[], None]:
        """Before an exchange, and before `updated`: whether states are partitioned, on every rank alike. What is
        returned takes back what that has changed, where the exchange fails. Collective."""
        ...

    def publish(self, flats: Sequence[ExchangedState], number: int) -> None:
        """Update `number` has changed the masters: change parameters. Collective."""
        ...


def kept_by(kind: type[Any]) -> Mapping[str, StatePlacement] | None:
    """What optimizers of this class keep beside gradients; None when they do not communicate."""
    return kind.kept if hasattr(kind, "exchange") else None


def sums_itself(optimizer: Optimizer) -> bool:
    """Whether the gradients of the next step are the optimizer's to sum."""
    return isinstance(optimizer, CommunicatingOptimizer) and optimizer.communicates


def steps_apart(kind: type[Any]) -> bool:
    """Whether optimizers of this class are such ones."""
    return kept_by(kind) is not None and hasattr(kind, "meet")


def keeps_now(optimizer: Optimizer) -> bool:
    """Whether a checkpoint has to have what the optimizer keeps beside gradients."""
    return optimizer.keeps if isinstance(optimizer, LocalStepOptimizer) else sums_itself(optimizer)


def updates_unused(optimizer: Optimizer) -> bool:
    """Whether the next update is of parameters that nobody used, too."""
    return isinstance(optimizer, LocalStepOptimizer) and optimizer.communicates


def check_whole_gradients(kind: type[Any], zero_policy: ZeroPolicy, stage: int) -> None:
    """Raises ValueError where the optimizer communicates and gradients would be partitioned."""
    if kept_by(kind) is not None and zero_policy.grads_sharded:
        raise ValueError(
            f"zero.stage {stage}: {kind.__name__} sums gradients itself and needs all of them on every rank; use stage "
            "0 or 1, and no offload.optimizer"
        )
    if steps_apart(kind) and stage > 0:
        raise ValueError(
            f"zero.stage {stage}: ranks of {kind.__name__} make steps of their own, with whole states each; use stage 0"
        )
    if kept_by(kind) is not None and zero_policy.grads_double_buffered:
        raise ValueError(
            f"offload.delayed_update: {kind.__name__} sums gradients itself, in its update, and ranks would exchange "
            "beside a step that does so, too; set it to null"
        )
