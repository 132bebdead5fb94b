"""Define `Setup`: a model's shape and how it is trained. Plain data for every part of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Literal

from speedlab.config import (
    AttentionConfig,
    AttentionView,
    OffloadConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ZeroConfig,
    describe,
)
from speedlab.config.layout_rules import dropout_rule, ways_out
from speedlab.config.model_shape import ModelShape
from speedlab.config.validation import (
    island_problems,
    offload_problems,
    optimizer_problems,
    partition_problems,
    quantized_problems,
)
from speedlab.layout import Layout, sequence_multiple

Checkpointing = Literal["none", "selective", "block"]
"""What backward recomputes.

- none: nothing.
- selective: what is cheap to compute and large to keep: everything between linear layers and fused attention. If
  attention is plain (in other systems), only its probabilities.
- block: each whole block.
"""

AttentionKind = Literal["fused", "plain", "sparse"]
"""fused: probabilities are never stored; plain: they are stored; sparse: only some blocks of tokens are computed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to predict memory and time for."""

    shape: ModelShape
    layout: Layout
    zero_stage: int
    dtype: Literal["float32", "bfloat16", "float16"]
    micro_size: int
    accumulation: int
    """Micro-batches of a step on each rank; with a pipeline, the micro-batches in the pipeline."""
    checkpointing: Checkpointing = "none"
    partition_inputs: bool = False
    """Whether each tensor-parallel rank keeps only 1/tp of a block's checkpointed input."""
    attention: AttentionKind = "fused"
    pattern: AttentionConfig = field(default_factory=AttentionConfig)
    """Pattern of sparse attention: the keys that a query sees. A ring sends only the needed keys and values."""
    ffn_tile: int | None = None
    """Tokens that feed-forward layers compute at a time; None: the whole sequence."""
    sequence_parallel: bool = False
    cp_heads: int | None = None
    """Number of cp ranks that share heads; None: the largest number that heads allow."""
    cp_pad: bool = False
    """Whether sequences are padded to a length that cp divides."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    chunks: int = 1
    cut: tuple[int, ...] | None = None
    """Blocks of each pipeline stage; None: balanced by parameters."""
    bucket_bytes: int = 2**20
    scattered_messages: bool = False
    """Whether tensor-parallel ranks split the messages between pipeline stages.

    Each rank sends 1/tp, which the next stage gathers (arXiv:2104.04473, section 4.1). This engine sends whole tensors.
    """
    wide_sums: bool = True
    """Whether gradients of several micro-batches are summed in float32, as in this engine."""
    overlap: tuple[Literal["dp", "tp", "pp"], ...] = ()
    """Axes whose communication overlaps with kernels in other systems; this engine waits for it.

    dp: gathers of parameters after the update; tp: sums; pp: messages between stages.
    """
    listed_gathers: bool = False
    """Whether ZeRO-3 gathers and reduces each matrix separately, as DeepSpeed did in early 2021.

    Each collective is a list of one tensor for each rank, the device waits for it, and it repeats before a block is
    recomputed (DeepSpeed's `runtime/zero/partition_parameters.py`). This engine gathers a whole unit, one unit ahead.
    """
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    """How DiLoCo islands synchronise, if the layout has several."""
    masters: Literal["float32", "none"] = "float32"
    """Whether bfloat16 parameters have float32 master weights; "none" rounds updates stochastically."""
    moments: Literal["float32", "8bit"] = "float32"
    """Dtype of the optimizer's moments between steps."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Which states are offloaded between two uses."""
    quantized_weights: bool = False
    """Whether parameters are gathered as int8 blocks."""
    quantized_gradients: bool = False
    """Whether gradients are exchanged as int4 blocks, first inside hosts, then between hosts."""
    secondary_partition: int | None = None
    """Ranks of a host that together hold a second copy of all partitioned parameters."""

    @property
    def zero(self) -> ZeroConfig:
        """The ZeRO section of a configuration with these values."""
        return ZeroConfig(
            stage=self.zero_stage,  # type: ignore[arg-type]  # checked by it
            bucket_bytes=self.bucket_bytes,
            quantized_weights=self.quantized_weights,
            quantized_gradients=self.quantized_gradients,
            secondary_partition=self.secondary_partition,
        )

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on one pipeline rank under this schedule."""
        return self.chunks if self.layout.pp > 1 and self.schedule in ("interleaved", "zero-bubble") else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on each rank, with padding."""
        return self.micro_size * self.padded_length // self.layout.cp

    @property
    def heads_shared(self) -> int:
        """Number of cp ranks that share heads."""
        return self.cp_heads or gcd(self.layout.cp, self.shape.heads // self.layout.tp)

    @property
    def padded_length(self) -> int:
        """Tokens of a sequence as computed, with padding."""
        length = self.shape.sequence_length
        return -(-length // self.sequence_multiple) * self.sequence_multiple if self.cp_pad else length

    @property
    def sequence_multiple(self) -> int:
        """The sequence length must be a multiple of this, or is padded to one."""
        layout = self.layout
        if layout.cp == 1:
            return 1
        block = self.pattern.block if self.attention == "sparse" else 1
        multiple = sequence_multiple(layout.cp, self.heads_shared, block)
        return lcm(multiple, layout.cp * layout.tp) if self.sequence_parallel else multiple

    @property
    def seen(self) -> AttentionView | None:
        """The view of sparse attention; None for dense attention.

        Raises:
            ValueError: a custom mask is too short.
        """
        if self.attention != "sparse":
            return None
        shape = self.shape
        return describe(self.pattern, shape.sequence_length, layers=shape.depth, causal=shape.causal)

    @property
    def attention_share(self) -> float:
        """Computed share of the blocks of dense attention."""
        return 1.0 if self.seen is None else self.seen.density

    @property
    def cuts_inputs(self) -> bool:
        """Whether tensor-parallel ranks partition the inputs of blocks.

        Under sequence parallelism the inputs are partitioned anyway.
        """
        asked = self.partition_inputs and self.checkpointing != "none"
        return asked and self.layout.tp > 1 and not self.sequence_parallel

    @property
    def global_size(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.micro_size * self.accumulation * self.layout.data_size

    @classmethod
    def of_config(
        cls,
        config: RunConfig,
        engines: int,
        *,
        dtype: Literal["float32", "bfloat16", "float16"],
        shape: ModelShape | None = None,
    ) -> Setup:
        """Return the set-up that `config` describes on `engines` ranks.

        Args:
            config: a run's configuration.
            engines: number of ranks.
            dtype: the configuration's precision, resolved for the device.
            shape: shape of another model than the built-in GPT.

        Raises:
            LayoutError: the layout does not fit the ranks.
            ConfigError: the batch does not fit the layout.
        """
        layout = config.layout(engines, built_in=shape is None)
        batch = config.batch.resolve(layout.data_size)
        return cls(
            shape=shape or ModelShape.of_config(config.model, config.data.sequence_length),
            layout=layout,
            zero_stage=config.zero.stage,
            dtype=dtype,
            micro_size=batch.micro_size,
            accumulation=batch.accumulation,
            checkpointing=config.activation.checkpointing,
            partition_inputs=config.activation.partition_inputs,
            attention="sparse" if config.model.attention.kind == "block_sparse" else "fused",
            pattern=config.model.attention,
            ffn_tile=config.model.ffn_tile if shape is None else None,
            sequence_parallel=config.parallel.sequence,
            cp_heads=config.parallel.cp_heads,
            cp_pad=config.parallel.cp_pad,
            schedule=config.parallel.schedule,
            chunks=config.parallel.stages_per_rank,
            cut=config.parallel.cut,
            bucket_bytes=config.zero.bucket_bytes,
            quantized_weights=config.zero.quantized_weights,
            quantized_gradients=config.zero.quantized_gradients,
            secondary_partition=config.zero.secondary_partition,
            optimizer=config.optimizer,
            outer=config.outer,
            masters=config.precision.masters,
            moments=config.precision.moments,
            offload=config.offload,
        )


def context_problems(setup: Setup) -> list[str]:
    """Return the reasons why the sequences cannot be split along cp.

    Args:
        setup: the training.

    Returns:
        One message for each problem; empty if they can be split.
    """
    shape, layout = setup.shape, setup.layout
    if layout.cp == 1:
        return []
    if not shape.causal:
        return [f"cp {layout.cp}: {shape.name} is no causal decoder, whose sequences could be cut; use cp 1"]
    heads, problems = shape.heads // layout.tp, []
    if layout.cp % setup.heads_shared or heads % setup.heads_shared:
        return [
            f"cp_heads {setup.heads_shared}: it has to divide cp {layout.cp} and the {heads} heads of a tp rank; "
            "left out it is the largest that does"
        ]
    if shape.dropout and setup.padded_length != shape.sequence_length:
        problems.append(
            f"cp {layout.cp}: sequences of {shape.sequence_length:,} tokens would be padded to "
            f"{setup.padded_length:,}, and {dropout_rule(shape.dropout)}"
        )
    if setup.padded_length % setup.sequence_multiple:
        length, multiple = shape.sequence_length, setup.sequence_multiple
        problems.append(
            f"cp {layout.cp}: {shape.name} has sequences of {length:,} tokens, which do not divide by {multiple}; "
            f"{ways_out(length, multiple)}"
        )
    return problems


def can_be_cut(setup: Setup, *, on_host: bool) -> bool:
    """Return whether the engine can split these sequences along cp.

    Args:
        setup: the set-up to check.
        on_host: whether the ranks compute on CPU cores. Only there rings support sparse attention and dropout.
    """
    in_ring = setup.layout.cp > setup.heads_shared
    plain = setup.attention != "sparse" and not setup.shape.dropout
    return not context_problems(setup) and (on_host or plain or not in_ring)


def state_problems(setup: Setup) -> list[str]:
    """Return the problems of placement, dtype and update of the states.

    Args:
        setup: the training.

    Returns:
        One message for each problem; empty if there are none.
    """
    layout = setup.layout
    problems = offload_problems(
        setup.offload,
        stage=setup.zero_stage,
        checkpointing=setup.checkpointing,
        in_backward=setup.optimizer.in_backward,
        masters=setup.masters,
    )
    problems += partition_problems(asked=setup.partition_inputs, checkpointing=setup.checkpointing)
    problems += optimizer_problems(
        setup.optimizer,
        stage=setup.zero_stage,
        offload=setup.offload,
        masters=setup.masters,
        moments=setup.moments,
        cp=layout.cp,
    )
    problems += island_problems(
        layout.islands,
        setup.optimizer,
        setup.outer,
        offload=setup.offload,
        masters=setup.masters,
        switches=setup.zero.switches,
    )
    problems += quantized_problems(setup.zero, setup.optimizer, offload=setup.offload, masters=setup.masters)
    if setup.masters == "none" and setup.dtype != "bfloat16":
        problems.append(
            f"masters none needs dtype bfloat16, whose updates are rounded stochastically, and it is {setup.dtype}"
        )
    if setup.optimizer.in_backward and (layout.replicas > 1 or layout.pp > 1 or setup.accumulation > 1):
        replicas = f"dp {layout.dp}" if layout.cp == 1 else f"dp {layout.dp}, cp {layout.cp}"
        problems.append(
            f"an update in backward is for one micro-batch and one rank of dp and pp, and there are "
            f"{setup.accumulation} micro-batches, {replicas} and pp {layout.pp}"
        )
    return problems
