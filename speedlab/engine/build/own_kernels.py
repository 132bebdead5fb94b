"""What computes the models of an engine in the place of torch's own kernels: `precision.products`,
`precision.attention`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cuda_ops import cpu_sdpa, onednn_matmul
from speedlab.config import PrecisionConfig


class OwnKernels:
    """Products and attention of the models of one engine, until `undo`. Nothing of another engine, or of one that this
    process had before, changes which kernels these are."""

    def __init__(
        self, models: Iterable[nn.Module], chosen: PrecisionConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._products = onednn_matmul.Products(chosen.products)
        layers = {module for model in models for module in model.modules()}  # Parts of a pipeline may share some.
        multiplies = onednn_matmul.in_use(device, dtype, chosen.products) != "torch"
        self._hooks = onednn_matmul.hook(layers, self._products) if multiplies else []
        self._attends = cpu_sdpa.in_use(device, chosen.attention) != "torch"
        if self._attends:
            cpu_sdpa.install()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around forward and backward. An exception may come in the midst of a product, and ends it."""
        try:
            with cpu_sdpa.under_way(self._attends), onednn_matmul.within(self._products):
                yield
        except BaseException:
            onednn_matmul.end()
            raise

    def undo(self) -> None:
        """Layers and kernels are as they were."""
        for hook in self._hooks:
            hook.remove()
