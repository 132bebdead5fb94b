"""What a step changes on one rank, and what it stands on: all that a checkpoint writes and reads.

A part of the model on one rank: a pipeline stage, or all of it.
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
from speedlab.optim.compressed_optimizer import CommunicatingOptimizer, LocalStepOptimizer, keeps_now
from speedlab.optim.diloco import DiLoCo
from speedlab.optim.sharded_optimizer import PartitionedOptimizer
from speedlab.parallel.context import ContextParallel
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import FlatParam, Zero
from speedlab.placement import Placement


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A pipeline stage on this rank (the whole model where there is no pipeline), with what drives it."""

    index: int
    module: nn.Module
    cut: tuple[int, ...]
    """Blocks of every pipeline stage; empty without a pipeline."""
    tensor: TensorParallel
    context: ContextParallel
    zero: Zero


log = logging.getLogger("speedlab.engine")


class TrainingState:
    """A rank's parts of the model, their flats and optimizer, the loss scale and the number of the step."""

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
        """`model_parts`: this rank's pipeline stages, first one first; the whole model is one. `batch`: the equation,
        whole."""
        self.model_parts = list(model_parts)
        self.partitioned_optimizer, self.scheduler = optimizer, scheduler
        self.config, self.batch, self.world, self.mesh, self.traffic = config, batch, world, mesh, traffic
        self.stores = stores
        """The places beside the device in which states of this rank lie."""
        self.loss_scale, self.dtype = loss_scale, dtype
        self._copies = HostCopies(world.device, traffic)
        self.islands = DiLoCo(optimizer, mesh, config.outer, before_change=self.before_change)
        """What meets with other islands."""
        self.zero_stage: int = config.zero.stage
        """The row of ZeRO's table that the flats are placed by. It is told, and asked by nothing here."""
        self.global_step = 0
        """Updates that were made."""
        self.skipped_steps = 0
        """Steps without an update, because a gradient overflowed in float16."""
        self.global_samples = 0
        """Sequences that went into all steps, over all ranks."""
        self.counted_per_micro_batch: float | None = None
        """How many targets counted in a micro-batch of the first step, on average over ranks: what losses are weighted
        relative to. 0 if the batches do not say; None before that step."""
        self.epochs: Epochs | None = None
        """Where the loader that `initialize` made stands; None where it made none."""
        self._told_apart: set[str] = set()
        self.updating = False
        """True from the first changed parameter to the end of a step: an interrupt then leaves ranks that differ."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """An input on this rank's device. From the host it comes through pinned memory, which nothing waits for."""
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
        """The placement table of this rank."""
        return Placement.joined(zero.placement for zero in self.zeros)

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def module(self) -> nn.Module:
        """The model, or this rank's first pipeline stage of it."""
        return self.model_parts[0].module

    @property
    def modules(self) -> list[nn.Module]:
        """The model, or this rank's pipeline stages of it."""
        return [part.module for part in self.model_parts]

    @property
    def cut(self) -> tuple[int, ...]:
        """Blocks of every pipeline stage; empty without a pipeline."""
        return self.model_parts[0].cut

    @property
    def zeros(self) -> list[Zero]:
        """What partitions the model parts, one for each."""
        return [part.zero for part in self.model_parts]

    @property
    def flats(self) -> list[FlatParam]:
        """All flats of this rank."""
        return [flat for zero in self.zeros for flat in zero.flats]

    @property
    def group(self) -> Group:
        """Ranks that hold the same part of the model and see other data."""
        return self.mesh.gather

    @property
    def everyone(self) -> Group:
        """All ranks of the layout."""
        return self.mesh.everyone

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer over this rank's partitions; schedulers hang on it."""
        return self.partitioned_optimizer.inner

    @property
    def apart(self) -> bool:
        """Whether ranks that train one model have parameters or moments of their own now."""
        return self.islands.apart or (isinstance(self.optimizer, LocalStepOptimizer) and self.optimizer.apart)

    def average_replicas(self) -> None:
        """Between two steps: give islands that have trained apart the mean of their parameters and moments, and ranks
        whose optimizer has let them an early exchange, as whoever wants one model does by itself. Collective of all
        ranks; the step behind it begins there."""
        if self.apart and not self.updating:
            self.tell_of_writes_apart()
            self.updating = True  # Where a peer is lost, ranks differ.
            if self.islands.apart:
                self.islands.average_replicas()
            else:
                self.before_change()
                self.partitioned_optimizer.meet()
            self.wait_until_read()
            self.updating = False

    @property
    def keeper(self) -> DiLoCo | CommunicatingOptimizer | None:
        """What keeps something beside gradients now, that a checkpoint has to have."""
        if self.islands.several:
            return self.islands
        inner = self.optimizer
        return inner if isinstance(inner, CommunicatingOptimizer) and keeps_now(inner) else None

    def begin_anew(self) -> None:
        """Parameters came from elsewhere: what was kept beside gradients would mislead."""
        self.islands.begin_anew()
        if isinstance(self.optimizer, CommunicatingOptimizer):
            self.optimizer.begin_anew()

    def parameters(self) -> Iterator[nn.Parameter]:
        return itertools.chain.from_iterable(module.parameters() for module in self.modules)

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers of this rank's parts of the model."""
        return [buffer for module in self.modules for buffer in module.buffers()]

    def replace_what_is_lost(self) -> None:
        """Before a load: where a place has lost some of what this rank has there, all of it begins anew, as zeros."""
        if all(store.sound for store in self.stores.made.values()):
            return
        states = [state for flat in self.flats for state in flat.offloaded.values()]
        for gradient in (flat.gradient for flat in self.flats if flat.gradient is not None):
            states += filter(None, (gradient.offloaded, gradient.waiting))
        for state in states:
            state.kept.drop()
        for state in states:
            state.begin_anew()

    def finish_update(self) -> None:
        """Between two steps: make an update that is late (`offload.delayed_update`) the parameters' now, as whatever
        looks at them does by itself. Inside a step nothing happens: it sees what the step sees.

        Collective of all ranks where there is such an update; the step behind it uses the newest parameters. Raises
        what the update failed with. What the caller has written into parameters meanwhile is lost, and told of.
        """
        if self.partitioned_optimizer.late and not self.updating:  # A step that was cut off stays so.
            self.before_change()
            self.apply_late()
            self.wait_until_read()
            self.updating = False

    def written_too_early(self) -> list[str]:
        """Parameters that the caller has written into while an update of them is under way: its values come in the
        place of these."""
        flats = self.partitioned_optimizer.flats if self.partitioned_optimizer.late else ()
        return [name for flat in flats for name in flat.written()]

    def words_of_early_writes(self) -> str:
        """What to say of them; on a rank that has none, of those of others."""
        names = _first_of(self.written_too_early()) or "a parameter on another rank"
        return (
            f"{names}: changed while an update was under way (offload.delayed_update), whose values come in its place; "
            "call engine.finish_update() on all ranks before such a change"
        )

    def tell_of_early_writes(self) -> None:
        """Warn of them where they are lost. (Not refused: only the ranks that were written on know.)"""
        if self.written_too_early():
            log.warning("%s", self.words_of_early_writes())

    def apply_late(self) -> None:
        """Make an update that is late, if there is one, the parameters'; `updating` from then on. Collective."""
        if not self.partitioned_optimizer.late:
            return
        try:
            self.partitioned_optimizer.wait()
        except Exception:
            self.updating = True  # Some masters are updated, and others not.
            raise
        self.updating = True
        self.partitioned_optimizer.publish()

    def take_changes(self) -> None:
        """What the caller has written into parameters are their values from now on."""
        self.tell_of_writes_apart()
        for flat in self.flats:
            flat.take_changes()

    def tell_of_writes_apart(self) -> None:
        """Warn of each parameter once that the caller has written into while the optimizer lets ranks train apart: no
        momentum has it, so that the next exchange loses it. (Not refused: only the ranks that were written on know.)"""
        if not (isinstance(self.optimizer, LocalStepOptimizer) and self.optimizer.apart):
            return
        written = [name for flat in self.partitioned_optimizer.flats for name in flat.written()]
        if new := [name for name in written if name not in self._told_apart]:
            self._told_apart.update(new)
            log.warning(
                "%s: written into between two exchanges of %s, the next of which loses it; call "
                "engine.average_replicas() on all ranks before such a write",
                _first_of(new),
                type(self.optimizer).__name__,
            )

    def wait_until_read(self) -> None:
        """After a change of parameters: until no peer reads this rank's any more, into which the caller may write at
        once. Collective."""
        for zero in self.zeros:
            zero.gathers.wait_until_all_read()

    def before_change(self) -> None:
        """Parameters are about to change, by an update or a load: nothing of a pass before may live on, nor an update
        that is under way. Collective."""
        self.partitioned_optimizer.settle()
        self.tell_of_early_writes()
        self.tell_of_writes_apart()
        for zero in self.zeros:
            zero.before_change()


def _first_of(names: Sequence[str]) -> str:
    """The first one, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""
