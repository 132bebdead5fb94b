"""What states in fewer bytes need of a device: kernels that are there, and compiled before the first step."""

from __future__ import annotations

import torch

from cuda_ops import gpu, warm
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
