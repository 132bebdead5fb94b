"""What a rank keeps away from its device between two uses: the interface of the places where it may lie."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from speedlab.comm import BufferMeter, Transfer
from speedlab.placement import MemoryKind


class OffloadedState(ABC):
    """One state of one flat (`numel` elements), away from the device.

    It is used in turns: `fetch`, then `tensor` and what is done with it, then `leave`. Whoever needs no more than a
    copy takes `read` or `write`, also of a stretch. One turn, read or write at a time begins where the one before has
    ended, in the order in which they were started; no caller has to wait for that.
    """

    where: MemoryKind
    numel: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    """Where it has values during a turn."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def fetch(self, *, values: bool = True) -> Transfer:
        """Begin a turn: start to bring the state to `device`. Without `values` only room for it, which the
        caller fills."""

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """(numel,) on `device`, once the transfer of `fetch` is over and until `leave`."""

    @abstractmethod
    def leave(self, *, changed: bool) -> None:
        """End the turn; what was `changed` is on its way to its place when this returns."""

    @abstractmethod
    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Start to copy elements [start, start + m) into `into` (m,), contiguous, of this dtype, on the host or on the
        device."""

    @abstractmethod
    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Start to copy `source` (m,), on the host or on the device, to elements [start, start + m). It must not change
        before the transfer is over."""

    @abstractmethod
    def drop(self) -> None:
        """Give up its room; it is of no use afterwards."""


class StateStore(ABC):
    """A place in which a rank keeps states."""

    where: MemoryKind

    def __init__(self) -> None:
        self.staging_meter = BufferMeter()
        """Bytes of the host's memory through which its states come and go."""

    @property
    def in_memory(self) -> list[Tensor]:
        """All of the host's memory that it holds: that, and the states that are kept there."""
        return []

    @abstractmethod
    def keep(self, numel: int, dtype: torch.dtype) -> OffloadedState:
        """Room for so many elements, zeros at first. Raises OffloadError where there is none."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was left, or written, is in its place. Raises OffloadError where some of it is not."""

    @property
    @abstractmethod
    def sound(self) -> bool:
        """Whether nothing of what was written is lost."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of all that is kept."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """What the place can hold in all."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up; a file is gone then."""


class OffloadError(RuntimeError):
    """A state cannot be kept, read or written; the text says where, why, and what to do."""
