"""By whom a model's linear layers, and kernels beside them, multiply float32: `precision.products`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from cuda_ops import products
from cuda_ops.products import Choice


class Multiplying:
    """The products of the models of one engine, until `undo`. Kernels have the choice of the engine that came last."""

    def __init__(self, models: Iterable[nn.Module], choice: Choice, device: torch.device, dtype: torch.dtype) -> None:
        products.choose(choice)
        layers = {module for model in models for module in model.modules()}  # Parts of a pipeline may share some.
        other = products.in_use(device, dtype, choice) != "torch"
        self._hooks = products.hook(layers) if other else []

    def break_off(self) -> None:
        """After an exception, which may have come in the midst of a product."""
        products.end()

    def undo(self) -> None:
        """Layers and kernels are as they were."""
        for hook in self._hooks:
            hook.remove()
        products.choose("auto")
