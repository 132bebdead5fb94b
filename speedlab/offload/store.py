"""Interfaces of offload stores: one offloaded state, and the store that allocates it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from speedlab.comm import BufferMeter, Transfer
from speedlab.placement import MemoryKind


class OffloadedState(ABC):
    """One offloaded state of one flat (`numel` elements).

    Two ways to use it:

    - A turn: `fetch`, wait, use `tensor`, then `leave`.
    - A copy of a range: `read` or `write`.

    Turns, reads and writes of one state run one at a time, in the order in which they were started. No caller has to
    wait for this order.
    """

    where: MemoryKind
    numel: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    """The device of `tensor` during a turn."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn: start to transfer the state to `device`.

        Args:
            values: If False, only allocate memory, which the caller fills.
        """

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The values (numel,) on `device`, from the end of the `fetch` transfer until `leave`."""

    @abstractmethod
    def leave(self, *, changed: bool) -> None:
        """End the turn.

        Args:
            changed: Whether to write the values back. The write runs in the background.
        """

    @abstractmethod
    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Start to copy elements [start, start + m) to a tensor.

        Args:
            into: (m,), contiguous, of this dtype, on the host or the device.
            start: First element.
        """

    @abstractmethod
    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Start to copy a tensor to elements [start, start + m).

        Args:
            source: (m,), contiguous, of this dtype, on the host or the device. Do not change it before the end of the
                transfer.
            start: First element.
        """

    @abstractmethod
    def drop(self) -> None:
        """Free the memory of the state. Do not use the state afterwards."""


class StateStore(ABC):
    """A memory that keeps offloaded states of one rank."""

    where: MemoryKind

    def __init__(self) -> None:
        self.staging_meter = BufferMeter()
        """Counts the host bytes of buffers for transfers."""

    @property
    def in_memory(self) -> list[Tensor]:
        """All host memory of this store: buffers, and states if they are in host memory."""
        return []

    @abstractmethod
    def keep(self, numel: int, dtype: torch.dtype) -> OffloadedState:
        """Allocate a state of zeros.

        Args:
            numel: Number of elements.
            dtype: Their dtype.

        Raises:
            OffloadError: There is no space.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until all changes are written. Raises OffloadError if a write failed."""

    @property
    @abstractmethod
    def sound(self) -> bool:
        """Whether no write has failed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all states."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that the store can hold in total."""

    @abstractmethod
    def close(self) -> None:
        """Drop all states; a file is deleted."""


class OffloadError(RuntimeError):
    """A state cannot be allocated, read or written. The message says where, why, and what to do."""
