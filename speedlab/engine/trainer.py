"""A run inside the engines: build it, train it, carry out control words, all ranks at the same step."""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.comm import Group, Traffic, World, join, leave
from speedlab.config import Batch, ConfigError
from speedlab.data import Corpus, Sampler, prepare
from speedlab.engine.checkpoint import CheckpointError, newest
from speedlab.engine.clock import StepCosts
from speedlab.engine.diagnose import first_non_finite, matmul_flops
from speedlab.engine.engine import Engine
from speedlab.engine.errors import NonFiniteError
from speedlab.engine.initialize import initialize
from speedlab.engine.interrupt import Interruption
from speedlab.models import GPT
from speedlab.planner.formula import flops_per_token
from speedlab.telemetry.folder import Command, RunFolder
from speedlab.telemetry.records import Event, RunState, StepRecord
from speedlab.telemetry.writer import RecordWriter

ModelMaker = Callable[[], nn.Module]


class Trainer:
    """One rank's part of a run."""

    def __init__(self, folder: RunFolder, model: ModelMaker | None) -> None:
        self.folder, self.config = folder, folder.config
        self.world: World = join()
        self.layout = self.config.layout(self.world.size)
        self.batch: Batch = self.config.batch.resolve(self.layout.dp)
        self.control = Group(range(self.world.size), Traffic(), self.world.device, channel="control")
        self.corpus: Corpus = self._on_all_ranks(self._prepare_data)
        self.train_rows = Sampler(self.corpus.train, self.config.data.sequence_length, self.config.seed)
        self.heldout_rows = Sampler(self.corpus.heldout, self.config.data.sequence_length, self.config.seed)
        torch.manual_seed(
            self.config.seed * 1000 + self.world.rank
        )  # Dropout differs by rank; initialisation does not.
        self.engine: Engine = initialize(model=model or self._make_gpt, config=self.config)[0]
        self._takes_targets = "targets" in inspect.signature(self.engine.module.forward).parameters
        self._flops = self._flops_per_token(model)
        self.state = RunState.PAUSED
        self.budget: int | None = None
        """Steps left before the run pauses by itself; None when it does not."""
        self.last_command = folder.read_status().command
        self.writer: RecordWriter | None = None
        self._started = False
        self._interruption = Interruption()
        self._trace_next = True

    def _prepare_data(self) -> Corpus:
        quiet = self.world.rank != 0
        corpus = prepare(self.config.data, progress=(lambda *_: None) if quiet else print)
        corpus.check_vocabulary(self.config.model.vocab_size)
        for tokens, name in ((corpus.train, "the training text"), (corpus.heldout, "the held-out text")):
            Sampler(tokens, self.config.data.sequence_length, 0, name=name)  # Raises when it is too short.
        return corpus

    def _make_gpt(self) -> nn.Module:
        return GPT(self.config.model)

    def _flops_per_token(self, model: ModelMaker | None) -> float:
        if model is None:
            return flops_per_token(self.config.model, self.config.data.sequence_length)
        return 6.0 * sum(flat.numel for flat in self.engine.flats)

    def _on_all_ranks(self, work: Callable[[], Any]) -> Any:
        """Run `work` on every rank; a ConfigError of one is raised on all, so that none waits for the others."""
        result, problem = None, None
        try:
            result = work()
        except ConfigError as error:
            problem = str(error)
        problems = [text for text in self.control.collect(problem) if text]
        if problems:
            raise ConfigError(problems[0])
        return result

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def advance(self) -> RunState:
        """Carry out control words and train until the run pauses, ends or fails. All ranks return the same state."""
        self.writer = RecordWriter(self.folder, self.world.rank, stream_hz=self.config.telemetry.stream_hz)
        # A client may have given up on words after a failure; they must not be carried out late.
        self.last_command = max(self.last_command, self.folder.read_status().command)
        try:
            with self._interruption:
                if not self._started:
                    self._start()
                self._carry_out_pending()
                while self.state is RunState.RUNNING:
                    command = self._step()
                    if command:
                        self._carry_out_pending()
            return self.state
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.writer.close()
            self._interruption = Interruption()

    def _step(self) -> bool:
        """One optimizer step. True when a control word waits."""
        engine, step = self.engine, self.engine.global_step
        engine.clock.take()
        engine.train()
        rows_of = self._rows_of(self.train_rows, step)
        every = self.config.telemetry.trace_every_steps
        traced = not self.config.compile and (self._trace_next or bool(every and step % every == 0))
        self._trace_next = False
        with engine.trace_activations() if traced else nullcontext():
            for index in range(self.batch.accumulation):
                with engine.clock.phase("data"):
                    rows = rows_of(index)
                loss = self._loss(rows)
                engine.backward(loss)
                # Read at the last moment before the reduction that carries them: what is asked later waits a step.
                last = engine.is_gradient_accumulation_boundary()
                engine.step((float(self._word_waits()), float(self._interruption.asked)) if last else ())
        costs = engine.clock.take()
        assert engine.totals is not None
        done = engine.global_step
        heldout = self._evaluate_if_due(done)
        self._write_record(done, costs, heldout, traced)
        self._save_if_due(done)
        word, interrupted = engine.totals.signals
        self._end_of_step(done, interrupted=interrupted > 0)
        return word > 0

    def _rows_of(self, sampler: Sampler, step: int) -> Callable[[int], Tensor]:
        micro, dp = self.batch.micro_size, self.batch.dp
        index = self.engine.group.index

        def rows(micro_index: int) -> Tensor:
            first = (micro_index * dp + index) * micro
            values = sampler.rows(step, self.batch.global_size, first, first + micro)
            return torch.from_numpy(values).to(self.world.device, non_blocking=True)

        return rows

    def _loss(self, rows: Tensor) -> Tensor:
        """Mean loss of the model on token rows (B, T + 1)."""
        tokens, targets = rows[:, :-1], rows[:, 1:]
        # Hugging Face models shift the labels themselves.
        output = self.engine(tokens, targets=targets) if self._takes_targets else self.engine(tokens, labels=tokens)
        return output.loss

    def _word_waits(self) -> bool:
        return self.world.rank == 0 and bool(self.folder.pending(self.last_command))

    def _end_of_step(self, step: int, *, interrupted: bool) -> None:
        if step >= self.config.steps:
            self._end(RunState.FINISHED, "finished", f"{step} steps")
        elif interrupted:
            self._end(RunState.PAUSED, "interrupted", "interrupted between two steps; the state is whole")
        elif self.budget is not None:
            self.budget -= 1
            if self.budget <= 0:
                self.budget = None
                self._end(RunState.PAUSED, "paused", "the steps asked for are done")

    def _end(self, state: RunState, kind: str, text: str) -> None:
        self.state = state
        self._event(kind, text)
        self._write_status()

    def _fail(self, error: BaseException) -> None:
        """Say what happened, leave the world so that no rank waits for this one, and keep the state for a look."""
        paused = isinstance(error, KeyboardInterrupt)
        self.state = RunState.PAUSED if paused else RunState.FAILED
        if isinstance(error, NonFiniteError):
            self._explain_non_finite(error)
        self._event("interrupted" if paused else "failed", str(error) or type(error).__name__)
        self._write_status(text="" if paused else f"{type(error).__name__}: {error}")
        if not isinstance(error, NonFiniteError | ConfigError):
            self.disconnect()

    def _explain_non_finite(self, error: NonFiniteError) -> None:
        """Run the step's micro-batches once more and name the first module whose output was not finite, by rank."""
        rows_of = self._rows_of(self.train_rows, self.engine.global_step)
        found = first_non_finite(
            self.engine, [lambda i=i: self._loss(rows_of(i)) for i in range(self.batch.accumulation)]
        )
        more = [
            f"the first output that is not finite is that of {name} on rank {rank}"
            for rank, name in enumerate(self.control.collect(found))
            if name
        ]
        kept = newest(self.folder.path / "checkpoints")
        more.append(f"the last good checkpoint is {kept.name}" if kept else "the run has no checkpoint yet")
        error.args = (f"{error}; {'; '.join(more)}",)

    # ---- control words -----------------------------------------------------------------------------------------------

    def _carry_out_pending(self) -> None:
        """Every control word that waits, in order; rank 0 reads the mailbox, all act on what it read."""
        commands = None
        if self.world.rank == 0:
            waiting = self.folder.pending(self.last_command)
            commands = [[command.number, command.word, command.arguments] for command in waiting]
        for number, word, arguments in self.control.share(commands):
            if self.state in (RunState.STOPPED, RunState.FINISHED) and word not in ("save", "stop"):
                self._answer(number, "warning", f"{word}: the run is {self.state.value}", error=True)
                continue
            self._carry_out(Command(number=number, word=word, arguments=arguments))

    def _carry_out(self, command: Command) -> None:
        start = time.perf_counter()
        actions = {
            "pause": self._pause,
            "resume": self._resume,
            "step": self._step_some,
            "stop": self._stop,
            "save": self._save,
            "reshape": self._reshape,
        }
        try:
            kind, text, details = actions[command.word](**command.arguments)
        except (CheckpointError, ConfigError, ValueError, TypeError) as error:
            self._answer(command.number, "warning", f"{command.word}: {error}", error=True)
            return
        self._answer(command.number, kind, text, **details, seconds=time.perf_counter() - start)

    def _answer(self, number: int, kind: str, text: str, **details: Any) -> None:
        self.last_command = number
        self._event(kind, text, command=number, **details)
        self._write_status()

    def _pause(self) -> tuple[str, str, dict[str, Any]]:
        self.state = RunState.PAUSED
        return "paused", f"after step {self.engine.global_step}", {}

    def _resume(self, step: int | None = None) -> tuple[str, str, dict[str, Any]]:
        text = ""
        if step is not None:
            path, _ = self.engine.load_checkpoint(self.folder.path / "checkpoints", f"step-{step:06d}")
            text = f"from {path.name}"
        self.state, self.budget = RunState.RUNNING, None
        return "resumed", text, {}

    def _step_some(self, n: int = 1) -> tuple[str, str, dict[str, Any]]:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"step: n is {n!r}; it is a whole number of at least 1")
        self.state, self.budget = RunState.RUNNING, n
        return "resumed", f"for {n} step{'s' if n > 1 else ''}", {}

    def _stop(self) -> tuple[str, str, dict[str, Any]]:
        if self.state is not RunState.FINISHED:
            self.state = RunState.STOPPED
        return "stopped", f"after step {self.engine.global_step}", {}

    def _save(self, tag: str | None = None) -> tuple[str, str, dict[str, Any]]:
        if tag is not None and (not tag or Path(tag).name != tag or tag.startswith(".")):
            raise ValueError(f"tag {tag!r} cannot name a folder; use letters, digits, '-' and '_'")
        path = self.engine.save_checkpoint(self.folder.path / "checkpoints", tag)
        return "checkpoint", path.name, {"bytes": sum(file.stat().st_size for file in path.iterdir())}

    def _reshape(self, zero: int) -> tuple[str, str, dict[str, Any]]:
        before = self.engine.zero_stage
        self.engine.reshape(zero=zero)
        self._trace_next = True
        return "reshaped", f"zero stage {before} → {zero}", {"before": before, "zero": zero}

    # ---- evaluation and checkpoints ----------------------------------------------------------------------------------

    def _evaluate_if_due(self, step: int) -> float | None:
        every = self.config.eval.every_steps
        if not every or (step % every and step != self.config.steps):
            return None
        return self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the configured number of held-out batches; the same rows at every call. Collective."""
        was_training = self.engine.module.training
        self.engine.eval()
        losses = [
            self._loss(self._rows_of(self.heldout_rows, batch)(index)).double()
            for batch in range(self.config.eval.batches)
            for index in range(self.batch.accumulation)
        ]
        self.engine.train(was_training)
        return float(self.engine.group.sum_scalars(torch.stack(losses).mean().reshape(1))) / self.engine.group.size

    def _save_if_due(self, step: int) -> None:
        every = self.config.checkpoint.every_steps
        if not every or step % every:
            return
        try:
            _, text, details = self._save()
        except CheckpointError as error:
            self._event("warning", f"checkpoint: {error}")  # A full disk must not cost the run.
            return
        self._event("checkpoint", text, **details)
        if self.world.rank == 0:
            kept = sorted((self.folder.path / "checkpoints").glob("step-*"))
            for old in kept[: -self.config.checkpoint.keep]:
                shutil.rmtree(old)

    # ---- records -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Go to the state the folder tells of: from the newest checkpoint when it has steps behind it, else from the
        start."""
        status = self.folder.read_status()
        kept = newest(self.folder.path / "checkpoints")
        records = self.folder.path / "records" / "rank-0.jsonl"
        if kept is not None:
            self.engine.load_checkpoint(kept.parent, kept.name)
        elif records.exists() and records.stat().st_size:
            raise ConfigError(
                f"{self.folder.name}: its engines were restarted and do not hold its state, and it has no checkpoint; "
                "start it again under another name, with checkpoint.every_steps set"
            )
        if status.state in (RunState.STARTING, RunState.RUNNING):
            self.state = RunState.RUNNING
        peak = matmul_flops(self.world.device, self.engine.dtype)
        details = {
            "parameters": sum(slot.numel for flat in self.engine.flats for slot in flat.slots),
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "optimizer": self.config.optimizer.name,
            "dp": self.layout.dp,
            "zero": self.engine.zero_stage,
            "peak_flops": sum(self.control.collect(peak)),
            "batch": str(self.batch),
        }
        text = f"{details['parameters']:,} parameters, {details['dtype']}, {self.layout}, {self.batch}"
        self._event("started", text, **details)
        if self.engine.global_step == 0 and self.config.eval.every_steps:
            self._event("evaluated", "before the first step", heldout_loss=self.evaluate())
        self._write_status()
        self._started = True

    def _write_record(
        self,
        step: int,
        costs: StepCosts,
        heldout: float | None,
        traced: bool,
    ) -> None:
        engine = self.engine
        assert engine.totals is not None
        assert self.writer is not None
        tokens = self.batch.global_size * self.config.data.sequence_length
        self.writer.write(
            StepRecord(
                step=step,
                rank=self.world.rank,
                time=time.time(),
                loss=engine.totals.loss,
                learning_rate=float(engine.optimizer.param_groups[0]["lr"]),
                grad_norm=engine.totals.grad_norm,
                loss_scale=engine.loss_scale.value,
                zero_stage=engine.zero_stage,
                tokens=tokens,
                flops=self._flops * tokens / self.world.size,
                seconds=costs.seconds,
                phases=costs.phases,
                sent_bytes=costs.sent_bytes,
                kernels=costs.kernels,
                ledger=engine.ledger(),
                heldout_loss=heldout,
                traced=traced,
            )
        )

    def _event(self, kind: str, text: str, command: int | None = None, **details: Any) -> None:
        if self.world.rank == 0 and self.writer is not None:
            step = self.engine.global_step
            self.writer.event(
                Event(kind=kind, step=step, time=time.time(), text=text, command=command, details=details)
            )

    def _write_status(self, text: str = "") -> None:
        if self.world.rank == 0:
            status = replace(
                self.folder.read_status(),
                state=self.state,
                step=self.engine.global_step,
                steps=self.config.steps,
                command=self.last_command,
                text=text,
            )
            self.folder.write_status(status)

    # ---- leaving and coming back -------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Close this rank's connections: peers that wait for it fail at once instead of at the timeout."""
        self.engine.disconnect()
        self.control.disconnect()
        leave()

    def reconnect(self) -> None:
        """Join the world anew where it was left, and make sure that all ranks stand at the same step. Collective."""
        self.world = join()
        self.control.reconnect()
        self.engine.reconnect()
        steps = self.control.collect([self.engine.global_step, self.engine.updating])
        if len({step for step, _ in steps}) == 1 and not any(updating for _, updating in steps):
            return
        kept = newest(self.folder.path / "checkpoints")
        if kept is None:
            self.state = RunState.FAILED
            raise ConfigError(
                f"the ranks were interrupted in the middle of an update and stand at steps {[s for s, _ in steps]}; "
                "there is no checkpoint to go back to: start the run again, with checkpoint.every_steps set"
            )
        self.engine.load_checkpoint(kept.parent, kept.name)
        self._event("warning", f"went back to {kept.name}: the interrupt came in the middle of an update")

    def close(self) -> None:
        self.engine.destroy(keep_parameters=False)
