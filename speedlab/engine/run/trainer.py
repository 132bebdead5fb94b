"""A run inside the engines: built, trained, asked by control words, left and come back to; all ranks at the same step.

What it holds is a `Training`; `reporting` tells of it, `loop` moves it on, `words` change it. None of them knows the
trainer.
"""

from __future__ import annotations

from speedlab.config import ConfigError
from speedlab.engine.checkpoint import newest
from speedlab.engine.engine import Engine
from speedlab.engine.run.diagnose import first_non_finite
from speedlab.engine.run.interrupt import Interruption
from speedlab.engine.run.loop import Loop
from speedlab.engine.run.reporting import Reporter
from speedlab.engine.run.training import ModelMaker, Training
from speedlab.engine.run.words import carry_out_pending
from speedlab.engine.step.errors import NonFiniteError
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import RunState


class Trainer:
    """One rank's part of a run."""

    def __init__(self, folder: RunFolder, model: ModelMaker | None) -> None:
        """Collective."""
        self.folder = folder
        self.training = Training(folder, model)
        self.reporter = Reporter(self.training)
        self._loop = Loop(self.training, self.reporter)
        self._started = False

    @property
    def engine(self) -> Engine:
        return self.training.engine

    def advance(self) -> RunState:
        """Carry out control words and train until the run pauses, ends or fails. All ranks return the same state."""
        training = self.training
        self.reporter.open()
        try:
            with Interruption() as interruption:
                if not self._started:
                    self._start()
                carry_out_pending(training, self.reporter)
                while training.state is RunState.RUNNING:
                    if self._loop.step(interruption):
                        carry_out_pending(training, self.reporter)
                self._loop.report_saving(wait=True)
            return training.state
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.reporter.close()

    def reconnect(self) -> None:
        """Join the world anew where it was left, and make sure that all ranks stand at the same step. Collective."""
        training = self.training
        training.reconnect()
        steps = training.control.collect([training.engine.global_step, training.engine.updating])
        if len({step for step, _ in steps}) == 1 and not any(updating for _, updating in steps):
            return
        kept = newest(self.folder.path / "checkpoints")
        if kept is None:
            training.state = RunState.FAILED
            raise ConfigError(
                f"the ranks were interrupted in the middle of an update and stand at steps {[s for s, _ in steps]}; "
                "there is no checkpoint to go back to: start the run again, with checkpoint.every_steps set"
            )
        training.engine.load_checkpoint(kept.parent, kept.name)
        self.reporter.event("warning", f"went back to {kept.name}: the interrupt came in the middle of an update")

    def close(self) -> None:
        self.training.close()

    def _start(self) -> None:
        """Go to the state the folder tells of: from the newest checkpoint when it has steps behind it, else from the
        start."""
        training = self.training
        status = self.folder.read_status()
        kept = newest(self.folder.path / "checkpoints")
        records = self.folder.path / "records" / "rank-0.jsonl"
        if kept is not None:
            training.engine.load_checkpoint(kept.parent, kept.name)
        elif records.exists() and records.stat().st_size:
            raise ConfigError(
                f"{self.folder.name}: its engines were restarted and do not hold its state, and it has no checkpoint; "
                "start it again under another name, with checkpoint.every_steps set"
            )
        if status.state in (RunState.STARTING, RunState.RUNNING):
            training.state = RunState.RUNNING
        self.reporter.started()
        if training.engine.global_step == 0 and training.config.eval.every_steps:
            self.reporter.event("evaluated", "before the first step", heldout_loss=training.evaluate())
        self.reporter.status()
        self._started = True

    # ---- failing -----------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Say what happened, leave the world so that no rank waits for this one, and keep the state for a look."""
        paused = isinstance(error, KeyboardInterrupt)
        self.training.state = RunState.PAUSED if paused else RunState.FAILED
        if isinstance(error, NonFiniteError):
            self._explain_non_finite(error)
        self.reporter.event("interrupted" if paused else "failed", str(error) or type(error).__name__)
        self.reporter.status("" if paused else f"{type(error).__name__}: {error}")
        if not isinstance(error, NonFiniteError | ConfigError):
            self.training.disconnect()

    def _explain_non_finite(self, error: NonFiniteError) -> None:
        """Run the step's micro-batches once more and name the first module whose output was not finite, by rank."""
        training, engine = self.training, self.engine
        found = first_non_finite(engine, training.batches(training.train_rows, engine.global_step))
        more = [
            f"the first output that is not finite is that of {name} on rank {rank}"
            for rank, name in enumerate(training.control.collect(found))
            if name
        ]
        kept = newest(self.folder.path / "checkpoints")
        more.append(f"the last good checkpoint is {kept.name}" if kept else "the run has no checkpoint yet")
        error.args = (f"{error}; {'; '.join(more)}",)
