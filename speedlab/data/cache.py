"""The user's cache of tokenizers and encoded corpora: atomic, and safe when several ranks arrive at once."""

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
    """Says what is going on, but only once it has taken a second, and at most once a second."""

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
        """A line that must not be missed."""
        if self._say is not None:
            self._spoke = True
            self._say(text)

    def done(self, text: str) -> None:
        """The last line, with the time it took; said when anything was, or when it took over a second."""
        seconds = time.monotonic() - self._started
        if self._say is not None and (self._spoke or seconds >= 1):
            self._say(f"{text} ({seconds:.1f} s)")


def default_cache() -> Path:
    """`speedlab` in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "speedlab"


def fingerprint(*parts: object) -> str:
    """A short name for JSON-like values: equal values, equal names."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode(errors="surrogateescape")).hexdigest()[:24]


@contextlib.contextmanager
def explain_disk_errors(cache: Path) -> Iterator[None]:
    """Turn a full or forbidden disk into a ConfigError that names the cache and how to move it."""
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
    """Hold the lock file `path`; call `waiting` while another process does. A process that dies loses its lock."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting("waiting for another rank that prepares the same data")
                time.sleep(_POLL_SECONDS)  # polling, so that an interrupt gets through and the line above is said
        yield


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary neighbour that becomes `folder` when the block succeeds and is removed when it does not.

    The caller holds the lock of `folder`, so that what an earlier, killed process left behind may be removed too.
    """
    for stale in folder.parent.glob(f"{folder.name}.*.part"):
        shutil.rmtree(stale)
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir(mode=0o700)
    try:
        yield part
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        if part.exists():
            shutil.rmtree(part)


def largest_token(header: TokenHeader, cache: Path) -> int:
    """`tokens.verify`, once for each state of a file: the result is remembered by path, size and time of change."""
    stat = header.path.stat()
    key = fingerprint(str(header.path.resolve()), stat.st_size, stat.st_mtime_ns)
    memo = cache / "verified" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no memo, or not one of ours: look again
        return int(json.loads(memo.read_text())["largest"])
    largest = verify(header)
    with contextlib.suppress(OSError):  # a memo that cannot be kept only means looking again next time
        memo.parent.mkdir(parents=True, exist_ok=True)
        part = memo.with_suffix(f".{secrets.token_hex(4)}.part")
        part.write_text(json.dumps({"largest": largest}))
        part.replace(memo)
    return largest
