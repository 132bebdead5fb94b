"""What scripts that were written for DeepSpeed ask an engine for, under its names, with its signatures and meanings.

Each is a line over what the engine has anyway; what DeepSpeed and SpeedLab call alike is in `Engine` itself.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from speedlab.engine.checkpoint.single_file import write_weights
from speedlab.engine.entry_points import entry_point
from speedlab.engine.full_state_dict import full_state_dict
from speedlab.engine.state import TrainingState
from speedlab.placement import Replication


class DeepSpeedNames(TrainingState):
    """The state of an engine under DeepSpeed's names."""

    # ---- where it runs -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.world.device

    @property
    def local_rank(self) -> int:
        """This rank's number on its host: what LOCAL_RANK says; without it all ranks are taken for one host's."""
        return int(os.environ.get("LOCAL_RANK", self.world.rank))

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.world.size

    # ---- how far it is -----------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Steps that were made, with those that float16 skipped; `global_step` is without them."""
        return self.global_step + self.skipped_steps

    def get_lr(self) -> list[float]:
        """The present learning rate of each of the optimizer's groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` steps, or None."""
        return self.scheduler

    # ---- what it was set up with -------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.batch.global_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Sequences of one forward of a rank."""
        return self.batch.micro_size

    def gradient_accumulation_steps(self) -> int:
        """Forwards of a step."""
        return self.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, as it is now."""
        return self.zero_stage

    # ---- the weights -------------------------------------------------------------------------------------------------

    @entry_point(alone=lambda engine: engine._whole_here and not (engine.apart or engine.partitioned_optimizer.late))
    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The whole module's state by name, in the dtypes that it computes in; `state_dict` has the float32 masters.

        Where every rank holds the whole module, it is `module.state_dict`, and one rank may call it alone, unless an
        update is late or ranks have trained apart, as islands, who take the mean first. Under ZeRO stage 3, tensor or
        pipeline parallelism it is put together, on every rank: a collective of all ranks. Raises ValueError for
        `keep_vars` then.
        """
        self.finish_update()
        self.average_replicas()
        state = OrderedDict() if destination is None else destination
        if self._whole_here:
            self.module.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        else:
            if keep_vars:
                raise ValueError("module_state_dict: keep_vars, but no rank holds the whole parameters; leave it out")
            whole = full_state_dict(self.model_parts, self.mesh["pp"], masters=False)
            state.update({f"{prefix}{name}": value for name, value in whole.items()})
        for name in self._frozen() if exclude_frozen_parameters else ():
            state.pop(f"{prefix}{name}", None)
        return state

    @entry_point()
    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `module_state_dict` to `save_dir/save_filename`, for `torch.load`, or as safetensors where that is how
        the name ends; a file that is there is replaced. Returns True. Collective.

        Values are in the compute dtype, which is float32 where the model trains in it. Raises CheckpointError on all
        ranks when it cannot be written. For a folder of transformers: `speedlab.export_hf`.
        """
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        write_weights(self.everyone, Path(save_dir) / save_filename, state)
        return True

    @property
    def _whole_here(self) -> bool:
        """Whether this rank holds the whole module between steps."""
        alone = self.layout.tp == self.layout.pp == 1
        return alone and not any(zero.params_unsharded_on_demand for zero in self.zeros)

    @property
    def _masters_here(self) -> bool:
        """Whether this rank holds the whole module and its masters, so that nothing has to come from others."""
        held = all(zero.zero_policy.optimizer_states is Replication.REPLICATED for zero in self.zeros)
        return held and self._whole_here and not (self.apart or self.partitioned_optimizer.late)

    def _frozen(self) -> set[str]:
        own = [name for module in self.modules for name, p in module.named_parameters() if not p.requires_grad]
        return {name for theirs in self.mesh["pp"].collect(own) for name in theirs}
