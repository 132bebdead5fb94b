"""Locks of files: for what one process at a time may do. A process that ends loses its own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_POLL_SECONDS = 0.02


def hold(path: Path, seconds: float) -> int:
    """A descriptor that holds the lock of this file until it is closed; the file is made where there is none. Raises
    TimeoutError where others hold it for `seconds`."""
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
                time.sleep(_POLL_SECONDS)  # So that an interrupt is heard.
    except BaseException:
        os.close(descriptor)
        raise
