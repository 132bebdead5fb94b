"""Segments: the stretches of a flat that one optimizer group updates alike.

Between a backward and the update their masters are of a class that refuses `.grad`, which is None then: clipping them
would do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.parallel.zero import Flat
from speedlab.parallel.zero.parameter import asked_by_torch, gradient_of, refuse_gradient_read, set_gradient

_thread = threading.local()
"""`updates`: whether this thread makes an update, next to the backward of another step."""


@contextmanager
def updating_on_this_thread() -> Iterator[None]:
    """Inside, `.grad` of a `HeldMaster` is torch's: an update that is late reads gradients of its own step."""
    _thread.updates = True
    try:
        yield
    finally:
        _thread.updates = False


class HeldMaster(Tensor):
    """A master between a backward and the update. An instance changes its class there and back, because torch's
    optimizers choose their fast form by the exact type of tensors."""

    # As nn.Parameter has it: results of functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # made in C++

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # torch's is an attribute that C++ makes
        if not getattr(_thread, "updates", False) and not asked_by_torch():
            refuse_gradient_read("optimizer.param_groups")
        found: Tensor | None = gradient_of(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not getattr(_thread, "updates", False) and not asked_by_torch():
            refuse_gradient_read("optimizer.param_groups")
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


@dataclass(frozen=True)
class Segment:
    """Elements [start, end) of a flat, of its slots [first, last); `master` is a view of the flat's master."""

    start: int
    end: int
    group: int
    first: int
    last: int
    master: Tensor


def cut(flat: Flat, begins: Collection[int] = (), *, apart: bool = False) -> list[Segment]:
    """The flat's state range, cut where its optimizer group changes, and before the slots `begins`. `apart`: before
    each slot; then no segment has the padding behind its parameter, which a mean over elements would count."""
    low, high = flat.state_range
    firsts: list[int] = []
    for index, slot in enumerate(flat.slots):
        if not index or apart or index in begins or slot.group != flat.slots[index - 1].group:
            firsts.append(index)
    segments = []
    for first, last in zip(firsts, [*firsts[1:], len(flat.slots)], strict=True):
        begin = flat.slots[first].offset
        end = flat.slots[last].offset if last < len(flat.slots) else flat.padded
        if apart:
            end = begin + flat.slots[first].numel
        start, stop = max(begin, low), min(end, high)
        if start < stop:
            master = flat.master[start - low : stop - low]
            segments.append(Segment(start, stop, flat.slots[first].group, first, last, master))
    return segments


def owned_ranges(flat: Flat, within: tuple[int, int], others: Collection[str]) -> list[tuple[int, int]]:
    """Elements [start, end) of the flat `within` a range without the parameters in `others`; neighbours are one."""
    ranges, (start, stop) = [], within
    for slot in flat.slots:
        if slot.name in others:
            ranges.append((start, slot.offset))
            start = max(start, slot.offset + slot.numel)
    ranges.append((start, stop))
    return [(low, min(high, stop)) for low, high in ranges if low < min(high, stop)]


def elementwise(value: Any, segment: Segment) -> bool:
    """Whether an optimizer's state of this segment has a value for each of its elements."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.shape == segment.master.shape


def has_kernels(master: Tensor) -> bool:
    """Whether cuda_ops updates such masters: those in float32."""
    return master.dtype is torch.float32
