"""What is planned: a model's shape, and how it is trained. Plain data that every part of the planner takes."""

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
"""What is computed again in backward: nothing; what is cheap to compute and large to keep, which is all between linear
layers and fused attention, and where attention is plain (of other systems) its probabilities alone; or each block."""

AttentionKind = Literal["fused", "plain", "sparse"]
"""fused: probabilities are never kept; plain: they are; sparse: those of some blocks of tokens."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training whose memory and time are asked for."""

    shape: ModelShape
    layout: Layout
    zero_stage: int
    dtype: Literal["float32", "bfloat16", "float16"]
    micro_size: int
    accumulation: int
    """Micro-batches of a step on each rank; those of the pipeline where there is one."""
    checkpointing: Checkpointing = "none"
    partition_inputs: bool = False
    """Whether of a block's input that is kept for its recomputation each tensor rank keeps its 1/tp."""
    attention: AttentionKind = "fused"
    pattern: AttentionConfig = field(default_factory=AttentionConfig)
    """Of sparse attention: what a query sees; a ring sends what is needed of keys and values."""
    ffn_tile: int | None = None
    """Tokens of a sequence that feed-forward layers compute at a time; None: all."""
    sequence_parallel: bool = False
    cp_heads: int | None = None
    """Of the ranks along cp, how many share heads; None: as many as heads allow."""
    cp_pad: bool = False
    """Whether sequences that cp does not divide are padded."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    chunks: int = 1
    cut: tuple[int, ...] | None = None
    """Blocks of each pipeline stage; None: balanced by parameters."""
    bucket_bytes: int = 2**20
    scattered_messages: bool = False
    """Whether tensor-parallel ranks each send 1/tp of what goes to the next pipeline stage, which gathers it there
    (arXiv:2104.04473, section 4.1); this engine sends whole tensors."""
    wide_sums: bool = True
    """Whether gradients of several micro-batches are summed in float32, as this engine does."""
    overlap: tuple[Literal["dp", "tp", "pp"], ...] = ()
    """Axes whose communication runs beside kernels where this engine waits for it: parameters that are gathered after
    the update, tensor-parallel sums, messages between pipeline stages."""
    listed_gathers: bool = False
    """Whether ZeRO-3 gathers and reduces each matrix by itself, as a list of one tensor for each rank, with the device
    idle until it is there, and again before a block is recomputed, as DeepSpeed's did in early 2021 (its
    `runtime/zero/partition_parameters.py`). This engine gathers a unit at once, one ahead."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    """How islands meet, where the layout has several."""
    masters: Literal["float32", "none"] = "float32"
    """Whether parameters in bfloat16 have float32 masters beside them, or are rounded stochastically."""
    moments: Literal["float32", "8bit"] = "float32"
    """As what the optimizer's moments are kept between two steps."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Which states lie away from the device between two uses."""
    quantized_weights: bool = False
    """Whether parameters are gathered as int8 blocks."""
    quantized_gradients: bool = False
    """Whether gradients are exchanged as int4 blocks, inside hosts, then between them."""
    secondary_partition: int | None = None
    """Ranks of a host that hold all partitioned parameters together once more."""

    @property
    def zero(self) -> ZeroConfig:
        """The stage and what is sent, as a configuration has them."""
        return ZeroConfig(
            stage=self.zero_stage,  # type: ignore[arg-type]  # checked by it
            bucket_bytes=self.bucket_bytes,
            quantized_weights=self.quantized_weights,
            quantized_gradients=self.quantized_gradients,
            secondary_partition=self.secondary_partition,
        )

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that one pipeline rank holds under this schedule."""
        return self.chunks if self.layout.pp > 1 and self.schedule in ("interleaved", "zero-bubble") else 1

    @property
    def tokens(self) -> int:
        """Of a micro-batch on each rank, with what pads them."""
        return self.micro_size * self.padded_length // self.layout.cp

    @property
    def heads_shared(self) -> int:
        """Of the ranks along cp, how many share heads."""
        return self.cp_heads or gcd(self.layout.cp, self.shape.heads // self.layout.tp)

    @property
    def padded_length(self) -> int:
        """Tokens of a sequence as it is computed."""
        length = self.shape.sequence_length
        return -(-length // self.sequence_multiple) * self.sequence_multiple if self.cp_pad else length

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence is to be a multiple of, or is padded to one."""
        layout = self.layout
        if layout.cp == 1:
            return 1
        block = self.pattern.block if self.attention == "sparse" else 1
        multiple = sequence_multiple(layout.cp, self.heads_shared, block)
        return lcm(multiple, layout.cp * layout.tp) if self.sequence_parallel else multiple

    @property
    def seen(self) -> AttentionView | None:
        """What sparse attention sees; None for dense attention. Raises ValueError where a custom mask is too short."""
        if self.attention != "sparse":
            return None
        shape = self.shape
        return describe(self.pattern, shape.sequence_length, layers=shape.depth, causal=shape.causal)

    @property
    def attention_share(self) -> float:
        """Of the blocks of dense attention, those that are computed."""
        return 1.0 if self.seen is None else self.seen.density

    @property
    def cuts_inputs(self) -> bool:
        """Whether tensor ranks cut inputs of blocks, which under sequence parallelism are in parts already."""
        asked = self.partition_inputs and self.checkpointing != "none"
        return asked and self.layout.tp > 1 and not self.sequence_parallel

    @property
    def global_size(self) -> int:
        """Sequences of a step."""
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
        """What `config` asks for on so many engines; `dtype` is its precision, resolved for the device. `shape`: of
        another model than its own GPT.

        Raises LayoutError or ConfigError when there is no such run.
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
    """What stands against the layout's cp."""
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
    """Whether the engine cuts these sequences along cp; `on_host`: on CPU cores, where rings take sparse attention and
    dropout."""
    in_ring = setup.layout.cp > setup.heads_shared
    plain = setup.attention != "sparse" and not setup.shape.dropout
    return not context_problems(setup) and (on_host or plain or not in_ring)


def state_problems(setup: Setup) -> list[str]:
    """What stands against where and how states are kept, and when parameters are updated."""
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
