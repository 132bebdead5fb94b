"""Protocols of optimizers that reduce gradients over data-parallel ranks themselves: compressed, or rarely.

1. `CommunicatingOptimizer` reduces gradients in its own step, for example as signs (1-bit Adam).
2. `LocalStepOptimizer` also makes steps without an exchange (0/1 Adam).
3. `ParamSyncOptimizer` also sends parameter changes in place of a gather.
"""

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
    """A flat parameter as an optimizer sees it: its gradient, and its moments by name over the state range."""

    gradient: Gradient
    moments: Mapping[str, Tensor]
    whole: bool
    """Whether the state range is the whole flat parameter, not this rank's partition."""
    segments: Sequence[tuple[int, Tensor]]
    """(first slot, master) of each segment."""
    masters: Tensor
    """Masters over the state range, on the device: `config.optimizer_rules` refuses offload for these optimizers."""
    parameters: Tensor
    """The whole flat parameter in the compute dtype; may share memory with the masters."""
    unused: Collection[int] = ()
    """Slots that no rank used in this step. They are not updated, and their extra state stays unchanged."""


@runtime_checkable
class NeedsSetup(Protocol):
    """An optimizer with work before the first step."""

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """Do slow one-time work, such as opening connections, so that no later step has to. Collective.

        Args:
            flats: The flat parameters.
        """
        ...


@runtime_checkable
class CommunicatingOptimizer(Protocol):
    """A torch optimizer that reduces gradients itself; these methods are added to its `step` over segments.

    While `communicates`, the engine leaves each rank its own gradient terms and calls `exchange` before the update.
    Terms of tensor-parallel peers and of copies are already summed. Nothing is clipped then. The reported gradient norm
    is that of unreduced terms: exact if all ranks have equal terms, else larger than the norm of the sum.
    """

    kept: ClassVar[Mapping[str, StatePlacement]]
    """Extra tensors per gradient, as `gradient.kept[name]`, zero at first.

    Checkpoints contain them while it communicates.

    They cover the whole flat parameter and differ per rank (`Replication.OWN`: error feedback), or cover the partition
    that a rank reduces (`Replication.OWN_PART`).
    """

    @property
    def communicates(self) -> bool:
        """Return whether the optimizer reduces the gradients of the next step; equal on all ranks.

        The engine asks when the first backward of a step begins.
        """
        ...

    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:
        """Fill `gradient.update` of each flat parameter with the gradient that `step` shall see.

        Called on all ranks per step.

        On any error the extra tensors in `kept` stay as they were after the last step.

        Args:
            flats: The flat parameters. `gradient.own` has this rank's terms of the whole flat parameter and may be
                overwritten.
            factor: The gradient is the sum of terms over `gradient.group`, times this factor.
        """
        ...

    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        """Record an update that all ranks have made; `communicates` may change here.

        Args:
            flats: The flat parameters.
            everyone: All ranks of the world.
        """
        ...

    def begin_again(self) -> None:
        """Restart as on the first step, because parameters were loaded without the extra tensors."""
        ...

    def reported(self) -> dict[str, float]:
        """Return figures of the exchange for the record of the step that has just ended; {} without any."""
        ...


@runtime_checkable
class LocalStepOptimizer(CommunicatingOptimizer, Protocol):
    """An optimizer with local steps between two exchanges, so that parameters differ between ranks meanwhile.

    While it communicates it also updates unused parameters, as if their gradient were 0, because an exchange resets
    what local steps have changed. It needs whole masters and states on every rank.
    """

    @property
    def replicas_differ(self) -> bool:
        """Return whether parameters differ between ranks now."""
        ...

    @property
    def keeps(self) -> bool:
        """Return whether the tensors in `kept` are in use now, even if the next step does not communicate."""
        ...

    def meet(self, flats: Sequence[ExchangedState]) -> None:
        """Make masters and states equal on all ranks, by an early exchange between two steps. Collective.

        Args:
            flats: The flat parameters.
        """
        ...


@runtime_checkable
class ParamSyncOptimizer(CommunicatingOptimizer, Protocol):
    """An optimizer that may send changes of partitioned masters to all ranks, in place of a gather."""

    @property
    def publishes(self) -> bool:
        """Return whether it does so in this step; asked after its exchange."""
        ...

    def restage(self, flats: Sequence[ExchangedState], *, partitioned: bool) -> Callable[[], None]:
        """Follow a change between whole and partitioned states, before an exchange and before `updated`. Collective.

        Args:
            flats: The flat parameters.
            partitioned: Whether states are partitioned now; equal on all ranks.

        Returns:
            A function that undoes the change, for an exchange that fails.
        """
        ...

    def publish(self, flats: Sequence[ExchangedState], number: int) -> None:
        """Change the parameters of all ranks as the update has changed the masters. Collective.

        Args:
            flats: The flat parameters.
            number: Number of the update.
        """
        ...


def kept_by(kind: type[Any]) -> Mapping[str, StatePlacement] | None:
    """Return the extra tensors of an optimizer class.

    Args:
        kind: The optimizer class.

    Returns:
        Their placement by name; None if the class does not communicate.
    """
    return kind.kept if hasattr(kind, "exchange") else None


def sums_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer reduces the gradients of the next step.

    Args:
        optimizer: Any torch optimizer.
    """
    return isinstance(optimizer, CommunicatingOptimizer) and optimizer.communicates


def steps_separate(kind: type[Any]) -> bool:
    """Return whether optimizers of this class make local steps.

    Args:
        kind: The optimizer class.
    """
    return kept_by(kind) is not None and hasattr(kind, "meet")


def keeps_now(optimizer: Optimizer) -> bool:
    """Return whether a checkpoint must contain the optimizer's extra tensors.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer.keeps if isinstance(optimizer, LocalStepOptimizer) else sums_itself(optimizer)


def updates_unused(optimizer: Optimizer) -> bool:
    """Return whether the next update also changes parameters that no rank used.

    Args:
        optimizer: Any torch optimizer.
    """
    return isinstance(optimizer, LocalStepOptimizer) and optimizer.communicates


def check_whole_gradients(kind: type[Any], zero_policy: ZeroPolicy, stage: int) -> None:
    """Check that a communicating optimizer gets whole gradients.

    Args:
        kind: The optimizer class.
        zero_policy: The planned placement.
        stage: The ZeRO stage, for the message.

    Raises:
        ValueError: If gradients would be partitioned or double-buffered, or states of local steps partitioned.
    """
    if kept_by(kind) is not None and zero_policy.grads_sharded:
        raise ValueError(
            f"zero.stage {stage}: {kind.__name__} sums gradients itself and needs all of them on every rank; use stage "
            "0 or 1, and no offload.optimizer"
        )
    if steps_separate(kind) and stage > 0:
        raise ValueError(
            f"zero.stage {stage}: ranks of {kind.__name__} make steps of their own, with whole states each; use stage 0"
        )
    if kept_by(kind) is not None and zero_policy.grads_double_buffered:
        raise ValueError(
            f"offload.delayed_update: {kind.__name__} sums gradients itself, in its update, and ranks would exchange "
            "during a step that also exchanges; set it to null"
        )
