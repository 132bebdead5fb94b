"""Which runs can update each unit in the middle of backward."""

from __future__ import annotations

import torch

from speedlab.config import ConfigError, RunConfig
from speedlab.config.batch import Batch
from speedlab.layout import Layout


def check_in_backward(config: RunConfig, layout: Layout, batch: Batch, dtype: torch.dtype) -> None:
    """Raises ConfigError where `optimizer.in_backward` is asked for and the update needs something that is known only
    when the backward has ended: one line for each."""
    if not config.optimizer.in_backward:
        return
    problems = {
        f"clip_norm {config.clip_norm}: the global norm is known when all gradients are; set clip_norm to null": (
            config.clip_norm is not None
        ),
        f"batch.accumulation {batch.accumulation}: gradients of several micro-batches have to be summed before; set it "
        "to 1": batch.accumulation > 1,
        f"parallel.dp {layout.dp}: what no rank used is known when the backward has ended; use one dp rank, with tp "
        "for more devices": layout.dp > 1,
        f"parallel.pp {layout.pp}: a pipeline sums the gradients of its micro-batches; set it to 1": layout.pp > 1,
        "precision.dtype float16: whether a step overflows is known when the backward has ended; use bfloat16": (
            dtype is torch.float16
        ),
    }
    found = [f"optimizer.in_backward cannot be with {problem}" for problem, is_one in problems.items() if is_one]
    if found:
        raise ConfigError("\n".join(found))
