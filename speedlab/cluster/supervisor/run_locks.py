"""Which runs are held: nobody advances such a run, and words wait, until whoever holds it lets go.

A hold ends with its holder's connection, or else with its process. A holder that has lost its connection asks for the
hold once more, with the same key, over another one, and may do so before the end of the first is heard here: it is held
as long as there is one. Holds are kept in a file of the cluster's folder: who takes over from a supervisor that has
ended keeps those whose holders live, as they go on with what they do and let go of the run under the same key.
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
"""A process of the same number that started within this of the other is the same."""


class RunLock(msgspec.Struct, frozen=True):
    """`key`: by which its holder lets go; `pid`, `started`: of the holder's process, 0 where the system does not say
    who asks."""

    key: str
    pid: int = 0
    started: float = 0.0

    @classmethod
    def of(cls, key: str, pid: int | None) -> RunLock:
        """Of a process that runs."""
        return cls(key, pid or 0, _start_of(pid) if pid else 0.0)

    @property
    def lives(self) -> bool:
        """Whether the holder's process is there; a later one of its number is another."""
        return self.pid != 0 and abs(_start_of(self.pid) - self.started) < _START_SECONDS


class _LockEntry(NamedTuple):
    hold: RunLock
    connections: set[object]
    """Over which it was asked for; none where an earlier supervisor was asked."""


class RunLocks:
    """The holds of one cluster's runs, by folder. Called with the lock of `Runs`."""

    def __init__(self, path: Path) -> None:
        """`path`: of the file."""
        self._path = path
        self._by_run: dict[Path, _LockEntry] = {}

    def __contains__(self, run: Path) -> bool:
        return run in self._by_run

    def take(self, run: Path, hold: RunLock, connection: object) -> bool:
        """Whether `run` is held by `hold` from now on; also where it was. `connection`: over which it was asked for.
        Raises OSError where that cannot be kept."""
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
        """The end of a hold; whether there was one."""
        if (held := self._by_run.get(run)) is None or held.hold.key != key:
            return False
        del self._by_run[run]
        try:
            self._write()
        except OSError as full:  # A later supervisor may keep it, until the process of its holder ends.
            log.warning("that %s is not held any more cannot be written down: %s", run, full)
        return True

    def leave(self, run: Path, key: str, connection: object) -> bool:
        """A connection has ended over which this hold was asked for; whether the hold has ended with it."""
        if (held := self._by_run.get(run)) is None or held.hold.key != key:
            return False
        held.connections.discard(connection)
        return not held.connections and self.release(run, key)

    def take_over(self) -> None:
        """Keep the holds of an earlier supervisor whose holders live."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[str, RunLock])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("which runs were held is not known: %s: %s", self._path, error)
            return
        self._by_run = {Path(run): _LockEntry(hold, set()) for run, hold in kept.items() if hold.lives}

    def abandoned(self) -> list[tuple[Path, str]]:
        """(run, key) of holds whose holders' processes have ended."""
        return [(run, hold.key) for run, (hold, _) in self._by_run.items() if hold.pid and not hold.lives]

    def _write(self) -> None:
        kept = {str(run): held.hold for run, held in self._by_run.items()}
        write_atomically(self._path, msgspec.json.encode(kept).decode())


def _start_of(pid: int) -> float:
    """When a process started; 0 where it has ended."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0
