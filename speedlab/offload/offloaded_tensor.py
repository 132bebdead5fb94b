"""A state that lies away from the device, as a tensor: it has values during a visit, and shows NaN between two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from speedlab.comm import Transfer
from speedlab.offload.store import OffloadedState


class OffloadedTensor:
    """`tensor` (numel,) stands for what is `kept`. It is one object for good; outside a visit it has the true shape and
    the memory of one element. Views of it have to be taken anew in each visit."""

    def __init__(self, keep: Callable[[], OffloadedState]) -> None:
        """`keep` makes room for it."""
        self._keep = keep
        self.kept = kept = keep()
        nothing = torch.full((), math.nan if kept.dtype.is_floating_point else 0, dtype=kept.dtype, device=kept.device)
        self._placeholder = nothing.expand(kept.numel)
        self.tensor: Tensor = self._placeholder.view(kept.numel)
        self._coming: Transfer | None = None
        self.blank = False
        """Whether there is only room for values, in this visit."""

    def fetch(self, *, values: bool = True) -> None:
        """Begin a visit: start to bring the values here; without `values` there is only room, for others."""
        if self._coming is None:
            self._coming, self.blank = self.kept.fetch(values=values), not values

    def arrive(self) -> Tensor:
        """The values are here when this returns."""
        self.fetch()
        assert self._coming is not None
        self._coming.wait()
        self.tensor.data = self.kept.tensor
        return self.tensor

    def leave(self, *, changed: bool) -> None:
        """End the visit, if there is one; what was `changed` goes back."""
        if self._coming is None:
            return
        self.tensor.data, self._coming = self._placeholder, None
        self.kept.leave(changed=changed)

    def begin_anew(self) -> None:
        """Zeros in new room: what was kept is lost, and has been dropped."""
        self.tensor.data, self._coming = self._placeholder, None
        self.kept = self._keep()


@contextmanager
def visit(states: Iterable[OffloadedTensor], *, changed: bool = False) -> Iterator[None]:
    """Inside, all `states` have their values; `changed` ones go back. What an exception broke off does not."""
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
