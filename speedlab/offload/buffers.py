"""Page-aligned memory of the host that is used again: the disk reads into it and writes from it without a copy."""

from __future__ import annotations

import mmap
import threading

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


class Buffers:
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
