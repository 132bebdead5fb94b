"""What parameters show: their values in a flat, or placeholders; and whether the caller has written there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.parallel.zero.parameter import ReshardedParameter, UnshardedParameter


class ParamViews:
    """The parameters of one flat, and the tensors that they are views of now.

    A released parameter shows NaN in its true shape, in the memory of one element, because torch would read memory that
    is not there; where Python reads it, it raises (`ReshardedParameter`).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[ParamSlot], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parameters, self._slots = parameters, slots
        nothing = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self._placeholders = [nothing.expand(slot.shape) for slot in slots]
        self._values: list[Tensor] = []
        self._versions: list[int] = []
        """How often each was written to in place; by the caller, as nothing here writes to parameters."""
        self._lost: set[int] = set()
        """In whose place the caller had put something when they were released."""

    def show(self, values: list[Tensor]) -> None:
        """Parameters are these, one for each."""
        self._become(UnshardedParameter)
        self._values = values
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def use_unsharded_views(self, whole: Tensor) -> None:
        """Parameters are views of the `whole` flat."""
        self.show([whole[slot.range].view(slot.shape) for slot in self._slots])

    def use_placeholder_views(self) -> None:
        self._lost.update(index for index in range(len(self._values)) if self.is_replaced(index))
        self.show(self._placeholders)
        self._become(ReshardedParameter)

    def _become(self, kind: type[UnshardedParameter]) -> None:
        """Those that an engine's `remember` has seen refuse reads while they are released."""
        for parameter in self._parameters:
            now = parameter.__class__
            if now is not kind and (now is ReshardedParameter or now is UnshardedParameter):
                parameter.__class__ = kind

    def count_from_now(self) -> None:
        """What was written so far is nobody's change."""
        with torch._C.DisableTorchFunctionSubclass():  # Released ones look at every question otherwise.
            self._versions = [parameter._version for parameter in self._parameters]

    def refuse_old_graphs(self) -> None:
        """The values are about to change as by an optimizer's in-place update, which autograd notices: a graph that
        has saved a parameter cannot be differentiated any more."""
        torch.autograd.graph.increment_version(self._parameters)
        self.count_from_now()

    def written(self) -> list[int]:
        """Which the caller has written into."""
        with torch._C.DisableTorchFunctionSubclass():
            return [index for index in range(len(self._parameters)) if self.is_written(index)]

    def is_written(self, index: int) -> bool:
        """Whether the caller has written into this parameter, or put something in its place (`.data`)."""
        counted = self._parameters[index]._version != self._versions[index]
        return counted or index in self._lost or self.is_replaced(index)

    def is_replaced(self, index: int) -> bool:
        return not _is_same(self._parameters[index], self._values[index])

    def told(self, index: int) -> None:
        """Somebody knows of what was written into this one."""
        self._versions[index] = self._parameters[index]._version
        self._lost.discard(index)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether both stand at the same place of the same memory."""
    return bool(
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.dtype is other.dtype
    )
