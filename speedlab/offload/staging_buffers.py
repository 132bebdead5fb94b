"""Page-aligned buffers for disk transfers, and the memory that a transfer reads or writes.

`BufferPool` reuses page-aligned host memory, so that the disk transfers without a copy. `StagedMemory` presents a
tensor, on the host or on the device, as the bytes of a state.
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
"""Addresses, offsets and lengths are multiples of this. O_DIRECT requires this on disks with sectors of up to 4 KiB."""

_UNUSED_SHARE = 0.25
"""An idle buffer serves a smaller request if at most this fraction of the buffer stays unused."""


def rounded(nbytes: int) -> int:
    """Round up to full pages.

    Args:
        nbytes: Number of bytes.
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class BufferPool:
    """A pool of page-aligned buffers. All mapped memory, in use or idle, counts as live bytes of `meter`.

    If no idle buffer fits a request, the pool unmaps as many idle bytes as it maps. So idle memory never grows on top
    of used memory.
    """

    def __init__(self, meter: BufferMeter, *, pinned: bool = False) -> None:
        """Start empty.

        Args:
            meter: Counts the mapped bytes.
            pinned: Whether to pin the memory, for asynchronous copies of a GPU.
        """
        self._meter, self._pinned = meter, pinned
        self._lock = threading.Lock()
        self._idle: dict[int, Tensor] = {}
        self._lent: dict[int, Tensor] = {}
        """Complete buffers by address."""

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer (`rounded(nbytes)`,) uint8, page-aligned, with arbitrary values.

        Args:
            nbytes: Bytes that the caller needs.

        Raises:
            MemoryError: The system has no memory left.
        """
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
        """Return a buffer to the pool. Thread-safe.

        Args:
            buffer: A result of `take` that no code uses any more.
        """
        with self._lock:
            whole = self._lent.pop(buffer.data_ptr())
            self._idle[whole.data_ptr()] = whole

    @property
    def all(self) -> list[Tensor]:
        """All buffers, in use or idle."""
        with self._lock:
            return [*self._lent.values(), *self._idle.values()]

    def trim(self) -> None:
        """Unmap all idle buffers."""
        with self._lock:
            self._unmap(sum(idle.nbytes for idle in self._idle.values()))

    def close(self) -> None:
        """Give up all buffers. A buffer in use stays mapped until its user releases it."""
        with self._lock:
            self._idle |= self._lent
            self._lent.clear()
        self.trim()

    def _unmap(self, nbytes: int) -> None:
        """Unmap idle buffers of `nbytes` in total, or all of them. The caller holds the lock."""
        for address, idle in sorted(self._idle.items(), key=lambda item: -item[1].nbytes):
            if nbytes <= 0:
                return
            nbytes -= idle.nbytes
            self._meter.add(-idle.nbytes)
            del self._idle[address]


def _mapped(nbytes: int, pinned: bool) -> Tensor:
    """Return page-aligned memory (nbytes,) uint8."""
    if not pinned:
        try:
            # Private, because shared anonymous memory counts as shared memory of the process and gets no huge pages.
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"offload: the system has no {nbytes:,} bytes of memory for a buffer: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The kernel pins transferred memory page by page, so fewer pages are faster.
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)
    made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if made.data_ptr() % PAGE_BYTES:  # CUDA returns full pages in practice, but does not guarantee it.
        made = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        start = -made.data_ptr() % PAGE_BYTES
        made = made[start : start + nbytes]
    return made


class StagedMemory(ABC):
    """Bytes [start, start + n) of a state, in the memory of a tensor. All offsets are bytes of the state."""

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        """Return the memory if the file can read or write it without a buffer; None if it cannot.

        Args:
            low: First byte.
            high: End.
            direct: Whether the transfer uses O_DIRECT, which needs full pages.
        """
        return None

    @abstractmethod
    def take(self, low: int, high: int, into: Tensor) -> None:
        """Copy bytes [low, high) to a buffer.

        Args:
            low: First byte.
            high: End.
            into: (high - low,) uint8 on the host.
        """

    @abstractmethod
    def put(self, low: int, high: int, source: Tensor) -> None:
        """Copy a buffer to bytes [low, high).

        Args:
            low: First byte.
            high: End.
            source: (high - low,) uint8 on the host.
        """


class HostMemory(StagedMemory):
    """A contiguous tensor on the host."""

    def __init__(self, tensor: Tensor, start: int = 0) -> None:
        self._tensor, self._start = tensor.detach(), start
        # NumPy copies on the calling thread. torch would start a thread team for each of our threads. The array is made
        # from the address, because torch cannot resize a storage that was shared with NumPy.
        self._bytes = np.ctypeslib.as_array((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        """Return the tensor's memory, unless O_DIRECT needs other alignment."""
        view = self._bytes[low - self._start : high - self._start]
        if direct and (low % PAGE_BYTES or high % PAGE_BYTES or view.ctypes.data % PAGE_BYTES):
            return None
        return view.data

    def take(self, low: int, high: int, into: Tensor) -> None:
        """Copy bytes to a buffer, on the calling thread."""
        np.copyto(into.numpy(), self._bytes[low - self._start : high - self._start])

    def put(self, low: int, high: int, source: Tensor) -> None:
        """Copy a buffer to bytes, on the calling thread."""
        np.copyto(self._bytes[low - self._start : high - self._start], source.numpy())


class DeviceMemory(StagedMemory):
    """A contiguous tensor on a GPU. Copies run on the store's stream, after the work that was enqueued before this
    object was created.
    """

    def __init__(self, tensor: Tensor, start: int, stream: torch.cuda.Stream) -> None:
        self._bytes, self._start, self._stream = _bytes_of(tensor), start, stream
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(tensor.device))

    def take(self, low: int, high: int, into: Tensor) -> None:
        """Copy bytes from the GPU to a buffer, and wait."""
        self._copy(self._bytes[low - self._start : high - self._start], into)

    def put(self, low: int, high: int, source: Tensor) -> None:
        """Copy a buffer to bytes on the GPU, and wait."""
        self._copy(source, self._bytes[low - self._start : high - self._start])

    def _copy(self, source: Tensor, into: Tensor) -> None:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            into.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()  # Runs on a thread of the store, which reuses the buffer right after this.


class Zeros(StagedMemory):
    """A source of zeros of any length."""

    def take(self, low: int, high: int, into: Tensor) -> None:
        """Fill a buffer with zeros."""
        into.numpy().fill(0)

    def put(self, low: int, high: int, source: Tensor) -> None:
        """Refuse the write."""
        raise AssertionError("zeros are read only")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
