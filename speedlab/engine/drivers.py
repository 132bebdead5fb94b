"""Drivers compute the micro-batches of a step: the whole model (`WholeModel`), or pipeline stages
(`PipelineStages`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from speedlab.engine.loss import LossFunction, loss_of
from speedlab.engine.loss_weights import TARGETS, Count, targets_of, with_one_counted
from speedlab.engine.phase_timer import PhaseClock
from speedlab.engine.pipeline_batches import pipeline_parts
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState
from speedlab.layout import LayoutError
from speedlab.models.gpt import FeedForward
from speedlab.models.hf_attention import keep_separate, without_cache
from speedlab.parallel.context import ContextParallel
from speedlab.parallel.pipeline import Pipeline, StageModule
from speedlab.parallel.zero import map_tensors
from speedlab.telemetry.records import Span

Batch = Any
"""A micro-batch: tokens, targets and optionally positions of documents, (B, T) int64 each, or any form that `loss_of`
accepts.
"""


class PipelineOutput(NamedTuple):
    """The result of an engine call under a pipeline. `logits`: (B, T, V)."""

    logits: Tensor


class Driver(Protocol):
    """The interface of forward and backward on this rank. Gradients are reduced into the flat parameters."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        ...

    def backward(self, loss: Tensor, counted_targets: Count = None, *, retain_graph: bool = False) -> None:
        """Compute the gradients of a micro-batch's loss.

        Args:
            loss: The mean loss.
            counted_targets: The number of targets that the loss is the mean of; None if unknown.
            retain_graph: As in torch.
        """
        ...

    def train(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward of all micro-batches of a step.

        Args:
            batches: The micro-batches of this rank.
        """
        ...

    def evaluate(self, batch: Batch) -> list[tuple[Tensor, Count]]:
        """Compute the loss of a micro-batch without gradients.

        Args:
            batch: The micro-batch.

        Returns:
            [(loss, counted targets)]; [] if another pipeline rank has the loss.
        """
        ...

    def update(self) -> AbstractContextManager[object]:
        """Return a context for the optimizer's update."""
        ...

    @property
    def timeline(self) -> list[Span]:
        """Return the spans of this rank in the last step, in order; [] without a pipeline."""
        ...

    @property
    def began(self) -> float:
        """Return when the last step began, in seconds since the epoch; 0 without a pipeline."""
        ...

    def abandon(self) -> bool:
        """Drop pending work after an exception; return whether gradients of earlier micro-batches were lost."""
        ...

    def reconnect(self) -> None:
        """Forget an interrupted step."""
        ...


class WholeModel:
    """The driver for ranks that hold the model's whole forward."""

    began = 0.0
    timeline: list[Span] = []  # noqa: RUF012  # nothing ever writes to it

    def __init__(
        self, state: TrainingState, step: StepState, clock: PhaseClock, *, dtype: torch.dtype, loss: LossFunction | None
    ) -> None:
        """Prepare the driver.

        Args:
            state: The training state.
            step: The step.
            clock: Measures the phases.
            dtype: Floating-point inputs are cast to this dtype.
            loss: The user's loss function; None uses the result of forward.
        """
        self._state, self._step, self._clock, self._dtype, self._loss_function = state, step, clock, dtype, loss
        (self._zero,) = state.zeros
        self._module = state.module
        self._weighs_evaluations = state.config.loss_over != "micro_batches"
        self._running_statistics = [b for module in state.modules for b in _running_statistics(module)]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward, counting targets if losses are weighted by them.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if self._step.weights.is_on and torch.is_grad_enabled():
            args, kwargs = self._counted(args, kwargs)
        # A call without gradients and targets may generate text, which needs a cache.
        trains = torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in TARGETS)
        with self._micro_batch((args, kwargs)), without_cache(self._module) if trains else nullcontext():
            kwargs = keep_separate(self._module, kwargs) if trains else kwargs
            args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
            return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, counted_targets: Count = None, *, retain_graph: bool = False) -> None:
        """Compute the gradients of a micro-batch's loss, scaled for its share of the step.

        Args:
            loss: The mean loss.
            counted_targets: The number of targets that the loss is the mean of; None takes it from the forward.
            retain_graph: As in torch.
        """
        weights = self._step.weights
        count = weights.of_backward(counted_targets)
        # A second loss of the same forward: its targets are already counted.
        again = weights.has_loss and counted_targets is None
        self._backward(loss, count, again=again, retain_graph=retain_graph)

    def _counted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Count the targets of a call, and return arguments in which at least one target counts."""
        args, kwargs = _by_name(self._module, args, kwargs)
        targets = targets_of(self._module, kwargs)
        self._step.weights.saw_forward(None if targets is None else targets.number)
        return args, kwargs if targets is None else with_one_counted(kwargs, targets)

    def _backward(self, loss: Tensor, count: Count, *, again: bool = False, retain_graph: bool = False) -> None:
        # Sharded gradients are reduced in every backward, others only in the last one of a step.
        due = self._step.sync and (self._step.at_boundary or self._zero.zero_policy.grads_sharded)
        with self._clock.phase("backward"):
            (scale,) = self._step.scales([count], again=again)
            self._zero.begin_backward(sync=due)
            self._step.in_backward = True
            try:
                (loss * scale).backward(retain_graph=retain_graph)
            finally:
                self._step.in_backward = False
            self._zero.end_backward()
        self._step.ended_backward([loss])

    def train(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward of all micro-batches of a step.

        Args:
            batches: The micro-batches of this rank.
        """
        for number, batch in enumerate(batches, 1):
            self._backward(*self._loss(batch))
            if number < len(batches):
                self._step.ended_micro_batch()

    def evaluate(self, batch: Batch) -> list[tuple[Tensor, Count]]:
        """Compute the loss of a micro-batch.

        Args:
            batch: The micro-batch.

        Returns:
            [(loss, counted targets)].
        """
        return [self._loss(batch)]

    @contextmanager
    def _micro_batch(self, given: Any) -> Iterator[None]:
        """Context around the forward of a micro-batch."""
        if torch.is_grad_enabled() and self._step.trains:
            self._step.data.look(given)
        # As in DistributedDataParallel: batch norms use rank 0's running statistics.
        for buffer in self._running_statistics:
            self._state.group.broadcast(buffer)
        self._step.begin_micro_batch()
        with self._clock.phase("forward"):
            yield

    def _cast(self, tensor: Tensor) -> Tensor:
        tensor = self._state.to_device(tensor)
        return tensor.to(self._dtype) if tensor.dtype == torch.float32 else tensor

    def _loss(self, batch: Batch) -> tuple[Tensor, Count]:
        """Return the loss of a micro-batch, and its number of targets."""
        with self._micro_batch(batch):
            if isinstance(batch, Mapping):
                batch = dict(batch)
            if self._loss_function is not None:
                return loss_of(self._module, map_tensors(batch, self._cast), self._loss_function), None
            if isinstance(batch, dict):
                # A Trainer passes the count of the whole step. Here the loss must be a mean; it gets its weight later.
                batch.pop("num_items_in_batch", None)
                # Before the copy to the device, where reading values would be a sync.
                batch = keep_separate(self._module, batch)
            targets = targets_of(self._module, batch)
            weighs = self._step.weights.is_on if torch.is_grad_enabled() else self._weighs_evaluations
            if targets is not None and weighs:
                batch = with_one_counted(batch, targets)
            loss = loss_of(self._module, map_tensors(batch, self._cast), None)
            return loss, None if targets is None else targets.number

    def update(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def abandon(self) -> bool:
        """Drop the pending pass; return whether it was a backward."""
        was = self._zero.current.value == "backward"
        self._zero.abandon_pass()
        return was

    def reconnect(self) -> None:
        pass  # Zero forgets its own passes.


class PipelineStages:
    """The driver for a pipeline, where no rank holds the whole forward: a step is one call."""

    def __init__(
        self,
        state: TrainingState,
        step: StepState,
        clock: PhaseClock,
        *,
        dtype: torch.dtype,
        split_backward: bool,
        context: ContextParallel,
    ) -> None:
        """Build the pipeline.

        Args:
            state: The training state.
            step: The step.
            clock: Measures the phases.
            dtype: The compute dtype.
            split_backward: As for `Pipeline`.
            context: Context parallelism, equal for all stages.
        """
        self._state, self._step, self._clock, self._context = state, step, clock, context
        parallel, mesh = state.config.parallel, state.mesh
        self._group = mesh["pp"]
        self._pipeline = Pipeline(
            [cast(StageModule, module) for module in state.modules],
            state.zeros,
            self._group,
            schedule=parallel.schedule,
            dtype=dtype,
            own_length=self._own_length,
            split_backward=split_backward,
            on_forward=step.begin_micro_batch,
            phase=clock.phase,
        )

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineOutput:
        """Return the logits of tokens, on every rank and without gradients.

        Args:
            args: (tokens,), (B, T) int64.
            kwargs: Or tokens by name.

        Raises:
            RuntimeError: With gradients enabled.
            TypeError: For anything but tokens.
        """
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("tokens"))
        if torch.is_grad_enabled() or not isinstance(tokens, Tensor) or len(args) + len(kwargs) != 1:
            kind = RuntimeError if torch.is_grad_enabled() else TypeError
            raise kind(
                f"under {self._state.layout} no rank holds the whole model; train with engine.train_batch(batches), "
                "evaluate with engine.evaluate(batches), both of pairs (tokens, targets), and call the engine for "
                "logits with tokens alone, (B, T) int64, in torch.no_grad()"
            )
        state, group = self._state, self._group
        made = self._pipeline.evaluate(state.to_device(tokens))
        described = [list(made[0].shape), str(made[0].dtype).removeprefix("torch.")] if made else None
        shape, dtype = group.share(described, group.size - 1)
        logits = made[0] if made else torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
        group.broadcast(logits, group.size - 1)
        return PipelineOutput(logits[:, : tokens.shape[1]])  # Without padding.

    @property
    def _token_share(self) -> int:
        """Return over how many tensor ranks the tokens of an activation are split."""
        return self._state.layout.tp if self._state.config.parallel.sequence else 1

    def _own_length(self, length: int) -> int:
        return -(-self._context.own_length(length) // self._token_share)

    def _check_length(self, length: int) -> None:
        """Check the sequence length on all ranks, because only some of them embed the tokens."""
        layout = self._state.layout
        if layout.cp > 1:
            self._context.check_length(length)
        elif rest := length % self._token_share:
            raise LayoutError(
                f"train_batch: under {layout} a sequence of {length} tokens does not divide by {self._token_share}; "
                f"use {length - rest} or {length - rest + self._token_share} tokens"
            )

    def backward(self, loss: Tensor, counted_targets: Count = None, *, retain_graph: bool = False) -> None:
        """Raise RuntimeError, because under a pipeline a step is one call."""
        raise RuntimeError(f"under {self._state.layout} a step is one call: engine.train_batch(batches)")

    def train(self, batches: Sequence[Batch]) -> None:
        """Run all micro-batches of a step through the pipeline.

        Args:
            batches: The micro-batches of this rank, of one shape.

        Raises:
            ValueError: For different shapes, or if only some micro-batches have positions.
            LayoutError: If the sequence length does not divide over ranks.
        """
        parts = [self._parts(batch) for batch in batches]
        step = self._step
        counts = [_number_of(self._state.modules[0], each) for each in parts]
        if step.weights.is_on:
            parts = [_with_one_counted(self._state.modules[0], each) for each in parts]
        step.data.look(batches)
        if len(shapes := {tuple(tokens.shape) for tokens, *_ in parts}) > 1:
            reported = ", ".join("×".join(map(str, shape)) for shape in sorted(shapes))
            raise ValueError(f"train_batch: under a pipeline micro-batches are of one shape, and these are {reported}")
        if len({len(each) for each in parts}) > 1:
            raise ValueError(
                "train_batch: positions came with some micro-batches and not with others; give all or none"
            )
        self._check_length(parts[0][0].shape[1])
        # One transfer for all micro-batches.
        given = [self._state.to_device(torch.cat(each)) for each in zip(*parts, strict=True)]
        with self._clock.phase("forward"):
            scales = step.scales(counts)
        losses = self._pipeline.train(*given, micro_batches=step.micro_batches.size, scales=scales)
        step.ended_backward(losses)
        # All micro-batches have run, so the next `step` call ends the step.
        step.micro_batches.ended = step.micro_batches.size - 1

    def evaluate(self, batch: Batch) -> list[tuple[Tensor, Count]]:
        """Compute the loss of a micro-batch.

        Args:
            batch: The micro-batch.

        Returns:
            [(loss, counted targets)]; [] if another pipeline rank has the loss.
        """
        parts, stage = self._parts(batch), self._state.modules[0]
        count = _number_of(stage, parts)
        if self._state.config.loss_over != "micro_batches":
            parts = _with_one_counted(stage, parts)
        losses = self._pipeline.evaluate(*map(self._state.to_device, parts))
        return [(loss, count) for loss in losses]

    def _parts(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return tokens, targets and optionally positions.

        Errors appear on all ranks, although only some embed the tokens.
        """
        return pipeline_parts(batch, cast(StageModule, self._state.modules[0]), self._state.layout)

    def update(self) -> AbstractContextManager[object]:
        """Return the pipeline's context for the update."""
        return self._pipeline.update()

    @property
    def timeline(self) -> list[Span]:
        """Return the spans of this rank in the last step."""
        return self._pipeline.timeline

    @property
    def began(self) -> float:
        """Return when the last step began, in seconds since the epoch."""
        return self._pipeline.began

    def abandon(self) -> bool:
        """Drop the pending pass; gradients of the step are always lost."""
        self._pipeline.abandon()
        return True

    def reconnect(self) -> None:
        """Forget an interrupted step."""
        self._pipeline.reconnect()


def driver_of(state: TrainingState, step: StepState, clock: PhaseClock, loss: LossFunction | None) -> Driver:
    """Return the driver for the layout.

    Args:
        state: The training state.
        step: The step.
        clock: Measures the phases.
        loss: The user's loss function; None uses the result of forward.
    """
    if state.layout.pp == 1:
        return WholeModel(state, step, clock, dtype=state.dtype, loss=loss)
    # With recomputation or compile, either half of a split backward would do all of its work.
    modules = (module for part in state.modules for module in part.modules())
    tiled = any(isinstance(module, FeedForward) and module.tile is not None for module in modules)
    config = state.config
    return PipelineStages(
        state,
        step,
        clock,
        dtype=state.dtype,
        split_backward=not (config.activation.checkpointing != "none" or config.compile or tiled),
        context=state.model_parts[0].context,
    )


def _running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the buffers of batch norms, which follow rank 0 as in DistributedDataParallel."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def _number_of(module: nn.Module, parts: tuple[Tensor, ...]) -> Count:
    """Return the number of counted targets."""
    targets = targets_of(module, parts)
    return None if targets is None else targets.number


def _with_one_counted(module: nn.Module, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    targets = targets_of(module, parts)
    return parts if targets is None else with_one_counted(parts, targets)


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same call with keyword arguments, if all arguments have names."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args)
    except (TypeError, ValueError):  # The call itself raises the error.
        return args, kwargs
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    if any(bound.signature.parameters[name].kind in unnamed for name in bound.arguments):
        return args, kwargs
    return (), {**bound.arguments, **kwargs}
