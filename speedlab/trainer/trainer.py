"""The trainer of a run on one rank: it builds the run, executes commands, and trains; all ranks are at the same step.

- `Loop`: one step, and the evaluation, record, checkpoint and end that are due after it.
- `Trainer`: start, advance, pause, failure. It owns a `Training` (the state) and a `Reporter` (records and events).

Neither the training nor the reporter knows the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from speedlab.comm import PeerLost
from speedlab.data import save_tokenizer
from speedlab.engine.checkpoint import CheckpointError, Saving, prune
from speedlab.engine.engine import Engine
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.lr_schedule import follow_schedule
from speedlab.telemetry.checkpoint_index import newest, step_of
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import TOKENIZER, UNSUPERVISED, RunFolder, RunFolderError
from speedlab.trainer.cell_runner import CellRunner
from speedlab.trainer.collective_errors import CommandRefused, RanksDiverged, agreed, together
from speedlab.trainer.commands import refuse_overtaken, run_pending_commands, save
from speedlab.trainer.diagnostics import first_non_finite
from speedlab.trainer.health import SlowDisk, Supervised
from speedlab.trainer.live_cells import CutOff
from speedlab.trainer.reporting import Reporter
from speedlab.trainer.training_run import OwnModel, Training


class Loop:
    """Trains step by step and reports each step."""

    def __init__(self, training: Training, reporter: Reporter) -> None:
        self._training, self._reporter = training, reporter
        self._saving: Saving | None = None
        """A background save that has not been reported yet."""
        self._slow_disk = SlowDisk()
        self._supervised = Supervised()

    def step(self) -> bool:
        """Train one optimizer step and do what is due after it. Collective.

        Returns:
            Whether a command is pending.
        """
        training, engine = self._training, self._training.engine
        step = engine.global_step
        engine.clock.begin()
        engine.train()
        traced = self._traces(step)
        with engine.trace_activations() if traced else nullcontext(), training.first_batch.watching():
            # Read the mailbox right before the reduction that carries these flags. A later command waits one step.
            engine.train_batch(
                training.batches(training.train_rows, step),
                signals=lambda: (
                    float(self._word_waits()),
                    float(training.interruption.asked),
                    float(training.world.rank == 0 and self._supervised.ended()),
                ),
            )
        costs = engine.clock.take()
        assert engine.totals is not None
        word, interrupted, unsupervised = engine.totals.signals
        if interrupted:
            training.interruption.heard()  # The run stops after this step, so the work below is not forced to end.
        done = engine.global_step
        updated = done > step  # A skipped step has the number of the one before, whose due work is done.
        self._reporter.record(costs, heldout=self._evaluate_if_due(done) if updated else None, traced=traced)
        if (
            updated
            and (proved := training.first_batch.after_step(costs.phases.get("forward", costs.seconds / 3))) is not None
        ):
            kind, text, details = proved
            self._reporter.event(kind, text, **details)
        if slow := self._slow_disk.after_step(training.config.offload, costs):
            self._reporter.event("warning", slow)
        self.report_saving()
        if updated:
            self._save_if_due(done)
        self._end_of_step(done, interrupted=interrupted > 0, unsupervised=unsupervised > 0)
        return word > 0

    def report_saving(self, *, wait: bool = False) -> None:
        """Report a background save that has ended.

        Args:
            wait: Whether to wait for a save in progress.
        """
        saving = self._saving
        if saving is None or not (wait or saving.done):
            return
        self._saving = None
        try:
            path = saving.wait()
        except CheckpointError as error:
            self._reporter.event("warning", f"checkpoint: {error}")
            return
        self._reporter.event("checkpoint", path.name, bytes=saving.bytes, seconds=saving.seconds)
        if self._training.world.rank == 0:
            try:
                prune(path.parent, self._training.config.checkpoint.keep)
            except OSError as error:
                self._reporter.event("warning", f"checkpoint: an older one was not removed: {error}")

    def _traces(self, step: int) -> bool:
        training = self._training
        every = training.config.telemetry.trace_every_steps
        due = training.trace_next or bool(every and step % every == 0)
        training.trace_next = False
        return due and not training.config.compile

    def _word_waits(self) -> bool:
        return bool(self._reporter.waiting())

    def _evaluate_if_due(self, step: int) -> float | None:
        config = self._training.config
        every = config.eval.every_steps
        if not every or (step % every and step != config.steps):
            return None
        return self._training.evaluate()

    def _save_if_due(self, step: int) -> None:
        training = self._training
        every = training.config.checkpoint.every_steps
        if not every or step % every:
            return
        # The next save waits for this one anyway, and would replace it before its report.
        self.report_saving(wait=True)
        folder = training.folder.path / "checkpoints"
        try:
            together(training, lambda: training.engine.save_checkpoint(folder, wait=False))
        except RanksDiverged as parted:
            self._reporter.event("warning", f"checkpoint: {parted}")  # A full disk must not end the run.
            return
        self._saving = training.engine.saving

    def _end_of_step(self, step: int, *, interrupted: bool, unsupervised: bool) -> None:
        training = self._training
        if step >= training.config.steps:
            self._end(RunState.FINISHED, "finished", f"{step} steps")
        elif interrupted:
            self._end(RunState.PAUSED, "interrupted", "interrupted between two steps; the state is whole")
        elif training.budget is not None:
            training.budget -= 1
            if training.budget <= 0:
                training.budget = None
                self._end(RunState.PAUSED, "paused", "the steps asked for are done")
        elif unsupervised:
            self._end(RunState.PAUSED, "paused", UNSUPERVISED, status=UNSUPERVISED)

    def _end(self, state: RunState, kind: str, text: str, *, status: str = "") -> None:
        self._training.state = state
        self._reporter.event(kind, text)
        self._reporter.status(status)


_STARTS_AS = {state: state for state in (RunState.RUNNING, RunState.FINISHED, RunState.STOPPED)} | {
    RunState.STARTING: RunState.RUNNING
}
"""State in the run folder → state in new engines. All other states become PAUSED."""


class Trainer:
    """One rank's part of a run."""

    def __init__(self, folder: RunFolder, own_model: OwnModel | None, cells: CellRunner | None = None) -> None:
        """Build the run. Collective.

        Args:
            folder: Run folder.
            own_model: Makes the user's model; None for the GPT of the configuration.
            cells: Runs the user's cells between two steps.
        """
        self.folder = folder
        self.training = Training(folder, own_model, cells)
        self.reporter = Reporter(self.training)
        self._loop = Loop(self.training, self.reporter)
        self._started = False

    @property
    def engine(self) -> Engine:
        """The present engine, which a reshape replaces."""
        return self.training.engine

    def advance(self) -> RunState:
        """Execute commands and train until the run pauses, ends or fails. Collective.

        An error on one rank ends the advance of all ranks.

        Returns:
            State of the run, equal on all ranks.
        """
        training = self.training
        with training.interruption:
            try:
                self.reporter.open()
                self.reconnect()
                if not self._started:
                    self._start()
                else:
                    self._heed_status()
                run_pending_commands(training, self.reporter)
                while training.state is RunState.RUNNING:
                    if self._loop.step():
                        run_pending_commands(training, self.reporter)
                self._loop.report_saving(wait=True)
                training.engine.finish_update()  # The user may inspect the parameters of a paused run.
                refuse_overtaken(training, self.reporter)
                return training.state
            except CutOff as cut:
                training.interruption.heard()
                self._pause_separate(cut)
                refuse_overtaken(training, self.reporter)
                return training.state
            except BaseException as error:
                if isinstance(error, PeerLost) and training.interruption.asked:
                    error = KeyboardInterrupt()  # The peers were interrupted, too, and one left first.
                training.interruption.heard()  # Repeated signals of the cluster must not cut off the cleanup.
                self._fail(error)
                raise error
            finally:
                self.reporter.close()

    def reconnect(self) -> None:
        """Rejoin the world if this rank left it, and bring all ranks to the same step. Collective.

        Ranks that were interrupted inside an update go back to the newest checkpoint.

        Raises:
            CommandRefused: If the ranks differ and there is no checkpoint.
        """
        training = self.training
        training.reconnect()
        engine = training.engine
        # Equal step numbers are not enough: a rank may be inside an update, or have a delayed update pending.
        steps = training.control.collect([engine.global_step, engine.updating, engine.partitioned_optimizer.late or 0])
        if len({(step, late) for step, _, late in steps}) == 1 and not any(updating for _, updating, _ in steps):
            return
        kept = self._newest()
        if kept is None:
            training.state = RunState.FAILED
            raise CommandRefused(
                f"the ranks were interrupted in the middle of an update and stand at steps {[s for s, *_ in steps]}; "
                "there is no checkpoint to go back to: start the run again, with checkpoint.every_steps set"
            )
        training.changing = True
        training.engine.load_checkpoint(kept)
        training.changing = False
        self.reporter.event("warning", f"went back to {kept.name}: the interrupt came in the middle of an update")

    def keep(self, tell: Callable[[], object]) -> None:
        """Save this paused run if no checkpoint holds its steps, because another run needs the engines. Collective.

        Args:
            tell: Called before a checkpoint is written.

        Raises:
            CommandRefused: On all ranks, if the checkpoint cannot be written.
            KeyboardInterrupt: If this rank was interrupted.
        """
        training = self.training
        training.state = RunState.PAUSED
        with training.interruption:
            try:
                self.reporter.open()
                if self._meets_at_one_step():
                    self._save_where_unsaved(tell)
                if training.interruption.asked:  # The interrupt was meant for the other run.
                    raise KeyboardInterrupt
            finally:
                self.reporter.close()

    def _meets_at_one_step(self) -> bool:
        """Rejoin the world and return whether all ranks are at one step, possibly that of a checkpoint. Collective."""
        try:
            self.reconnect()
        except CommandRefused:
            return False
        return True

    def _save_where_unsaved(self, tell: Callable[[], object]) -> None:
        training, step = self.training, self.engine.global_step
        kept = self._newest()
        if kept is not None and step_of(kept) == step:
            return
        tell()
        try:
            answer = together(training, agreed(training.control, lambda: save(training)))
        except RanksDiverged as parted:
            raise CommandRefused(
                f"run {self.folder.name!r} is paused at step {step}, which no checkpoint holds, and cannot be saved to "
                f"make room for another run: {parted}; its stop() gives it up"
            ) from parted
        self.reporter.event(answer.kind, answer.text, **answer.details)

    def close(self) -> None:
        """Destroy the engine."""
        self.training.close()

    def _start(self) -> None:
        """Load the newest checkpoint, if there is one, and take the state from the run folder."""
        training = self.training
        kept = self._newest()
        if kept is not None:
            training.engine.load_checkpoint(kept)
            follow_schedule(training.engine.scheduler, training.config)
        state = agreed(training.control, lambda: self.folder.read_status().state)
        training.state = _STARTS_AS.get(state, RunState.PAUSED)
        if training.world.rank == 0:
            save_tokenizer(training.corpus.tokenizer, self.folder.path / TOKENIZER)
        self.reporter.started()
        if training.engine.global_step == 0 and training.config.eval.every_steps:
            self.reporter.event("evaluated", "before the first step", heldout_loss=training.evaluate())
        self.reporter.status()
        self._started = True

    def _heed_status(self) -> None:
        """Pause a run that this rank considers failed if the status file says that it is paused. Collective.

        The cluster sees the errors of all ranks and writes the correct state.
        """
        training = self.training
        if RunState.FAILED in training.control.collect(training.state):
            state = agreed(training.control, lambda: self.folder.read_status().state)
            if training.control.share(state) == RunState.PAUSED:
                training.state = RunState.PAUSED

    def _newest(self) -> Path | None:
        """Return the newest checkpoint that rank 0 sees in the folder. Collective."""
        folder = self.folder.path / "checkpoints"
        kept = agreed(self.training.control, lambda: newest(folder))
        name = self.training.control.share(kept.path.name if kept else None)
        return folder / name if name else None

    def _pause_separate(self, cut: CutOff) -> None:
        """Leave the world until the next advance, and pause a running run."""
        self.training.disconnect()
        if self.training.state is RunState.RUNNING:
            self.training.state = RunState.PAUSED
        self.reporter.event("interrupted", str(cut))
        self.reporter.status()

    # ---- failing -----------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Leave the world, so that no rank waits for this one, report the error, and keep the state for inspection."""
        paused = isinstance(error, KeyboardInterrupt)
        text = str(error) or ("in the midst of a step" if paused else type(error).__name__)
        self.training.state = RunState.PAUSED if paused else RunState.FAILED
        if isinstance(error, NonFiniteError):
            self._explain_non_finite(error)
        elif not isinstance(error, CommandRefused | RanksDiverged):  # All ranks raise these and stay connected.
            self.training.disconnect()
        # The disk may be the reason of the failure. The cluster then reports the error itself.
        with suppress(OSError, RunFolderError):
            self.reporter.event("interrupted" if paused else "failed", text)
            self.reporter.status("" if paused else f"{type(error).__name__}: {error}")

    def _explain_non_finite(self, error: NonFiniteError) -> None:
        """Run the micro-batches of the step again and add the first module with a non-finite output, by rank, to the
        error.
        """
        training, engine = self.training, self.engine
        try:
            found = first_non_finite(engine, training.batches(training.train_rows, engine.global_step))
            reports = training.control.collect(found)
        except Exception as more:  # The original error matters more than this search.
            error.add_note(f"which module it was could not be found: {type(more).__name__}: {more}")
            training.disconnect()
            return
        reported = [
            f"the first output that is not finite is that of {name} on rank {rank}"
            for rank, name in enumerate(reports)
            if name
        ]
        kept = newest(self.folder.path / "checkpoints")
        reported.append(f"the last good checkpoint is {kept.path.name}" if kept else "the run has no checkpoint yet")
        error.args = (f"{error}; {'; '.join(reported)}",)
