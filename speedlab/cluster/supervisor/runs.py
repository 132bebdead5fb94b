"""Supervise the training runs of one cluster: submit commands, detect failures, start recovery.

How a run is advanced:

1. Training is one submission on all ranks, `remote.advance`. It executes commands as they arrive and ends when the run
   pauses, finishes or fails. A paused run has no submission, so its engines can execute cells.
2. A command that arrives while the run has no submission creates one. The submission queues like any other.
3. When a submission ends, the supervisor checks for commands once more. A command that arrived in between is neither
   lost nor executed twice.
4. A command is dropped if its submission ended without executing it, or if it waited while the run failed. Otherwise it
   would be executed long after the user meant it.
5. A failed run is recovered (`recovery.py`) if its configuration asks for that.

`RunEngines` is the part of `engines.Engines` that this module and `recovery.py` need.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import speedlab.cluster.worker.remote as remote
from speedlab.cluster.errors import ClusterError, RankError, is_kept, keep_failure, newest_failure
from speedlab.cluster.known_runs import KnownCluster, remember_run, remembered_runs
from speedlab.cluster.supervisor.protocol import RunStatus
from speedlab.cluster.supervisor.recovery import Recovery, advice, without_hosts
from speedlab.cluster.supervisor.run_locks import RunLock, RunLocks
from speedlab.telemetry.records import RESTING, RunState
from speedlab.telemetry.run_folder import UNSUPERVISED, RunCommand, RunFolder, RunFolderError, Status

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.record_relay import RecordRelay
    from speedlab.hardware import Device


class RunSubmission(Protocol):
    """The part of a submission that a run uses."""

    id: str

    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> RankError | None: ...

    def add_done_callback(self, callback: Any, /) -> None: ...


class RunEngines(KnownCluster, Protocol):
    """The part of `Engines` that a run uses."""

    @property
    def devices(self) -> list[Device]: ...
    @property
    def dead(self) -> Collection[int]: ...
    @property
    def pids(self) -> tuple[int, ...]: ...
    @property
    def lost_ranks(self) -> Collection[int]: ...

    def submit(self, function: Any, *arguments: Any, label: str = "") -> RunSubmission: ...
    def left_of(self, label: str) -> RunSubmission | None: ...
    def at_work(self, submission: Any) -> bool: ...
    def way_back(self, dead: list[int]) -> str: ...
    def restart(self, *ranks: int) -> None: ...
    def resize(self, size: int) -> None: ...
    def wire(self, folder: RunFolder) -> RecordRelay | None: ...
    def interrupt(self, only: Any = None, seconds: float = 2.0) -> list[int]: ...


log = logging.getLogger("speedlab.supervisor")

_HOLD_POLL_SECONDS = 0.02
_TEXT_LIMIT = 2000
_WAY_ON = "; run.resume() goes on once that is mended"


class SupervisedRuns:
    """All runs of this cluster. Methods are thread-safe."""

    def __init__(self, ranks: RunEngines) -> None:
        self._ranks = ranks
        self._turn = threading.RLock()
        """Held while a run is changed, which may wait for hosts. Readers do not take this lock."""
        self._lock = threading.RLock()
        """Held briefly, while the state of the runs changes. Lock order: `_turn` first, then `_lock`."""
        self._open: dict[Path, SupervisedRun] = {}
        self._holds = RunLocks(ranks.directory / "holds.json")

    def begin(self, path: Path) -> None:
        """Start a new run on the ranks.

        Args:
            path: Folder of the run.

        Raises:
            ClusterError: If another run is active or recovering.
        """
        with self._turn:
            self._refuse_second(path)
            remember_run(self._ranks, path)
            self._of(path).begin()

    def post(self, path: Path, word: str, arguments: dict[str, Any], key: str) -> int:
        """Post a command to a run and return the number of the command.

        Args:
            path: Folder of the run.
            word: Name of the command, such as "resume".
            arguments: Arguments of the command.
            key: Idempotency key. A command that is sent twice with the same key is posted once.

        Raises:
            ClusterError: If an engine is dead. Also if another run is active: this run would take the engines when the
                other one pauses, and the unsaved state of the other run would be lost.
        """
        with self._turn:
            self._refuse_second(path)
            return self._of(path).post(word, arguments, key)

    def _refuse_second(self, path: Path) -> None:
        path = path.resolve()
        for other in self._all():
            if (other.active or other.recovering) and other.folder.path != path:
                status = other.folder.read_status()
                state = "being brought back" if other.recovering else str(status.state)
                raise ClusterError(
                    f"run {other.folder.name!r} is {state} on {self._ranks.name!r}, step {status.step} of "
                    f"{status.steps}; pause or stop it first, or start a cluster of another name"
                )

    def attend(self, path: Path) -> None:
        """Submit a run if commands wait for it and no rank works on it.

        Args:
            path: Folder of the run.

        Raises:
            ClusterError: If an engine is dead.
            RunFolderError: If this version cannot continue the run.
        """
        with self._turn:
            self._of(path).attend()

    def standing(self, path: Path) -> RunStatus:
        """Return whether a run is active or recovering, and its last problem. Does not wait for hosts.

        Args:
            path: Folder of the run.
        """
        return self._of(path).standing()

    def hold(self, path: Path, hold: RunLock, seconds: float, connection: object = None) -> None:
        """Lock a run until `release`: no rank advances it, and commands wait.

        Args:
            path: Folder of the run.
            hold: Lock with its key and the process that owns it.
            seconds: Time to wait until the run rests.
            connection: Connection of the client that asked.

        Raises:
            ClusterError: If the run is still advanced, or locked under another key, after `seconds`.
        """
        deadline = time.monotonic() + seconds
        run, path = self._of(path), path.resolve()
        while True:
            with self._turn, self._lock:
                if not (run.active or run.recovering) and self._holds.take(path, hold, connection):
                    return
            if time.monotonic() > deadline:
                raise ClusterError(f"run {run.folder.name!r} is advanced by another client; pause it first")
            time.sleep(_HOLD_POLL_SECONDS)

    def release(self, path: Path, key: str) -> None:
        """Release a lock. Commands that waited are executed.

        Args:
            path: Folder of the run.
            key: Key of the lock.
        """
        self._end_hold(path, lambda run: self._holds.release(run, key))

    def leave(self, path: Path, key: str, connection: object) -> None:
        """Remove a closed connection from a lock; release the lock if no other connection asked for it.

        Args:
            path: Folder of the run.
            key: Key of the lock.
            connection: Connection that was closed.
        """
        self._end_hold(path, lambda run: self._holds.leave(run, key, connection))

    def _end_hold(self, path: Path, ends: Callable[[Path], bool]) -> None:
        with self._turn:
            with self._lock:
                if not ends(path.resolve()):
                    return
            with contextlib.suppress(ClusterError, RunFolderError):  # The folder is no longer a run.
                self._of(path).attend_later()

    def let_go_of_abandoned(self) -> None:
        """Release the locks whose owner process has ended."""
        with self._lock:
            abandoned = self._holds.abandoned()
        for path, key in abandoned:
            log.warning("run %s is not held any more: the process that held it has ended", path)
            self.release(path, key)

    def interrupt(self, path: Path, seconds: float) -> list[int]:
        """Interrupt the work of the ranks on this run, and nothing else.

        Args:
            path: Folder of the run.
            seconds: Time to wait until the ranks stop.

        Returns:
            The ranks that are idle afterwards.
        """
        run = self._of(path)
        run.give_up()  # A user who interrupts a run does not want recovery.
        task = run.task
        if task is None:
            with self._turn:  # A submission or a recovery may be in progress; `_turn` waits for it.
                run.give_up()
                task = run.task
        return self._ranks.interrupt(task, seconds) if task is not None else []

    def take_over(self) -> None:
        """Supervise the runs of an earlier supervisor."""
        with self._lock:
            self._holds.take_over()
        for path in remembered_runs(self._ranks):
            with self._turn:
                try:
                    if RunFolder(path).read_status().token == self._ranks.token:
                        self._of(path).take_over()
                except Exception as error:  # A full disk or a damaged folder must not stop the other runs.
                    log.warning("run %s is not looked after: %s", path, error)
                    with contextlib.suppress(Exception):  # The status file itself may be damaged.
                        self._of(path).left_over(error)

    def settle(self, seconds: float) -> bool:
        """Wait until every run has recorded how its work ended; return False on timeout.

        Args:
            seconds: Longest time to wait.
        """
        deadline = time.monotonic() + seconds
        while any(run.active for run in self._all()) and time.monotonic() < deadline:
            time.sleep(_HOLD_POLL_SECONDS)
        return not any(run.active for run in self._all())

    def close(self) -> None:
        """Stop all recoveries."""
        for run in self._all():
            run.give_up()

    def _all(self) -> list[SupervisedRun]:
        with self._lock:
            return list(self._open.values())

    def _of(self, path: Path) -> SupervisedRun:
        path = path.resolve()
        with self._lock:
            if path not in self._open:
                is_held = functools.partial(self._holds.__contains__, path)
                self._open[path] = SupervisedRun(RunFolder(path), self._ranks, self._turn, self._lock, is_held)
            return self._open[path]


class SupervisedRun:
    """One run, as its supervisor sees it.

    Callers hold `SupervisedRuns._turn`, unless the method says that it is thread-safe.
    """

    def __init__(
        self,
        folder: RunFolder,
        ranks: RunEngines,
        turn: threading.RLock,
        lock: threading.RLock,
        is_held: Callable[[], bool],
    ) -> None:
        """Supervise the run in `folder`.

        Args:
            folder: Folder of the run.
            ranks: Engines of the cluster.
            turn: Lock of `SupervisedRuns` for changes of a run.
            lock: Lock of `SupervisedRuns` for its state.
            is_held: Return whether the run is locked.
        """
        self.folder = folder
        self.task: RunSubmission | None = None
        self.trouble: Exception | None = None
        """Why a waiting command could not be sent to the ranks; reset to None by the next command."""
        self.lock = lock
        self._ranks = ranks
        self._turn = turn
        self._is_held = is_held
        self._changing = 0
        self._given: list[RunCommand] = []
        self._wire: RecordRelay | None = None
        self._recovery = Recovery(self, ranks)

    @property
    def active(self) -> bool:
        """Whether the ranks work on the run, will do so when they are idle, or its state is changing. Thread-safe."""
        with self.lock:
            return self.task is not None or self._changing > 0

    @property
    def recovering(self) -> bool:
        """Whether its engines are being recovered, or a recovery waits for its next attempt. Thread-safe."""
        return self._recovery.under_way

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Take `_turn` and report the run as active inside the block, between two states. Thread-safe."""
        with self._turn:
            with self.lock:
                self._changing += 1
            try:
                yield
            finally:
                with self.lock:
                    self._changing -= 1

    def begin(self) -> None:
        """Start the new run; a repeated request after a takeover starts it once."""
        self.trouble = None
        self._recovery.begin_again()
        # A request repeated after a takeover must not start a second run.
        if self.task is None and not self._takes_what_is_left():
            self._submit()

    def post(self, word: str, arguments: dict[str, Any], key: str = "") -> int:
        """Post a command and submit the run if no rank works on it.

        Args:
            word: Name of the command.
            arguments: Arguments of the command.
            key: Idempotency key; "" for none.

        Returns:
            The number of the command.
        """
        if self._wire is not None:
            self._wire.refuse(word)
        self._recovery.hand_over()
        # A client repeats a request after a lost connection: post the command once.
        number = self.folder.number_of(key) if key else None
        if number is None:
            number = self.folder.post(word, key=key, **arguments)
        if self.task is not None and self._wire is not None:
            self._wire.give_word(number)
        self.attend()
        return number

    def attend(self) -> None:
        """Submit the run if a command waits and no rank works on the run.

        Raises:
            ClusterError: If an engine is dead.
            RunFolderError: If this version cannot continue the run.
        """
        self.trouble = None
        if self.task is not None or self._is_held() or self.recovering or not self.waiting():
            return
        try:
            if dead := sorted(self._ranks.dead):
                raise ClusterError(without_hosts(self.folder, self._ranks) or self._ranks.way_back(dead))
            self.folder.require_known()
            self.note_processes(self._ranks.pids)
            self._submit()
        # Also if an engine dies just now: a waiting command must not run much later.
        except (ClusterError, RunFolderError):
            self._drop_waiting(self.folder.read_status())
            raise

    def attend_later(self) -> None:
        """Do the same as `attend` when no client waits for the answer: store an error in `trouble`."""
        try:
            self.attend()
        except (ClusterError, RunFolderError) as trouble:
            self._in_vain(trouble)

    def standing(self) -> RunStatus:
        """Return the status that clients see. Thread-safe."""
        with self.lock:
            trouble = self.trouble
            return RunStatus(
                active=self.active,
                recovering=self.recovering,
                trouble=str(trouble) if trouble is not None else "",
                trouble_kind=type(trouble).__name__ if trouble is not None else "",
            )

    def take_over(self) -> None:
        """Continue from the state that an earlier supervisor left."""
        taken = self._takes_what_is_left()
        if not self._recovery.take_over(rests=not taken) and not taken:
            self._go_on()

    def _takes_what_is_left(self) -> bool:
        """Adopt the submission of an earlier supervisor if its end was not recorded; return whether there is one."""
        left = self._ranks.left_of(str(self.folder.path))
        if left is None:
            return False
        state = self.folder.read_status().state
        if is_kept(self.folder, left.id):  # Its failure was recorded, so the submission has ended on all ranks.
            if state not in RESTING and (failure := newest_failure(self.folder)) is not None:
                self._account_for(failure[1], left.id)
            return False
        if not (self._ranks.at_work(left) or state not in RESTING or state is RunState.FAILED):
            return False
        self.task = left
        self._follow_ranks()
        left.add_done_callback(self._ended_elsewhere)
        return True

    def give_up(self) -> None:
        """Cancel the recovery of the run. Thread-safe."""
        self._recovery.stop()

    def leave(self, trouble: Exception) -> None:
        """Record that recovery failed, and drop the waiting commands.

        Args:
            trouble: Reason, which the next client gets.
        """
        self.trouble = trouble
        self._drop_waiting(self.folder.read_status())

    def left_over(self, trouble: Exception) -> None:
        """Record in the status that the run cannot continue under this supervisor: no client has asked, so none gets an
        error.

        Args:
            trouble: Reason.
        """
        self.trouble = trouble
        status = self.folder.read_status()
        unfinished = status.state in (RunState.PAUSED, RunState.FAILED) and status.token == self._ranks.token
        if unfinished and self.task is None:
            before = "" if status.text in ("", UNSUPERVISED) else f"{status.text}\n"
            text = f"{before}the supervisor ended, and under the next one the run could not go on: {trouble}"
            text = f"{text[: _TEXT_LIMIT - len(_WAY_ON)]}{_WAY_ON}"
            self._drop_waiting(replace(status, text=text))

    def _in_vain(self, trouble: Exception) -> None:
        """Record that a command failed for which no client waits."""
        self.trouble = trouble
        if self.folder.read_status().text == UNSUPERVISED:  # This status text promises that the run continues.
            self.left_over(trouble)

    def _go_on(self) -> None:
        """Execute waiting commands; resume a run that paused because it had no supervisor."""
        status = self.folder.read_status()
        if status.state is RunState.PAUSED and status.text == UNSUPERVISED and not self.waiting():
            self.folder.post("resume")
        self.attend()

    def waiting(self) -> list[RunCommand]:
        """Return the commands that no rank has executed."""
        return self.folder.pending(self.folder.read_status().command)

    def _drop_waiting(self, status: Status) -> None:
        """Write `status` with all waiting commands counted as done. Call only while no rank advances the run."""
        last = max([status.command, *(command.number for command in self.folder.pending(status.command))])
        self.folder.write_status(replace(status, command=last))

    def note_processes(self, pids: tuple[int, ...]) -> None:
        """Update the engine processes in the status after an engine was restarted.

        Args:
            pids: Process ids of the engines, by rank.
        """
        status = self.folder.read_status()
        if (status.rank_pids, status.token) != (pids, self._ranks.token):
            self.folder.write_status(replace(status, rank_pids=pids, token=self._ranks.token))

    def _follow_ranks(self, *, give: bool = False) -> None:
        """Relay the records of the ranks if not all hosts see the folder.

        Args:
            give: Whether to send the contents of the folder to the hosts first.
        """
        self._wire = self._ranks.wire(self.folder)
        if self._wire is not None:
            if give:
                self._wire.give()
            self._wire.follow()

    def _submit(self) -> None:
        self._follow_ranks(give=True)
        # Remember these commands: they are dropped if the submission ends without executing them.
        self._given = self.waiting()
        try:
            self.task = self._ranks.submit(remote.advance, str(self.folder.path), label=str(self.folder.path))
        except BaseException:
            if self._wire is not None:
                self._wire.close()
            raise
        self.task.add_done_callback(self._ended_elsewhere)

    def _ended_elsewhere(self, task: RunSubmission) -> None:
        # The callback runs on a thread that others wait for, and `_ended` waits for files.
        threading.Thread(target=self._ended, args=(task,), name="speedlab-run-ended", daemon=True).start()

    def _ended(self, task: RunSubmission) -> None:
        if self._wire is not None:
            try:
                self._wire.settle()
            except Exception as trouble:  # For example a full disk: continue with the records that arrived.
                log.warning("the rest of what ranks of %s wrote cannot be taken in: %s", self.folder.name, trouble)
        with self.changing():
            try:
                self._account_for(task.error, task.id)
            except Exception as trouble:  # For example, the user has deleted the folder of the run.
                self.trouble = trouble
            if self.task is task:
                self.task = None
            if self.trouble is None:
                try:
                    if not self._recovery.begin(task.error, task.id):
                        self._go_on()
                except Exception as trouble:
                    self.trouble = trouble
                    with contextlib.suppress(Exception):  # The status file may be the one that cannot be read.
                        self._in_vain(trouble)

    def _account_for(self, error: RankError | None, submission: str) -> None:
        """Record the error in folder and status; drop commands that no rank will execute."""
        status = self.folder.read_status()
        if error is not None and error.only_interrupted:
            # No rank recorded the interrupt, or rank 0 recorded it as the failure of another rank.
            if status.state not in RESTING or (status.state is RunState.FAILED and error.stopped):
                status = replace(status, state=RunState.PAUSED, text="")
        elif error is not None:
            status = self._failed(error, submission, status)
        ignored = bool(self._given) and status.command < self._given[0].number
        if error is not None or ignored:
            self._drop_waiting(status)

    def _failed(self, error: RankError, submission: str, status: Status) -> Status:
        """Record the error in the folder; return the status that describes it."""
        if not is_kept(self.folder, submission):  # An earlier supervisor may have recorded it already.
            error.advice = advice(error, self.folder, self._ranks)
            with contextlib.suppress(Exception):  # A failing explanation must not hide the error itself.
                from speedlab.cluster.oom_report import out_of_memory_lines

                error.notes = out_of_memory_lines(error, self.folder, self._ranks.devices)
            try:
                keep_failure(self.folder, error, submission)
            except OSError as full:  # The status describes the error anyway.
                log.warning("what the ranks of %s raised cannot be kept: %s", self.folder.name, full)
        # When one rank fails, the others are interrupted. To the rank that writes the status, this looks like a pause.
        if status.state not in RESTING - {RunState.PAUSED}:
            return replace(status, state=RunState.FAILED, text=str(error)[:_TEXT_LIMIT])
        return status
