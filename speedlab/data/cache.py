"""The user's cache of tokenizers and encoded corpora: writes are atomic, and ranks may use it concurrently."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from speedlab.config import ConfigError
from speedlab.data.token_file import TokenHeader, verify

_POLL_SECONDS = 0.02


class SlowProgress:
    """Progress lines of slow work: the first after one second, then at most one per second."""

    def __init__(self, say: Callable[[str], object] | None) -> None:
        self._say = say
        self._started = self._last = time.monotonic()
        self._spoke = False

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= 1:
            self._last = now
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line at any time.

        Args:
            text: The line.
        """
        if self._say is not None:
            self._spoke = True
            self._say(text)

    def done(self, text: str) -> None:
        """Print the last line with the duration, if another line was printed or the work took over a second.

        Args:
            text: The line.
        """
        seconds = time.monotonic() - self._started
        if self._say is not None and (self._spoke or seconds >= 1):
            self._say(f"{text} ({seconds:.1f} s)")


def default_cache() -> Path:
    """Return the folder `speedlab` in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "speedlab"


def fingerprint(*parts: object) -> str:
    """Return a short hash of JSON-like values: equal values have equal hashes.

    Args:
        parts: Values that JSON can hold.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode(errors="surrogateescape")).hexdigest()[:24]


@contextlib.contextmanager
def explain_disk_errors(cache: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a ConfigError that names the cache and how to move it.

    Args:
        cache: Folder of the cache.

    Raises:
        ConfigError: If the disk is full, or the cache is not writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(cache).free / 2**20 if cache.exists() else 0.0
            raise ConfigError(
                f"{cache}: no room for the encoded data: {free:,.1f} MiB are free; "
                f"make room, lower data.max_bytes, or set XDG_CACHE_HOME to another disk"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(
                f"{cache}: the cache cannot be written: {error.strerror}; "
                f"set XDG_CACHE_HOME to a folder you may write to"
            ) from None
        raise


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[str], object]) -> Iterator[None]:
    """Hold a file lock. A process that dies loses its lock.

    Args:
        path: Lock file.
        waiting: Called repeatedly while another process holds the lock.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting("waiting for another rank that prepares the same data")
                time.sleep(_POLL_SECONDS)  # poll, so that interrupts are handled and the progress line is printed
        yield


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` after success and is removed after an error.

    The caller holds the lock of `folder`, so leftovers of a killed process are removed, too.

    Args:
        folder: Final path.
    """
    for stale in folder.parent.glob(f"{folder.name}.*.part"):
        shutil.rmtree(stale)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir(mode=0o700)
    try:
        yield part
        if folder.exists():
            shutil.rmtree(folder)
        # The rename is atomic: other ranks see the folder complete or not at all.
        part.rename(folder)
    finally:
        if part.exists():
            shutil.rmtree(part)


def largest_token(header: TokenHeader, cache: Path) -> int:
    """Verify a token file and return its largest id, once for each state of the file.

    The result is cached by path, size and modification time.

    Args:
        header: Header of the file.
        cache: Folder of the cache.

    Raises:
        ConfigError: If the file is damaged, see `verify`.
    """
    stat = header.path.stat()
    key = fingerprint(str(header.path.resolve()), stat.st_size, stat.st_mtime_ns)
    memo = cache / "verified" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no valid cache entry: verify the file
        return int(json.loads(memo.read_text())["largest"])
    largest = verify(header)
    with contextlib.suppress(OSError):  # without a cache entry, the next call only verifies again
        memo.parent.mkdir(parents=True, exist_ok=True)
        part = memo.with_suffix(f".{secrets.token_hex(4)}.part")
        part.write_text(json.dumps({"largest": largest}))
        part.replace(memo)
    return largest
