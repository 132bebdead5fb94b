"""Locks on runs: no rank advances a locked run, and commands wait until its owner releases it.

1. A lock ends with its owner's connection, or else with its owner's process.
2. An owner that reconnects asks for the lock again, with the same key. The request may arrive before the supervisor
   notices the end of the first connection. So the lock lasts as long as one connection remains.
3. Locks are stored in the folder of the cluster. A later supervisor keeps those whose owner process lives.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from speedlab.telemetry.run_folder import write_atomically

log = logging.getLogger("speedlab.supervisor")

_START_SECONDS = 1.0
"""Two processes with the same id and start times closer than this are the same process."""


class RunLock(msgspec.Struct, frozen=True):
    """A lock: the `key` that releases it, and the owner process. `pid` and `started` are 0 if the system does not
    report them.
    """

    key: str
    pid: int = 0
    started: float = 0.0

    @classmethod
    def of(cls, key: str, pid: int | None) -> RunLock:
        """Return a lock of a running process.

        Args:
            key: Key that releases the lock.
            pid: Owner process; None if unknown.
        """
        return cls(key, pid or 0, _start_of(pid) if pid else 0.0)

    @property
    def lives(self) -> bool:
        """Whether the owner process runs; a later process with the same id does not count."""
        return self.pid != 0 and abs(_start_of(self.pid) - self.started) < _START_SECONDS


class _LockEntry(NamedTuple):
    hold: RunLock
    connections: set[object]
    """Connections over which it was requested; empty if an earlier supervisor got the request."""


class RunLocks:
    """The locks on the runs of one cluster, by folder. Callers hold the lock of `SupervisedRuns`."""

    def __init__(self, path: Path) -> None:
        """Store locks in the file `path`."""
        self._path = path
        self._by_run: dict[Path, _LockEntry] = {}

    def __contains__(self, run: Path) -> bool:
        return run in self._by_run

    def take(self, run: Path, hold: RunLock, connection: object) -> bool:
        """Lock `run`; return whether `hold` owns the lock afterwards.

        Args:
            run: Folder of the run.
            hold: Lock to take.
            connection: Connection of the request.

        Raises:
            OSError: If the lock cannot be stored.
        """
        if (known := self._by_run.get(run)) is not None:
            if known.hold.key == hold.key:
                known.connections.add(connection)
            return known.hold.key == hold.key
        self._by_run[run] = _LockEntry(hold, {connection})
        try:
            self._write()
        except BaseException:
            del self._by_run[run]
            raise
        return True

    def release(self, run: Path, key: str) -> bool:
        """Release the lock with `key`; return whether there was one.

        Args:
            run: Folder of the run.
            key: Key of the lock.
        """
        if (held := self._by_run.get(run)) is None or held.hold.key != key:
            return False
        del self._by_run[run]
        try:
            self._write()
        except OSError as full:  # A later supervisor may keep the lock until its owner process ends.
            log.warning("that %s is not held any more cannot be written down: %s", run, full)
        return True

    def leave(self, run: Path, key: str, connection: object) -> bool:
        """Remove a closed connection; return whether that released the lock.

        Args:
            run: Folder of the run.
            key: Key of the lock.
            connection: Connection that was closed.
        """
        if (held := self._by_run.get(run)) is None or held.hold.key != key:
            return False
        held.connections.discard(connection)
        return not held.connections and self.release(run, key)

    def take_over(self) -> None:
        """Keep the locks of an earlier supervisor whose owner process lives."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[str, RunLock])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("which runs were held is not known: %s: %s", self._path, error)
            return
        self._by_run = {Path(run): _LockEntry(hold, set()) for run, hold in kept.items() if hold.lives}

    def abandoned(self) -> list[tuple[Path, str]]:
        """Return (run, key) of locks whose owner process has ended."""
        return [(run, hold.key) for run, (hold, _) in self._by_run.items() if hold.pid and not hold.lives]

    def _write(self) -> None:
        kept = {str(run): held.hold for run, held in self._by_run.items()}
        write_atomically(self._path, msgspec.json.encode(kept).decode())


def _start_of(pid: int) -> float:
    """Return the start time of a process; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0
