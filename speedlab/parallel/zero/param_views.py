"""Views of a flat that its parameters show: the full values, or placeholders. Also detects writes of the caller."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.parallel.zero.parameter import ReshardedParameter, UnshardedParameter


class ParamViews:
    """The parameters of one flat, and the tensors that they currently view.

    A released parameter shows NaN in its true shape, in the memory of one element. Without this placeholder, torch
    would read freed memory. Reads from Python raise an error (`ReshardedParameter`).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[ParamSlot], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parameters, self._slots = parameters, slots
        nothing = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self._placeholders = [nothing.expand(slot.shape) for slot in slots]
        self._values: list[Tensor] = []
        self._versions: list[int] = []
        """Version counter of each parameter at the last check. Only the caller writes to parameters in place, so a
        higher counter is a write of the caller."""
        self._lost: set[int] = set()
        """Indices of parameters that were released while the caller's own tensor was in their `.data`."""

    def show(self, values: list[Tensor]) -> None:
        """Set the parameters to these tensors.

        Args:
            values: One tensor per parameter, with its shape.
        """
        self._become(UnshardedParameter)
        self._values = values
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def use_unsharded_views(self, whole: Tensor) -> None:
        """Make the parameters views of the full flat.

        Args:
            whole: The full flat, (padded,).
        """
        self.show([whole[slot.range].view(slot.shape) for slot in self._slots])

    def use_placeholder_views(self) -> None:
        """Make the parameters show NaN placeholders, after their release."""
        # The release loses the caller's tensor, but `take_changes` must still report the write.
        self._lost.update(index for index in range(len(self._values)) if self.is_replaced(index))
        self.show(self._placeholders)
        self._become(ReshardedParameter)

    def _become(self, kind: type[UnshardedParameter]) -> None:
        """Change the class of the parameters that `remember` registered. Only those refuse reads while they are
        released.
        """
        for parameter in self._parameters:
            now = parameter.__class__
            if now is not kind and (now is ReshardedParameter or now is UnshardedParameter):
                parameter.__class__ = kind

    def count_from_now(self) -> None:
        """Ignore all writes so far."""
        # Released parameters otherwise run Python code on every attribute read.
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [parameter._version for parameter in self._parameters]

    def refuse_old_graphs(self) -> None:
        """Make autograd refuse graphs that saved these parameters, as after an in-place update of an optimizer."""
        torch.autograd.graph.increment_version(self._parameters)
        self.count_from_now()

    def written(self) -> list[int]:
        """Return the indices of parameters that the caller wrote to."""
        with torch._C.DisableTorchFunctionSubclass():
            return [index for index in range(len(self._parameters)) if self.is_written(index)]

    def is_written(self, index: int) -> bool:
        """Return whether the caller wrote to this parameter in place, or assigned to its `.data`.

        Args:
            index: Index of the parameter.
        """
        counted = self._parameters[index]._version != self._versions[index]
        return counted or index in self._lost or self.is_replaced(index)

    def is_replaced(self, index: int) -> bool:
        """Return whether the caller assigned another tensor to the `.data` of this parameter.

        Args:
            index: Index of the parameter.
        """
        return not _is_same(self._parameters[index], self._values[index])

    def reported(self, index: int) -> None:
        """Mark the write to a parameter as handled.

        Args:
            index: Index of the parameter.
        """
        self._versions[index] = self._parameters[index]._version
        self._lost.discard(index)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors start at the same address of the same storage, with the same dtype."""
    return bool(
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.dtype is other.dtype
    )
