"""Files that others have written, for reading: what somebody has put in their place stops no reader."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at `path`. Raises OSError for what is none: a pipe would stop its reader for ever, and some
    devices never end."""
    return os.fdopen(plain_descriptor(path), "rb")


def plain_descriptor(path: str | os.PathLike[str]) -> int:
    """Likewise, for who reads with `os.pread`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe's opening would wait, too.
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))
