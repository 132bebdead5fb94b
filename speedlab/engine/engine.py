"""The engine: one rank's part in a training step of a partitioned model, with DeepSpeed's call names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedlab.comm import Group, Traffic, World
from speedlab.config import RunConfig
from speedlab.engine import checkpoint
from speedlab.engine.clock import PhaseClock
from speedlab.engine.errors import NonFiniteError, name_module
from speedlab.engine.memory import (
    ActivationTrace,
    PeakMemory,
    known_storages,
    make_ledger,
    measure_states,
    release_freed_memory,
)
from speedlab.engine.optimizer import PartitionedOptimizer
from speedlab.engine.precision import LossScale
from speedlab.engine.wrap import BlockWrapper
from speedlab.layout import Layout, Part
from speedlab.parallel.zero import Flat, Residency, Zero, forget, map_tensors, remember
from speedlab.telemetry.records import Ledger


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What one reduction over the ranks told about a step."""

    loss: float
    """Mean of the losses that were given to `backward`, over micro-batches and ranks."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    signals: tuple[float, ...]
    """Sums over ranks of the numbers that were given to `step`."""
    finite: bool


class Engine:
    """A module that trains with its states partitioned over the data-parallel ranks.

    A step is `accumulation` times (call, `backward`, `step`), as in DeepSpeed; only the last `step` updates parameters.
    All methods that communicate must be called by all ranks. Made by `speedlab.initialize`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        zero: Zero,
        optimizer: PartitionedOptimizer,
        scheduler: Any,
        config: RunConfig,
        world: World,
        layout: Layout,
        parts: Mapping[str, Part],
        duplicates: Collection[str],
        group: Group,
        everyone: Group,
        traffic: Traffic,
        dtype: torch.dtype,
        accumulation: int,
        outside_bytes: int,
    ) -> None:
        self.module, self.config, self.world = module, config, world
        self.layout = layout
        self.parts = parts
        """Full name of a parameter → which slice of the whole this rank's tensor is; whole ones are not in."""
        self.duplicates = frozenset(duplicates)
        """Names of parameters of which another tensor- or pipeline-parallel rank holds the same values and answers for
        them: in checkpoints, in norms."""
        self.zero, self.partitioned_optimizer, self.scheduler = zero, optimizer, scheduler
        self.dtype, self.accumulation = dtype, accumulation
        self.group = group
        """Ranks that hold the same part of the model and see other data."""
        self.everyone = everyone
        """All ranks of the layout."""
        self.clock = PhaseClock(traffic, world.device)
        self.global_step = 0
        self.updating = False
        """True from the first changed parameter to the end of a step: an interrupt then leaves ranks that differ."""
        self.loss_scale = LossScale(config.precision, dtype)
        self.totals: Totals | None = None
        self._traffic = traffic
        self._wrapper = BlockWrapper(
            zero, checkpointing=config.activation.checkpointing == "block", compile=config.compile
        )
        self._mutable_buffers = _mutable_buffers(module)
        self._micro_step = 0
        self._sync = True
        self._losses: list[Tensor] = []
        self._peak = PeakMemory(world.device)
        self._outside_bytes = outside_bytes
        self._activation_bytes = 0
        remember(zero)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating-point inputs are cast to the compute dtype. On an exception the state is that
        between steps."""
        for buffer in self._mutable_buffers:
            self.group.broadcast(buffer)
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        with self.clock.phase("forward"), self._guard():
            return self.module(*args, **kwargs)

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
        due = self._sync and (
            self.is_gradient_accumulation_boundary() or self.zero.residency.gradients.value == "partitioned"
        )
        scale = self.loss_scale.value / (self.accumulation * self.group.size)
        with self.clock.phase("backward"), self._guard():
            self.zero.begin_backward(sync=due)
            (loss * scale).backward()
            self.zero.end_backward()
        self._losses.append(loss.detach())
        return loss

    def step(self, signals: Sequence[float] = ()) -> bool:
        """End a micro-batch; at the last one of the accumulation, update the parameters. True when they were updated.

        `signals`: a few numbers that are summed over the ranks on the way, into `totals.signals`.
        Raises NonFiniteError when the gradient is not finite and a smaller loss scale cannot help.
        """
        if not self.is_gradient_accumulation_boundary():
            self._micro_step += 1
            return False
        if self.zero.unsummed:
            raise RuntimeError(
                "step: the last backward ran inside no_sync; one backward outside has to come before a step"
            )
        with self.clock.phase("optimizer"):
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
            self.zero.agree_on_order()
        self._end_step()
        self.loss_scale.update(overflow=False)
        self.updating = False
        return True

    def _sum_totals(self, signals: Sequence[float]) -> Totals:
        device = self.world.device
        losses = (
            torch.stack([loss.double() for loss in self._losses]).sum()
            if self._losses
            else torch.zeros((), device=device)
        )
        numbers = [self.partitioned_optimizer.sum_of_squares().double().to(device), losses.double().to(device)]
        vector = torch.stack([*numbers, *(torch.tensor(float(s), dtype=torch.float64, device=device) for s in signals)])
        # The one point of a step where the host waits for the device: clipping, the overflow decision and the control
        # words of the run need these numbers before the update.
        squares, loss, *summed = self.group.sum_scalars(vector).tolist()
        norm = math.sqrt(squares) / self.loss_scale.value if squares >= 0 else math.nan
        return Totals(
            loss=loss / max(1, len(self._losses)) / self.group.size,
            grad_norm=norm,
            signals=tuple(summed),
            finite=math.isfinite(squares),
        )

    def _overflow(self) -> None:
        """The gradient is not finite: skip the update; float16 goes on with a smaller scale, anything else stops."""
        exhausted = self.loss_scale.exhausted
        error = self._non_finite() if exhausted else None
        self.loss_scale.update(overflow=True)
        self._end_step(updated=False)
        if error is not None:
            raise error

    def _non_finite(self) -> NonFiniteError:
        own = bool(self._losses) and not bool(
            torch.isfinite(torch.stack([loss.float() for loss in self._losses])).all()
        )
        # Ranges of the partitions do not overlap, so every bad element is named by the rank that owns it.
        tensors = [name for flat in self.partitioned_optimizer.flats for name in _non_finite_slots(flat)]
        reports = self.group.collect({"loss": own, "tensors": tensors[:5]})
        ranks = [rank for rank, report in zip(self.group.ranks, reports, strict=True) if report["loss"]]
        names = list(dict.fromkeys(name for report in reports for name in report["tensors"]))
        where = (
            f"the loss is not finite on rank {', '.join(map(str, ranks))}"
            if ranks
            else "the loss is finite on every rank"
        )
        what = f"the gradient is not finite in {', '.join(names[:3])}" + (" and others" if len(names) > 3 else "")
        step = self.global_step + 1
        return NonFiniteError(
            f"step {step}: {where}; {what}. The update was not made: parameters are those of step {self.global_step}. "
            "Lower optimizer.lr, set clip_norm, or go back to a checkpoint",
            step=step,
            ranks=ranks,
            tensors=names,
        )

    def _end_step(self, *, updated: bool = True) -> None:
        self.zero.clear_gradients()
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
                self.zero.abandon_pass()
            # An interrupt must not wait for peers: what is under way stays as it is until `reconnect`.
            name_module(error, self.module, step=self.global_step + 1, rank=self.world.rank)
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
        return self.zero.flats

    @property
    def zero_stage(self) -> int:
        return self.zero.residency.stage

    def reshape(self, *, zero: int) -> None:
        """Change the ZeRO stage in place, between two steps: states are cut, freed, or gathered once. Nothing is
        lost."""
        if self._micro_step or self.zero.phase.value != "idle":
            raise RuntimeError(
                f"reshape: micro-batch {self._micro_step + 1} of a step is under way; change the stage between two "
                f"steps"
            )
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"reshape: zero is {zero}; it is 0, 1, 2 or 3")
        before = self.zero.residency
        self.zero.place(Residency.of_stage(zero, self.group.size))
        self.partitioned_optimizer.move(before)
        release_freed_memory()
        self._peak.take()

    def state_dict(self) -> dict[str, Tensor]:
        """The module's whole state on every rank (a collective), parameters as float32 masters where they exist."""
        state = {name: buffer.detach().clone() for name, buffer in _named_persistent_buffers(self.module)}
        for flat in self.flats:
            whole = flat.whole_master()
            for slot in flat.slots:
                state[slot.name] = whole[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name not in state:
                state[name] = next(state[other] for other, p in self.module.named_parameters() if p is parameter)
        return state

    def save_checkpoint(
        self, folder: str | Path, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> Path:
        """Write `folder/tag` (default `step-000123`): every rank what it owns, then a manifest. Returns its path."""
        return checkpoint.save(self, Path(folder), tag or f"step-{self.global_step:06d}", client_state or {})

    def load_checkpoint(self, folder: str | Path, tag: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Read `folder/tag`, or the newest one in `folder`; any number of ranks and any stage may have written it.

        Returns (its path, the client state). Raises CheckpointError, naming the file, before anything is changed.
        """
        return checkpoint.load(self, Path(folder), tag)

    def disconnect(self) -> None:
        """Let go of connections, for a rank that fails: its peers then fail at once instead of waiting for it."""
        self.zero.disconnect()

    def reconnect(self) -> None:
        """Use the present world's connections; a pass that was cut off is forgotten. Collective."""
        self.zero.reconnect()
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
        known = lambda: known_storages(self.module, self.zero, self.partitioned_optimizer)  # noqa: E731  # read at entry
        with ActivationTrace(known) as trace:
            yield
        self._activation_bytes = trace.peak_bytes

    def ledger(self) -> Ledger:
        """Bytes by category at the peak since the last call."""
        return make_ledger(
            measure_states(self.module, self.zero, self.partitioned_optimizer),
            activations=self._activation_bytes,
            buffers=self._traffic.buffers.take_peak(),
            peak=self._peak.take(),
            outside=self._outside_bytes,
            device=self.world.device,
        )

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def destroy(self, *, keep_parameters: bool = True) -> None:
        """Give everything back: hooks, flats, optimizer states. The module works on by itself, with its master values.

        Collective where states are partitioned. Without `keep_parameters` nothing is gathered, and parameters that are
        partitioned are lost.
        """
        self.zero.detach()
        self._wrapper.undo()
        if self.zero.partitioned:
            for unit in self.zero.units:
                unit.release()
        forget(self.zero)
        if keep_parameters:
            for flat in self.flats:
                flat.give_back()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.zero.units.clear()
        self.zero.order.clear()
        self.partitioned_optimizer.forget()
        release_freed_memory()

    def __repr__(self) -> str:
        count = sum(flat.numel for flat in self.flats)
        return (
            f"Engine({type(self.module).__name__}, {count:,} parameters in {len(self.zero.units)} units, zero "
            f"{self.zero_stage}, "
            f"{str(self.dtype).removeprefix('torch.')}, rank {self.world.rank} of {self.world.size}, step "
            f"{self.global_step})"
        )


def _mutable_buffers(module: nn.Module) -> list[Tensor]:
    """Running statistics, which follow rank 0 as under DistributedDataParallel."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def _named_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for key, buffer in child.named_buffers(recurse=False):
            if key not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def _non_finite_slots(flat: Any) -> list[str]:
    gradient, found = flat.gradient, []
    if bool(torch.isfinite(gradient).all()):
        return found
    for slot in flat.slots:
        low, high = max(slot.offset, flat.start), min(slot.offset + slot.numel, flat.end)
        if low < high and not bool(torch.isfinite(gradient[low - flat.start : high - flat.start]).all()):
            found.append(slot.name)
    return found
