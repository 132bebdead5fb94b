"""The runs of a cluster, in their supervisor: it keeps the ranks working on control words, sees failures, and brings a
run back where that was asked for.

1. Training is one submission on all ranks, `remote.advance`; it carries out words as they come and ends when the run
   pauses, ends or fails. While it is paused no submission is there, so the engines serve cells.
2. A word that comes while none is there submits one; it waits in line like any other.
3. When it ends, words are looked for once more: one that came in between is neither left lying nor carried out twice.
4. A word that a submission was given and did not take, or that was waiting when the run failed or was cut off, is
   dropped: else it would be carried out long after it was meant.
5. A run that has failed is brought back (`recovery.py`) if its configuration says so.

The ranks of a cluster, as far as its runs need them: what `engines.Engines` is to `runs.py` and `recovery.py`.
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
    """A submission, as far as a run asks it anything."""

    id: str

    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> RankError | None: ...

    def add_done_callback(self, callback: Any, /) -> None: ...


class RunEngines(KnownCluster, Protocol):
    """The engines, as far as a run needs them."""

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
    """All runs that this cluster was given. Methods may be called from any thread."""

    def __init__(self, ranks: RunEngines) -> None:
        self._ranks = ranks
        self._turn = threading.RLock()
        """Held while something is done to a run, which may ask hosts; who only looks does not wait for it."""
        self._lock = threading.RLock()
        """Held for moments, while what is known of runs changes. Taken behind `_turn` where both are."""
        self._open: dict[Path, SupervisedRun] = {}
        self._holds = RunLocks(ranks.directory / "holds.json")

    def begin(self, path: Path) -> None:
        """Let the ranks begin with a new run. Raises ClusterError while another one is under way."""
        with self._turn:
            self._refuse_beside_another(path)
            remember_run(self._ranks, path)
            self._of(path).begin()

    def post(self, path: Path, word: str, arguments: dict[str, Any], key: str) -> int:
        """Give a control word to a run; returns its number. Raises ClusterError when an engine is dead, or while
        another run is under way: it would take the engines when that pauses, and what they hold would be gone."""
        with self._turn:
            self._refuse_beside_another(path)
            return self._of(path).post(word, arguments, key)

    def _refuse_beside_another(self, path: Path) -> None:
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
        """Look whether words wait for a run that nobody works on."""
        with self._turn:
            self._of(path).attend()

    def standing(self, path: Path) -> RunStatus:
        """How a run stands with its ranks. Waits for no host."""
        return self._of(path).standing()

    def hold(self, path: Path, hold: RunLock, seconds: float, connection: object = None) -> None:
        """Nobody advances the run until `release`; words wait. `connection`: over which it was asked for. The run has
        to rest; raises ClusterError when it is still worked on, or held by another, after `seconds`."""
        deadline = time.monotonic() + seconds
        run, path = self._of(path), path.resolve()
        while True:
            with self._turn, self._lock:
                if not (run.active or run.recovering) and self._holds.take(path, hold, connection):
                    return
            if time.monotonic() > deadline:
                raise ClusterError(f"run {run.folder.name!r} is being advanced by somebody else; pause it first")
            time.sleep(_HOLD_POLL_SECONDS)

    def release(self, path: Path, key: str) -> None:
        """The end of the hold of this key. Words that have waited are carried out."""
        self._end_hold(path, lambda run: self._holds.release(run, key))

    def leave(self, path: Path, key: str, connection: object) -> None:
        """The end of a connection over which this hold was asked for: of the hold, too, unless it was asked for again
        over another one."""
        self._end_hold(path, lambda run: self._holds.leave(run, key, connection))

    def _end_hold(self, path: Path, ends: Callable[[Path], bool]) -> None:
        with self._turn:
            with self._lock:
                if not ends(path.resolve()):
                    return
            with contextlib.suppress(ClusterError, RunFolderError):  # It is no run any more.
                self._of(path).attend_later()

    def let_go_of_abandoned(self) -> None:
        """The end of holds whose holders' processes have ended."""
        with self._lock:
            abandoned = self._holds.abandoned()
        for path, key in abandoned:
            log.warning("run %s is not held any more: the process that held it has ended", path)
            self.release(path, key)

    def interrupt(self, path: Path, seconds: float) -> list[int]:
        """Interrupt what the ranks do for this run, and no more."""
        run = self._of(path)
        run.give_up()  # Who interrupts a run does not want it back.
        task = run.task
        if task is None:
            with self._turn:  # It may be on its way to the ranks, or about to be brought back.
                run.give_up()
                task = run.task
        return self._ranks.interrupt(task, seconds) if task is not None else []

    def take_over(self) -> None:
        """Look after the runs that an earlier supervisor was given."""
        with self._lock:
            self._holds.take_over()
        for path in remembered_runs(self._ranks):
            with self._turn:
                try:
                    if RunFolder(path).read_status().token == self._ranks.token:
                        self._of(path).take_over()
                except Exception as error:  # A full disk, a damaged folder: the cluster and its other runs go on.
                    log.warning("run %s is not looked after: %s", path, error)
                    with contextlib.suppress(Exception):  # What tells of it may be what is damaged.
                        self._of(path).left_behind(error)

    def settle(self, seconds: float) -> bool:
        """Wait until what has happened to the runs is written down; False when that took longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while any(run.active for run in self._all()) and time.monotonic() < deadline:
            time.sleep(_HOLD_POLL_SECONDS)
        return not any(run.active for run in self._all())

    def close(self) -> None:
        """Bring no run back any more."""
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
    """One run, as its supervisor sees it. Its methods are called by whoever has the turn of `SupervisedRuns`, but for
    those that say otherwise."""

    def __init__(
        self,
        folder: RunFolder,
        ranks: RunEngines,
        turn: threading.RLock,
        lock: threading.RLock,
        is_held: Callable[[], bool],
    ) -> None:
        self.folder = folder
        self.task: RunSubmission | None = None
        self.trouble: Exception | None = None
        """Why a waiting word could not be sent to the ranks; None again with the next word."""
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
        """Whether the ranks work on it, or will as soon as they are free, or it is about to be known. Called by
        anybody."""
        with self.lock:
            return self.task is not None or self._changing > 0

    @property
    def recovering(self) -> bool:
        """Whether engines are brought back for it, or it waits to try again. Called by anybody."""
        return self._recovery.under_way

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Has the turn. Inside, nobody finds the run at rest, as it is between two states. Called by anybody."""
        with self._turn:
            with self.lock:
                self._changing += 1
            try:
                yield
            finally:
                with self.lock:
                    self._changing -= 1

    def begin(self) -> None:
        self.trouble = None
        self._recovery.begin_anew()
        if self.task is None and not self._takes_what_is_left():  # Asked twice, across a takeover, it is one run.
            self._submit()

    def post(self, word: str, arguments: dict[str, Any], key: str = "") -> int:
        if self._wire is not None:
            self._wire.refuse(word)
        self._recovery.hand_over()
        number = self.folder.number_of(key) if key else None
        if number is None:
            number = self.folder.post(word, key=key, **arguments)
        if self.task is not None and self._wire is not None:
            self._wire.give_word(number)
        self.attend()
        return number

    def attend(self) -> None:
        """Submit if a word waits and nobody works on the run. Raises ClusterError when an engine is dead, and
        RunFolderError for a run that this version cannot go on with."""
        self.trouble = None
        if self.task is not None or self._is_held() or self.recovering or not self.waiting():
            return
        try:
            if dead := sorted(self._ranks.dead):
                raise ClusterError(without_hosts(self.folder, self._ranks) or self._ranks.way_back(dead))
            self.folder.require_known()
            self.note_processes(self._ranks.pids)
            self._submit()
        except (ClusterError, RunFolderError):  # Also where an engine dies just now: it is not done much later.
            self._drop_waiting(self.folder.read_status())
            raise

    def attend_later(self) -> None:
        """As `attend`, where nobody waits for an answer: what it raises is the run's `trouble`."""
        try:
            self.attend()
        except (ClusterError, RunFolderError) as trouble:
            self._in_vain(trouble)

    def standing(self) -> RunStatus:
        """Called by anybody."""
        with self.lock:
            trouble = self.trouble
            return RunStatus(
                active=self.active,
                recovering=self.recovering,
                trouble=str(trouble) if trouble is not None else "",
                trouble_kind=type(trouble).__name__ if trouble is not None else "",
            )

    def take_over(self) -> None:
        """Go on where an earlier supervisor has left it."""
        taken = self._takes_what_is_left()
        if not self._recovery.take_over(rests=not taken) and not taken:
            self._go_on()

    def _takes_what_is_left(self) -> bool:
        """Whether an earlier supervisor has let the ranks work on it and nobody has heard how that ended."""
        left = self._ranks.left_of(str(self.folder.path))
        if left is None:
            return False
        state = self.folder.read_status().state
        if is_kept(self.folder, left.id):  # It has ended, on all ranks.
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
        """It is not brought back. Called by anybody."""
        self._recovery.stop()

    def leave(self, trouble: Exception) -> None:
        """It cannot be brought back: words that wait for it are not carried out, and whoever asks is told why."""
        self.trouble = trouble
        self._drop_waiting(self.folder.read_status())

    def left_behind(self, trouble: Exception) -> None:
        """It was to go on under this supervisor, and cannot. Nobody has asked, so the status tells of it."""
        self.trouble = trouble
        status = self.folder.read_status()
        unfinished = status.state in (RunState.PAUSED, RunState.FAILED) and status.token == self._ranks.token
        if unfinished and self.task is None:
            before = "" if status.text in ("", UNSUPERVISED) else f"{status.text}\n"
            text = f"{before}the supervisor ended, and under the next one the run could not go on: {trouble}"
            text = f"{text[: _TEXT_LIMIT - len(_WAY_ON)]}{_WAY_ON}"
            self._drop_waiting(replace(status, text=text))

    def _in_vain(self, trouble: Exception) -> None:
        """A word could not be carried out for which nobody waits any more."""
        self.trouble = trouble
        if self.folder.read_status().text == UNSUPERVISED:  # That promises that it goes on.
            self.left_behind(trouble)

    def _go_on(self) -> None:
        """Attend to words, the one included that a run waits for which has paused for want of a supervisor."""
        status = self.folder.read_status()
        if status.state is RunState.PAUSED and status.text == UNSUPERVISED and not self.waiting():
            self.folder.post("resume")
        self.attend()

    def waiting(self) -> list[RunCommand]:
        """Words that nobody has carried out."""
        return self.folder.pending(self.folder.read_status().command)

    def _drop_waiting(self, status: Status) -> None:
        """Write `status`, with the waiting words counted as done. Only while no rank advances the run."""
        last = max([status.command, *(command.number for command in self.folder.pending(status.command))])
        self.folder.write_status(replace(status, command=last))

    def note_processes(self, pids: tuple[int, ...]) -> None:
        """Keep true in the status which engines hold the run, after one was restarted."""
        status = self.folder.read_status()
        if (status.rank_pids, status.token) != (pids, self._ranks.token):
            self.folder.write_status(replace(status, rank_pids=pids, token=self._ranks.token))

    def _follow_ranks(self, *, give: bool = False) -> None:
        """Where not all hosts see the folder, what ranks write there is taken in from now on. `give`: after they were
        given what it says."""
        self._wire = self._ranks.wire(self.folder)
        if self._wire is not None:
            if give:
                self._wire.give()
            self._wire.follow()

    def _submit(self) -> None:
        self._follow_ranks(give=True)
        self._given = self.waiting()
        try:
            self.task = self._ranks.submit(remote.advance, str(self.folder.path), label=str(self.folder.path))
        except BaseException:
            if self._wire is not None:
                self._wire.close()
            raise
        self.task.add_done_callback(self._ended_elsewhere)

    def _ended_elsewhere(self, task: RunSubmission) -> None:
        # The callback comes on a thread that others wait for, and what follows waits for files.
        threading.Thread(target=self._ended, args=(task,), name="speedlab-run-ended", daemon=True).start()

    def _ended(self, task: RunSubmission) -> None:
        if self._wire is not None:
            try:
                self._wire.settle()
            except Exception as trouble:  # A full disk: what there is has to do.
                log.warning("the rest of what ranks of %s wrote cannot be taken in: %s", self.folder.name, trouble)
        with self.changing():
            try:
                self._account_for(task.error, task.id)
            except Exception as trouble:  # For example: somebody has removed the folder under the run.
                self.trouble = trouble
            if self.task is task:
                self.task = None
            if self.trouble is None:
                try:
                    if not self._recovery.begin(task.error, task.id):
                        self._go_on()
                except Exception as trouble:
                    self.trouble = trouble
                    with contextlib.suppress(Exception):  # The status may be what cannot be read.
                        self._in_vain(trouble)

    def _account_for(self, error: RankError | None, submission: str) -> None:
        """Keep the error and see that the status tells of it; drop what nobody will carry out."""
        status = self.folder.read_status()
        if error is not None and error.only_interrupted:
            # No rank has come to say so, or the one that tells took it for the failure of another.
            if status.state not in RESTING or (status.state is RunState.FAILED and error.stopped):
                status = replace(status, state=RunState.PAUSED, text="")
        elif error is not None:
            status = self._failed(error, submission, status)
        ignored = bool(self._given) and status.command < self._given[0].number
        if error is not None or ignored:
            self._drop_waiting(status)

    def _failed(self, error: RankError, submission: str, status: Status) -> Status:
        """Keep the error; the status that tells of it."""
        if not is_kept(self.folder, submission):  # An earlier supervisor may have come so far.
            error.advice = advice(error, self.folder, self._ranks)
            with contextlib.suppress(Exception):  # The explanation must not hide what it explains.
                from speedlab.cluster.oom_report import out_of_memory_lines

                error.notes = out_of_memory_lines(error, self.folder, self._ranks.devices)
            try:
                keep_failure(self.folder, error, submission)
            except OSError as full:  # The status tells of it all the same.
                log.warning("what the ranks of %s raised cannot be kept: %s", self.folder.name, full)
        # When one rank fails the others are interrupted; to the one that writes the status this looks like a pause.
        if status.state not in RESTING - {RunState.PAUSED}:
            return replace(status, state=RunState.FAILED, text=str(error)[:_TEXT_LIMIT])
        return status
