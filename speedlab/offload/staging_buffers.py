"""Page-aligned memory of the host that is used again: the disk reads into it and writes from it without a copy.

The memory that a disk reads into or writes from, on the host or on the device, as the bytes of a state.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from speedlab.comm import BufferMeter

PAGE_BYTES = 4096
"""Addresses, offsets and lengths are multiples of it: what O_DIRECT asks for on disks with sectors of up to 4 KiB."""

_UNUSED_SHARE = 0.25
"""An idle buffer serves a smaller request when at most this much of it lies unused."""


def rounded(nbytes: int) -> int:
    """`nbytes` in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class BufferPool:
    """Memory that is taken and given back. What it has mapped, in use or idle, counts as live bytes of `meter`.

    What is idle never grows beside what is asked for: where no idle buffer fits, as many bytes of them are unmapped as
    are mapped anew.
    """

    def __init__(self, meter: BufferMeter, *, pinned: bool = False) -> None:
        """`pinned`: so that a GPU can copy to and from it by itself."""
        self._meter, self._pinned = meter, pinned
        self._lock = threading.Lock()
        self._idle: dict[int, Tensor] = {}
        self._lent: dict[int, Tensor] = {}
        """Whole buffers by address."""

    def take(self, nbytes: int) -> Tensor:
        """(`rounded(nbytes)`,) uint8 with any values, page-aligned. Raises MemoryError where there is no more."""
        needed = max(rounded(nbytes), PAGE_BYTES)
        with self._lock:
            fitting = [idle for idle in self._idle.values() if needed <= idle.nbytes <= needed / (1 - _UNUSED_SHARE)]
            if fitting:
                whole = min(fitting, key=lambda idle: idle.nbytes)
                del self._idle[whole.data_ptr()]
            else:
                self._unmap(needed)
                whole = _mapped(needed, self._pinned)
                self._meter.add(whole.nbytes)
            self._lent[whole.data_ptr()] = whole
        return whole[: rounded(nbytes)]

    def give_back(self, buffer: Tensor) -> None:
        """`buffer` came from `take`, and nothing uses it any more. From any thread."""
        with self._lock:
            whole = self._lent.pop(buffer.data_ptr())
            self._idle[whole.data_ptr()] = whole

    @property
    def all(self) -> list[Tensor]:
        """In use or idle."""
        with self._lock:
            return [*self._lent.values(), *self._idle.values()]

    def trim(self) -> None:
        """Give the memory of idle buffers back to the system."""
        with self._lock:
            self._unmap(sum(idle.nbytes for idle in self._idle.values()))

    def close(self) -> None:
        """Give everything back, also what somebody took; that lives on until they let go of it."""
        with self._lock:
            self._idle |= self._lent
            self._lent.clear()
        self.trim()

    def _unmap(self, nbytes: int) -> None:
        """Give up idle buffers of `nbytes` together, or all of them. The lock is held."""
        for address, idle in sorted(self._idle.items(), key=lambda item: -item[1].nbytes):
            if nbytes <= 0:
                return
            nbytes -= idle.nbytes
            self._meter.add(-idle.nbytes)
            del self._idle[address]


def _mapped(nbytes: int, pinned: bool) -> Tensor:
    """(nbytes,) uint8, page-aligned."""
    if not pinned:
        try:
            # Private: shared anonymous memory would count as shared memory of the process, and never has huge pages.
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"offload: the system has no {nbytes:,} bytes of memory for a buffer: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # The kernel pins what it transfers, page by page.
        return torch.frombuffer(memory, dtype=torch.uint8)
    made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if made.data_ptr() % PAGE_BYTES:  # CUDA gives whole pages, but does not promise them.
        made = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        start = -made.data_ptr() % PAGE_BYTES
        made = made[start : start + nbytes]
    return made


class StagedMemory(ABC):
    """Bytes [start, start + n) of a state. Everything is told in bytes of the state, [low, high) among these."""

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        """Where the file can transfer by itself, only whole pages if `direct`; None where staging has to help."""
        return None

    @abstractmethod
    def take(self, low: int, high: int, into: Tensor) -> None:
        """Copy to `into` (high - low,) uint8 on the host."""

    @abstractmethod
    def put(self, low: int, high: int, source: Tensor) -> None:
        """Copy from `source` (high - low,) uint8 on the host."""


class HostMemory(StagedMemory):
    """A contiguous tensor on the host."""

    def __init__(self, tensor: Tensor, start: int = 0) -> None:
        self._tensor, self._start = tensor.detach(), start
        # NumPy copies on the thread that asks; torch would start a team of threads for each of ours. By its address,
        # because a storage that NumPy was shown can never be emptied again.
        self._bytes = np.ctypeslib.as_array((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        view = self._bytes[low - self._start : high - self._start]
        if direct and (low % PAGE_BYTES or high % PAGE_BYTES or view.ctypes.data % PAGE_BYTES):
            return None
        return view.data

    def take(self, low: int, high: int, into: Tensor) -> None:
        np.copyto(into.numpy(), self._bytes[low - self._start : high - self._start])

    def put(self, low: int, high: int, source: Tensor) -> None:
        np.copyto(self._bytes[low - self._start : high - self._start], source.numpy())


class DeviceMemory(StagedMemory):
    """A contiguous tensor on a GPU: copied on a stream of the store, after what was enqueued when this was made."""

    def __init__(self, tensor: Tensor, start: int, stream: torch.cuda.Stream) -> None:
        self._bytes, self._start, self._stream = _bytes_of(tensor), start, stream
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(tensor.device))

    def take(self, low: int, high: int, into: Tensor) -> None:
        self._copy(self._bytes[low - self._start : high - self._start], into)

    def put(self, low: int, high: int, source: Tensor) -> None:
        self._copy(source, self._bytes[low - self._start : high - self._start])

    def _copy(self, source: Tensor, into: Tensor) -> None:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            into.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()  # On a thread of the store: staging is used again at once.


class Zeros(StagedMemory):
    """Zeros, as many as are asked for."""

    def take(self, low: int, high: int, into: Tensor) -> None:
        into.numpy().fill(0)

    def put(self, low: int, high: int, source: Tensor) -> None:
        raise AssertionError("zeros are read only")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
