"""Tensors of this process that its peers may read in place.

All of them are in one anonymous file, so a process keeps one descriptor for any number of tensors.

1. The file grows by extents, each mapped as a whole. Its first page, the directory, lists them.
2. `Arena.empty` allocates a block of whole pages of an extent. A rank sends (extent, offset) to its peers.
3. `PeerMemory.address` maps a peer's extent at its first use, and keeps it mapped.
4. After the last reference to a block is gone, its pages return to the system at once and read as zeros. A later
   `empty` reuses the block. A tensor that peers read must be kept until they have read it.

The garbage collector may release a tensor at any moment, in any thread, also inside this file. So step 4 takes no lock.
It leaves a note that the next holder of the lock reads.
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
"""Entries of the directory: start of an extent in the file, and its bytes (0: no extent yet)."""

_SMALLEST_EXTENT, _LARGEST_GROWTH = 64 << 20, 1 << 30
"""Limits of an extent. The file doubles between them, and grows by more for a larger tensor. Untouched pages take no
memory.
"""


class TensorAddress(NamedTuple):
    """Address of memory, in the form that peers get; `block` keeps the memory alive."""

    extent: int
    offset: int
    block: np.ndarray


class _Block(weakref.ref):
    """Pages that hold a tensor; a weak reference that calls back when the array over them is gone."""

    __slots__ = ("address", "extent", "nbytes", "offset", "size", "zeros")
    address: int
    extent: int
    offset: int
    nbytes: int
    size: int
    zeros: bool


class Arena:
    """This process's file, its extents, and their used pages."""

    def __init__(self) -> None:
        self.handle = create_file(_DIRECTORY_BYTES)
        self._directory = Mapping(self.handle.descriptor, _DIRECTORY_BYTES)
        self._entries = self._directory.bytes.view(np.int64).reshape(_MOST_EXTENTS, 2)
        self._extents: list[Mapping] = []
        self._file_bytes = _DIRECTORY_BYTES
        self._blocks: dict[int, _Block] = {}
        """Blocks in use, by address."""
        self._starts: list[int] = []
        """Sorted addresses of the blocks, to find a tensor's block."""
        self._living_bytes = 0
        self._idle: dict[int, list[tuple[int, int, bool]]] = {}
        """Blocks to reuse, by size: (extent, offset, whether they are zeros). These are taken first."""
        self._ranges: list[tuple[int, int, int]] = []
        """Other free pages, all zeros: (extent, offset, bytes), sorted, without adjacent ranges."""
        self._dropped: deque[_Block] = deque()
        """Notes of blocks without references."""
        self._kept: deque[tuple[Any, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype, *, byte: int = 0) -> Tensor:
        """Allocate a tensor (numel,) of zeros.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            byte: Offset of the tensor in its first page.

        Raises:
            MemoryError: If the system has no more memory.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype)
        size = -(-(byte + nbytes) // _PAGE) * _PAGE
        with self._lock:
            self._settle()
            extent, offset, zeros = self._take(size)
            mapping = self._extents[extent]
            # The tensor keeps this array alive, and so the block.
            array = mapping.bytes[offset + byte : offset + byte + nbytes]
            block = _Block(array, self._drop)
            block.address, block.size, block.nbytes = mapping.address + offset, size, nbytes
            block.extent, block.offset, block.zeros = extent, offset, False
            self._blocks[block.address] = block
            insort(self._starts, block.address)
            self._living_bytes += nbytes
        # Clear reused pages outside of the lock.
        if not zeros:
            ctypes.memset(block.address, 0, size)
        return torch.from_numpy(array).view(dtype)

    def find(self, address: int, nbytes: int) -> TensorAddress | None:
        """Return the place of memory in this arena; None for other memory.

        Args:
            address: Address in this process.
            nbytes: Bytes.
        """
        with self._lock:
            self._settle()
            nearest = bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[nearest]] if nearest >= 0 else None
            array = None if block is None else block()
            if block is None or array is None or address + nbytes > block.address + block.size:
                return None
            return TensorAddress(block.extent, block.offset + address - block.address, array)

    def address(self, extent: int, offset: int) -> int:
        """Return the address of a byte of an extent in this process.

        Args:
            extent: Number of the extent.
            offset: Byte in the extent.
        """
        return self._extents[extent].address + offset

    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None:
        """Map pages of this arena at another address; see `PeerMemory.map_at`."""
        map_over(address, nbytes, self.handle.descriptor, int(self._entries[extent, 0]) + offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in this arena."""
        with self._lock:
            self._settle()
            return self._living_bytes

    def keep(self, owner: Any, over: Callable[[], bool]) -> None:
        """Keep `owner` and its tensors alive until `over()`. Takes no lock, because finalizers may call this.

        Args:
            owner: Object with tensors of this arena.
            over: Returns whether the owner may be released.
        """
        self._kept.append((owner, over))

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _drop(self, block: weakref.ref) -> None:
        """Free the pages of a block without references. Takes no lock: this runs at any moment, in any thread."""
        assert isinstance(block, _Block)
        if os.getpid() != self.handle.pid:
            return  # A forked child released its copy; the memory belongs to its parent.
        if block.size > _PAGE:
            block.zeros = free_pages(block.address, block.size)
        self._dropped.append(block)

    def _settle(self) -> None:
        """Process all notes. The caller holds the lock."""
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
        """Return (extent, offset, whether they are zeros) of free pages."""
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
        """Turn idle blocks into free pages, and merge adjacent ones."""
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
                f"out of memory: tried to allocate {size} bytes of shared memory in addition to {held} bytes: {error}"
            ) from error
        self._entries[len(self._extents)] = self._file_bytes, wanted
        self._file_bytes += wanted
        self._ranges.append((len(self._extents), 0, wanted))
        self._extents.append(mapping)

    def _map(self, nbytes: int) -> Mapping:
        os.ftruncate(self.handle.descriptor, self._file_bytes + nbytes)
        return Mapping(self.handle.descriptor, nbytes, self._file_bytes)


class PeerProcess:
    """Another process of this host.

    Raises:
        ProcessLookupError: If there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)  # The descriptor becomes readable when the process ends.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        look = select.poll()
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))


class PeerMemory:
    """The arena of another process. Extents are mapped at their first use; one object serves all groups."""

    def __init__(self, handle: FileHandle) -> None:
        self._handle = handle
        self._directory = self._map(handle.nbytes, 0)
        self._entries = self._directory.bytes.view(np.int64).reshape(-1, 2)
        self._extents: dict[int, Mapping] = {}
        self._process = PeerProcess(handle.pid)

    @classmethod
    def of(cls, handle: FileHandle) -> PeerMemory:
        """Return the object of a peer, which is made once.

        Args:
            handle: The directory of the peer's arena.

        Raises:
            OSError: If the process has ended or belongs to another user.
        """
        known = _peers.get(handle)
        if known is None:
            known = _peers[handle] = cls(handle)
        return known

    @property
    def ended(self) -> bool:
        """Whether the peer's process has ended."""
        return self._process.ended

    def address(self, extent: int, offset: int) -> int:
        """Return the address in this process of a byte of the peer's extent.

        Args:
            extent: Number of the extent.
            offset: Byte in the extent.

        Raises:
            OSError: If the extent was not mapped before and the process has ended.
        """
        mapping = self._extents.get(extent)
        if mapping is None:
            start, nbytes = self._entries[extent].tolist()
            mapping = self._extents[extent] = self._map(nbytes, start)
        return mapping.address + offset

    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None:
        """Map whole pages of the peer privately at another address; see `map_over`.

        Args:
            address: Address in this process.
            nbytes: Bytes to map.
            extent: Number of the extent.
            offset: First byte in the extent.

        Raises:
            OSError: If the process has ended.
        """
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
    """Return the arena of this process. Memory belongs to processes, not to groups."""
    return Arena()


# A forked child shares its parent's pages and must not allocate from them, so it gets its own arena.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=arena.cache_clear)
