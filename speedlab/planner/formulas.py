"""Compute parameters, FLOPs and model states of the built-in GPT by formula. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speedlab.config import ModelConfig, OptimizerConfig, OptimizerName, describe
from speedlab.layout import Layout, share_of
from speedlab.placement import Replication, ZeroPolicy
from speedlab.planner.layer_shapes import (
    block_vectors,
    block_weights,
    norm_vectors,
    position_elements,
    shape_parameters,
    stage_counts,
)
from speedlab.planner.setup import ModelShape

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32_BYTES = 4


def parameter_count(model: ModelConfig) -> int:
    """Return the exact number of parameters of the built-in GPT.

    Args:
        model: its configuration; a tied head counts once.
    """
    return shape_parameters(_shape(model))


def block_parameters(model: ModelConfig, *, tp: int = 1) -> int:
    """Return the parameters of one block on each tensor-parallel rank.

    Norms, and biases that are added after the sum over the ranks, are replicated on each rank.

    Args:
        model: the built-in GPT.
        tp: tensor-parallel ranks.
    """
    whole = sum(vector.elements for vector in block_vectors(_shape(model)) if not vector.cut)
    return (block_weights(_shape(model)).total - whole) // tp + whole


def stage_blocks(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, balanced by parameters: the engine's default.

    Args:
        model: the built-in GPT.
        stages: number of pipeline stages.

    Raises:
        LayoutError: there are fewer blocks than stages.
    """
    return stage_counts(_shape(model), stages)


def _shape(model: ModelConfig) -> ModelShape:
    return ModelShape.of_config(model, model.context)


def rank_parameters(model: ModelConfig, layout: Layout, counts: Sequence[int]) -> list[int]:
    """Return the parameters of the built-in GPT on each rank of `layout`, before ZeRO partitions them.

    Stage s is on pipeline rank s mod pp. A tied embedding is on the first and on the last pipeline rank. A vocabulary
    that tp does not divide is split as evenly as possible.

    Args:
        model: the built-in GPT.
        layout: the ranks.
        counts: blocks of each pipeline stage, first stage first.

    Returns:
        One number for each rank, by rank.
    """
    held = []
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        pipeline, tensor = at["pp"], at["tp"]
        first, last = pipeline == 0, pipeline == (len(counts) - 1) % layout.pp
        start, end = share_of(model.vocab_size, layout.tp, tensor)
        # A tied table is stored once if both ends are on the same rank.
        tables = int(first) + int(last) - int(first and last and model.tied)
        held.append(
            sum(counts[pipeline :: layout.pp]) * block_parameters(model, tp=layout.tp)
            + tables * (end - start) * model.hidden
            + (position_elements(_shape(model)) if first else 0)
            + (sum(norm_vectors(_shape(model))) if last else 0)
        )
    return held


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the model FLOPs of a training step (forward and backward) for one token.

    The convention of PaLM's appendix B (arXiv:2204.02311): 6 N + 12 L H D T. N counts the parameters without tables
    that are only looked up (learned positions, and an untied token embedding), L layers, H D = hidden, T the sequence
    length. A multiplication and an addition are two operations. Recomputation for activation checkpointing does not
    count. The causal mask does not halve attention. Block-sparse attention counts with its share of blocks.

    Args:
        model: the built-in GPT.
        sequence_length: tokens of a sequence (T).
    """
    lookups = position_elements(_shape(model))
    if not model.tied:
        lookups += model.vocab_size * model.hidden
    weights = parameter_count(model) - lookups
    seen = sequence_length * describe(model.attention, sequence_length).density
    return float(6 * weights + 12 * model.layers * model.hidden * seen)


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of model states on one rank, by ledger category."""

    stage: int
    dp: int
    parameters: int
    gradients: int
    master_weights: int
    optimizer_moments: int

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    def explain(self) -> str:
        """Return what the stage partitions, for instance "gradients and optimizer states in 1/dp" for stage 2."""
        return explain_stage(self.stage)


def explain_stage(stage: int) -> str:
    """Return what a ZeRO stage partitions, in a few words.

    Raises:
        ValueError: the stage is not 0, 1, 2 or 3.
    """
    return {
        0: "everything whole on every rank",
        1: "optimizer states in 1/dp",
        2: "gradients and optimizer states in 1/dp",
        3: "parameters, gradients and optimizer states in 1/dp",
    }[_stage(stage)]


def model_states(
    parameters: int,
    *,
    dp: int,
    stage: int,
    dtype: str,
    optimizer: OptimizerConfig | OptimizerName = "adamw",
) -> ModelStates:
    """Return the model states on each of `dp` ranks, by ZeRO's formula (arXiv:1910.02054, section 3).

    - Parameters and gradients have the compute dtype; a 16-bit dtype adds float32 master weights.
    - float32 moments: AdamW and LAMB have two, Lion one, SGD one (none without momentum).
    - 1-bit Adam has AdamW's moments, float32 gradients, and two float32 errors, one of them partitioned in 1/dp.
    - Optimizer states are masters and moments together.
    - Partitions are rounded up to whole elements; the padding of single flats is not counted.

    Args:
        parameters: number of parameters before partitioning.
        dp: data-parallel ranks.
        stage: ZeRO stage, 0 to 3.
        dtype: compute dtype, not "auto".
        optimizer: name or configuration.

    Raises:
        ValueError: the dtype, stage, dp or number of parameters is invalid.
    """
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not {', '.join(_DTYPE_BYTES)}; resolve 'auto' for the device first")
    if dp < 1 or parameters < 0:
        raise ValueError(f"dp {dp} must be at least 1, and the number of parameters {parameters} at least 0")
    config = OptimizerConfig.model_validate({"name": optimizer}) if isinstance(optimizer, str) else optimizer
    moments = config.moments
    zero_policy = ZeroPolicy.of_stage(stage, dp)
    optimizer_share = zero_policy.optimizer_states.share(parameters, dp)
    gradient_share = zero_policy.gradients.share(parameters, dp)
    parameter_share = zero_policy.parameters.share(parameters, dp)
    compute_bytes = _DTYPE_BYTES[dtype]
    gradients = compute_bytes * gradient_share
    if config.sums_itself:
        # Whole float32 gradients, the rank's own error (same size), and the error of its partition.
        gradients = _FLOAT32_BYTES * (2 * parameters + Replication.OWN_PART.share(parameters, dp))
    return ModelStates(
        stage=stage,
        dp=dp,
        parameters=compute_bytes * parameter_share,
        gradients=gradients,
        master_weights=0 if dtype == "float32" else _FLOAT32_BYTES * optimizer_share,
        optimizer_moments=_FLOAT32_BYTES * moments * optimizer_share,
    )


def _stage(stage: int) -> int:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stage {stage!r} is not one of 0, 1, 2, 3")
    return stage
