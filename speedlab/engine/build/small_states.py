"""What states and exchanges in fewer bytes need of a device: kernels that are there, and compiled before the first
step."""

from __future__ import annotations

import torch

from cuda_ops import gpu, stochastic, warm
from speedlab.config import ConfigError, RunConfig


def prepare_small_states(config: RunConfig, device: torch.device) -> None:
    """Compile the kernels of 8-bit moments and of stochastic rounding, where `config` asks for one of them. Raises
    ConfigError where a GPU keeps such states and has no kernels for them."""
    small = {"moments": config.precision.moments == "8bit", "masters": config.precision.masters == "none"}
    asked = [f"precision.{name} {getattr(config.precision, name)!r}" for name, is_so in small.items() if is_so]
    if not asked:
        return
    if device.type == "cuda" and config.offload.optimizer == "none" and not gpu.available():
        raise ConfigError(
            f"{' and '.join(asked)}: kernels for GPUs need numba-cuda; install it with: pip install 'speedlab[cuda]', "
            "or set offload.optimizer to 'host', where they are computed on the host"
        )
    warm.warm_up(lambda line: print(line, flush=True), steps=warm.COMPACT)


def prepare_optimizer(config: RunConfig, device: torch.device) -> None:
    """The same of signs, where the optimizer sends them, and of updates that look at whole parameters."""
    optimizer = config.optimizer
    steps = (*(warm.SIGNS if optimizer.sums_itself else ()), *(warm.LAYERWISE if optimizer.looks_at_parameters else ()))
    if optimizer.sums_itself and config.zero.stage:  # Narrow parameters are rounded as they move.
        steps += (stochastic.warm,)
    if not steps:
        return
    if device.type == "cuda" and not gpu.available():
        raise ConfigError(
            f"optimizer.name {optimizer.name!r}: kernels for GPUs need numba-cuda; install it with: pip install "
            "'speedlab[cuda]', or set optimizer.name to 'adamw'"
        )
    warm.warm_up(lambda line: print(line, flush=True), steps=tuple(dict.fromkeys(steps)))
