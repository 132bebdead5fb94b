"""Which stretches of a file are taken, in whole pages."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from speedlab.offload.staging_buffers import rounded


class Extent(NamedTuple):
    """A stretch of the file. `fresh`: nothing has been written there, so it reads as zeros."""

    offset: int
    nbytes: int
    fresh: bool


class GrowingFile(Protocol):
    """The file."""

    def grow(self, size: int, grown: int) -> None: ...
    def shrink(self, size: int) -> None: ...


class FileAllocator:
    """Extents of one file, which grows when none that is free fits and shrinks when its last ones are given back."""

    def __init__(self, file: GrowingFile) -> None:
        self._file, self._size = file, 0
        self._free: list[tuple[int, int]] = []
        """(start, stop), sorted, none beside another and none at the end of the file."""
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def take(self, nbytes: int) -> Extent:
        """Whole pages for `nbytes`: the smallest free stretch that fits, else new ones. Raises what `grow` raises."""
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
