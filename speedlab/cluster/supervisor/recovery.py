"""Bringing a run back that has failed: dead engines are started again, and it goes on from a checkpoint.

`recover: {attempts: 3, from: newest}` in the configuration asks for it. The first attempt comes at once, each further
one after a pause twice as long as the last; attempts count until a newer checkpoint was written, so that a run that
fails now and then goes on for ever and one that always fails at the same place ends. An attempt that itself fails, as
one whose engines do not come up, counts like one after which the run fails again.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speedlab.cluster.errors import INTERRUPTED, ClusterError, RankError, name_ranks
from speedlab.telemetry.checkpoints import newest
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.writer import note

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.runs import Ranks, Run

log = logging.getLogger("speedlab.supervisor")

FIRST_PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 60.0


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
    """The attempts to bring one run back. Called with the lock of `Runs`, but for its own thread."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._failed = 0
        """Attempts since the newest checkpoint was written."""
        self._from_step = -1
        self._attempt: Attempt | None = None

    @property
    def under_way(self) -> bool:
        return self._attempt is not None

    def begin(self, error: RankError | None) -> bool:
        """Bring the run back after `error`, on a thread of its own; False when that was not asked for, or no more."""
        folder = self._run.folder
        if error is None or folder.read_status().state is not RunState.FAILED or folder.config.recover.attempts == 0:
            return False
        if all(failure.kind == INTERRUPTED for failure in error.by_rank.values()):
            return False  # Somebody wanted it to stop.
        self._attempt = self._next(_cause(error))
        if self._attempt is not None:
            threading.Thread(target=self._go, args=(self._attempt,), name="speedlab-recovery", daemon=True).start()
        return self.under_way

    def begin_anew(self) -> None:
        """A new run: what an earlier one at this place went through does not count."""
        self._failed, self._from_step = 0, -1

    def hand_over(self) -> None:
        """Somebody speaks to the run: what is under way is brought to its end at once, and then his words count. Until
        then they wait."""
        if self._attempt is not None:
            self._attempt.by_hand = True
            self._attempt.wake.set()

    def stop(self) -> None:
        """No further attempt: nobody wants the run back."""
        if self._attempt is not None:
            self._attempt.given_up = True
            self._attempt.wake.set()
        self._attempt = None

    def _next(self, cause: str) -> Attempt | None:
        """The attempt that follows `cause`, announced; None when there is none."""
        folder = self._run.folder
        most, kept = folder.config.recover.attempts, newest(folder.path / "checkpoints")
        if kept is None:
            self._note("there is no checkpoint from which recover could go on")
            return None
        if (step := kept.step) > self._from_step:
            self._failed, self._from_step = 0, step
        if self._failed >= most:
            self._note(
                f"it failed again after {self._failed} attempts from step {step}: recover.attempts is at its end"
            )
            return None
        pause = 0.0 if self._failed == 0 else min(FIRST_PAUSE_SECONDS * 2 ** (self._failed - 1), MOST_PAUSE_SECONDS)
        self._failed += 1
        what = f"attempt {self._failed} of {most} {f'in {pause:g} s' if pause else 'at once'}"
        self._note(f"{cause}; {what}, from step {step}")
        return Attempt(pause)

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
        from speedlab.cluster.shapes import change_shape, shapes_on

        before, after = shapes_on(folder, had, left)
        if lost:
            ranks.resize(left)
        change_shape(folder, before, had, after, left, step=status.step, started=begun)

    def _resume(self, attempt: Attempt) -> None:
        with self._run._lock:
            if attempt.given_up:
                return
            self._attempt = None
            if not attempt.by_hand:
                kept, wanted = newest(self._run.folder.path / "checkpoints"), self._run.folder.config.recover.checkpoint
                assert kept is not None, "looked at when the attempt began"
                self._run.folder.post("resume", tag=kept.path.name if wanted == "newest" else wanted)
            self._run.attend()

    def _after(self, trouble: Exception, attempt: Attempt) -> Attempt | None:
        """The next attempt; None when there is none, and the run is left as it is."""
        with self._run._lock:
            if attempt.given_up:
                return None
            self._attempt = None if attempt.by_hand else self._next(str(trouble).partition("\n")[0])
            if self._attempt is None:
                self._run.leave(trouble)
            return self._attempt

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
