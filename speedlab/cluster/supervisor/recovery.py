"""Recover a failed run: restart dead engines and resume from a checkpoint.

`recover: {attempts: 3, from: newest}` in the configuration enables it.

1. The first attempt starts at once. Each further attempt waits twice as long as the one before.
2. Attempts count until a newer checkpoint is written. So a run that fails now and then continues for ever, and a run
   that always fails at the same step ends.
3. An attempt that fails itself, for example because an engine does not start, counts like a failure of the run.
4. The count is stored in the run folder (`recovery.json`). If the supervisor ends, the next one continues the attempt
   after the rest of its pause, and keeps counting.

`advice` and `without_hosts` describe what a user can do with a failed run.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from speedlab.cluster.errors import DIED, ClusterError, RankError, name_ranks, newest_failure
from speedlab.telemetry.checkpoint_index import newest
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.run_folder import RunFolder, write_atomically
from speedlab.telemetry.writer import note

if TYPE_CHECKING:
    from pathlib import Path

    from speedlab.cluster.supervisor.runs import RunEngines, SupervisedRun


log = logging.getLogger("speedlab.supervisor")

FIRST_PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 60.0


class AttemptCount(msgspec.Struct, kw_only=True):
    """The count of attempts, as `recovery.json` stores it."""

    token: str
    """Id of the cluster; attempts in another cluster do not count."""
    failed: int = 0
    """Attempts after the newest checkpoint was written."""
    from_step: int = -1
    """Step of that checkpoint."""
    answered: str = ""
    """Id of the last failed submission that was handled: whether an attempt follows is decided."""
    due: float | None = None
    """Start time of the current attempt, in seconds since the epoch; None without an attempt."""


@dataclass(eq=False)
class Attempt:
    """One attempt, from its announcement to its end."""

    pause_seconds: float
    wake: threading.Event = field(default_factory=threading.Event)
    """Set to end the pause before the attempt."""
    by_hand: bool = False
    """Whether the user has posted a command meanwhile: engines are restarted, and then the command decides."""
    given_up: bool = False
    """Whether the attempt was cancelled."""


class Recovery:
    """The attempts to recover one run.

    Callers hold `SupervisedRuns._turn`, except for `under_way`, `stop` and the thread of the recovery.
    """

    def __init__(self, run: SupervisedRun, ranks: RunEngines) -> None:
        self._run, self._ranks = run, ranks
        self._count = AttemptCount(token=ranks.token)
        self._attempt: Attempt | None = None

    @property
    def under_way(self) -> bool:
        """Whether an attempt is waiting or in progress."""
        return self._attempt is not None

    def begin(self, error: RankError | None, submission: str) -> bool:
        """Recover the run after a failed submission, on a separate thread.

        Args:
            error: Error of the submission; None if it did not fail.
            submission: Id of the submission.

        Returns:
            False if recovery is not configured, not possible, or its attempts are used up.
        """
        folder = self._run.folder
        if error is None or error.only_interrupted:
            return False  # A user who interrupts a run wants it to stop.
        if folder.read_status().state is not RunState.FAILED or folder.config.recover.attempts == 0:
            return False
        self._count.answered = submission
        self._start(self._next(_cause(error)))
        return self.under_way

    def begin_again(self) -> None:
        """Reset the count for a new run in the same folder."""
        self._count = AttemptCount(token=self._ranks.token)

    def take_over(self, *, rests: bool) -> bool:
        """Continue the attempt and the count of an earlier supervisor.

        Args:
            rests: Whether no rank works on the run.

        Returns:
            Whether an attempt is in progress now.
        """
        folder = self._run.folder
        self._count = self._read()
        most = folder.config.recover.attempts
        if not rests or not most or folder.read_status().state is not RunState.FAILED:
            self._keep(due=None)
            return False
        by_hand = bool(self._run.waiting())
        if (due := self._count.due) is not None:
            pause = 0.0 if by_hand else min(max(0.0, due - time.time()), MOST_PAUSE_SECONDS)
            what = f"attempt {self._count.failed} of {most} {f'in {pause:.1f} s' if pause else 'at once'}"
            self._note(f"the supervisor ended meanwhile; the next one makes {what}, from step {self._count.from_step}")
            self._start(Attempt(pause, by_hand=by_hand))
        elif not by_hand and (last := newest_failure(folder)) is not None and last[0] != self._count.answered:
            return self.begin(last[1], last[0])
        return self.under_way

    def hand_over(self) -> None:
        """Let a command of the user take over: the current attempt restarts the engines at once, then the command
        executes.
        """
        with self._run.lock:
            if self._attempt is not None:
                self._attempt.by_hand = True
                self._attempt.wake.set()

    def stop(self) -> None:
        """Cancel the current attempt."""
        with self._run.lock:
            if self._attempt is not None:
                self._attempt.given_up = True
                self._attempt.wake.set()
                self._attempt = None
                self._keep(due=None)

    def _start(self, attempt: Attempt | None) -> None:
        self._attempt = attempt
        if attempt is not None:
            threading.Thread(target=self._go, args=(attempt,), name="speedlab-recovery", daemon=True).start()

    def _next(self, cause: str) -> Attempt | None:
        """Announce and return the attempt that follows `cause`; None if there is none."""
        folder, count = self._run.folder, self._count
        most, kept = folder.config.recover.attempts, newest(folder.path / "checkpoints")
        if kept is None:
            self._keep(due=None)
            self._note("there is no checkpoint from which recover could go on")
            return None
        if (step := kept.step) > count.from_step:
            count.failed, count.from_step = 0, step
        if count.failed >= most:
            self._keep(due=None)
            self._note(
                f"it failed again after {count.failed} attempts from step {step}: recover.attempts is at its end"
            )
            return None
        pause = 0.0 if count.failed == 0 else min(FIRST_PAUSE_SECONDS * 2 ** (count.failed - 1), MOST_PAUSE_SECONDS)
        count.failed += 1
        # Record it before the announcement: a takeover in between then announces it.
        self._keep(due=time.time() + pause)
        what = f"attempt {count.failed} of {most} {f'in {pause:g} s' if pause else 'at once'}"
        self._note(f"{cause}; {what}, from step {step}")
        return Attempt(pause)

    # ---- stored count ------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._run.folder.path / "recovery.json"

    def _keep(self, *, due: float | None) -> None:
        """Store the count.

        Args:
            due: Start time of the current attempt; None without one.
        """
        self._count.due = due
        if self._count == AttemptCount(token=self._ranks.token) and not self._path.exists():
            return  # A run that has never failed needs no file.
        try:
            write_atomically(self._path, msgspec.json.encode(self._count).decode())
        except OSError as full:  # Recovery works without the file; only a takeover loses the count.
            log.warning("how often %s was brought back cannot be kept: %s", self._run.folder.name, full)

    def _read(self) -> AttemptCount:
        fresh = AttemptCount(token=self._ranks.token)
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=AttemptCount)
        except FileNotFoundError:
            return fresh
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("attempts are counted from the first one: %s: %s", self._path, error)
            return fresh
        return found if found.token == fresh.token else fresh

    # ---- on the recovery thread --------------------------------------------------------------------------------------

    def _go(self, attempt: Attempt | None) -> None:
        while attempt is not None:
            _waited(attempt.wake, attempt.pause_seconds)
            begun = time.perf_counter()
            try:
                if not attempt.given_up:
                    self._bring_engines_back()
                self._resume(attempt)
            except Exception as trouble:
                log.exception("run %s could not be brought back", self._run.folder.name)
                attempt = self._after(trouble, attempt)
            else:
                log.info("run %s is back after %.2f s", self._run.folder.name, time.perf_counter() - begun)
                return

    def _bring_engines_back(self) -> None:
        """Restart dead engines. If a host is lost, continue on fewer engines if the layout allows that.

        Raises:
            ClusterError: If no host is left or an engine does not start.
            ConfigError: If the configuration does not fit the remaining engines.
            LayoutError: If no such layout exists; names the nearest layouts.
        """
        begun, ranks, folder = time.perf_counter(), self._ranks, self._run.folder
        lost = set(ranks.lost_ranks)
        if dead := [rank for rank in sorted(ranks.dead) if rank not in lost]:
            ranks.restart(*dead)
        status = folder.read_status()
        had = len(status.rank_pids) or len(ranks.devices)
        left = len(ranks.devices) - len(lost)
        if left == 0:
            raise ClusterError(ranks.way_back(sorted(lost)))
        if had == left:
            return
        from speedlab.cluster.run_commands import change_shape, shapes_on

        before, after = shapes_on(folder, had, left)
        if lost:
            ranks.resize(left)
        change_shape(folder, before, had, after, left, step=status.step, started=begun)
        self._run.note_processes(ranks.pids)  # A later supervisor finds the changed processes in the status.

    def _resume(self, attempt: Attempt) -> None:
        with self._run.changing():
            with self._run.lock:
                if attempt.given_up:
                    return
                self._attempt = None
            if not attempt.by_hand:
                kept, wanted = newest(self._run.folder.path / "checkpoints"), self._run.folder.config.recover.checkpoint
                assert kept is not None, "looked at when the attempt began"
                self._run.folder.post("resume", tag=kept.path.name if wanted == "newest" else wanted)
            self._run.attend()
            self._keep(due=None)

    def _after(self, trouble: Exception, attempt: Attempt) -> Attempt | None:
        """Return the next attempt; None if there is none, and the run stays failed."""
        with self._run.changing():
            if attempt.given_up:
                return None
            following = None if attempt.by_hand else self._next(str(trouble).partition("\n")[0])
            if following is None:
                self._keep(due=None)
                self._run.leave(trouble)
            with self._run.lock:
                if not attempt.given_up:
                    self._attempt = following
                    return following
                self._keep(due=None)  # `stop` was called just now.
                return None

    def _note(self, text: str) -> None:
        """Record an event. Call only while no rank advances the run."""
        step = self._run.folder.read_status().step
        note(self._run.folder, Event(kind="recovering", step=step, time=time.time(), text=text))


def _waited(stopped: threading.Event, seconds: float) -> bool:
    """Return whether the event was set within these seconds."""
    return stopped.wait(seconds)


def _cause(error: RankError) -> str:
    ranks, failure = error.groups[0]
    return f"{name_ranks(ranks)}: {failure.kind}"


def advice(error: RankError, folder: RunFolder, ranks: RunEngines) -> str | None:
    """Return what the user can do after `error`; None if the text of the error says it already.

    Args:
        error: Error of the run.
        folder: Folder of the run.
        ranks: Engines of the cluster.
    """
    if any(failure.kind == DIED for failure in error.by_rank.values()):
        return without_hosts(folder, ranks)
    kept = newest(folder.path / "checkpoints")
    back = f" · go back: run.resume(step={kept.step})" if kept is not None else ""
    return f"The engines are idle and keep their state. {error.way_to_look}{back} · full trace: run.errors[-1]"


def without_hosts(folder: RunFolder, ranks: RunEngines) -> str | None:
    """Return how the run can continue without lost hosts, or after they are back; None if no host is lost.

    Args:
        folder: Folder of the run.
        ranks: Engines of the cluster.
    """
    lost = sorted(ranks.lost_ranks)
    if not lost:
        return None
    kept, left = newest(folder.path / "checkpoints"), len(ranks.devices) - len(lost)
    if kept is None:
        return f"{ranks.way_back(lost)}; the run has no checkpoint, and can only be started again"
    without = f"run.reshape(engines={left})"
    try:
        from speedlab.cluster.run_commands import shapes_on

        had = len(folder.read_status().rank_pids) or len(ranks.devices)
        layout = shapes_on(folder, had, left)[1].layout(left, built_in=False)
        way = f"{without} goes on from step {kept.step} as {layout}"
    except ValueError as error:
        way = f"{without} needs another layout: {error}" if left else "no host is left"
    return f"{ranks.way_back(lost)} and run.resume() goes on from step {kept.step}; without: {way}"
