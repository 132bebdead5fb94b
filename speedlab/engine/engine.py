"""The engine: one rank's part in a training step of a model under any layout, with DeepSpeed's call names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedlab.comm import Group, Traffic, World
from speedlab.config import RunConfig
from speedlab.engine import checkpoint
from speedlab.engine.build.model_parts import Axes, ModelPart
from speedlab.engine.build.wrap import BlockWrapper
from speedlab.engine.step.clock import PhaseClock
from speedlab.engine.step.errors import name_module
from speedlab.engine.step.memory import (
    ActivationTrace,
    PeakMemory,
    known_storages,
    make_ledger,
    measure_states,
    release_freed_memory,
)
from speedlab.engine.step.optimizer import PartitionedOptimizer
from speedlab.engine.step.precision import LossScale
from speedlab.engine.step.random_streams import RandomStreams
from speedlab.engine.step.totals import Totals, find_non_finite, sum_totals
from speedlab.engine.step.whole import remember_parts, whole_state
from speedlab.layout import Layout, Part
from speedlab.parallel.pipeline import Pipeline, StageModule
from speedlab.parallel.zero import Flat, Residency, Zero, forget, map_tensors, remember
from speedlab.telemetry.records import Ledger


class PipelineOutput(NamedTuple):
    """What the engine's call gives under a pipeline. `logits`: (B, T, V)."""

    logits: Tensor


class Engine:
    """A module that trains with its states partitioned over the data-parallel ranks.

    A step is `accumulation` times (call, `backward`, `step`), as in DeepSpeed; only the last `step` updates parameters.
    All methods that communicate must be called by all ranks. Made by `speedlab.initialize`.
    """

    def __init__(
        self,
        model_parts: Sequence[ModelPart],
        *,
        optimizer: PartitionedOptimizer,
        scheduler: Any,
        config: RunConfig,
        world: World,
        layout: Layout,
        axes: Axes,
        traffic: Traffic,
        dtype: torch.dtype,
        accumulation: int,
        outside_bytes: int,
    ) -> None:
        """`stages`: this rank's pipeline stages, first one first; the whole model is one."""
        self.model_parts = list(model_parts)
        self.config, self.world, self.layout, self.axes = config, world, layout, axes
        self.parts: dict[str, Part] = {}
        """Full name of a parameter → which slice of the whole this rank's tensor is; whole ones are not in."""
        self.duplicates = frozenset[str]().union(*(part.duplicates for part in model_parts))
        """Names of parameters of which another tensor- or pipeline-parallel rank holds the same values and answers for
        them: in checkpoints, in norms."""
        for part in model_parts:
            self.parts |= part.tensor.parts
        self.partitioned_optimizer, self.scheduler = optimizer, scheduler
        self.dtype, self.accumulation = dtype, accumulation
        self.clock = PhaseClock(traffic, world.device)
        self.global_step = 0
        self.updating = False
        """True from the first changed parameter to the end of a step: an interrupt then leaves ranks that differ."""
        self.loss_scale = LossScale(config.precision, dtype)
        self.totals: Totals | None = None
        self.pipeline = self._make_pipeline(traffic)
        """What drives the stages; None where the whole model is one."""
        self._traffic = traffic
        self._wrapper = BlockWrapper(
            self.zeros,
            checkpointing=config.activation.checkpointing == "block",
            compile=config.compile,
            device=world.device,
        )
        self._streams = RandomStreams(config.seed, world.device)
        for part in model_parts:
            self._streams.attach(part.module, part.zero)
            remember(part.zero)
            remember_parts(part)
        self._mutable_buffers = [buffer for part in model_parts for buffer in _mutable_buffers(part.module)]
        self._micro_step = 0
        self._sync = True
        self._losses: list[Tensor] = []
        self._peak = PeakMemory(world.device)
        self._outside_bytes = outside_bytes
        self._activation_bytes = 0

    def _make_pipeline(self, traffic: Traffic) -> Pipeline | None:
        if self.layout.pp == 1:
            return None
        parallel = self.config.parallel
        return Pipeline(
            [cast(StageModule, part.module) for part in self.model_parts],
            self.zeros,
            schedule=parallel.schedule,
            layout=self.layout,
            rank=self.world.rank,
            device=self.world.device,
            dtype=self.dtype,
            traffic=traffic,
            sequence_share=self.layout.tp if parallel.sequence else 1,
            # Where a block computes its forward anew or is compiled, either half of a backward would do all of it.
            split_backward=self.config.activation.checkpointing == "none" and not self.config.compile,
            on_forward=self._begin_micro_batch,
            phase=self.clock.phase,
        )

    @property
    def module(self) -> nn.Module:
        """The model, or this rank's first pipeline stage of it."""
        return self.model_parts[0].module

    @property
    def cut(self) -> tuple[int, ...]:
        """Blocks of every pipeline stage; empty without a pipeline."""
        return self.model_parts[0].cut

    @property
    def zeros(self) -> list[Zero]:
        """What partitions the stages, one for each."""
        return [part.zero for part in self.model_parts]

    @property
    def group(self) -> Group:
        """Ranks that hold the same part of the model and see other data."""
        return self.axes.gather

    @property
    def everyone(self) -> Group:
        """All ranks of the layout."""
        return self.axes.everyone

    # ---- the step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating-point inputs are cast to the compute dtype. On an exception the state is that
        between steps.

        Under a pipeline no rank holds the module: this then computes logits of tokens, on every rank and without
        gradients; training is `train_batch`.
        """
        if self.pipeline is not None:
            return self._logits(self.pipeline, *args, **kwargs)
        for buffer in self._mutable_buffers:
            self.group.broadcast(buffer)
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        self._begin_micro_batch(self._micro_step)
        with self.clock.phase("forward"), self._guard():
            return self.module(*args, **kwargs)

    def _begin_micro_batch(self, index: int) -> None:
        """The next forward is of this rank's micro-batch `index` of the step."""
        self._streams.begin(self.global_step, index * self.layout.dp + self.group.index)

    def _logits(self, pipeline: Pipeline, tokens: Tensor) -> PipelineOutput:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"under {self.layout} no rank holds the whole model; train with engine.train_batch(batches), and call "
                "the engine for logits in torch.no_grad()"
            )
        with self._guard():
            made = pipeline.evaluate(tokens.to(self.world.device))
            group = self.axes.pipeline
            described = [list(made[0].shape), str(made[0].dtype).removeprefix("torch.")] if made else None
            shape, dtype = group.share(described, group.size - 1)
            logits = made[0] if made else torch.empty(shape, dtype=getattr(torch, dtype), device=self.world.device)
            group.broadcast(logits, group.size - 1)
            return PipelineOutput(logits)

    def backward(self, loss: Tensor) -> Tensor:
        """Gradients of `loss` (a scalar, the mean over this rank's micro-batch), summed over the ranks when they are
        due.

        The loss is scaled here for accumulation, data parallelism and float16; do not scale it before.
        Returns it as given.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"backward: the loss has shape {tuple(loss.shape)}; reduce it to one number first, for instance by "
                f"mean()"
            )
        if self.pipeline is not None:
            raise RuntimeError(f"under {self.layout} a step is one call: engine.train_batch(batches)")
        (zero,) = self.zeros
        due = self._sync and (
            self.is_gradient_accumulation_boundary() or zero.residency.gradients.value == "partitioned"
        )
        with self.clock.phase("backward"), self._guard():
            zero.begin_backward(sync=due)
            (loss * self._scale).backward()
            zero.end_backward()
        self._losses.append(loss.detach())
        return loss

    @property
    def _scale(self) -> float:
        """Factor on the loss of a micro-batch, so that gradients are means over the global batch."""
        return self.loss_scale.value / (self.accumulation * self.group.size)

    def train_batch(
        self, batches: Iterable[tuple[Tensor, Tensor]], *, signals: Callable[[], Sequence[float]] = tuple
    ) -> float:
        """A whole step under any layout: forward and backward of this rank's micro-batches, then the update.

        Args:
            batches: `accumulation` pairs of tokens and targets, (B, T) int64 each. Ranks of one dp index give the same.
            signals: asked at the last moment for what `step` takes.

        Returns the mean loss over the global batch. Raises ValueError for another number of micro-batches.
        """
        if self.pipeline is None:
            count = 0
            for count, (tokens, targets) in enumerate(batches, 1):  # noqa: B007  # read after the loop
                self.backward(self.loss(tokens, targets))
                self.step(signals() if self.is_gradient_accumulation_boundary() else ())
            self._check_count(count)
        else:
            self._train_pipeline(self.pipeline, list(batches))
            self.step(signals())
        assert self.totals is not None
        return self.totals.loss

    def _train_pipeline(self, pipeline: Pipeline, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._check_count(len(batches))
        tokens, targets = (torch.cat(parts).to(self.world.device) for parts in zip(*batches, strict=True))
        with self._guard():
            losses = pipeline.train(tokens, targets, micro_batches=self.accumulation, scale=self._scale)
        self._losses += [loss.detach() for loss in losses]
        self._micro_step = self.accumulation - 1

    def _check_count(self, count: int) -> None:
        if count != self.accumulation:
            raise ValueError(
                f"train_batch: {count} micro-batches came, but batch.accumulation is {self.accumulation}; give as many"
            )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The module's mean loss on tokens and targets, (B, T) int64 each. Not under a pipeline."""
        # Hugging Face models shift the labels themselves, and some of them ask for whole memory.
        named = {"targets": targets} if takes_targets(self.module) else {"labels": tokens.contiguous()}
        return self(tokens, **named).loss

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Mean loss over all ranks' micro-batches, without gradients or dropout. Collective."""
        was_training = self.module.training
        self.eval()
        losses: list[Tensor] = []
        for tokens, targets in batches:
            if self.pipeline is None:
                losses.append(self.loss(tokens, targets))
            else:
                with self._guard():
                    losses += self.pipeline.evaluate(tokens.to(self.world.device), targets.to(self.world.device))
        self.train(was_training)
        total = torch.stack([loss.double() for loss in losses]).sum() if losses and self._answers_for_loss else 0.0
        vector = torch.tensor([float(total), len(losses) * self._answers_for_loss], dtype=torch.float64)
        loss_sum, count = self.everyone.sum_scalars(vector.to(self.world.device)).tolist()
        return loss_sum / count

    @property
    def _answers_for_loss(self) -> bool:
        """Whether the losses of this rank count: those of its tensor-parallel peers are the same."""
        return self.axes.tensor.index == 0

    def step(self, signals: Sequence[float] = ()) -> bool:
        """End a micro-batch; at the last one of the accumulation, update the parameters. True when they were updated.

        `signals`: a few numbers that are summed over the ranks on the way, into `totals.signals`.
        Raises NonFiniteError when the gradient is not finite and a smaller loss scale cannot help.
        """
        if not self.is_gradient_accumulation_boundary():
            self._micro_step += 1
            return False
        if any(zero.unsummed for zero in self.zeros):
            raise RuntimeError(
                "step: the last backward ran inside no_sync; one backward outside has to come before a step"
            )
        with self.clock.phase("optimizer"), self.pipeline.update() if self.pipeline is not None else nullcontext():
            self.totals = self._sum_totals(signals)
            if not self.totals.finite:
                self._overflow()
                return False
            factor = 1.0 / self.loss_scale.value
            limit = self.config.clip_norm
            if limit is not None and self.totals.grad_norm > limit:
                factor *= limit / (self.totals.grad_norm + 1e-6)
            self.updating = True
            self.partitioned_optimizer.step(factor)
        if self.scheduler is not None:
            self.scheduler.step()
        if self.global_step == 0:
            for zero in self.zeros:
                zero.agree_on_order()
        self._end_step()
        self.loss_scale.update(overflow=False)
        self.updating = False
        return True

    def _sum_totals(self, signals: Sequence[float]) -> Totals:
        squares = self.partitioned_optimizer.sum_of_squares().double().to(self.world.device)
        losses = self._losses if self._answers_for_loss else []
        return sum_totals(self.everyone, losses, squares, scale=self.loss_scale.value, signals=signals)

    def _overflow(self) -> None:
        """The gradient is not finite: skip the update; float16 goes on with a smaller scale, anything else stops."""
        error = None
        if self.loss_scale.exhausted:
            flats = self.partitioned_optimizer.flats
            error = find_non_finite(self.everyone, self._losses, flats, step=self.global_step + 1)
        self.loss_scale.update(overflow=True)
        self._end_step(updated=False)
        if error is not None:
            raise error

    def _end_step(self, *, updated: bool = True) -> None:
        for zero in self.zeros:
            zero.clear_gradients()
        self._losses.clear()
        self._micro_step = 0
        if updated:
            self.global_step += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        return self._micro_step + 1 >= self.accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` leaves the gradients with each rank; the first one outside sums all of them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient over all parameters and ranks, before clipping; None before the first
        step."""
        return self.totals.grad_norm if self.totals else None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                for zero in self.zeros:
                    zero.abandon_pass()
            # An interrupt must not wait for peers: what is under way stays as it is until `reconnect`.
            name_module(
                error, [part.module for part in self.model_parts], step=self.global_step + 1, rank=self.world.rank
            )
            raise

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.device != self.world.device:
            tensor = tensor.to(self.world.device, non_blocking=True)
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor

    # ---- the state ---------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer over this rank's partitions; schedulers hang on it."""
        return self.partitioned_optimizer.inner

    @property
    def flats(self) -> list[Flat]:
        """All flats of this rank."""
        return [flat for zero in self.zeros for flat in zero.flats]

    @property
    def zero_stage(self) -> int:
        return self.zeros[0].residency.stage

    def reshape(self, *, zero: int) -> None:
        """Change the ZeRO stage in place, between two steps: states are cut, freed, or gathered once. Nothing is
        lost."""
        if self._micro_step or any(zero.current.value != "idle" for zero in self.zeros):
            raise RuntimeError(
                f"reshape: micro-batch {self._micro_step + 1} of a step is under way; change the stage between two "
                f"steps"
            )
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"reshape: zero is {zero}; it is 0, 1, 2 or 3")
        before = self.zeros[0].residency
        for part in self.zeros:
            part.place(Residency.of_stage(zero, self.group.size))
        self.partitioned_optimizer.move(before)
        release_freed_memory()
        self._peak.take()

    def state_dict(self) -> dict[str, Tensor]:
        """The module's whole state on every rank (a collective), parameters as float32 masters where they exist."""
        return whole_state(self.model_parts, self.axes)

    def save_checkpoint(
        self,
        folder: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        verify: bool = True,
    ) -> Path:
        """Write `folder/tag` (default `step-000123`): every rank what it answers for, then a manifest.

        Returns its path. `wait=False` comes back when the tensors are copied; `saving` tells of the rest. Without
        `verify` nothing is hashed or brought to the disk: for folders in memory.
        """
        tag = tag or f"step-{self.global_step:06d}"
        return checkpoint.save(self, Path(folder), tag, client_state or {}, wait=wait, verify=verify)

    @property
    def saving(self) -> checkpoint.Saving | None:
        """The last save in the background, under way or ended; None before the first."""
        return checkpoint.saving_of(self)

    def load_checkpoint(
        self, folder: str | Path, tag: str | None = None, *, verify: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Read `folder/tag`, or the newest one in `folder`; any layout and any stage may have written it.

        Returns (its path, the client state). Raises CheckpointError, naming the file, before anything is changed.
        """
        return checkpoint.load(self, Path(folder), tag, verify=verify)

    def disconnect(self) -> None:
        """Let go of connections, for a rank that fails: its peers then fail at once instead of waiting for it."""
        self.axes.disconnect()
        if self.pipeline is not None:
            self.pipeline.disconnect()

    def reconnect(self) -> None:
        """Use the present world's connections; a pass that was cut off is forgotten. Collective."""
        self.axes.reconnect()
        if self.pipeline is not None:
            self.pipeline.reconnect()
        for zero in self.zeros:
            zero.reconnect()
        if self._micro_step or self._losses:
            self._end_step(updated=False)

    # ---- looking -----------------------------------------------------------------------------------------------------

    @contextmanager
    def trace_activations(self) -> Iterator[None]:
        """Measure the activations of the step inside exactly; it is slower. Later ledgers carry the figure on.

        Not with `compile`: a traced step would run uncompiled, and torch would not compile those blocks again.
        """
        if self.config.compile:
            yield
            return

        def known() -> set[int]:
            lent = [buffer for group in self.axes.groups for buffer in group.idle_buffers]
            return known_storages([*self._buffers(), *lent], self.flats, self.partitioned_optimizer)

        # What an optimizer makes in its first step are moments.
        with ActivationTrace(known, follows=lambda: self._traffic.phase != "optimizer") as trace:
            yield
        self._activation_bytes = trace.peak_bytes

    def ledger(self) -> Ledger:
        """Bytes by category at the peak since the last call."""
        return make_ledger(
            measure_states(self._buffers(), self.flats, self.partitioned_optimizer),
            activations=self._activation_bytes,
            buffers=self._traffic.buffers.take_peak(),
            peak=self._peak.take(),
            outside=self._outside_bytes,
            device=self.world.device,
        )

    def _buffers(self) -> list[Tensor]:
        return [buffer for part in self.model_parts for buffer in part.module.buffers()]

    def train(self, mode: bool = True) -> Engine:
        for part in self.model_parts:
            part.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        return itertools.chain.from_iterable(part.module.parameters() for part in self.model_parts)

    def destroy(self, *, keep_parameters: bool = True) -> None:
        """Give everything back: hooks, flats, optimizer states. The module works on by itself, with its master values.

        Collective where states are partitioned. Without `keep_parameters` nothing is gathered, and parameters that are
        partitioned are lost.
        """
        checkpoint.finish_saving(self)
        self._streams.detach()
        self._wrapper.undo()
        for part in reversed(self.model_parts):  # Stages of one given module share some of its modules.
            part.zero.detach()
            part.tensor.detach()
            if part.zero.partitioned:
                for unit in part.zero.units:
                    unit.release()
            forget(part.zero)
            if keep_parameters:
                for flat in part.zero.flats:
                    flat.give_back()
            part.zero.units.clear()
            part.zero.order.clear()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.partitioned_optimizer.forget()
        release_freed_memory()

    def __repr__(self) -> str:
        count, units = sum(flat.numel for flat in self.flats), sum(len(zero.units) for zero in self.zeros)
        return (
            f"Engine({type(self.module).__name__}, {count:,} parameters here in {units} units, {self.layout}, zero "
            f"{self.zero_stage}, "
            f"{str(self.dtype).removeprefix('torch.')}, rank {self.world.rank} of {self.world.size}, step "
            f"{self.global_step})"
        )


def takes_targets(module: nn.Module) -> bool:
    """Whether its forward has a parameter `targets`, as ours; Hugging Face's take `labels` and shift them."""
    return "targets" in inspect.signature(module.forward).parameters


def _mutable_buffers(module: nn.Module) -> list[Tensor]:
    """Running statistics, which follow rank 0 as under DistributedDataParallel."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
