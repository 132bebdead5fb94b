"""An offloaded state as a tensor: it has values during a visit, and shows NaN outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from speedlab.comm import Transfer
from speedlab.offload.store import OffloadedState


class OffloadedTensor:
    """A tensor (numel,) for the state in `kept`.

    `tensor` is always the same object. Outside a visit it has the true shape and the memory of one element. Create
    views of it again in each visit.
    """

    def __init__(self, keep: Callable[[], OffloadedState]) -> None:
        """Allocate the state.

        Args:
            keep: Allocates the state in its store.
        """
        self._keep = keep
        self.kept = kept = keep()
        nothing = torch.full((), math.nan if kept.dtype.is_floating_point else 0, dtype=kept.dtype, device=kept.device)
        self._placeholder = nothing.expand(kept.numel)
        self.tensor: Tensor = self._placeholder.view(kept.numel)
        self._coming: Transfer | None = None
        self.blank = False
        """Whether this visit has only memory, without values."""

    def fetch(self, *, values: bool = True) -> None:
        """Start a visit: start to transfer the values.

        Args:
            values: If False, only allocate memory, which the caller fills.
        """
        if self._coming is None:
            self._coming, self.blank = self.kept.fetch(values=values), not values

    def arrive(self) -> Tensor:
        """Wait for the values, and return `tensor`."""
        self.fetch()
        assert self._coming is not None
        self._coming.wait()
        self.tensor.data = self.kept.tensor
        return self.tensor

    def leave(self, *, changed: bool) -> None:
        """End the visit, if there is one.

        Args:
            changed: Whether to write the values back.
        """
        if self._coming is None:
            return
        self.tensor.data, self._coming = self._placeholder, None
        self.kept.leave(changed=changed)

    def begin_again(self) -> None:
        """Allocate the state again, as zeros, after its values were lost and dropped."""
        self.tensor.data, self._coming = self._placeholder, None
        self.kept = self._keep()


@contextmanager
def visit(states: Iterable[OffloadedTensor], *, changed: bool = False) -> Iterator[None]:
    """Fetch all `states` for the time of the block.

    Args:
        states: The states to visit.
        changed: Whether to write them back. After an exception nothing is written back.
    """
    states = list(states)
    whole = False
    try:
        for state in states:
            state.fetch()
        for state in states:
            state.arrive()
        yield
        whole = True
    finally:
        for state in states:
            state.leave(changed=changed and whole)
