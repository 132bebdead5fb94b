"""The parts of a run's configuration. Panel help, CLI help and docs are generated from the descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, create_model, field_validator

from speedlab.config.part import Part

_Decay = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Part):
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


class ParallelConfig(Part):
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
        """Pipeline stages that one pipeline rank holds under this schedule."""
        return self.chunks if self.pp > 1 and self.schedule in ("interleaved", "zero-bubble") else 1


class ZeroConfig(Part):
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
        description="Units whose gradients may be summed at once, each a whole gradient; 1 on CPUs and 2 on GPUs when "
        "left out",
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
        """What of ZeRO++ is on, in words; '' for nothing."""
        words = {
            "weights in int8": self.quantized_weights,
            "gradients in int4": self.quantized_gradients,
            f"parameters partitioned again over {self.secondary_partition}": self.secondary_partition is not None,
        }
        return ", ".join(word for word, is_on in words.items() if is_on)


class PrecisionConfig(Part):
    """In which dtype the model computes, and as what masters and moments are kept between two steps."""

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
        description="bfloat16 only: 'none' keeps no float32 masters beside the parameters, and rounds each update "
        "stochastically (arXiv:1502.02551)",
    )
    moments: Literal["float32", "8bit"] = Field(
        default="float32",
        description="The optimizer's moments between two steps: float32, or blockwise 8 bits (arXiv:2110.02861)",
    )


OptimizerName = Literal["adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam", "lion", "sgd"]


class OptimizerConfig(Part):
    """The update rule."""

    name: OptimizerName = Field(
        default="adamw",
        description="adamw (arXiv:1711.05101), lamb for large batches (arXiv:1904.00962), onebit_adam, onebit_lamb and "
        "zero_one_adam for slow networks (arXiv:2102.02888, arXiv:2104.06069, arXiv:2202.06009), lion "
        "(arXiv:2302.06675), or sgd with momentum",
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate at the top of the schedule")
    betas: tuple[_Decay, _Decay] = Field(
        default=(0.9, 0.95),
        description="adamw, lamb, onebit_*, zero_one_adam: decay of the first and second moment, per step; lion: of "
        "the moment in the update, and in what is kept",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="adamw, lamb, onebit_*, zero_one_adam: added to the root of the second moment"
    )
    bias_correction: bool = Field(
        default=True,
        description="adamw, lamb, onebit_*, zero_one_adam: whether moments are corrected for their start at 0, as "
        "usual",
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decay of matrices, per unit of learning rate; of sgd, added to the gradient"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd: share of the last update that is kept")
    in_backward: bool = Field(
        default=False,
        description="Update each unit as soon as its gradient is there, in backward, and free that; for one dp rank, "
        "one micro-batch a step, and without clip_norm",
    )
    freeze_step: int | None = Field(
        default=None,
        ge=1,
        description="onebit_*: updates before the variance is frozen and momenta travel as signs; when left out, "
        "until the variance is steady; zero_one_adam: updates before the variance is frozen and ranks make steps of "
        "their own; when left out, neither ever is",
    )
    steady: float = Field(
        default=0.96,
        gt=0,
        lt=1,
        description="onebit_* without freeze_step: the variance is steady when it keeps this share of itself over "
        "1 / (1 - beta2) updates in which the learning rate did not rise",
    )
    compression: Literal["signs", "none"] = Field(
        default="signs",
        description="onebit_*, zero_one_adam: how momenta travel behind the warm-up; 'none' sends them whole, to "
        "compare",
    )
    variance_floor: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="onebit_*, zero_one_adam: roots of a variance that signs are divided by are at least this share of "
        "their parameter's mean; 0 as in the papers",
    )
    max_coeff: float = Field(
        default=10.0,
        gt=0,
        description="lamb, onebit_lamb: most that a parameter's trust ratio, its norm over its update's, may be",
    )
    min_coeff: float = Field(
        default=0.01, ge=0, description="lamb, onebit_lamb: least that a parameter's trust ratio may be"
    )
    coeff_beta: float = Field(
        default=0.9, ge=0, lt=1, description="onebit_lamb: decay of the mean of a trust ratio, over the warm-up"
    )
    factor_max: float = Field(
        default=4.0, gt=0, description="onebit_lamb: most by which a compressed step multiplies a mean trust ratio"
    )
    factor_min: float = Field(
        default=0.5, gt=0, description="onebit_lamb: least by which a compressed step multiplies a mean trust ratio"
    )
    factor_threshold: float = Field(
        default=0.1, gt=0, le=1, description="onebit_lamb: share by which that factor may change from step to step"
    )
    angle_every_steps: int = Field(
        default=0,
        ge=0,
        description="onebit_*, zero_one_adam: steps between two looks at the angle between the update and the one of "
        "what was compressed, feedback included, each at the cost of a whole sum; 0 never looks",
    )
    variance_doubling: int = Field(
        default=16,
        ge=1,
        description="zero_one_adam: updates of the variance, by whole gradients, before the distance between two of "
        "them doubles; in short trainings a variance of few updates makes it diverge",
    )
    local_doubling: int = Field(
        default=1000,
        ge=1,
        description="zero_one_adam: steps behind freeze_step before the distance between two exchanges doubles, which "
        "is 1 at first",
    )
    max_local_steps: int = Field(
        default=16, ge=1, description="zero_one_adam: largest distance between two exchanges, in steps"
    )

    @property
    def moments(self) -> int:
        """States in float32 beside each element of the masters."""
        if self.name == "zero_one_adam":  # Where local steps are, the anchor is one more.
            return 2 + self.steps_apart
        return {"onebit_lamb": 3, "lion": 1, "sgd": int(self.momentum > 0)}.get(self.name, 2)

    @property
    def plain(self) -> OptimizerName:
        """The optimizer that it is before it compresses anything."""
        plain: dict[OptimizerName, OptimizerName] = {
            "onebit_adam": "adamw",
            "onebit_lamb": "lamb",
            "zero_one_adam": "adamw",
        }
        return plain.get(self.name, self.name)

    @property
    def looks_at_parameters(self) -> bool:
        """Whether its update of an element looks at norms of its whole parameter."""
        return self.name in ("lamb", "onebit_lamb")

    @property
    def sums_itself(self) -> bool:
        """Whether it exchanges something else than gradients between data-parallel ranks, after a warm-up."""
        return self.name in ("onebit_adam", "onebit_lamb", "zero_one_adam")

    @property
    def exchange_every(self) -> int:
        """Steps between two exchanges, at the end of a long run."""
        return self.max_local_steps if self.steps_apart else 1

    @property
    def steps_apart(self) -> bool:
        """Whether ranks make steps of their own between two exchanges, once the variance is frozen."""
        return self.name == "zero_one_adam" and self.freeze_step is not None


class OuterConfig(Part):
    """Meetings of islands (DiLoCo, arXiv:2311.08105): each trains by itself; then the mean of how far they went is a
    gradient, which an outer SGD takes from where they last met."""

    every_steps: int = Field(default=50, ge=1, description="Steps of the islands between two meetings")
    lr: float = Field(default=0.7, gt=0, description="Learning rate of the outer SGD; 1 with momentum 0 takes the mean")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Share of the last outer update that is kept")
    nesterov: bool = Field(default=True, description="Whether the outer momentum is Nesterov's")
    compression: Literal["none", "signs", "topk"] = Field(
        default="none",
        description="How outer gradients travel: in float32, as signs with a magnitude for each 1024 of them, or the "
        "largest elements only; what is not sent is kept, and added the next time",
    )
    topk_share: float = Field(
        default=0.01, gt=0, le=1, description="compression topk: share of the elements that is sent, 8 bytes each"
    )

    fragments: int = Field(
        default=1,
        ge=1,
        description="Parts of the model that meet in turn, each every every_steps steps, so that less travels at once "
        "(arXiv:2501.18512)",
    )
    delay_steps: int = Field(
        default=0,
        ge=0,
        description="Steps that are made while outer gradients travel, before the outer update comes; 0 waits for it",
    )
    mixing: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="With delay_steps: share of an island's own parameters that stays when the outer update comes",
    )

    @property
    def states(self) -> int:
        """Tensors in float32 that are kept of each element between meetings: anchor, momentum, error feedback."""
        return 1 + (self.momentum > 0) + (self.compression != "none")


class ScheduleConfig(Part):
    """Learning rate over the steps: linear warm-up, then a cosine or a line down to a floor, or constant."""

    kind: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Shape after the warm-up")
    warmup_steps: int = Field(default=10, ge=0, description="Steps over which the rate rises linearly from 0")
    floor: float = Field(default=0.1, ge=0, le=1, description="Share of the top rate that remains at the last step")


class ActivationConfig(Part):
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
"""Where a state lies between two uses, other than on the device."""


class OffloadConfig(Part):
    """Which model states leave the device between two uses (arXiv:2101.06840, arXiv:2104.07857)."""

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
        description="First step whose update is made beside the next step's forward and backward, which so use "
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
        """Whether anything lies away from the device."""
        return (self.optimizer, self.parameters, self.activations) != ("none",) * 3


class EvalConfig(Part):
    """Loss on held-out text."""

    every_steps: int = Field(default=50, ge=0, description="Steps between evaluations; 0 never evaluates")
    batches: int = Field(default=4, ge=1, description="Global batches in one evaluation")


class CheckpointConfig(Part):
    """When the run's state is written to its folder."""

    every_steps: int = Field(default=0, ge=0, description="Steps between checkpoints; 0 saves only when asked")
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay")


class _Recovering(Part):
    attempts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How often a run that failed is brought back without a newer checkpoint; 0 leaves it to a person",
    )

    @property
    def checkpoint(self) -> str:
        """What it goes on from: 'newest', or a checkpoint's name."""
        return getattr(self, "from")


if TYPE_CHECKING:
    RecoverConfig = _Recovering
else:  # A field called `from` cannot be written down in a class.
    RecoverConfig = create_model(
        "RecoverConfig",
        __base__=_Recovering,
        __doc__="What happens by itself when a run fails: its dead engines are started again, and it goes on.",
        **{"from": (str, Field(default="newest", description="Checkpoint to go on from: 'newest', or one's name"))},
    )


class TelemetryConfig(Part):
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
