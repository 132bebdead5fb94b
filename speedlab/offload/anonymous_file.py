"""A file without a name: it is gone when the process is, however that ends.

1. O_TMPFILE makes one that never had a name. Where the file system cannot, it is made with a name of ours, locked, and
   the name is removed at once.
2. A process that is killed between these leaves the name. Whoever comes next removes what has our form of name, belongs
   to this user and is locked by nobody; nothing else.
3. O_DIRECT where it works, so that states neither pass through nor fill the page cache. Elsewhere each piece is written
   through and its pages are given up at once, because they would count in the control group's memory.
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
"""The number of the process, the rank, and a word that nobody else draws."""

_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class AnonymousFile:
    """Reads and writes pieces of it, from any thread. Its room is reserved before it is used."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises OffloadError where no file can be made."""
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
        """Give it up, and with it the room on the disk; a second time does nothing."""
        self.direct = self._goes_direct()
        if not self.direct:
            # Nobody reads the same twice, and what is read ahead would stay in the cache.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _goes_direct(self) -> bool:
        """Whether O_DIRECT works: some file systems refuse the flag, others the first transfer."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
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
        """Fill `into` from `offset` on; with O_DIRECT all of it whole pages. Raises OffloadError."""
        done = 0
        try:
            while done < len(into):
                done += self._counted(os.preadv(self._descriptor, [into[done:]], offset + done), len(into) - done)
            if not self.direct:
                os.posix_fadvise(self._descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed("read states from", error) from error

    def write(self, source: memoryview, offset: int) -> None:
        """Write all of `source` from `offset` on; with O_DIRECT all of it whole pages. Raises OffloadError."""
        # Only pages that are on the disk can be given up.
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
        """How much of what was moved counts: with O_DIRECT it goes on at a whole page."""
        if self.direct and moved < wanted:
            moved -= moved % PAGE_BYTES
        if moved == 0:
            raise OSError(errno.EIO, f"not one page of {wanted} bytes was transferred")
        return moved

    # ---- room --------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """What this user may still write on its file system."""
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def grow(self, size: int, grown: int) -> None:
        """From `size` to `grown` bytes, which read as zeros. Raises OffloadError, the file as before, without room."""
        needed = grown - size
        if needed > self.free_bytes:  # Trying would first fill the disk for everybody.
            raise self._too_small(needed)
        try:
            os.posix_fallocate(self._descriptor, size, needed)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # It cannot reserve: then its word has to do.
                os.ftruncate(self._descriptor, grown)
                return
            os.ftruncate(self._descriptor, size)
            if error.errno in _NO_ROOM:
                raise self._too_small(needed) from error
            raise self._failed("reserve room in", error) from error

    def shrink(self, size: int) -> None:
        """Give everything from `size` on back to the disk."""
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
    """Remove, and return, files that a process of this user made here and was killed before it could unname them."""
    removed = []
    for path in folder.iterdir():
        if not _OURS.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # A link, somebody else's, or gone by now.
            continue
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
        except OSError:  # Locked by the process that is just making it, or gone by now.
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
    except OSError:  # A file system without locks, or somebody who is just removing it as a leftover: as good.
        pass
    finally:
        path.unlink(missing_ok=True)
    return descriptor
