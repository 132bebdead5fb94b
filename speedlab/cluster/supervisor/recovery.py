"""Bringing a run back that has failed: dead engines are started again, and it goes on from a checkpoint.

`recover: {attempts: 3, from: newest}` in the configuration asks for it. The first attempt comes at once, each further
one after a pause twice as long as the last; attempts count until a newer checkpoint was written, so that a run that
fails now and then goes on for ever and one that always fails at the same place ends. An attempt that itself fails, as
one whose engines do not come up, counts like one after which the run fails again.

What counts is kept in the run's folder (`recovery.json`): where the supervisor itself ends, the next one takes the
attempt up that was under way, after what is left of its pause, and counts on.

What a person can do next with a run that has failed, in words.
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
    """What counts, as it is kept."""

    token: str
    """Of the cluster; what the run went through in another one does not count."""
    failed: int = 0
    """Attempts since the newest checkpoint was written."""
    from_step: int = -1
    """Of that checkpoint."""
    answered: str = ""
    """The submission whose failure was seen last: whether an attempt follows it is decided."""
    due: float | None = None
    """When the attempt that is under way begins, or began, since the epoch; None while none is."""


@dataclass(eq=False)
class Attempt:
    """One attempt, from its announcement to its end."""

    pause_seconds: float
    wake: threading.Event = field(default_factory=threading.Event)
    """Ends the pause before it."""
    by_hand: bool = False
    """Somebody has spoken to the run meanwhile: engines are brought back, and his words count."""
    given_up: bool = False
    """Nothing of it counts any more."""


class Recovery:
    """The attempts to bring one run back. Called by whoever has the turn of `Runs`, but for `under_way`, `stop` and its
    own thread."""

    def __init__(self, run: SupervisedRun, ranks: RunEngines) -> None:
        self._run, self._ranks = run, ranks
        self._count = AttemptCount(token=ranks.token)
        self._attempt: Attempt | None = None

    @property
    def under_way(self) -> bool:
        return self._attempt is not None

    def begin(self, error: RankError | None, submission: str) -> bool:
        """Bring the run back after the `error` of this submission, on a thread of its own; False when that was not
        asked for, or no more."""
        folder = self._run.folder
        if error is None or error.only_interrupted:
            return False  # Whoever has interrupted it wanted it to stop.
        if folder.read_status().state is not RunState.FAILED or folder.config.recover.attempts == 0:
            return False
        self._count.answered = submission
        self._start(self._next(_cause(error)))
        return self.under_way

    def begin_anew(self) -> None:
        """A new run: what an earlier one at this place went through does not count."""
        self._count = AttemptCount(token=self._ranks.token)

    def take_over(self, *, rests: bool) -> bool:
        """Count on where an earlier supervisor has ended, and take the attempt up that was under way; True where one is
        now. `rests`: whether the run waits for nothing that the ranks were given."""
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
        """Somebody speaks to the run: what is under way is brought to its end at once, and then his words count. Until
        then they wait."""
        with self._run.lock:
            if self._attempt is not None:
                self._attempt.by_hand = True
                self._attempt.wake.set()

    def stop(self) -> None:
        """No further attempt: nobody wants the run back."""
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
        """The attempt that follows `cause`, announced; None when there is none."""
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
        self._keep(due=time.time() + pause)  # Before it is announced: who takes over says that it was.
        what = f"attempt {count.failed} of {most} {f'in {pause:g} s' if pause else 'at once'}"
        self._note(f"{cause}; {what}, from step {step}")
        return Attempt(pause)

    # ---- what is kept ------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._run.folder.path / "recovery.json"

    def _keep(self, *, due: float | None) -> None:
        """`due`: of the attempt that is under way from now on."""
        self._count.due = due
        if self._count == AttemptCount(token=self._ranks.token) and not self._path.exists():
            return  # A run that has never failed has no such file.
        try:
            write_atomically(self._path, msgspec.json.encode(self._count).decode())
        except OSError as full:  # It is brought back all the same, and only a takeover knows less.
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

    # ---- on its own thread -------------------------------------------------------------------------------------------

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
        """Dead ones are started again; where their host is lost, the run goes on without, if its layout allows that.

        Raises ClusterError, or ConfigError or LayoutError with the nearest layouts."""
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
        self._run.note_processes(ranks.pids)  # Who takes over finds it changed.

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
        """The next attempt; None when there is none, and the run is left as it is."""
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
                self._keep(due=None)  # Somebody has stopped it just now.
                return None

    def _note(self, text: str) -> None:
        """Only while no rank advances the run."""
        step = self._run.folder.read_status().step
        note(self._run.folder, Event(kind="recovering", step=step, time=time.time(), text=text))


def _waited(stopped: threading.Event, seconds: float) -> bool:
    """Whether somebody took over within these seconds."""
    return stopped.wait(seconds)


def _cause(error: RankError) -> str:
    ranks, failure = error.groups[0]
    return f"{name_ranks(ranks)}: {failure.kind}"


def advice(error: RankError, folder: RunFolder, ranks: RunEngines) -> str | None:
    """Look at the ranks, go back to the last checkpoint, read the whole trace; None where the error's own words do."""
    if any(failure.kind == DIED for failure in error.by_rank.values()):
        return without_hosts(folder, ranks)
    kept = newest(folder.path / "checkpoints")
    back = f" · go back: run.resume(step={kept.step})" if kept is not None else ""
    return f"The engines are idle and keep their state. {error.way_to_look}{back} · full trace: run.errors[-1]"


def without_hosts(folder: RunFolder, ranks: RunEngines) -> str | None:
    """How the run can go on without the hosts that are lost, or once they are back; None where none is lost."""
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
