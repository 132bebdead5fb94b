"""The training state of one rank: what a step changes and what a checkpoint writes and reads.

`ModelPart` is one pipeline stage (or the whole model). `TrainingState` holds the parts, the optimizer and the counters.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedlab.comm import CommStats, Group, HostCopies, World
from speedlab.config import RunConfig
from speedlab.config.batch import Batch
from speedlab.data import Epochs
from speedlab.engine.precision import LossScale
from speedlab.layout import Layout
from speedlab.offload import StoreRegistry
from speedlab.optim.communicating_protocols import CommunicatingOptimizer, LocalStepOptimizer, keeps_now
from speedlab.optim.diloco import DiLoCo
from speedlab.optim.sharded_optimizer import PartitionedOptimizer
from speedlab.parallel.context import ContextParallel
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import FlatParam, Zero
from speedlab.placement import Placement


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A pipeline stage on this rank with its parallel wrappers; without a pipeline, the whole model."""

    index: int
    module: nn.Module
    cut: tuple[int, ...]
    """Blocks of every pipeline stage; empty without a pipeline."""
    tensor: TensorParallel
    context: ContextParallel
    zero: Zero


log = logging.getLogger("speedlab.engine")


class TrainingState:
    """The model parts of a rank, their flat parameters and optimizer, the loss scale and the step counters."""

    def __init__(
        self,
        model_parts: Sequence[ModelPart],
        *,
        optimizer: PartitionedOptimizer,
        scheduler: Any,
        config: RunConfig,
        batch: Batch,
        world: World,
        mesh: Mesh,
        traffic: CommStats,
        stores: StoreRegistry,
        loss_scale: LossScale,
        dtype: torch.dtype,
    ) -> None:
        """Store the parts of a rank; `speedlab.initialize` builds them.

        Args:
            model_parts: The pipeline stages of this rank, in order. Without a pipeline: one part, the whole model.
            optimizer: The optimizer over the flat parameters of all parts.
            scheduler: A torch scheduler, or None.
            config: The configuration of the run.
            batch: The resolved batch equation, with all sizes.
            world: All ranks and the device of this rank.
            mesh: One process group per parallel axis.
            traffic: Counters of bytes that collectives and host copies move.
            stores: The stores (host memory, disk) of offloaded states.
            loss_scale: The loss scale, which changes only in float16.
            dtype: The compute dtype.
        """
        self.model_parts = list(model_parts)
        self.partitioned_optimizer, self.scheduler = optimizer, scheduler
        self.config, self.batch, self.world, self.mesh, self.traffic = config, batch, world, mesh, traffic
        self.stores = stores
        """The stores (host memory, disk) that hold offloaded states of this rank."""
        self.loss_scale, self.dtype = loss_scale, dtype
        self._copies = HostCopies(world.device, traffic)
        self.islands = DiLoCo(optimizer, mesh, config.outer, before_change=self.before_change)
        """DiLoCo: averages parameters with other islands."""
        self.zero_stage: int = config.zero.stage
        """The ZeRO stage that placed the flat parameters. For display only: this class never branches on it."""
        self.global_step = 0
        """Number of updates."""
        self.skipped_steps = 0
        """Steps without an update, because a gradient overflowed in float16."""
        self.global_samples = 0
        """Sequences of all steps, over all ranks."""
        self.counted_per_micro_batch: float | None = None
        """Counted targets in a micro-batch of the first step, averaged over ranks.

        Losses are weighted relative to this number.

        0 if the batches do not say how many targets count; None before the first step.
        """
        self.epochs: Epochs | None = None
        """Position of the data loader that `initialize` made; None without such a loader."""
        # Parameters that the warning of local steps has already named.
        self._reported_writes: set[str] = set()
        self.updating = False
        """True from the first changed parameter to the end of a step.

        An interrupt in between leaves ranks that differ.
        """

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy an input to the device of this rank, without waiting for the copy.

        Args:
            tensor: An input on any device.

        Returns:
            The tensor on the device; the same object if it is there already. Host tensors are copied through pinned
            memory.
        """
        if tensor.device == self.world.device:
            return tensor
        if tensor.device.type != "cpu":
            return tensor.to(self.world.device, non_blocking=True)
        source = tensor.contiguous()
        made = torch.empty_like(source, device=self.world.device)
        self._copies.to_device(source, made).wait()
        return made

    @property
    def placement(self) -> Placement:
        """Return the placement table of this rank."""
        return Placement.joined(zero.placement for zero in self.zeros)

    @property
    def layout(self) -> Layout:
        """Return the layout of the run."""
        return self.mesh.layout

    @property
    def module(self) -> nn.Module:
        """Return the model, or the first pipeline stage of this rank."""
        return self.model_parts[0].module

    @property
    def modules(self) -> list[nn.Module]:
        """Return the model, or the pipeline stages of this rank."""
        return [part.module for part in self.model_parts]

    @property
    def cut(self) -> tuple[int, ...]:
        """Return the number of blocks of every pipeline stage; empty without a pipeline."""
        return self.model_parts[0].cut

    @property
    def zeros(self) -> list[Zero]:
        """Return the ZeRO partitioner of each model part."""
        return [part.zero for part in self.model_parts]

    @property
    def flats(self) -> list[FlatParam]:
        """Return all flat parameters of this rank."""
        return [flat for zero in self.zeros for flat in zero.flats]

    @property
    def group(self) -> Group:
        """Return the ranks that hold the same part of the model and see other data."""
        return self.mesh.gather

    @property
    def everyone(self) -> Group:
        """Return the group of all ranks of the layout."""
        return self.mesh.everyone

    @property
    def optimizer(self) -> Optimizer:
        """Return the torch optimizer over the partitions of this rank; learning-rate schedulers use this object."""
        return self.partitioned_optimizer.inner

    @property
    def replicas_differ(self) -> bool:
        """Return whether replicas of one model differ now in parameters or moments."""
        return self.islands.replicas_differ or (
            isinstance(self.optimizer, LocalStepOptimizer) and self.optimizer.replicas_differ
        )

    def average_replicas(self) -> None:
        """Average replicas that differ, between two steps. Collective over all ranks.

        Islands (DiLoCo) take the mean of parameters and moments. Ranks of an optimizer with local steps exchange early.
        `state_dict` and other calls that need one model do this automatically. The next step starts from the averaged
        values.
        """
        if self.replicas_differ and not self.updating:
            self.report_lost_writes()
            self.updating = True  # Ranks differ if a peer is lost from here on.
            if self.islands.replicas_differ:
                self.islands.average_replicas()
            else:
                self.before_change()
                self.partitioned_optimizer.meet()
            self.wait_until_read()
            self.updating = False

    @property
    def keeper(self) -> DiLoCo | CommunicatingOptimizer | None:
        """Return the object whose extra state (error feedback, outer momentum) a checkpoint must contain; None without
        one.
        """
        if self.islands.several:
            return self.islands
        inner = self.optimizer
        return inner if isinstance(inner, CommunicatingOptimizer) and keeps_now(inner) else None

    def begin_again(self) -> None:
        """Reset state kept next to gradients (error feedback, momentum), because parameters were loaded from
        elsewhere.
        """
        self.islands.begin_again()
        if isinstance(self.optimizer, CommunicatingOptimizer):
            self.optimizer.begin_again()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank's model parts."""
        return itertools.chain.from_iterable(module.parameters() for module in self.modules)

    @property
    def buffers(self) -> list[Tensor]:
        """Return all buffers of the model parts of this rank."""
        return [buffer for module in self.modules for buffer in module.buffers()]

    def replace_what_is_lost(self) -> None:
        """Reset all offloaded states to zeros if a store has lost data. Call this before a load."""
        if all(store.sound for store in self.stores.made.values()):
            return
        states = [state for flat in self.flats for state in flat.offloaded.values()]
        for gradient in (flat.gradient for flat in self.flats if flat.gradient is not None):
            states += filter(None, (gradient.offloaded, gradient.waiting))
        for state in states:
            state.kept.drop()
        for state in states:
            state.begin_again()

    def finish_update(self) -> None:
        """Apply a delayed update (`offload.delayed_update`) now, between two steps.

        Calls that read parameters do this automatically. Inside a step this does nothing. Collective over all ranks if
        an update is pending. The next step uses the newest parameters. Values that the caller wrote into parameters
        meanwhile are lost, with a warning.

        Raises:
            Exception: The error of the update on its thread, if the update failed.
        """
        if self.partitioned_optimizer.late and not self.updating:  # An interrupted step stays marked as interrupted.
            self.before_change()
            self.apply_late()
            self.wait_until_read()
            self.updating = False

    def written_too_early(self) -> list[str]:
        """Return names of parameters that the caller changed during a delayed update, which will overwrite these
        values.
        """
        flats = self.partitioned_optimizer.flats if self.partitioned_optimizer.late else ()
        return [name for flat in flats for name in flat.written()]

    def words_of_early_writes(self) -> str:
        """Return the warning about such writes; without one on this rank, the warning about writes on other ranks."""
        names = _first_of(self.written_too_early()) or "a parameter on another rank"
        return (
            f"{names}: changed while an update was under way (offload.delayed_update), whose values come in its place; "
            "call engine.finish_update() on all ranks before such a change"
        )

    def tell_of_early_writes(self) -> None:
        """Warn about writes that a delayed update overwrites.

        A warning, because only the writing ranks know of the write.
        """
        if self.written_too_early():
            log.warning("%s", self.words_of_early_writes())

    def apply_late(self) -> None:
        """Apply a pending delayed update to the parameters, and set `updating`. Collective."""
        if not self.partitioned_optimizer.late:
            return
        try:
            self.partitioned_optimizer.wait()
        except Exception:
            self.updating = True  # Some masters are updated and others are not.
            raise
        self.updating = True
        self.partitioned_optimizer.publish()

    def take_changes(self) -> None:
        """Accept values that the caller wrote into parameters, and copy them to the masters."""
        self.report_lost_writes()
        for flat in self.flats:
            flat.take_changes()

    def report_lost_writes(self) -> None:
        """Warn once per parameter that the caller changed while the optimizer trains ranks with local steps.

        The momentum does not contain such a write, so the next exchange loses the written value. This is a warning, not
        an error, because only the writing ranks know of the write.
        """
        if not (isinstance(self.optimizer, LocalStepOptimizer) and self.optimizer.replicas_differ):
            return
        written = [name for flat in self.partitioned_optimizer.flats for name in flat.written()]
        if new := [name for name in written if name not in self._reported_writes]:
            self._reported_writes.update(new)
            log.warning(
                "%s: written into between two exchanges of %s, the next of which loses it; call "
                "engine.average_replicas() on all ranks before such a write",
                _first_of(new),
                type(self.optimizer).__name__,
            )

    def wait_until_read(self) -> None:
        """Wait until no peer reads the parameters of this rank, so that the caller may write to them. Collective."""
        for zero in self.zeros:
            zero.gathers.wait_until_all_read()

    def before_change(self) -> None:
        """Finish pending work before an update or a load changes parameters. Collective.

        Gathered values of an earlier pass are dropped, and a pending update is completed.
        """
        self.partitioned_optimizer.settle()
        self.tell_of_early_writes()
        self.report_lost_writes()
        for zero in self.zeros:
            zero.before_change()


def _first_of(names: Sequence[str]) -> str:
    """Return the first name and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""
