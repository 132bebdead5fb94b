"""A file that appears whole, and once: for numbers and keys that several processes want to give at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV})
"""What `link` says on file systems without hard links: exFAT, FUSE and some shared folders of virtual machines."""


def place(draft: Path, path: Path) -> None:
    """Move `draft` to `path`. Raises FileExistsError, and leaves the draft, where somebody was faster.

    Both are in one folder. Whoever reads `path` finds nothing or all of it.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _place_under_lock(draft, path)
    else:
        draft.unlink()


def _place_under_lock(draft: Path, path: Path) -> None:
    # The lock goes with the process that holds it, so that one that was killed here keeps nobody waiting.
    lock = os.open(path.parent / ".place-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        draft.rename(path)
    finally:
        os.close(lock)
