"""What computes the models of an engine in the place of torch's own kernels: `precision.products`,
`precision.attention`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cuda_ops import products, torch_attention
from speedlab.config import PrecisionConfig


class OwnKernels:
    """Products and attention of the models of one engine, until `undo`. Nothing of another engine, or of one that this
    process had before, changes which kernels these are."""

    def __init__(
        self, models: Iterable[nn.Module], chosen: PrecisionConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._products = products.Products(chosen.products)
        layers = {module for model in models for module in model.modules()}  # Parts of a pipeline may share some.
        multiplies = products.in_use(device, dtype, chosen.products) != "torch"
        self._hooks = products.hook(layers, self._products) if multiplies else []
        self._attends = torch_attention.in_use(device, chosen.attention) != "torch"
        if self._attends:
            torch_attention.install()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around forward and backward. An exception may come in the midst of a product, and ends it."""
        try:
            with torch_attention.under_way(self._attends), products.within(self._products):
                yield
        except BaseException:
            products.end()
            raise

    def undo(self) -> None:
        """Layers and kernels are as they were."""
        for hook in self._hooks:
            hook.remove()
