"""What a run will hold and compute, before it starts. No torch."""

from speedlab.planner.bubble import bubble_share
from speedlab.planner.formula import (
    ModelStates,
    explain_stage,
    flops_per_token,
    model_states,
    parameter_count,
    rank_parameters,
    stage_blocks,
)
from speedlab.planner.peaks import Peaks, predicted_peaks
from speedlab.planner.states import parameters_by_rank, rank_states

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
