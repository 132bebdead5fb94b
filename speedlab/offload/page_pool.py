"""Memory of tensors that come and go, at the same address each time: views and saved tensors stay what they are.

1. On a Linux host each tensor has a stretch of addresses for good, and pages of memory that one has left are moved to
   the addresses of the next (mremap). Given back to the system they would be zeroed and faulted in again, which took a
   fifth of a step whose parameters come from disk, on two cores. Whole pages also take what the disk reads as it is.
2. Elsewhere the tensor's storage is emptied, and filled by its allocator.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from speedlab.offload.staging_buffers import rounded

_HUGE_BYTES = 2 << 20
"""Of the larger pages that the processor maps at once."""

_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NORESERVE, _MAP_FIXED = 0x4000, 0x10
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
"""Flags of mmap(2) and mremap(2); the last one came with Linux 5.7."""


class RepinnableTensor(ABC):
    """`tensor`, whose values may be used while it is `here`. It is not at first; it comes with any values.

    Whoever reads it at other times finds other values, or none, and may not be told.
    """

    tensor: Tensor
    here = False

    @abstractmethod
    def materialize(self) -> None: ...

    @abstractmethod
    def free(self) -> None: ...


class PagePool:
    """The pages of tensors of one rank that come and go."""

    def __init__(self) -> None:
        self._idle: weakref.WeakSet[_Moved] = weakref.WeakSet()
        """Those that have left pages behind."""
        self._can_move = True
        """Whether the system has not refused it yet."""

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> RepinnableTensor:
        """For a tensor (numel,)."""
        if device.type == "cpu" and sys.platform == "linux" and numel:
            with suppress(OSError):  # No addresses left: where the system counts them as memory, say.
                return _Moved(numel, dtype, self)
        return _Resized(numel, dtype, device)

    def trim(self) -> None:
        """Give idle pages back to the system."""
        self._drop(sum(each.nbytes for each in self._idle))

    # ---- for those that come and go ----------------------------------------------------------------------------------

    def leave(self, which: _Moved) -> None:
        self._idle.add(which)

    def fill(self, which: _Moved) -> None:
        """Give it pages: those that it left, those of another, or new ones in place of as many idle bytes."""
        if which in self._idle:
            self._idle.discard(which)
            return
        other = next((each for each in self._idle if each.nbytes == which.nbytes), None)
        if other is None or not self._can_move:
            self._drop(which.nbytes)
            return
        self._idle.discard(other)
        self._can_move = which.take_pages(other)
        if not self._can_move:
            other.drop_pages()

    def _drop(self, nbytes: int) -> None:
        """At least `nbytes` of what is idle, or all of it."""
        for each in list(self._idle):
            if nbytes <= 0:
                return
            nbytes -= each.nbytes
            self._idle.discard(each)
            each.drop_pages()


class _Moved(RepinnableTensor):
    """Whole pages at addresses of its own."""

    def __init__(self, numel: int, dtype: torch.dtype, pages: PagePool) -> None:
        self._pages = pages
        self.nbytes = rounded(numel * dtype.itemsize)
        self._huge = self.nbytes // _HUGE_BYTES * _HUGE_BYTES
        """At the beginning, in huge pages. Behind them one would be mostly unused."""
        spare = _HUGE_BYTES if self._huge else 0
        # Without a reservation: the addresses of a model may be more than there is memory.
        whole = torch.frombuffer(mmap.mmap(-1, self.nbytes + spare, flags=_OWN | _NORESERVE), dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_BYTES if self._huge else 0
        self.tensor = whole[start : start + numel * dtype.itemsize].view(dtype)
        self._advise()

    def materialize(self) -> None:
        if not self.here:
            self.here = True
            self._pages.fill(self)

    def free(self) -> None:
        if self.here:
            self.here = False
            self._pages.leave(self)

    def take_pages(self, other: _Moved) -> bool:
        """Those of `other`, of the same size, which has none then. False where the system cannot: then there are new
        ones. Raises MemoryError where there are not."""
        here, there = self.tensor.data_ptr(), other.tensor.data_ptr()
        # One by one: the system sees two stretches, and most versions of Linux move no more than one at a time.
        for start, stop in ((0, self._huge), (self._huge, self.nbytes)):
            size = stop - start
            if size and _libc().mremap(there + start, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, here + start) != (
                here + start
            ):
                self._map_anew()
                return False
        return True

    def _map_anew(self) -> None:
        """A move that fails may have left nothing at this address."""
        here, access = self.tensor.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
        if _libc().mmap(here, self.nbytes, access, _OWN | _NORESERVE | _MAP_FIXED, -1, 0) != here:
            raise MemoryError(f"offload: the system gives no memory of {self.nbytes:,} bytes for parameters that come")
        self._advise()

    def _advise(self) -> None:
        if self._huge and hasattr(mmap, "MADV_HUGEPAGE"):  # Refused by a kernel that has none: no harm.
            _libc().madvise(self.tensor.data_ptr(), self._huge, mmap.MADV_HUGEPAGE)

    def drop_pages(self) -> None:
        _libc().madvise(self.tensor.data_ptr(), self.nbytes, mmap.MADV_DONTNEED)


class _Resized(RepinnableTensor):
    """Memory of the device's own allocator."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.free()

    def materialize(self) -> None:
        self.here = True
        self.tensor.untyped_storage().resize_(self.tensor.nbytes)

    def free(self) -> None:
        self.here = False
        self.tensor.untyped_storage().resize_(0)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.mremap.restype, library.mremap.argtypes = address, [address, size, size, ctypes.c_int, address]
    library.mmap.restype, library.mmap.argtypes = address, [address, size, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.restype, library.madvise.argtypes = ctypes.c_int, [address, size, ctypes.c_int]
    return library
