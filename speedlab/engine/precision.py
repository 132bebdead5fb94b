"""Compute dtype, and the dynamic loss scale of float16 (arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from speedlab.config import ConfigError, PrecisionConfig
from speedlab.hardware import cpu_fast_dtype

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype:
    """Return the configured compute dtype; for 'auto', bfloat16 if `device` multiplies it fast, else float32.

    Args:
        config: The `precision` section of the configuration.
        device: The device of this rank.

    Raises:
        ConfigError: If the device lacks the dtype, or if masters do not fit it.
    """
    dtype = _chosen(config, device)
    if config.masters == "none" and dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")  # Only for 'auto': the configuration checks explicit dtypes.
        raise ConfigError(
            f"precision.masters 'none' needs precision.dtype bfloat16, whose updates are rounded stochastically, and "
            f"'auto' stands for {name} on this device; set precision.dtype to 'bfloat16', or precision.masters to "
            "'float32'"
        )
    return dtype


def dtypes_of(module: nn.Module, compute: torch.dtype) -> dict[int, torch.dtype]:
    """Return the compute dtype of each parameter, by its id.

    float32 parameters use `compute`, except in layers with float32 statistics (BatchNorm), which need one dtype for
    both. Other parameters keep their dtype.

    Args:
        module: The model.
        compute: The compute dtype.
    """
    alongside_statistics = {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, _BatchNorm)
        and layer.running_mean is not None
        and layer.running_mean.dtype == torch.float32
        for parameter in layer.parameters(recurse=False)
    }
    return {
        id(each): compute if each.dtype == torch.float32 and id(each) not in alongside_statistics else each.dtype
        for each in module.parameters()
    }


def _chosen(config: PrecisionConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
        if dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError(
                f"precision.dtype bfloat16: {torch.cuda.get_device_name(device)} has no bfloat16; use float16 or "
                f"float32"
            )
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    return _DTYPES[cpu_fast_dtype()]


class LossScale:
    """The factor on the loss: halved after an overflow, doubled after `window` good steps.

    Constant 1 without float16.
    """

    def __init__(self, config: PrecisionConfig, dtype: torch.dtype) -> None:
        self.dynamic = dtype is torch.float16
        self.value = config.initial_loss_scale if self.dynamic else 1.0
        self._window, self._minimum = config.loss_scale_window, config.min_loss_scale
        self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """Return whether the factor cannot shrink further."""
        return not self.dynamic or self.value <= self._minimum

    def update(self, *, overflow: bool) -> None:
        """Change the factor after a step.

        Args:
            overflow: Whether the gradient was not finite.
        """
        if not self.dynamic:
            return
        if overflow:
            self.value = max(self._minimum, self.value / 2)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self._window:
            self.value *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from a checkpoint.

        Args:
            state: As from `state_dict`.
        """
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
