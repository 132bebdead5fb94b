"""Predict memory, time and cost of a training before it starts. No torch."""

from speedlab.planner.formulas import (
    ModelStates,
    explain_stage,
    flops_per_token,
    model_states,
    parameter_count,
    rank_parameters,
    stage_blocks,
)
from speedlab.planner.memory.fit import Peaks, predicted_peaks
from speedlab.planner.memory.rank_memory import parameters_by_rank, rank_states
from speedlab.planner.time.step_time import bubble_share

__all__ = [
    "ModelStates",
    "Peaks",
    "bubble_share",
    "explain_stage",
    "flops_per_token",
    "model_states",
    "parameter_count",
    "parameters_by_rank",
    "predicted_peaks",
    "rank_parameters",
    "rank_states",
    "stage_blocks",
]
