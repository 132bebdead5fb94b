"""File locks between processes. A process that ends releases its locks."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_POLL_SECONDS = 0.02


def hold(path: Path, seconds: float) -> int:
    """Lock a file, which is made if needed.

    Args:
        path: File.
        seconds: Longest time to wait.

    Returns:
        A descriptor; closing it releases the lock.

    Raises:
        TimeoutError: If other processes hold the lock for `seconds`.
    """
    deadline = time.monotonic() + seconds
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: another process has held it for {seconds:g} s") from None
                time.sleep(_POLL_SECONDS)  # Poll instead of blocking, so that an interrupt arrives.
    except BaseException:
        os.close(descriptor)
        raise
