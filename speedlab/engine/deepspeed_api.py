"""DeepSpeed's engine attributes and methods, with its names, signatures and meanings.

Each delegates to the engine. Methods that have the same name in SpeedLab are in `Engine`.
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
    """The training state under DeepSpeed's names."""

    # ---- ranks and device --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Return the device of this rank."""
        return self.world.device

    @property
    def local_rank(self) -> int:
        """Return this rank's number on its host, from LOCAL_RANK; without it all ranks count as one host."""
        return int(os.environ.get("LOCAL_RANK", self.world.rank))

    @property
    def global_rank(self) -> int:
        """Return this rank's number."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    # ---- progress ----------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Return the number of steps, including those that float16 skipped; `global_step` excludes them."""
        return self.global_step + self.skipped_steps

    def get_lr(self) -> list[float]:
        """Return the present learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def lr_scheduler(self) -> Any:
        """Return the scheduler that `step` steps, or None."""
        return self.scheduler

    # ---- batch sizes and ZeRO stage ----------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the sequences of a step, over all ranks."""
        return self.batch.global_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the sequences of one forward of a rank."""
        return self.batch.micro_size

    def gradient_accumulation_steps(self) -> int:
        """Return the forwards of a step."""
        return self.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """Return the present ZeRO stage."""
        return self.zero_stage

    # ---- weights -----------------------------------------------------------------------------------------------------

    @entry_point(
        alone=lambda engine: engine._whole_here and not (engine.replicas_differ or engine.partitioned_optimizer.late)
    )
    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the whole module's state by name, in the compute dtypes; `state_dict` has the float32 masters.

        If every rank holds the whole module, this is `module.state_dict`, and one rank may call it alone, unless a
        delayed update is pending or replicas differ. Otherwise (ZeRO stage 3, tensor or pipeline parallelism) the state
        is gathered on every rank, which is collective. Replicas that differ are averaged first.

        Args:
            destination: A dict to fill, as in torch.
            prefix: Prefix of all names.
            keep_vars: As in torch; only if every rank holds the whole module.
            exclude_frozen_parameters: Leave out frozen parameters.

        Raises:
            ValueError: For `keep_vars` if no rank holds the whole module.
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
        """Write `module_state_dict` to a file. Collective. An existing file is replaced.

        Values are in the compute dtype, which is float32 if the model trains in float32. `speedlab.export_hf` writes a
        transformers folder instead.

        Args:
            save_dir: The folder.
            save_filename: The name; the suffix .safetensors chooses this format, others are for `torch.load`.
            exclude_frozen_parameters: Leave out frozen parameters.

        Returns:
            True.

        Raises:
            CheckpointError: On all ranks, if the file cannot be written.
        """
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        write_weights(self.everyone, Path(save_dir) / save_filename, state)
        return True

    @property
    def _whole_here(self) -> bool:
        """Return whether this rank holds the whole module between steps."""
        alone = self.layout.tp == self.layout.pp == 1
        return alone and not any(zero.params_unsharded_on_demand for zero in self.zeros)

    @property
    def _masters_here(self) -> bool:
        """Return whether this rank holds the whole module and its masters, so that no gather is needed."""
        held = all(zero.zero_policy.optimizer_states is Replication.REPLICATED for zero in self.zeros)
        return held and self._whole_here and not (self.replicas_differ or self.partitioned_optimizer.late)

    def _frozen(self) -> set[str]:
        own = [name for module in self.modules for name, p in module.named_parameters() if not p.requires_grad]
        return {name for theirs in self.mesh["pp"].collect(own) for name in theirs}
