"""Predict the memory of published systems by the rules of their papers. No torch.

For this project's own engine, `memory.predict_memory` is exact; these rules allow a comparison with other measurements.

Let a layer see s × b tokens of h, with a heads and tensor parallelism t. For backward in 16 bits (arXiv:2205.05198,
equations 1 to 6) it keeps s b h (34 + 5 a s / h) bytes on one device.

- Of the 34, 24 are inside attention and feed-forward and are divided by t; 10 only with sequence parallelism, too.
- Fused or recomputed attention does not keep 5 a s / h.
- Recomputation of whole layers keeps their inputs, 2 s b h, and one layer's activations at a time.
- The code counts the 34 from the shape, so that gated layers and models without dropout have their own number: 34 is
  the result for a GPT with dropout.

Under 1F1B the first pipeline stage keeps as many micro-batches as there are stages, so it holds all layers' worth.
Under GPipe every stage keeps all micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from speedlab.planner.formulas import model_states
from speedlab.planner.layer_shapes import head_size, kv_heads
from speedlab.planner.memory.pipeline_stage import most_in_flight
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup
from speedlab.planner.time.step_time import blocks_by_rank, rank_parameters

_HALF_BYTES = 2
_LOGIT_BYTES = 2 + 4 + 4 + 4 + 2
"""Bytes of one logit on the last stage: itself, in float32, its probability, and the gradients of both."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model states for one parameter, before ZeRO partitions them."""

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    buffers: float = 0
    """Additional bytes of a rank: reduction buckets, and what the driver counts for a process."""

    def of_rank(self, parameters: float, *, stage: int, dp: int) -> float:
        """Return the bytes of states of a rank (arXiv:1910.02054).

        Args:
            parameters: parameters that the rank computes with.
            stage: ZeRO stage, 0 to 3.
            dp: data-parallel ranks.
        """
        # Stage 3 partitions parameters, 2 gradients, 1 optimizer states.
        shares = [dp if stage >= least else 1 for least in (3, 2, 1)]
        each = (self.parameters, self.gradients, self.optimizer)
        return parameters * sum(size / share for size, share in zip(each, shares, strict=True))


def layer_activation_bytes(setup: Setup) -> float:
    """Return the bytes of one layer and one micro-batch on one tensor-parallel rank.

    Args:
        setup: the training. Nothing is recomputed, except attention's probabilities with selective checkpointing.
    """
    shape, t = setup.shape, setup.layout.tp
    hidden, queries, values = shape.hidden, shape.heads * head_size(shape), kv_heads(shape) * head_size(shape)
    mask = 1 if shape.dropout else 0
    whole = (2 * 2 + 2 * 2 + 2 * mask) * hidden  # two norms' inputs, two layers' inputs, two masks
    cut = 2 * (queries + 2 * values) + 2 * queries + (8 if shape.gated else 4) * shape.ffn_hidden
    if setup.attention == "plain" and setup.checkpointing != "selective":
        cut += (5 if mask else 2) * shape.heads * shape.sequence_length
    tokens = setup.tokens
    return tokens * (whole / (t if setup.sequence_parallel else 1) + cut / t)


def stage_activation_bytes(setup: Setup, stage: int) -> float:
    """Return the bytes of all micro-batches in flight on a pipeline rank.

    Args:
        setup: the training.
        stage: index of the pipeline rank.
    """
    shape, layout = setup.shape, setup.layout
    tokens = setup.tokens
    in_flight = most_in_flight(setup, stage)
    blocks = blocks_by_rank(setup)[stage]
    layer = layer_activation_bytes(setup)
    if setup.checkpointing == "block":
        kept = in_flight * blocks * _HALF_BYTES * tokens * shape.hidden + layer
    else:
        kept = in_flight * blocks * layer
    logits = tokens * shape.vocab_size / layout.tp * _LOGIT_BYTES if stage == layout.pp - 1 else 0
    return kept + logits


def peak_bytes(setup: Setup, states: StateBytes) -> float:
    """Return the bytes of the heaviest rank: states, activations, and with ZeRO-3 the gathered layer.

    Args:
        setup: the training.
        states: bytes of states for one parameter.
    """
    held = rank_parameters(setup)
    most = max(stage_activation_bytes(setup, stage) for stage in range(setup.layout.pp))
    of_states = states.of_rank(held, stage=setup.zero_stage, dp=setup.layout.replicas)
    return of_states + states.buffers + most + _gathered_bytes(setup, held)


def _gathered_bytes(setup: Setup, held: float) -> float:
    return 2 * _HALF_BYTES * held / max(1, blocks_by_rank(setup)[0]) if setup.zero_stage == 3 else 0


def memory_by_rules(setup: Setup) -> list[RankMemory]:
    """Return the memory of each pipeline position, by these rules.

    Gradients of several micro-batches are in float32, as in this engine. All positions have the parameters of the
    heaviest one.

    Args:
        setup: the training; its offload is ignored.
    """
    held = round(rank_parameters(setup))
    states = model_states(
        held, dp=setup.layout.replicas, stage=setup.zero_stage, dtype=setup.dtype, optimizer=setup.optimizer
    )
    wide = 2 if setup.accumulation > 1 and setup.dtype != "float32" else 1
    return [
        RankMemory(
            pipeline=stage,
            ranks=setup.layout.replicas * setup.layout.tp,
            parameters=states.parameters,
            gradients=wide * states.gradients,
            master_weights=states.master_weights,
            optimizer_moments=states.optimizer_moments,
            activations=round(stage_activation_bytes(setup, stage)),
            communication_buffers=round(_gathered_bytes(setup, held)),
        )
        for stage in range(setup.layout.pp)
    ]
