"""Memory that the ranks of one host share: anonymous files, which have no name in any folder.

A segment lives as long as some process has it mapped, so nothing is left behind however a process ends, and it is not
limited by the size of /dev/shm. A peer opens it through /proc, which the kernel allows to processes of the same user.

1. `Arena.empty` makes a tensor in a segment of its own and enters it in this process's directory, itself a segment.
2. A rank tells its peers (segment number, offset), a pair of integers.
3. `PeerMemory.address` looks the number up in the peer's directory, maps the segment, and keeps it mapped.
4. A segment whose tensor is gone leaves the directory; peers let go of it at the next `PeerMemory.trim`.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_DIRECTORY_SLOTS = 1 << 14
_ENTRY_WORDS = 4
"""Of a directory entry: segment number (from 1; 0 is none), file descriptor, bytes, inode."""


def host_identity() -> str:
    """Equal in two processes exactly when they can share memory: same kernel, same process numbers, same user.

    SPEEDLAB_HOST, where it is set, is added: tests tell ranks of one machine apart with it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"no shared memory: {os.getpid()}"
    return f"{boot}/{processes}/{os.getuid()}/{os.environ.get('SPEEDLAB_HOST', '')}"


@dataclass(frozen=True)
class Handle:
    """What a peer needs to open a segment."""

    pid: int
    descriptor: int
    nbytes: int
    inode: int

    def close(self) -> None:
        """From now on no peer can open it; those that have it keep it. For the process that made it."""
        os.close(self.descriptor)


class Segment:
    """A mapped anonymous file. `bytes` (nbytes,) uint8 keeps the mapping alive."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes)
        self.nbytes = nbytes
        self.bytes: np.ndarray = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, Handle]:
        """A new one, zeroed. The caller closes the handle when no peer shall open it any more."""
        nbytes = max(nbytes, 1)
        descriptor = os.memfd_create("speedlab", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        inode = os.fstat(descriptor).st_ino
        return cls(descriptor, nbytes), Handle(os.getpid(), descriptor, nbytes, inode)

    @classmethod
    def open(cls, handle: Handle) -> Segment:
        """A peer's. Raises OSError when the peer has ended, has closed it, or belongs to another user."""
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise FileNotFoundError(f"process {handle.pid} has closed its shared segment {handle.descriptor}")
            return cls(descriptor, handle.nbytes)
        finally:
            os.close(descriptor)


class Arena:
    """The segments of this process that hold tensors, and the directory in which peers find them."""

    def __init__(self) -> None:
        self._directory, self.handle = Segment.create(_DIRECTORY_SLOTS * _ENTRY_WORDS * 8)
        self._entries = self._directory.bytes.view(np.int64).reshape(_DIRECTORY_SLOTS, _ENTRY_WORDS)
        self._number = 0
        self._memory: dict[int, weakref.ref[np.ndarray]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}
        """Number of a segment → (address, bytes)."""
        self._starts: list[tuple[int, int]] = []
        """(address, number), sorted: where a tensor's segment is looked up."""
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor (numel,) of zeros in a segment of its own."""
        segment, handle = Segment.create(numel * dtype.itemsize)
        with self._lock:
            self._number += 1
            number, slot = self._number, self._number % _DIRECTORY_SLOTS
            if self._entries[slot, 0]:
                handle.close()
                raise MemoryError(f"more than {_DIRECTORY_SLOTS:,} shared tensors in one process")
            self._entries[slot, 1:] = handle.descriptor, handle.nbytes, handle.inode
            self._entries[slot, 0] = number
            self._ranges[number] = segment.address, segment.nbytes
            self._memory[number] = weakref.ref(segment.bytes)
            self._index()
        # The tensor keeps this array, and with it the mapping.
        weakref.finalize(segment.bytes, self._close, number, handle).atexit = False
        return torch.from_numpy(segment.bytes)[: numel * dtype.itemsize].view(dtype)

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(segment number, byte offset) of memory in this arena; None for memory that is elsewhere."""
        place = bisect_right(self._starts, (address, 1 << 62)) - 1
        if place < 0:
            return None
        start, number = self._starts[place]
        if address + nbytes > start + self._ranges[number][1]:
            return None
        return number, address - start

    def memory(self, number: int) -> np.ndarray:
        """The bytes of a segment; they stay as long as somebody holds this array."""
        array = self._memory[number]()
        assert array is not None
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in it."""
        return sum(nbytes for _, nbytes in self._ranges.values())

    def _close(self, number: int, handle: Handle) -> None:
        with self._lock:
            self._entries[number % _DIRECTORY_SLOTS] = 0
            del self._ranges[number], self._memory[number]
            self._index()
        handle.close()

    def _index(self) -> None:
        self._starts = sorted((address, number) for number, (address, _) in self._ranges.items())


class PeerMemory:
    """The segments of another process, mapped when they are first needed."""

    def __init__(self, directory: Handle) -> None:
        self._pid = directory.pid
        self._directory = Segment.open(directory)
        self._entries = self._directory.bytes.view(np.int64).reshape(_DIRECTORY_SLOTS, _ENTRY_WORDS)
        self._mapped: dict[int, Segment] = {}

    def address(self, number: int, offset: int) -> int:
        """Where byte `offset` of the peer's segment `number` stands in this process."""
        segment = self._mapped.get(number)
        if segment is None:
            found, descriptor, nbytes, inode = self._entries[number % _DIRECTORY_SLOTS].tolist()
            if found != number:
                raise FileNotFoundError(f"process {self._pid} has given up shared segment {number}")
            segment = self._mapped[number] = Segment.open(Handle(self._pid, descriptor, nbytes, inode))
        return segment.address + offset

    def trim(self) -> None:
        """Let go of segments whose owner has given them up; only then their memory is free."""
        for number in [n for n in self._mapped if self._entries[n % _DIRECTORY_SLOTS, 0] != n]:
            del self._mapped[number]


@cache
def arena() -> Arena:
    """The one of this process: memory belongs to processes, not to groups."""
    return Arena()
