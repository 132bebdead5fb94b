"""A limit on the memory that some processes may take from now on: a memory cgroup of their own.

What they hold already stays with the group they came from (memory is charged where it is first touched), so that the
limit is one on what they take beyond that. The kernel's cache of files that they read and write counts inside it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
          (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"))  # fmt: skip
"""Of the two versions of cgroups: where groups are made, the file of the limit, and that of the most there was."""

_ENDING_SECONDS = 30.0


class NoLimitError(RuntimeError):
    """This process may not make a memory cgroup; the text says why."""


class MemoryLimit:
    """The group while it is there."""

    def __init__(self, group: Path, limit: str, peak: str) -> None:
        self._group, self._limit, self._peak = group, limit, peak

    def set(self, nbytes: int) -> None:
        """From now on; more than this ends a process."""
        (self._group / self._limit).write_text(str(nbytes))

    def take_in(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int:
        """The most that the group held at once."""
        return int((self._group / self._peak).read_text())


@contextmanager
def memory_limit(name: str) -> Iterator[MemoryLimit]:
    """A group of its own, without a limit at first; it goes at the end, when its processes have ended.

    Raises NoLimitError where that is not allowed."""
    for root, limit, peak in _ROOTS:
        group = root / f"{name}-{os.getpid()}"
        if not (root / limit).exists() and not (root / "cgroup.subtree_control").exists():
            continue
        try:
            group.mkdir()
        except OSError as error:
            why = f"{root} allows no group of one's own ({error.strerror})"
            raise NoLimitError(f"{why}; run as root, or in a group that is delegated to you") from None
        try:
            if (group / limit).exists():
                yield MemoryLimit(group, limit, peak)
                return
        finally:
            _remove(group)
    raise NoLimitError("this system has no memory cgroups")


def _remove(group: Path) -> None:
    """A process that is just ending is listed no more, and yet keeps its group for a moment."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.05)  # Between two tries, bounded by the deadline.
