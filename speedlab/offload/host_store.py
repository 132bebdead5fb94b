"""States in host memory: ordinary memory on a CPU device; pinned memory with copies on a stream next to a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from speedlab.comm import CommStats, HostCopies, Transfer
from speedlab.hardware import memory_bytes
from speedlab.offload.store import OffloadedState, OffloadError, StateStore
from speedlab.placement import MemoryKind

_CPU = torch.device("cpu")
_WAKE_SECONDS = 0.05
"""A wait returns to Python this often, so that signals are handled."""


class HostStore(StateStore):
    """The states that a rank keeps in host memory."""

    where = MemoryKind.HOST

    def __init__(self, traffic: CommStats, device: torch.device) -> None:
        """Start without states.

        Args:
            traffic: Counts transfers.
            device: Tensors of this device can be read and written, in addition to host tensors.
        """
        super().__init__()
        self.traffic, self.device = traffic, device
        self.copies = HostCopies(device, traffic)
        self._kept: list[HostState] = []

    def keep(self, numel: int, dtype: torch.dtype) -> HostState:
        """Allocate a state of zeros in host memory.

        Args:
            numel: Number of elements.
            dtype: Their dtype.

        Raises:
            OffloadError: The host has too little memory left.
        """
        needed, available = numel * dtype.itemsize, memory_bytes()[1]
        if needed > available:
            raise OffloadError(
                f"offload: the host has {available / 2**30:,.3f} GiB of memory left and {needed / 2**30:,.3f} GiB are "
                f"needed for one more state; keep it on disk, or use more hosts"
            )
        kept = HostState(self, torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda"))
        self._kept.append(kept)
        return kept

    @property
    def in_memory(self) -> list[Tensor]:
        return [kept.here() for kept in self._kept]

    def flush(self) -> None:
        """Wait for all copies between the device and the states."""
        for kept in self._kept:
            kept.settle()

    @property
    def sound(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    @property
    def capacity_bytes(self) -> int:
        return memory_bytes()[0]

    def close(self) -> None:
        """Drop all states."""
        for kept in list(self._kept):
            kept.drop()

    def forget(self, kept: HostState) -> None:
        """Remove a dropped state from the list."""
        self._kept.remove(kept)


class HostState(OffloadedState):
    """A state that is used in place, in host memory. So a turn transfers nothing."""

    where = MemoryKind.HOST

    def __init__(self, store: HostStore, values: Tensor) -> None:
        self.numel, self.dtype = values.numel(), values.dtype
        self._store = store
        self._values: Tensor | None = values
        self._open = False
        self._later: deque[_Later] = deque()
        """Operations that were started during a turn. They begin when the turn ends."""
        self._copied: torch.cuda.Event | None = None
        """Recorded after the last copy between the device and this state."""

    # ---- turns -------------------------------------------------------------------------------------------------------

    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn. There is nothing to transfer, but pending copies must end."""
        return self._start(self._fetch, opens=True)

    def _fetch(self) -> Transfer:
        copied = self._copied
        return Transfer(None if copied is None else copied.synchronize, self._store.traffic, _CPU)

    @property
    def tensor(self) -> Tensor:
        if not self._open:
            raise RuntimeError("offload: no turn is open; `fetch` the state first")
        return self.here()

    def leave(self, *, changed: bool) -> None:
        """End the turn, and start the operations that waited for its end.

        Args:
            changed: Ignored, because changes are in place.

        Raises:
            RuntimeError: No turn is open.
        """
        if not self._open:
            raise RuntimeError("offload: no turn is open; `fetch` the state first")
        self._open = False
        while self._later and not self._open:
            later = self._later.popleft()
            self._open = later.opens
            later.begin()

    def _start(self, begin: Callable[[], Transfer], *, opens: bool = False) -> Transfer:
        self.here()
        if self._open:
            later = _Later(begin, opens, self._store.traffic)
            self._later.append(later)
            return later
        self._open = opens
        return begin()

    # ---- stretches ---------------------------------------------------------------------------------------------------

    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Start to copy a range to `into`, or let it wait for the end of the open turn."""
        stretch = self._stretch(into, start)
        return self._start(lambda: self._copy(stretch, into.detach(), out=True))

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Start to copy `source` to a range, or let it wait for the end of the open turn."""
        stretch = self._stretch(source, start)
        return self._start(lambda: self._copy(stretch, source.detach(), out=False))

    def _copy(self, stretch: Tensor, other: Tensor, *, out: bool) -> Transfer:
        """Copy between the state and `other`, which is on the host or on the device."""
        copies, device = self._store.copies, self._store.device
        if device.type != "cuda":
            return copies.to_device(stretch, other) if out else copies.to_host(other, stretch)
        if other.device.type == "cpu":
            # Host copies are done at once, after pending device copies, so that no later operation overtakes them.
            self.settle()
            _ = other.copy_(stretch) if out else stretch.copy_(other)
            return Transfer(None, self._store.traffic, _CPU, link="host copy", nbytes=other.nbytes)
        transfer = copies.to_device(stretch, other) if out else copies.to_host(other, stretch)
        self._copied = torch.cuda.Event()
        self._copied.record(transfer.stream)
        return transfer

    def _stretch(self, tensor: Tensor, start: int) -> Tensor:
        fits = 0 <= start <= self.numel - tensor.numel()
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not fits:
            raise ValueError(
                f"offload: {tensor.numel()} elements of {tensor.dtype} from element {start} on, of a state of "
                f"{self.numel} elements of {self.dtype}; expected a contiguous tensor of that dtype that is within"
            )
        return self.here()[start : start + tensor.numel()].view(tensor.shape)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Free the memory, after pending copies have ended."""
        if self._values is not None:
            self.settle()
            self._values = None
            self._store.forget(self)

    def settle(self) -> None:
        """Wait until all copies between the device and this state have ended."""
        if self._copied is not None:
            self._copied.synchronize()

    def here(self) -> Tensor:
        """Return the values in place. Raises OffloadError after `drop`."""
        if self._values is None:
            raise OffloadError("offload: the state was dropped; `keep` a new one")
        return self._values


class _Later(Transfer):
    """A transfer that begins when the open turn ends."""

    def __init__(self, start: Callable[[], Transfer], opens: bool, traffic: CommStats) -> None:
        super().__init__(self._until_begun, traffic, _CPU)
        self.opens = opens
        self._start, self._begun = start, threading.Event()
        self._transfer: Transfer | None = None

    def begin(self) -> None:
        self._transfer = self._start()
        self._begun.set()

    @property
    def over(self) -> bool:
        return self._transfer is not None and self._transfer.over

    def wait(self) -> None:
        super().wait()
        assert self._transfer is not None
        self._transfer.wait()

    def _until_begun(self) -> None:
        while not self._begun.wait(_WAKE_SECONDS):
            pass
