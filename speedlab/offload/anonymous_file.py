"""A file without a name, which disappears with its process, however the process ends.

1. O_TMPFILE creates a file that never had a name. If the file system does not support this, we create a named file,
   lock it, and remove the name at once.
2. A process that is killed in between leaves the name. So the next store removes leftovers: files with our name
   pattern that belong to this user and are not locked. It removes nothing else.
3. O_DIRECT, if it works, keeps states out of the page cache. Otherwise each write is synchronous and its cached pages
   are dropped at once, because they would count as memory of the control group.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

import numpy as np

from speedlab.offload.staging_buffers import PAGE_BYTES
from speedlab.offload.store import OffloadError

PREFIX = ".speedlab-states-"
_OURS = re.compile(re.escape(PREFIX) + r"\d+-\d+-[0-9a-f]{16}")
"""Process id, rank, and a random part."""

_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class AnonymousFile:
    """Reads and writes parts of the file, from any thread. Space is reserved before it is used."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the file.

        Args:
            folder: An existing folder on the disk.
            rank: Global rank, for the name.

        Raises:
            OffloadError: The file cannot be created.
        """
        self.folder = folder
        if not folder.is_dir():
            raise OffloadError(
                f"offload: {folder} is no folder; create it on the disk that shall hold the states, or name another one"
            )
        try:
            remove_leftovers(folder)
            self._descriptor = _open_unlinked(folder, rank)
        except OSError as error:
            raise self._failed("make a file in", error, "name a folder that this user may write to") from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Close the file and free its space. A second call does nothing."""
        self.direct = self._goes_direct()
        if not self.direct:
            # No block is read twice in a row, and read-ahead would fill the page cache.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _goes_direct(self) -> bool:
        """Return whether O_DIRECT works. Some file systems refuse the flag, others the first transfer."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        # Two pages always contain one aligned page.
        two = np.empty(2 * PAGE_BYTES, dtype=np.uint8)
        page = two[-two.ctypes.data % PAGE_BYTES :][:PAGE_BYTES]
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(self._descriptor, [page.data], 0)
            os.preadv(self._descriptor, [page.data], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise self._failed("write to", error) from error
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return False
        finally:
            os.ftruncate(self._descriptor, 0)
        return True

    # ---- pieces ------------------------------------------------------------------------------------------------------

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from the file. With O_DIRECT, address, length and offset must be full pages.

        Args:
            into: Target memory.
            offset: Byte offset in the file.

        Raises:
            OffloadError: The read failed.
        """
        done = 0
        try:
            while done < len(into):
                done += self._counted(os.preadv(self._descriptor, [into[done:]], offset + done), len(into) - done)
            if not self.direct:
                os.posix_fadvise(self._descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed("read states from", error) from error

    def write(self, source: memoryview, offset: int) -> None:
        """Write all of `source` to the file. With O_DIRECT, address, length and offset must be full pages.

        Args:
            source: The bytes to write.
            offset: Byte offset in the file.

        Raises:
            OffloadError: The write failed.
        """
        # posix_fadvise drops only pages that are on the disk already, so the write is synchronous.
        done, flags = 0, 0 if self.direct else os.RWF_DSYNC
        try:
            while done < len(source):
                moved = os.pwritev(self._descriptor, [source[done:]], offset + done, flags)
                done += self._counted(moved, len(source) - done)
            if not self.direct:
                os.posix_fadvise(self._descriptor, offset, len(source), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed("write states to", error) from error

    def _counted(self, moved: int, wanted: int) -> int:
        """Return how many of the transferred bytes count. With O_DIRECT, a short transfer continues at a full page."""
        if self.direct and moved < wanted:
            moved -= moved % PAGE_BYTES
        if moved == 0:
            raise OSError(errno.EIO, f"not one page of {wanted} bytes was transferred")
        return moved

    # ---- room --------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that this user can still write on the file system."""
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def grow(self, size: int, grown: int) -> None:
        """Reserve space. New bytes read as zeros.

        Args:
            size: Current size in bytes.
            grown: New size in bytes.

        Raises:
            OffloadError: There is no space; the file keeps its size.
        """
        needed = grown - size
        if needed > self.free_bytes:  # An attempt would fill the disk for all users before it fails.
            raise self._too_small(needed)
        try:
            os.posix_fallocate(self._descriptor, size, needed)
        except OSError as error:
            # No reservation on this file system, so we rely on its free space.
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                os.ftruncate(self._descriptor, grown)
                return
            os.ftruncate(self._descriptor, size)
            if error.errno in _NO_ROOM:
                raise self._too_small(needed) from error
            raise self._failed("reserve room in", error) from error

    def shrink(self, size: int) -> None:
        """Free everything from `size` bytes on."""
        os.ftruncate(self._descriptor, size)

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _too_small(self, needed: int) -> OffloadError:
        return OffloadError(
            f"offload: {self.folder} has too little room: {needed / 2**30:,.3f} GiB more are needed, "
            f"{self.free_bytes / 2**30:,.3f} GiB are free; make room there, name a folder on a larger disk, or keep "
            f"these states elsewhere"
        )

    def _failed(self, operation: str, error: OSError, advice: str = "") -> OffloadError:
        number = error.errno or 0
        if not advice:
            remedy = "make room there" if number in _NO_ROOM else "check the disk or name a folder on another one"
            advice = f"{remedy}, then go back to the last checkpoint, which does not depend on this file"
        name = errno.errorcode.get(number, str(number))
        return OffloadError(f"offload: cannot {operation} {self.folder}: {error.strerror} ({name}); {advice}")


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the files that a killed process of this user left before it could remove their names.

    Args:
        folder: The folder to search.

    Returns:
        The removed paths.
    """
    removed = []
    for path in folder.iterdir():
        if not _OURS.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # A link, a file of another user, or already removed.
            continue
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
        except OSError:  # Locked by its creator, or already removed.
            continue
        finally:
            os.close(descriptor)
    return removed


def _open_unlinked(folder: Path, rank: int) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    path = folder / f"{PREFIX}{os.getpid()}-{rank}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # The file system has no locks, or another process is removing the file as a leftover. Both are harmless.
    except OSError:
        pass
    finally:
        path.unlink(missing_ok=True)
    return descriptor
