"""A part of the model on one rank: a pipeline stage, or all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from speedlab.parallel.context import ContextParallel
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import Zero


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
