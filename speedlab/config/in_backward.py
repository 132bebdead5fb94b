"""Which runs can update each unit in the middle of backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedlab.layout import Layout

if TYPE_CHECKING:
    from speedlab.config.run import RunConfig


def in_backward_problems(config: RunConfig, layout: Layout) -> list[str]:
    """What stands against `optimizer.in_backward`, where it is asked for: all that is known only when the backward has
    ended, a line for each."""
    if not config.optimizer.in_backward:
        return []
    accumulation = config.batch.resolve(layout.data_size).accumulation
    problems = {
        f"clip_norm {config.clip_norm}: the global norm is known when all gradients are; set clip_norm to null": (
            config.clip_norm is not None
        ),
        f"batch.accumulation {accumulation}: gradients of several micro-batches have to be summed before; set it to "
        "1": accumulation > 1,
        f"parallel.dp {layout.dp}: what no rank used is known when the backward has ended; use one dp rank, with tp "
        "for more devices": layout.dp > 1,
        f"parallel.cp {layout.cp}: gradients are summed over these ranks when all are; set it to 1": layout.cp > 1,
        f"parallel.pp {layout.pp}: a pipeline sums the gradients of its micro-batches; set it to 1": layout.pp > 1,
        "precision.dtype float16: whether a step overflows is known when the backward has ended; use bfloat16": (
            config.precision.dtype == "float16"
        ),
    }
    return [f"optimizer.in_backward cannot be with {problem}" for problem, is_one in problems.items() if is_one]
