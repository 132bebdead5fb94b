"""Anonymous files that the ranks of one host map: memory without a name in any folder.

A file lives as long as a process maps it. So nothing is left when processes end, and the size of /dev/shm is no limit.
A peer opens the file through /proc, which the kernel allows to processes of the same user.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_DROP_PAGES = 4
"""MADV_DONTNEED of madvise(2): drop this process's view of the pages. Writes to private pages are lost."""

_FIXED, NORESERVE = 0x10, 0x4000
"""Flags of mmap(2): map at this address and replace what is there; do not reserve swap space."""

_ASYNC = 1
"""MS_ASYNC of msync(2), which only checks whether all pages are mapped."""

_FREE_PAGES = 9
"""MADV_REMOVE of madvise(2): free the file's pages in all mappings; they then read as zeros."""


def host_identity() -> str:
    """Return a text that is equal in two processes if and only if they can share memory.

    It contains kernel, process namespace and user, and SPEEDLAB_HOST if set, with which tests simulate several hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"no shared memory: {os.getpid()}"
    return f"{boot}/{processes}/{os.getuid()}/{os.environ.get('SPEEDLAB_HOST', '')}"


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


class Mapping:
    """A mapped part of a file. Python's own mmap would keep a descriptor open.

    `bytes` (nbytes,) uint8 and all its views keep the memory mapped.

    Args:
        descriptor: File to map.
        nbytes: Bytes to map.
        offset: First byte in the file.

    Raises:
        MemoryError: If there is no room.
    """

    def __init__(self, descriptor: int, nbytes: int, offset: int = 0) -> None:
        self.nbytes = nbytes
        self.bytes: np.ndarray = np.asarray(_Mapped(descriptor, nbytes, offset))
        self.address: int = self.bytes.ctypes.data


class _Mapped:
    """Base of the arrays of a mapping; unmaps after the last of them is gone."""

    _address = 0

    def __init__(self, descriptor: int, nbytes: int, offset: int) -> None:
        self._unmap = _library().munmap  # Look up munmap now: at exit, modules are cleared before objects are deleted.
        address = _map(None, nbytes, mmap.MAP_SHARED, descriptor, offset)
        self._address, self._nbytes = address, nbytes
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self._nbytes)


def map_over(address: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Map a part of a file privately over whole pages; writes stay in this process.

    Args:
        address: Address of the first page.
        nbytes: Bytes to map.
        descriptor: File to map.
        offset: First byte in the file.

    Raises:
        OSError: If mapping fails; then the pages may be unmapped.
        MemoryError: If there is no room; then the pages may be unmapped.
    """
    _map(address, nbytes, mmap.MAP_PRIVATE | _FIXED | NORESERVE, descriptor, offset)


def remap(address: int, nbytes: int) -> None:
    """Replace whole private pages by memory of this process, with undefined values.

    Args:
        address: Address of the first page.
        nbytes: Bytes to replace.

    Raises:
        MemoryError: If there is no memory.
    """
    try:
        _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | NORESERVE, -1, 0)
    except MemoryError:  # With too many mappings, the old pages are still mapped and can be used.
        if _library().msync(address, nbytes, _ASYNC) != 0:
            raise


def _map(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _library().mmap(address, nbytes, access, flags, descriptor, offset)
    if mapped != ctypes.c_void_p(-1).value:
        return mapped
    code = ctypes.get_errno()
    if code == errno.ENOMEM:  # Not an OSError, which callers would attribute to a peer.
        raise MemoryError(f"{os.strerror(code)}: tried to allocate {nbytes} bytes")
    raise OSError(code, os.strerror(code))


def drop_copies(address: int, nbytes: int) -> bool:
    """Drop written pages of `map_over`, so that they show their file again.

    Args:
        address: Address of the first page.
        nbytes: Bytes.

    Returns:
        Whether it was possible; locked memory does not allow it.
    """
    return _library().madvise(address, nbytes, _DROP_PAGES) == 0


def free_pages(address: int, nbytes: int) -> bool:
    """Return the memory of whole mapped pages to the system; they then read as zeros.

    Args:
        address: Address of the first page.
        nbytes: Bytes.

    Returns:
        Whether it was possible.
    """
    return _library().madvise(address, nbytes, _FREE_PAGES) == 0


@dataclass(frozen=True)
class FileHandle:
    """What a peer needs to open a file of another process."""

    pid: int
    descriptor: int
    nbytes: int
    inode: int

    def open(self) -> int:
        """Return a descriptor, which the caller closes.

        Raises:
            OSError: If that process has ended, has closed the file, or belongs to another user.
        """
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        # The peer may have closed the file and reused the descriptor for another one.
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            raise FileNotFoundError(f"process {self.pid} has closed its shared segment {self.descriptor}")
        return descriptor

    def close(self) -> None:
        """Close the file in the process that made it. Peers that have mapped it keep it."""
        os.close(self.descriptor)


def create_file(nbytes: int) -> FileHandle:
    """Create an anonymous file of zeros.

    Args:
        nbytes: Size.
    """
    descriptor = os.memfd_create("speedlab", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return FileHandle(os.getpid(), descriptor, nbytes, os.fstat(descriptor).st_ino)


class AnonymousSegment(Mapping):
    """A mapping of a whole anonymous file."""

    @classmethod
    def create(cls, nbytes: int) -> tuple[AnonymousSegment, FileHandle]:
        """Create a zeroed segment. The caller closes the handle when no more peers may open it.

        Args:
            nbytes: Size.
        """
        handle = create_file(nbytes)
        return cls(handle.descriptor, nbytes), handle

    @classmethod
    def open(cls, handle: FileHandle) -> AnonymousSegment:
        """Open a peer's segment.

        Args:
            handle: From the peer.

        Raises:
            OSError: See `FileHandle.open`.
        """
        descriptor = handle.open()
        try:
            return cls(descriptor, handle.nbytes)
        finally:
            os.close(descriptor)
