"""Advance: keeps the ranks of a run working on its control words, from any number of kernels.

1. Training is one task on all ranks, `remote.advance`; it carries out words as they come and ends when the run pauses,
   ends or fails. While it is paused no task is there, so the engines serve cells.
2. Whoever posts a word while no task is there submits one, if the ranks are idle. Of all handles in all kernels, only
   the one that holds the lock on `control/advance.lock` may. The lock is the system's (flock) and goes with its
   process: the lock of a kernel that has died is never in the way.
3. When the task ends, its handle gives the lock back and only then looks for words once more; who was refused the lock
   had posted before. So a word is neither left lying nor carried out twice.
4. A word that a task was given and did not take, or that was waiting when the run failed, is dropped: else it would be
   carried out long after it was meant.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import speedlab.cluster.remote as remote
from speedlab.cluster.errors import DIED, ClusterError, RankError
from speedlab.cluster.out_of_memory import out_of_memory_lines
from speedlab.telemetry.checkpoints import newest
from speedlab.telemetry.folder import Command, RunFolder, RunFolderError, Status
from speedlab.telemetry.records import RunState

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster
    from speedlab.cluster.results import RankResults

RESTING = frozenset({RunState.PAUSED, RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
"""States in which no rank advances until a control word asks for it."""

_RETRY_SECONDS = 0.25
_HOLD_POLL_SECONDS = 0.02
_CHECK_SECONDS = 1.0
_TEXT_LIMIT = 2000


class Advance:
    """The task of one run on the ranks of `cluster`, as seen from one handle."""

    def __init__(self, folder: RunFolder, cluster: Cluster) -> None:
        self.errors: list[RankError] = []
        """What the ranks raised, oldest first."""
        self.trouble: Exception | None = None
        """Why a waiting word could not be sent to the ranks; None again with the next word."""
        self._folder = folder
        self._cluster = cluster
        self._lock = threading.RLock()
        self._claim = Claim(folder.path / "control" / "advance.lock")
        self._task: RankResults | None = None
        self._given: list[Command] = []
        self._retrying = False
        self._check_due = 0.0

    @property
    def active(self) -> bool:
        """Whether a task submitted by this handle is on the ranks."""
        return self._task is not None

    def check(self) -> None:
        """Raise what keeps waiting words or the task from ever ending: a dead engine, a dead controller (ClusterError).

        Looks at most once a second.
        """
        if self.trouble is not None:
            raise self.trouble
        now = time.monotonic()
        if (task := self._task) is not None and now >= self._check_due:
            self._check_due = now + _CHECK_SECONDS
            task.wait(0.001)

    def start(self) -> None:
        """Submit the first task of a new run."""
        with self._lock:
            if not self._claim.take():
                raise ClusterError(f"run {self._folder.name!r} is being started by another process")
            self._submit()

    def start_if_needed(self) -> None:
        """Submit a task when words are waiting and none is there; tries again in the background while ranks are busy.

        Raises ClusterError when an engine is dead.
        """
        self.trouble = None
        with self._lock:
            if not self._settle() and not self._retrying:
                self._retrying = True
                threading.Thread(target=self._retry, name="speedlab-run-retry", daemon=True).start()

    @contextlib.contextmanager
    def held_back(self, seconds: float = 10.0) -> Iterator[None]:
        """Nobody advances the run meanwhile, in this kernel or another; words wait. The run has to rest; raises
        ClusterError when some handle still works on it after `seconds`."""
        claim = Claim(self._folder.path / "control" / "advance.lock")
        deadline = time.monotonic() + seconds
        while not claim.take():
            if time.monotonic() > deadline:
                raise ClusterError(f"run {self._folder.name!r} is being advanced by another process; pause it first")
            time.sleep(_HOLD_POLL_SECONDS)
        try:
            yield
        finally:
            claim.release()

    def _settle(self) -> bool:
        """Submit if a word waits and this handle may; False when it has to be tried again. Called with the lock."""
        if self._task is not None or not self._waiting():
            return True
        if not self._claim.take():
            return False  # Another handle has a task on the ranks, or is about to.
        try:
            if not self._waiting():
                return True
            engines = self._cluster.status()
            if dead := [engine.rank for engine in engines if engine.state == "dead"]:
                self._drop_waiting(self._folder.read_status())
                raise ClusterError(f"ranks {dead} are dead; cluster.restart({dead[0]}) brings an engine back")
            if any(engine.state != "idle" for engine in engines):
                return False
            self._note_processes(tuple(engine.pid for engine in engines))
            self._submit()
            return True
        finally:
            if self._task is None:
                self._claim.release()

    def _waiting(self) -> list[Command]:
        return self._folder.pending(self._folder.read_status().command)

    def _drop_waiting(self, status: Status) -> None:
        """Write `status`, with the waiting words counted as done. Only with the claim, and no task on the ranks."""
        last = max([status.command, *(command.number for command in self._folder.pending(status.command))])
        self._folder.write_status(replace(status, command=last))

    def _note_processes(self, pids: tuple[int, ...]) -> None:
        """Keep the status' process ids true after an engine was restarted."""
        status = self._folder.read_status()
        if status.rank_pids != pids:
            self._folder.write_status(replace(status, rank_pids=pids))

    def _submit(self) -> None:
        self._given = self._waiting()
        try:
            task = self._cluster.submit(remote.advance, str(self._folder.path))
        except BaseException:
            self._claim.release()
            raise
        self._task = task
        task.add_done_callback(self._ended_elsewhere)

    def _ended_elsewhere(self, results: RankResults) -> None:
        # The callback may come on the thread that serves the engines' messages, and what follows waits for those.
        threading.Thread(target=self._ended, args=(results,), name="speedlab-run-ended", daemon=True).start()

    def _ended(self, results: RankResults) -> None:
        error: RankError | None = None
        try:
            results.result()
        except RankError as raised:
            error = raised
        except Exception as trouble:  # Kept, and raised to whoever waits: the engines cannot be reached any more.
            self.trouble = trouble
        with self._lock:
            try:
                self._account_for(error)
            except RunFolderError as trouble:  # Somebody has removed the folder under the run.
                self.trouble = trouble
            finally:
                self._task = None
                self._claim.release()
        if self.trouble is None:
            try:
                self.start_if_needed()
            except ClusterError as trouble:
                self.trouble = trouble

    def _account_for(self, error: RankError | None) -> None:
        """Keep the error and see that the status tells of it; drop what nobody will carry out."""
        if error is not None:
            error.advice = self._advice(error)
            with contextlib.suppress(ClusterError, OSError):  # The explanation must not hide what it explains.
                error.notes = out_of_memory_lines(error, self._folder, self._cluster.devices)
            self.errors.append(error)
        status = self._folder.read_status()
        # When one rank fails the others are interrupted; to the one that writes the status this looks like a pause.
        if error is not None and status.state not in RESTING - {RunState.PAUSED}:
            status = replace(status, state=RunState.FAILED, text=str(error)[:_TEXT_LIMIT])
        ignored = bool(self._given) and status.command < self._given[0].number
        if error is not None or ignored:
            self._drop_waiting(status)

    def _advice(self, error: RankError) -> str | None:
        """What a person can do next: look at the ranks, go back to the last checkpoint, read the whole trace."""
        if any(failure.kind == DIED for failure in error.by_rank.values()):
            return None
        kept = newest(self._folder.path / "checkpoints")
        back = f" · go back: run.resume(step={kept.step})" if kept is not None else ""
        rank = error.groups[0][0][0]
        return f"The engines are idle and keep their state. Look: %%ranks {rank}{back} · full trace: run.errors[-1]"

    def _retry(self) -> None:
        while True:
            with self._lock:
                try:
                    settled = self._settle()
                except Exception as trouble:  # Kept, and raised to whoever waits for the word.
                    self.trouble = trouble
                    settled = True
                if settled:
                    self._retrying = False
                    return
            time.sleep(_RETRY_SECONDS)


class Claim:
    """An exclusive lock on a file over all processes of this machine; it ends with the process that holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock; False when somebody else has it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())  # For people who look into the folder; nothing reads it.
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # Also where a forked child still has the file open.
            os.close(descriptor)
