"""Memory of tensors that are materialized and freed, always at the same address, so that views and saved tensors stay
valid.

1. On a Linux host, each tensor keeps an address range forever. When a tensor is freed, its pages move to the next
   tensor (mremap). Freeing pages would make the system zero them and fault them in again. This took a fifth of a step
   with parameters on disk, on two cores. Full pages also let the disk read into them directly.
2. Otherwise, the tensor's storage is resized to zero, and back by its allocator.
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
"""Bytes of a huge page."""

_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NORESERVE, _MAP_FIXED = 0x4000, 0x10
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
"""Flags of mmap(2) and mremap(2). The last one needs Linux 5.7."""


class RepinnableTensor(ABC):
    """A tensor whose memory is materialized and freed. It starts freed, and has arbitrary values after `materialize`.

    Code that reads it while it is freed finds other values or none, possibly without an error.
    """

    tensor: Tensor
    here = False

    @abstractmethod
    def materialize(self) -> None:
        """Give the tensor memory, with arbitrary values."""
        ...

    @abstractmethod
    def free(self) -> None:
        """Free the memory."""
        ...


class PagePool:
    """The pages of the freed tensors of one rank."""

    def __init__(self) -> None:
        self._idle: weakref.WeakSet[_Moved] = weakref.WeakSet()
        """Freed tensors that still have pages."""
        self._can_move = True
        """False after the system refused to move pages."""

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> RepinnableTensor:
        """Return a tensor without memory; `materialize` gives it memory.

        Args:
            numel: Number of elements.
            dtype: Their dtype.
            device: Its device. On a Linux host, the tensor keeps its address.
        """
        if device.type == "cpu" and sys.platform == "linux" and numel:
            with suppress(OSError):  # No address space left, for example if the system counts addresses as memory.
                return _Moved(numel, dtype, self)
        return _Resized(numel, dtype, device)

    def trim(self) -> None:
        """Free all idle pages."""
        self._drop(sum(each.nbytes for each in self._idle))

    # ---- for those that come and go ----------------------------------------------------------------------------------

    def leave(self, which: _Moved) -> None:
        """Note that a tensor was freed and still has its pages.

        Args:
            which: The tensor.
        """
        self._idle.add(which)

    def fill(self, which: _Moved) -> None:
        """Give a tensor pages: its own idle ones, those of another tensor of equal size, or new ones. New pages
        replace as many idle bytes.

        Args:
            which: The tensor.

        Raises:
            MemoryError: There is no memory for new pages.
        """
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
        """Free at least `nbytes` of idle pages, or all of them."""
        for each in list(self._idle):
            if nbytes <= 0:
                return
            nbytes -= each.nbytes
            self._idle.discard(each)
            each.drop_pages()


class _Moved(RepinnableTensor):
    """A tensor on full pages, at its own address range."""

    def __init__(self, numel: int, dtype: torch.dtype, pages: PagePool) -> None:
        self._pages = pages
        self.nbytes = rounded(numel * dtype.itemsize)
        self._huge = self.nbytes // _HUGE_BYTES * _HUGE_BYTES
        """Bytes at the start that use huge pages. In the rest, a huge page would be mostly unused."""
        spare = _HUGE_BYTES if self._huge else 0
        # NORESERVE, because the address ranges of all tensors may exceed the memory.
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
        """Move the pages of another tensor of equal size here.

        Args:
            other: A freed tensor; it has no pages afterwards.

        Returns:
            False if the system cannot move pages. Then this tensor has new pages.

        Raises:
            MemoryError: There is no memory for new pages.
        """
        here, there = self.tensor.data_ptr(), other.tensor.data_ptr()
        # Two calls, because huge and normal pages are separate mappings, and most versions of Linux move only one at a
        # time.
        for start, stop in ((0, self._huge), (self._huge, self.nbytes)):
            size = stop - start
            if size and _libc().mremap(there + start, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, here + start) != (
                here + start
            ):
                self._remap()
                return False
        return True

    def _remap(self) -> None:
        """Map new pages here, because a failed move may have left nothing at this address."""
        here, access = self.tensor.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
        if _libc().mmap(here, self.nbytes, access, _OWN | _NORESERVE | _MAP_FIXED, -1, 0) != here:
            raise MemoryError(f"offload: the system gives no memory of {self.nbytes:,} bytes for parameters that come")
        self._advise()

    def _advise(self) -> None:
        # A kernel without huge pages refuses this, which is harmless.
        if self._huge and hasattr(mmap, "MADV_HUGEPAGE"):
            _libc().madvise(self.tensor.data_ptr(), self._huge, mmap.MADV_HUGEPAGE)

    def drop_pages(self) -> None:
        """Free the pages; the address range stays."""
        _libc().madvise(self.tensor.data_ptr(), self.nbytes, mmap.MADV_DONTNEED)


class _Resized(RepinnableTensor):
    """A tensor whose storage is resized by the device's allocator."""

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
