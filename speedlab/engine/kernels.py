"""Kernels of the engine: compile those that a configuration needs, and replace torch's CPU kernels.

`CpuKernelOverrides` replaces matmul and attention, as `precision.products` and `precision.attention` say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cuda_ops import cpu_sdpa, gpu, onednn_matmul, stochastic, warm
from speedlab.config import ConfigError, PrecisionConfig, RunConfig


def prepare_small_states(config: RunConfig, device: torch.device) -> None:
    """Compile the kernels of 8-bit moments and of stochastic rounding, if the configuration uses them.

    Args:
        config: The configuration of the run.
        device: The device of this rank.

    Raises:
        ConfigError: If states are on a GPU that has no kernels for them.
    """
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
    """Compile the kernels of sign compression and of layer-wise optimizers, if the configuration uses them.

    Args:
        config: The configuration of the run.
        device: The device of this rank.

    Raises:
        ConfigError: If a GPU has no kernels for the optimizer.
    """
    optimizer = config.optimizer
    steps = (*(warm.SIGNS if optimizer.sums_itself else ()), *(warm.LAYERWISE if optimizer.looks_at_parameters else ()))
    if optimizer.sums_itself and config.zero.stage:  # Narrow parameters are rounded stochastically.
        steps += (stochastic.warm,)
    if not steps:
        return
    if device.type == "cuda" and not gpu.available():
        raise ConfigError(
            f"optimizer.name {optimizer.name!r}: kernels for GPUs need numba-cuda; install it with: pip install "
            "'speedlab[cuda]', or set optimizer.name to 'adamw'"
        )
    warm.warm_up(lambda line: print(line, flush=True), steps=tuple(dict.fromkeys(steps)))


class CpuKernelOverrides:
    """Matmul and attention kernels of one engine's models, until `undo`. Other engines do not change them."""

    def __init__(
        self, models: Iterable[nn.Module], chosen: PrecisionConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._products = onednn_matmul.Products(chosen.products)
        layers = {module for model in models for module in model.modules()}  # Pipeline stages may share modules.
        multiplies = onednn_matmul.in_use(device, dtype, chosen.products) != "torch"
        self._hooks = onednn_matmul.hook(layers, self._products) if multiplies else []
        self._attends = cpu_sdpa.in_use(device, chosen.attention) != "torch"
        if self._attends:
            cpu_sdpa.install()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Context around forward and backward. An exception inside a product resets its state."""
        try:
            with cpu_sdpa.under_way(self._attends), onednn_matmul.within(self._products):
                yield
        except BaseException:
            onednn_matmul.end()
            raise

    def undo(self) -> None:
        """Restore the layers' own kernels."""
        for hook in self._hooks:
            hook.remove()
