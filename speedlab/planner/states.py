"""Model states of each rank of a run: its layout, its stage, how its gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speedlab.config import RunConfig
from speedlab.layout import Layout
from speedlab.placement import Holders
from speedlab.planner.formula import ModelStates, model_states, parameter_count, rank_parameters, stage_blocks

_FLOAT32_BYTES = 4


def parameters_by_rank(config: RunConfig, layout: Layout, *, whole: int | None = None) -> list[int]:
    """Parameters that each rank computes with. `whole`: of a model that is not the configuration's GPT, whose ranks are
    taken to hold equal shares."""
    if whole is not None and whole != parameter_count(config.model):
        return [-(-whole // (layout.pp * layout.tp))] * layout.world_size
    counts = config.parallel.cut or stage_blocks(config.model, layout.pp * config.parallel.stages_per_rank)
    return rank_parameters(config.model, layout, counts)


def rank_states(
    config: RunConfig, layout: Layout, parameters: Sequence[int], *, stage: int, dtype: str
) -> list[ModelStates]:
    """Model states at `stage` on each rank that computes with so many `parameters`: what it keeps between two passes.

    Gradients of several micro-batches are summed in float32. What islands keep between meetings counts with them.
    """
    several = config.batch.resolve(layout.data_size).accumulation > 1
    sums = dtype != "float32" and several and not config.optimizer.sums_itself  # Whose gradients always are.
    found = []
    for count in parameters:
        state = model_states(count, dp=layout.replicas, stage=stage, dtype=dtype, optimizer=config.optimizer)
        gradients = (2 if sums else 1) * state.gradients
        if layout.islands > 1:
            gradients += _FLOAT32_BYTES * config.outer.states * Holders.OWN_PART.share(count, layout.replicas)
        found.append(replace(state, gradients=gradients))
    return found
