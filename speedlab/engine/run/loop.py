"""The loop of a run: a step, and what is due after it - evaluation, record, checkpoint, end."""

from __future__ import annotations

from contextlib import nullcontext

from speedlab.engine.checkpoint import CheckpointError, Saving, prune
from speedlab.engine.run.agreement import Parted, together
from speedlab.engine.run.reporting import Reporter
from speedlab.engine.run.slow_disk import SlowDisk
from speedlab.engine.run.supervised import Supervised
from speedlab.engine.run.training import Training
from speedlab.telemetry.folder import UNSUPERVISED
from speedlab.telemetry.records import RunState


class Loop:
    """Moves a training on step by step, and says so."""

    def __init__(self, training: Training, reporter: Reporter) -> None:
        self._training, self._reporter = training, reporter
        self._saving: Saving | None = None
        """A save in the background that was not told of yet."""
        self._slow_disk = SlowDisk()
        self._supervised = Supervised()

    def step(self) -> bool:
        """One optimizer step and what is due after it. True when a control word waits."""
        training, engine = self._training, self._training.engine
        step = engine.global_step
        engine.clock.begin()
        engine.train()
        traced = self._traces(step)
        with engine.trace_activations() if traced else nullcontext(), training.first_batch.watching():
            # Words are read at the last moment before the reduction that carries them: a later one waits a step.
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
            training.interruption.heard()  # The run stops behind this step; what is due before may take its time.
        done = engine.global_step
        updated = done > step  # Else it was skipped, and what is due at this number is done.
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
        """Tell of a save in the background that has ended; with `wait`, of the one that is under way."""
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
        self.report_saving(wait=True)  # The next save waits for it anyway, and would take its place.
        folder = training.folder.path / "checkpoints"
        try:
            together(training, lambda: training.engine.save_checkpoint(folder, wait=False))
        except Parted as parted:
            self._reporter.event("warning", f"checkpoint: {parted}")  # A full disk must not cost the run.
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
