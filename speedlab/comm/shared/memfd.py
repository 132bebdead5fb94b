"""Anonymous files that the ranks of one host map: memory that has no name in any folder.

A file lives as long as some process has it mapped, so nothing is left behind however a process ends, and it is not
limited by the size of /dev/shm. A peer opens it through /proc, which the kernel allows to processes of the same user.
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
"""MADV_DONTNEED of madvise(2): this process's view of them goes. What was written into private pages is lost."""

_FIXED, NORESERVE = 0x10, 0x4000
"""Flags of mmap(2): at this address, whatever is there; without counting it as memory that was promised."""

_ASYNC = 1
"""MS_ASYNC of msync(2), which does nothing but look whether all pages are mapped."""

_FREE_PAGES = 9
"""MADV_REMOVE of madvise(2): the file's pages go, from the memory of all who have mapped them; they read as zeros."""


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
    """`nbytes` of a file from `offset` on, in this process's memory. Python's own mmap would keep a descriptor for it.

    `bytes` (nbytes,) uint8 and every view of it keep it mapped. Raises MemoryError where that does not fit.
    """

    def __init__(self, descriptor: int, nbytes: int, offset: int = 0) -> None:
        self.nbytes = nbytes
        self.bytes: np.ndarray = np.asarray(_Mapped(descriptor, nbytes, offset))
        self.address: int = self.bytes.ctypes.data


class _Mapped:
    """What the arrays of a mapping rest on: it unmaps when the last of them is gone."""

    _address = 0

    def __init__(self, descriptor: int, nbytes: int, offset: int) -> None:
        self._unmap = _library().munmap  # Found now: at the end of the process modules are empty before objects go.
        address = _map(None, nbytes, mmap.MAP_SHARED, descriptor, offset)
        self._address, self._nbytes = address, nbytes
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self._nbytes)


def map_over(address: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Map `nbytes` of a file from `offset` on privately in place of the whole pages at `address`: what is written there
    stays with this process. Raises OSError, or MemoryError where that does not fit; then nothing may be there."""
    _map(address, nbytes, mmap.MAP_PRIVATE | _FIXED | NORESERVE, descriptor, offset)


def map_anew(address: int, nbytes: int) -> None:
    """Memory of this process, with any values, in place of the whole private pages at `address`. Raises MemoryError
    where there is none."""
    try:
        _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | NORESERVE, -1, 0)
    except MemoryError:  # Where there are too many mappings, what was there still is, and will do.
        if _library().msync(address, nbytes, _ASYNC) != 0:
            raise


def _map(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _library().mmap(address, nbytes, access, flags, descriptor, offset)
    if mapped != ctypes.c_void_p(-1).value:
        return mapped
    code = ctypes.get_errno()
    if code == errno.ENOMEM:  # No peer's fault, which an OSError is taken for.
        raise MemoryError(f"{os.strerror(code)}: tried to allocate {nbytes} bytes")
    raise OSError(code, os.strerror(code))


def drop_copies(address: int, nbytes: int) -> bool:
    """Pages of `map_over` that were written show their file again. Whether that was possible: not of locked memory."""
    return _library().madvise(address, nbytes, _DROP_PAGES) == 0


def free_pages(address: int, nbytes: int) -> bool:
    """Give the memory of whole mapped pages back to the system; they read as zeros then. Whether that was possible."""
    return _library().madvise(address, nbytes, _FREE_PAGES) == 0


@dataclass(frozen=True)
class FileHandle:
    """What a peer needs to open a file of another process's."""

    pid: int
    descriptor: int
    nbytes: int
    inode: int

    def open(self) -> int:
        """A descriptor of it, to be closed. Raises OSError when that process has ended, has closed it, or belongs to
        another user."""
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            raise FileNotFoundError(f"process {self.pid} has closed its shared segment {self.descriptor}")
        return descriptor

    def close(self) -> None:
        """From now on no peer can open it; those that have it keep it. For the process that made it."""
        os.close(self.descriptor)


def create_file(nbytes: int) -> FileHandle:
    """A new anonymous file of zeros."""
    descriptor = os.memfd_create("speedlab", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return FileHandle(os.getpid(), descriptor, nbytes, os.fstat(descriptor).st_ino)


class AnonymousSegment(Mapping):
    """The whole of an anonymous file."""

    @classmethod
    def create(cls, nbytes: int) -> tuple[AnonymousSegment, FileHandle]:
        """A new one, zeroed. The caller closes the handle when no peer shall open it any more."""
        handle = create_file(nbytes)
        return cls(handle.descriptor, nbytes), handle

    @classmethod
    def open(cls, handle: FileHandle) -> AnonymousSegment:
        """A peer's. Raises OSError as `FileHandle.open` does."""
        descriptor = handle.open()
        try:
            return cls(descriptor, handle.nbytes)
        finally:
            os.close(descriptor)
