"""A run inside the engines: build it, train it, carry out control words, all ranks at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.comm import Group, Traffic, World, join, leave
from speedlab.config import ConfigError, RunConfig
from speedlab.data import Corpus, Sampler, prepare
from speedlab.engine.build.initialize import initialize
from speedlab.engine.checkpoint import CheckpointError, Saving, newest, prune
from speedlab.engine.engine import Engine
from speedlab.engine.run.diagnose import first_non_finite, matmul_flops
from speedlab.engine.run.interrupt import Interruption
from speedlab.engine.run.reshaping import Undone, rebuild
from speedlab.engine.step.clock import StepCosts
from speedlab.engine.step.errors import NonFiniteError
from speedlab.models import GPT
from speedlab.planner.bubble import bubble_share
from speedlab.planner.formula import flops_per_token
from speedlab.telemetry.folder import Command, RunFolder
from speedlab.telemetry.records import Event, RunState, StepRecord
from speedlab.telemetry.shape import changed_config, differences, present_config, shape_of
from speedlab.telemetry.writer import RecordWriter

ModelMaker = Callable[[], nn.Module]


class Trainer:
    """One rank's part of a run."""

    def __init__(self, folder: RunFolder, model: ModelMaker | None) -> None:
        self.folder, self._model = folder, model
        self.world: World = join()
        self._take_shape(present_config(folder.config, folder.read_events(), self.world.size))
        self.control = Group(range(self.world.size), Traffic(), self.world.device, channel="control")
        self.corpus: Corpus = self._on_all_ranks(self._prepare_data)
        self.train_rows = Sampler(self.corpus.train, self.config.data.sequence_length, self.config.seed)
        self.heldout_rows = Sampler(self.corpus.heldout, self.config.data.sequence_length, self.config.seed)
        self.engine: Engine = self._build(self.config)
        self.parameters = self._count_parameters()
        self._flops = self._flops_per_token()
        self.state = RunState.PAUSED
        self.budget: int | None = None
        """Steps left before the run pauses by itself; None when it does not."""
        self.last_command = folder.read_status().command
        self.writer: RecordWriter | None = None
        self._started = False
        self._saving: Saving | None = None
        """A save in the background that was not told of yet."""
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

    def _count_parameters(self) -> int:
        """Of the whole model: each rank counts those for which no other answers."""
        slots = [slot for flat in self.engine.flats for slot in flat.slots]
        own = sum(slot.numel for slot in slots if slot.name not in self.engine.duplicates)
        return sum(self.control.collect(own)) // self.layout.dp

    def _flops_per_token(self) -> float:
        if self._model is None:
            return flops_per_token(self.config.model, self.config.data.sequence_length)
        return 6.0 * self.parameters

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
                self._report_saving(wait=True)
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
        every = self.config.telemetry.trace_every_steps
        traced = not self.config.compile and (self._trace_next or bool(every and step % every == 0))
        self._trace_next = False
        with engine.trace_activations() if traced else nullcontext():
            # Words are read at the last moment before the reduction that carries them: a later one waits a step.
            engine.train_batch(
                self._batches(self.train_rows, step),
                signals=lambda: (float(self._word_waits()), float(self._interruption.asked)),
            )
        costs = engine.clock.take()
        assert engine.totals is not None
        done = engine.global_step
        heldout = self._evaluate_if_due(done)
        self._write_record(done, costs, heldout, traced)
        self._report_saving()
        self._save_if_due(done)
        word, interrupted = engine.totals.signals
        self._end_of_step(done, interrupted=interrupted > 0)
        return word > 0

    def _batches(self, sampler: Sampler, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step: tokens and targets."""
        micro, layout = self.batch.micro_size, self.layout
        for number in range(self.batch.accumulation):
            with self.engine.clock.phase("data"):
                first = (number * layout.data_size + layout.data_index(self.world.rank)) * micro
                values = sampler.rows(step, self.batch.global_size, first, first + micro)
                rows = torch.from_numpy(values).to(self.world.device, non_blocking=True)
            yield rows[:, :-1], rows[:, 1:]

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
        found = first_non_finite(self.engine, self._batches(self.train_rows, self.engine.global_step))
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

    def _reshape(self, **changes: Any) -> tuple[str, str, dict[str, Any]]:
        wanted = changed_config(self.config, self.world.size, built_in=self._model is None, **changes)
        changed = differences(self.config, wanted, self.world.size)
        before, named = shape_of(self.config, self.world.size), self._shape_text()
        through = "in place"
        if changed.keys() <= {"zero"}:
            self.engine.reshape(zero=wanted.zero.stage)
            self._take_shape(wanted)
        else:
            through = self._rebuild(wanted)
        after = shape_of(self.config, self.world.size)
        self._trace_next = True
        return "reshaped", f"{named} → {self._shape_text()}", {"before": before, "after": after, "through": through}

    def _rebuild(self, wanted: RunConfig) -> str:
        """Move the run to the layout of `wanted`; returns through what its state went."""
        try:
            engine, through = rebuild(
                self.engine,
                wanted,
                self.parameters,
                build=self._build,
                control=self.control,
                folder=self.folder.path,
            )
        except Undone as undone:
            self.engine, self.world = undone.engine, join()
            raise
        self.engine = engine
        self._take_shape(wanted)
        return through

    def _build(self, config: RunConfig) -> Engine:
        return initialize(model=self._model or self._make_gpt, config=config)[0]

    def _take_shape(self, config: RunConfig) -> None:
        """The layout, ZeRO stage and micro-batches are those of `config` from now on."""
        self.config = config
        self.layout = config.layout(self.world.size, built_in=False)
        self.batch = config.batch.resolve(self.layout.dp)

    def _shape_text(self) -> str:
        return f"zero stage {self.config.zero.stage}, {self.layout}"

    # ---- evaluation and checkpoints ----------------------------------------------------------------------------------

    def _evaluate_if_due(self, step: int) -> float | None:
        every = self.config.eval.every_steps
        if not every or (step % every and step != self.config.steps):
            return None
        return self.evaluate()

    def evaluate(self) -> float:
        """Mean loss over the configured number of held-out batches; the same rows at every call. Collective."""
        return self.engine.evaluate(
            pair for batch in range(self.config.eval.batches) for pair in self._batches(self.heldout_rows, batch)
        )

    def _save_if_due(self, step: int) -> None:
        every = self.config.checkpoint.every_steps
        if not every or step % every:
            return
        try:
            self.engine.save_checkpoint(self.folder.path / "checkpoints", wait=False)
        except CheckpointError as error:
            self._event("warning", f"checkpoint: {error}")  # A full disk must not cost the run.
            return
        self._saving = self.engine.saving

    def _report_saving(self, *, wait: bool = False) -> None:
        """Tell of a save in the background that has ended; with `wait`, of the one that is under way."""
        saving = self._saving
        if saving is None or not (wait or saving.done):
            return
        self._saving = None
        try:
            path = saving.wait()
        except CheckpointError as error:
            self._event("warning", f"checkpoint: {error}")
            return
        self._event("checkpoint", path.name, bytes=saving.bytes, seconds=saving.seconds)
        if self.world.rank == 0:
            prune(path.parent, self.config.checkpoint.keep)

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
            "parameters": self.parameters,
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "optimizer": self.config.optimizer.name,
            "pp": self.layout.pp,
            "dp": self.layout.dp,
            "tp": self.layout.tp,
            "zero": self.engine.zero_stage,
            "peak_flops": sum(self.control.collect(peak)),
            "batch": str(self.batch),
        }
        text = f"{details['parameters']:,} parameters, {details['dtype']}, {self.layout}, {self.batch}"
        if self.layout.pp > 1:
            details["cut"], bubble = self.engine.cut, self._bubble()
            text += f", bubble {bubble:.0%} in theory"
        self._event("started", text, **details)
        if self.engine.global_step == 0 and self.config.eval.every_steps:
            self._event("evaluated", "before the first step", heldout_loss=self.evaluate())
        self._write_status()
        self._started = True

    def _bubble(self) -> float:
        """The share of a step in which a pipeline rank has nothing to do, in theory."""
        parallel = self.config.parallel
        chunks, pp = parallel.stages_per_rank, self.layout.pp
        return bubble_share(parallel.schedule, pp=pp, chunks=chunks, micro_batches=self.batch.accumulation)

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
                began=engine.pipeline.began if engine.pipeline is not None else 0.0,
                timeline=engine.pipeline.timeline if engine.pipeline is not None else [],
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
