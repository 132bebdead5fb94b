"""Define the sections of a run's configuration. Panel help, CLI help and docs come from the descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, create_model, field_validator

from speedlab.config.base import ConfigSection


class DataConfig(ConfigSection):
    """Where the text comes from and how it is cut."""

    source: str | tuple[str, ...] = Field(
        default="stdlib",
        description="'stdlib' (this Python's own sources), files or folders of text, a token file (.bin, .tokens), or "
        "a synthetic task over vocab_size tokens: 'task:copy', 'task:retrieval', 'task:retrieval@0.5' (at that depth)",
    )
    sequence_length: int = Field(default=256, ge=1, description="Length of a training sequence, tokens")
    tokenizer: str = Field(
        default="bpe", description="'bpe' (trained on the data and cached), 'bytes', or the path of a tokenizer.json"
    )
    vocab_size: int = Field(default=4096, ge=257, description="Size of the trained vocabulary, tokens")
    heldout_share: float = Field(
        default=0.05, gt=0, lt=1, description="Share of the files kept for evaluation (0 to 1)"
    )
    max_bytes: int = Field(default=8 * 2**20, ge=1, description="At most this much text is read, bytes")
    documents: Literal["joined", "separate"] = Field(
        default="joined",
        description="joined: a token sees all before it in its sequence, also of other documents; separate: only its "
        "own document, in which positions count from 0; documents end with the tokenizer's end token",
    )

    @field_validator("source")
    @classmethod
    def _something_to_read(cls, source: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not source or not all(source):
            raise ValueError("no source is named; give 'stdlib', or the paths of files or folders")
        return source


class ParallelConfig(ConfigSection):
    """The layout islands × pp × dp × cp × tp, and how a pipeline works."""

    dp: int | None = Field(
        default=None,
        ge=1,
        description="Data-parallel ranks, of each island; follows from the number of engines when left out",
    )
    tp: int = Field(default=1, ge=1, description="Tensor-parallel ranks a layer is cut over")
    sequence: bool = Field(
        default=False, description="Whether tp ranks also share out the tokens between layers (sequence parallelism)"
    )
    cp: int = Field(
        default=1, ge=1, description="Context-parallel ranks a sequence is cut over; they share in ZeRO's partitions"
    )
    cp_heads: int | None = Field(
        default=None,
        ge=1,
        description="Of the cp ranks, how many exchange tokens for heads in attention (Ulysses); the others form a "
        "ring, around which keys and values go; as many as heads allow when left out",
    )
    cp_pad: bool = Field(
        default=False,
        description="Whether sequences that cp does not divide are padded at their ends up to the next length that it "
        "does: what pads is computed, and counts in no loss; without it they are refused",
    )
    pp: int = Field(default=1, ge=1, description="Pipeline ranks the blocks are cut over")
    islands: int = Field(
        default=1,
        ge=1,
        description="Equal groups of neighbouring ranks, whole hosts at best, that each train parameters of their own; "
        "these meet every outer.every_steps steps (arXiv:2311.08105)",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        default="1f1b",
        description="Order in which a pipeline rank works on micro-batches; there are `accumulation` many",
    )
    chunks: int = Field(
        default=2, ge=1, description="Stages of each pipeline rank under the schedules interleaved and zero-bubble"
    )
    cut: tuple[int, ...] | None = Field(
        default=None, description="Blocks of each pipeline stage, first stage first; balanced when left out"
    )
    balance: Literal["parameters", "time"] = Field(
        default="parameters", description="By what stages are balanced: parameters, or the measured time of blocks"
    )

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on one pipeline rank under this schedule."""
        return self.chunks if self.pp > 1 and self.schedule in ("interleaved", "zero-bubble") else 1


class ZeroConfig(ConfigSection):
    """Which of optimizer states, gradients and parameters are partitioned over the dp ranks (arXiv:1910.02054)."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=2, description="0: all replicated; 1: optimizer states in 1/dp; 2: and gradients; 3: and parameters"
    )
    bucket_bytes: int = Field(
        default=2**20,
        ge=1,
        description="Neighbouring repeated blocks are gathered and reduced together up to this many bytes",
    )
    reductions_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Units whose gradients may be summed at once, each a whole gradient at stages 2 and 3 and over a "
        "network; when left out 2 where that takes no memory and on GPUs, else 1",
    )
    quantized_weights: bool = Field(
        default=False,
        description="Stages 1 to 3: parameters are gathered as int8 blocks, for slow networks (arXiv:2306.10209); "
        "masters stay exact, in memory of their own",
    )
    secondary_partition: int | None = Field(
        default=None,
        ge=1,
        description="Stage 3: so many ranks of a host hold all parameters together once more, and gathers after the "
        "first one of a step stay among them (arXiv:2306.10209); null: one partition, over all dp ranks",
    )
    quantized_gradients: bool = Field(
        default=False,
        description="Stages 1 to 3: gradients are exchanged as int4 blocks, first inside each host, then their sums "
        "between hosts, for slow networks (arXiv:2306.10209)",
    )

    @property
    def switches(self) -> str:
        """The active parts of ZeRO++ as text; empty if there are none."""
        words = {
            "weights in int8": self.quantized_weights,
            "gradients in int4": self.quantized_gradients,
            f"parameters partitioned again over {self.secondary_partition}": self.secondary_partition is not None,
        }
        return ", ".join(word for word, is_on in words.items() if is_on)


class PrecisionConfig(ConfigSection):
    """Compute dtype of the model, and dtypes of masters and moments between two steps."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute dtype; 'auto': bfloat16 where the device does it fast, else float32"
    )
    initial_loss_scale: float = Field(
        default=2.0**16, gt=0, description="float16 only: factor on the loss at the start"
    )
    loss_scale_window: int = Field(default=1000, ge=1, description="float16 only: good steps before the factor doubles")
    min_loss_scale: float = Field(default=1.0, gt=0, description="float16 only: the factor never falls below this")
    masters: Literal["float32", "none"] = Field(
        default="float32",
        description="bfloat16 only: 'none' keeps no float32 masters next to the parameters, and rounds each update "
        "stochastically (arXiv:1502.02551)",
    )
    moments: Literal["float32", "8bit"] = Field(
        default="float32",
        description="The optimizer's moments between two steps: float32, or blockwise 8 bits (arXiv:2110.02861)",
    )
    products: Literal["auto", "torch"] = Field(
        default="auto",
        description="float32 on CPUs only: 'auto' multiplies in linear layers and the loss by oneDNN where that is "
        "faster and as exact (AMD with AVX-512), 'torch' by what torch calls of itself",
    )
    attention: Literal["auto", "torch"] = Field(
        default="auto",
        description="CPUs only: 'auto' computes what models ask of torch's scaled_dot_product_attention by our kernels "
        "where these are faster (AVX-512, but no matrix units), 'torch' by torch's",
    )


class ActivationConfig(ConfigSection):
    """What is kept of the forward pass for the backward pass."""

    checkpointing: Literal["none", "selective", "block"] = Field(
        default="none",
        description="What the backward pass computes again: 'selective' all of a block but its linear layers and fused "
        "attention, whose results it keeps (arXiv:2205.05198); 'block' all, of which it keeps each block's input",
    )
    partition_inputs: bool = Field(
        default=False,
        description="With checkpointing: each tensor rank keeps 1/tp of a block's input, which all of them have, and "
        "they gather it before they compute the block again",
    )


Away = Literal["none", "host", "disk"]
"""Storage of a state between two uses; "none" is the device."""


class OffloadConfig(ConfigSection):
    """Which model states are offloaded between two uses (arXiv:2101.06840, arXiv:2104.07857)."""

    optimizer: Away = Field(
        default="none",
        description="Where optimizer states and float32 masters lie, and gradients once they are summed; the update is "
        "computed on the host",
    )
    parameters: Away = Field(
        default="none", description="ZeRO stage 3 only: where parameters lie while no unit needs them"
    )
    activations: Literal["none", "host"] = Field(
        default="none", description="With checkpointing 'block' only: where the inputs of blocks wait for backward"
    )
    delayed_update: int | None = Field(
        default=None,
        ge=1,
        description="First step whose update is made during the next step's forward and backward, which so use "
        "parameters one update older (arXiv:2101.06840, section 5.2): a training changes by it; never when left out",
    )
    folder: Path | None = Field(
        default=None, description="Folder in which states on disk have their files; the run's own when left out"
    )

    @field_validator("folder")
    @classmethod
    def _home_folder(cls, folder: Path | None) -> Path | None:
        return None if folder is None else folder.expanduser()

    @property
    def used(self) -> bool:
        """Whether anything is offloaded."""
        return (self.optimizer, self.parameters, self.activations) != ("none",) * 3


class EvalConfig(ConfigSection):
    """Loss on held-out text."""

    every_steps: int = Field(default=50, ge=0, description="Steps between evaluations; 0 never evaluates")
    batches: int = Field(default=4, ge=1, description="Global batches in one evaluation")


class CheckpointConfig(ConfigSection):
    """When the run's state is written to its folder."""

    every_steps: int = Field(default=0, ge=0, description="Steps between checkpoints; 0 saves only when asked")
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay")


class _Recovering(ConfigSection):
    attempts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How often a run that failed is brought back without a newer checkpoint; 0 leaves it to a person",
    )

    @property
    def checkpoint(self) -> str:
        """The checkpoint to restart from: 'newest', or a name."""
        return getattr(self, "from")


if TYPE_CHECKING:
    RecoverConfig = _Recovering
else:  # `from` is a keyword, so a class body cannot define the field.
    RecoverConfig = create_model(
        "RecoverConfig",
        __base__=_Recovering,
        __doc__="What happens by itself when a run fails: its dead engines are started again, and it goes on.",
        **{"from": (str, Field(default="newest", description="Checkpoint to go on from: 'newest', or one's name"))},
    )


class TelemetryConfig(ConfigSection):
    """What is recorded and how often it is sent."""

    stream_hz: float = Field(
        default=10.0, gt=0, le=10, description="At most this many records per second go to a dashboard"
    )
    trace_every_steps: int = Field(
        default=0, ge=0, description="Steps between exact activation traces; 0: only the first step and after changes"
    )
    tensorboard: bool = Field(
        default=True, description="Whether TensorBoard event files are written when tensorboard is installed"
    )
