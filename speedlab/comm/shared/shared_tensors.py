"""The tensors of this process that its peers may read where they are.

All of them lie in one anonymous file, so that a process holds one descriptor for them however many there are.

1. The file grows by extents, each mapped as a whole. Which there are stands in the file's first page, the directory.
2. `Arena.empty` gives a tensor a block of whole pages of an extent. A rank tells its peers (extent, offset).
3. `PeerMemory.address` maps that extent of the peer's when it is first asked for, and keeps it mapped.
4. When nothing holds a block's memory any more, its pages go back to the system at once, and read as zeros. The block
   itself is used again by a later `empty`. Whoever lets peers read a tensor must hold its memory until they have.

What lets go of a tensor may be the garbage collector, at any moment of any thread, also inside this file: so 4 takes no
lock. It leaves a note, which the next one who holds the lock reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedlab.comm.shared.memfd import FileHandle, Mapping, create_file, free_pages, map_over

_PAGE = mmap.PAGESIZE
_DIRECTORY_BYTES = 1 << 16
_MOST_EXTENTS = _DIRECTORY_BYTES // 16
"""An entry of the directory: where an extent begins in the file, and its bytes (0: there is none yet)."""

_SMALLEST_EXTENT, _LARGEST_GROWTH = 64 << 20, 1 << 30
"""The file grows by as much as it has, between these; by more for a larger tensor. Pages never touched take nothing."""


class TensorAddress(NamedTuple):
    """Where memory is, as peers are told it; `block` keeps it."""

    extent: int
    offset: int
    block: np.ndarray


class _Block(weakref.ref):
    """Pages that hold a tensor; calls back when the array over them is gone."""

    __slots__ = ("address", "extent", "nbytes", "offset", "size", "zeros")
    address: int
    extent: int
    offset: int
    nbytes: int
    size: int
    zeros: bool


class Arena:
    """This process's file, its extents, and which of their pages are taken."""

    def __init__(self) -> None:
        self.handle = create_file(_DIRECTORY_BYTES)
        self._directory = Mapping(self.handle.descriptor, _DIRECTORY_BYTES)
        self._entries = self._directory.bytes.view(np.int64).reshape(_MOST_EXTENTS, 2)
        self._extents: list[Mapping] = []
        self._file_bytes = _DIRECTORY_BYTES
        self._blocks: dict[int, _Block] = {}
        """Blocks in use, by address."""
        self._starts: list[int] = []
        """Their addresses, sorted: where a tensor's block is looked up."""
        self._living_bytes = 0
        self._idle: dict[int, list[tuple[int, int, bool]]] = {}
        """Blocks to use again, by size: (extent, offset, whether they are zeros). The first that a tensor takes."""
        self._ranges: list[tuple[int, int, int]] = []
        """Other free pages, all zeros: (extent, offset, bytes), sorted, none beside another."""
        self._dropped: deque[_Block] = deque()
        """Notes of blocks that nothing holds any more."""
        self._kept: deque[tuple[Any, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype, *, byte: int = 0) -> Tensor:
        """A tensor (numel,) of zeros, which begins at this `byte` of a page. Raises MemoryError when the system has no
        more."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype)
        size = -(-(byte + nbytes) // _PAGE) * _PAGE
        with self._lock:
            self._settle()
            extent, offset, zeros = self._take(size)
            mapping = self._extents[extent]
            # The tensor keeps this array, and with it the block.
            array = mapping.bytes[offset + byte : offset + byte + nbytes]
            block = _Block(array, self._drop)
            block.address, block.size, block.nbytes = mapping.address + offset, size, nbytes
            block.extent, block.offset, block.zeros = extent, offset, False
            self._blocks[block.address] = block
            insort(self._starts, block.address)
            self._living_bytes += nbytes
        if not zeros:
            ctypes.memset(block.address, 0, size)
        return torch.from_numpy(array).view(dtype)

    def find(self, address: int, nbytes: int) -> TensorAddress | None:
        """Where memory of this arena is; None for memory that is elsewhere."""
        with self._lock:
            self._settle()
            nearest = bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[nearest]] if nearest >= 0 else None
            array = None if block is None else block()
            if block is None or array is None or address + nbytes > block.address + block.size:
                return None
            return TensorAddress(block.extent, block.offset + address - block.address, array)

    def address(self, extent: int, offset: int) -> int:
        """Where byte `offset` of an extent stands in this process."""
        return self._extents[extent].address + offset

    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None:
        """As `PeerMemory.map_at`."""
        map_over(address, nbytes, self.handle.descriptor, int(self._entries[extent, 0]) + offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in it."""
        with self._lock:
            self._settle()
            return self._living_bytes

    def keep(self, owner: Any, over: Callable[[], bool]) -> None:
        """Hold `owner`, and with it the tensors that it holds, until `over()`. Finalizers may call this: no lock."""
        self._kept.append((owner, over))

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _drop(self, block: weakref.ref) -> None:
        """Nothing holds the block any more. Called at any moment, in any thread: no lock is taken here."""
        assert isinstance(block, _Block)
        if os.getpid() != self.handle.pid:
            return  # A forked child let go of its copy; the memory is its parent's.
        if block.size > _PAGE:
            block.zeros = free_pages(block.address, block.size)
        self._dropped.append(block)

    def _settle(self) -> None:
        """Read all notes. The lock is held."""
        for _ in range(len(self._kept)):
            owner, over = self._kept.popleft()
            if not over():
                self._kept.append((owner, over))
            del owner, over
        while self._dropped:
            block = self._dropped.popleft()
            del self._blocks[block.address]
            del self._starts[bisect_right(self._starts, block.address) - 1]
            self._living_bytes -= block.nbytes
            self._idle.setdefault(block.size, []).append((block.extent, block.offset, block.zeros))

    def _take(self, size: int) -> tuple[int, int, bool]:
        """(extent, offset, whether it is zeros) of free pages."""
        idle = self._idle.get(size)
        if idle:
            return idle.pop()
        found = self._cut(size)
        if found is None and self._idle:
            self._join_idle()
            found = self._cut(size)
        if found is None:
            self._grow(size)
            found = self._cut(size)
        assert found is not None
        return *found, True

    def _cut(self, size: int) -> tuple[int, int] | None:
        for k, (extent, offset, free) in enumerate(self._ranges):
            if free > size:
                self._ranges[k] = extent, offset + size, free - size
                return extent, offset
            if free == size:
                del self._ranges[k]
                return extent, offset
        return None

    def _join_idle(self) -> None:
        """Idle blocks become free pages again, joined with those beside them."""
        free = self._ranges
        for size, blocks in self._idle.items():
            for extent, offset, zeros in blocks:
                address = self._extents[extent].address + offset
                if not zeros and not free_pages(address, size):
                    ctypes.memset(address, 0, size)
                free.append((extent, offset, size))
        self._idle.clear()
        joined: list[tuple[int, int, int]] = []
        for extent, offset, size in sorted(free):
            last = joined[-1] if joined else (-1, 0, 0)
            if (extent, offset) == (last[0], last[1] + last[2]):
                joined[-1] = extent, last[1], last[2] + size
            else:
                joined.append((extent, offset, size))
        self._ranges = joined

    def _grow(self, size: int) -> None:
        if len(self._extents) == _MOST_EXTENTS:
            raise MemoryError(f"out of memory: more than {_MOST_EXTENTS:,} extents of shared memory in one process")
        held = sum(extent.nbytes for extent in self._extents)
        wanted = max(size, _SMALLEST_EXTENT, min(held, _LARGEST_GROWTH))
        try:
            try:
                mapping = self._map(wanted)
            except (OSError, MemoryError):
                wanted = size
                mapping = self._map(wanted)
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"out of memory: tried to allocate {size} bytes of shared memory beside {held} bytes: {error}"
            ) from error
        self._entries[len(self._extents)] = self._file_bytes, wanted
        self._file_bytes += wanted
        self._ranges.append((len(self._extents), 0, wanted))
        self._extents.append(mapping)

    def _map(self, nbytes: int) -> Mapping:
        os.ftruncate(self.handle.descriptor, self._file_bytes + nbytes)
        return Mapping(self.handle.descriptor, nbytes, self._file_bytes)


class PeerProcess:
    """Another process of this host. Raises ProcessLookupError when there is none of that number."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)  # It becomes readable when the process ends.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        look = select.poll()
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))


class PeerMemory:
    """The arena of another process. Extents are mapped when they are first needed; one object serves all groups."""

    def __init__(self, handle: FileHandle) -> None:
        self._handle = handle
        self._directory = self._map(handle.nbytes, 0)
        self._entries = self._directory.bytes.view(np.int64).reshape(-1, 2)
        self._extents: dict[int, Mapping] = {}
        self._process = PeerProcess(handle.pid)

    @classmethod
    def of(cls, handle: FileHandle) -> PeerMemory:
        """That of `handle`. Raises OSError when its process has ended or belongs to another user."""
        known = _peers.get(handle)
        if known is None:
            known = _peers[handle] = cls(handle)
        return known

    @property
    def ended(self) -> bool:
        """Whether the peer's process has ended."""
        return self._process.ended

    def address(self, extent: int, offset: int) -> int:
        """Where byte `offset` of the peer's extent stands in this process. Raises OSError when it was not mapped before
        and the process has ended."""
        mapping = self._extents.get(extent)
        if mapping is None:
            start, nbytes = self._entries[extent].tolist()
            mapping = self._extents[extent] = self._map(nbytes, start)
        return mapping.address + offset

    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None:
        """Map whole pages of it, from byte `offset` of an extent on, privately at `address` (`map_over`). Raises
        OSError when the process has ended."""
        descriptor = self._handle.open()
        try:
            map_over(address, nbytes, descriptor, int(self._entries[extent, 0]) + offset)
        finally:
            os.close(descriptor)

    def _map(self, nbytes: int, offset: int) -> Mapping:
        descriptor = self._handle.open()
        try:
            return Mapping(descriptor, nbytes, offset)
        finally:
            os.close(descriptor)


_peers: weakref.WeakValueDictionary[FileHandle, PeerMemory] = weakref.WeakValueDictionary()


@cache
def arena() -> Arena:
    """The one of this process: memory belongs to processes, not to groups."""
    return Arena()


# A forked child has its parent's memory mapped, and must not give out its pages. It gets an arena of its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=arena.cache_clear)
