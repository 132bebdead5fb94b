"""Pipeline parallelism: cut a model into stages, schedules as data, and the loop that runs them."""

from speedlab.layout import layer_counts
from speedlab.parallel.pipeline.partition import DecoderStage, StageModule, block_costs, cut_model
from speedlab.parallel.pipeline.pipeline import Pipeline
from speedlab.parallel.pipeline.schedules import check_micro_batches, training_plan

__all__ = [
    "DecoderStage",
    "Pipeline",
    "StageModule",
    "block_costs",
    "check_micro_batches",
    "cut_model",
    "layer_counts",
    "training_plan",
]
