"""Allocates extents of a file, in full pages."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from speedlab.offload.staging_buffers import rounded


class Extent(NamedTuple):
    """A byte range of the file. `fresh`: it was never written, so it reads as zeros."""

    offset: int
    nbytes: int
    fresh: bool


class GrowingFile(Protocol):
    """A file that can grow and shrink."""

    def grow(self, size: int, grown: int) -> None:
        """Grow the file.

        Args:
            size: Current size in bytes.
            grown: New size in bytes.
        """
        ...

    def shrink(self, size: int) -> None:
        """Shrink the file to `size` bytes."""
        ...


class FileAllocator:
    """Allocates extents of one file. The file grows if no free range fits, and shrinks if its last extents are
    freed.
    """

    def __init__(self, file: GrowingFile) -> None:
        self._file, self._size = file, 0
        self._free: list[tuple[int, int]] = []
        """Free ranges (start, stop), sorted. Neighbours are merged, and none ends at the end of the file."""
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def take(self, nbytes: int) -> Extent:
        """Return an extent: the smallest free range that fits, or new pages at the end.

        Args:
            nbytes: Bytes needed, rounded up to full pages.

        Raises:
            OffloadError: The file cannot grow.
        """
        needed = rounded(nbytes)
        with self._lock:
            fitting = [(stop - start, start) for start, stop in self._free if stop - start >= needed > 0]
            if fitting:
                length, start = min(fitting)
                self._free.remove((start, start + length))
                if length > needed:
                    self._free = sorted([*self._free, (start + needed, start + length)])
                return Extent(start, needed, fresh=False)
            start = self._size
            if needed:
                self._file.grow(start, start + needed)
            self._size = start + needed
            return Extent(start, needed, fresh=True)

    def give_back(self, extent: Extent) -> None:
        """Free an extent, and merge it with free neighbours.

        Args:
            extent: A result of `take`.
        """
        if extent.nbytes == 0:
            return
        with self._lock:
            joined: list[tuple[int, int]] = []
            for start, stop in sorted([*self._free, (extent.offset, extent.offset + extent.nbytes)]):
                if joined and joined[-1][1] == start:
                    joined[-1] = joined[-1][0], stop
                else:
                    joined.append((start, stop))
            if joined[-1][1] == self._size:
                self._size = joined.pop()[0]
                self._file.shrink(self._size)
            self._free = joined
