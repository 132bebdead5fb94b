"""RunConfig: the one description of a run. Panel help, CLI help and docs are generated from the fields below.

Every part is frozen; a changed configuration is a new object. Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from speedlab.layout import Layout


class ConfigError(ValueError):
    """A configuration that cannot run. Each line of the message: the key, the rule with its values, what to change."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.4)
                    hint = (
                        f"the nearest known key is {near[0]!r}"
                        if near
                        else f"known keys: {', '.join(cls.model_fields)}"
                    )
                    raise ValueError(f"unknown key {str(key)!r}; {hint}")
        return data


class ModelConfig(_Part):
    """The built-in GPT: a preset, of which any field may be changed."""

    preset: str = Field(
        default="gpt-tiny", description="Size preset: gpt-tiny (CPUs), gpt-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
    )
    layers: int = Field(default=6, ge=1, description="Number of transformer blocks")
    hidden: int = Field(default=192, ge=1, description="Width of the residual stream, elements")
    heads: int = Field(default=6, ge=1, description="Attention heads; must divide hidden")
    ffn_hidden: int = Field(default=768, ge=1, description="Width inside the feed-forward layer, elements")
    vocab_size: int = Field(default=4096, ge=2, description="Number of distinct tokens the embedding holds")
    context: int = Field(default=256, ge=2, description="Longest sequence the model accepts, tokens")
    position: Literal["rotary", "learned"] = Field(
        default="rotary", description="How positions enter: rotary angles or a learned table"
    )
    norm: Literal["rms", "layer"] = Field(default="rms", description="Normalisation: RMSNorm or LayerNorm")
    tied: bool = Field(default=True, description="Whether the output head shares the embedding's weights")
    bias: bool = Field(default=False, description="Whether linear layers have a bias")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Probability with which an activation is dropped in training"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("preset", "gpt-tiny")
        if name not in MODEL_PRESETS:
            near = difflib.get_close_matches(str(name), MODEL_PRESETS, n=1)
            raise ValueError(
                f"unknown model preset {name!r}; {f'nearest: {near[0]!r}; ' if near else ''}known: {', '.join(MODEL_PRESETS)}"
            )
        return {**MODEL_PRESETS[name], "preset": name, **data}

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden % self.heads:
            near = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            raise ValueError(
                f"hidden {self.hidden} does not divide by heads {self.heads}; "
                f"heads {min(near, key=lambda n: abs(n - self.heads))} would"
            )
        if self.position == "rotary" and self.hidden // self.heads % 2:
            raise ValueError(
                f"rotary positions need an even head size; hidden {self.hidden} / heads {self.heads} is odd"
            )
        return self


_GPT2 = {"vocab_size": 50257, "context": 1024, "position": "learned", "norm": "layer", "tied": True, "bias": True}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {},
    "gpt-mini": {"layers": 8, "hidden": 384, "heads": 6, "ffn_hidden": 1536, "vocab_size": 8192, "context": 512},
    "gpt2": {**_GPT2, "layers": 12, "hidden": 768, "heads": 12, "ffn_hidden": 3072},
    "gpt2-medium": {**_GPT2, "layers": 24, "hidden": 1024, "heads": 16, "ffn_hidden": 4096},
    "gpt2-large": {**_GPT2, "layers": 36, "hidden": 1280, "heads": 20, "ffn_hidden": 5120},
    "gpt2-xl": {**_GPT2, "layers": 48, "hidden": 1600, "heads": 25, "ffn_hidden": 6400},
}


class DataConfig(_Part):
    """Where the text comes from and how it is cut."""

    source: str | tuple[str, ...] = Field(
        default="stdlib",
        description="'stdlib' (this Python's own sources), files or folders of text, or a token file (.bin, .tokens)",
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


class ParallelConfig(_Part):
    """The layout pp × dp × tp."""

    dp: int | None = Field(
        default=None, ge=1, description="Data-parallel ranks; follows from the number of engines when left out"
    )
    tp: int = Field(default=1, ge=1, description="Tensor-parallel ranks a layer is cut over")
    pp: int = Field(default=1, ge=1, description="Pipeline stages the blocks are cut into")


class ZeroConfig(_Part):
    """Which of optimizer states, gradients and parameters are partitioned over the dp ranks (arXiv:1910.02054)."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=2, description="0: all replicated; 1: optimizer states in 1/dp; 2: and gradients; 3: and parameters"
    )
    bucket_bytes: int = Field(
        default=2**20,
        ge=1,
        description="Neighbouring repeated blocks are gathered and reduced together up to this many bytes",
    )


class PrecisionConfig(_Part):
    """In which dtype the model computes; masters and moments are always float32."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute dtype; 'auto': bfloat16 where the device does it fast, else float32"
    )
    initial_loss_scale: float = Field(
        default=2.0**16, gt=0, description="float16 only: factor on the loss at the start"
    )
    loss_scale_window: int = Field(default=1000, ge=1, description="float16 only: good steps before the factor doubles")
    min_loss_scale: float = Field(default=1.0, gt=0, description="float16 only: the factor never falls below this")


class OptimizerConfig(_Part):
    """The update rule."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw (arXiv:1711.05101) or sgd with momentum")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate at the top of the schedule")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="adamw: decay of the first and second moment, per step"
    )
    eps: float = Field(default=1e-8, gt=0, description="adamw: added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled decay of matrices, per unit of learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd: share of the last update that is kept")


class ScheduleConfig(_Part):
    """Learning rate over the steps: linear warm-up, then cosine to a floor, or constant."""

    kind: Literal["cosine", "constant"] = Field(default="cosine", description="Shape after the warm-up")
    warmup_steps: int = Field(default=10, ge=0, description="Steps over which the rate rises linearly from 0")
    floor: float = Field(default=0.1, ge=0, le=1, description="Share of the top rate that remains at the last step")


class BatchConfig(_Part):
    """global = micro × accumulation × dp. Any two given, the third follows."""

    global_size: int | None = Field(default=None, ge=1, description="Sequences in one optimizer step over all ranks")
    micro_size: int | None = Field(
        default=None, ge=1, description="Sequences in one forward pass of one rank (8 when it does not follow)"
    )
    accumulation: int | None = Field(
        default=None, ge=1, description="Forward passes before one optimizer step (1 when it does not follow)"
    )

    def resolve(self, dp: int) -> Batch:
        """The whole equation for `dp` data-parallel ranks; raises ConfigError with its numbers when it has no solution."""
        total, micro, accumulation = self.global_size, self.micro_size, self.accumulation
        if total is None:
            micro, accumulation = micro or 8, accumulation or 1
            total = micro * accumulation * dp
        elif micro is None:
            accumulation = accumulation or 1
            micro = total // (accumulation * dp)
        elif accumulation is None:
            accumulation = total // (micro * dp)
        product = micro * accumulation * dp
        if product != total or product == 0:
            known = [
                f"global {self.global_size or '?'} =",
                f"micro {self.micro_size or '?'}",
                f"× accumulation {self.accumulation or '?'}",
                f"× dp {dp}",
            ]
            step = (self.micro_size or 1) * (self.accumulation or 1) * dp
            near = max(step, round(total / step) * step)
            raise ConfigError(
                f"batch: the equation {' '.join(known)} has no whole solution; "
                f"a global batch of {near} would work, it must be a multiple of {step}"
            )
        return Batch(global_size=total, micro_size=micro, accumulation=accumulation, dp=dp)


class Batch(_Part):
    """The batch equation, whole."""

    global_size: int
    micro_size: int
    accumulation: int
    dp: int

    def __str__(self) -> str:
        return f"global batch {self.global_size} = micro-batch {self.micro_size} × accumulation {self.accumulation} × dp {self.dp}"


class ActivationConfig(_Part):
    """What is kept of the forward pass for the backward pass."""

    checkpointing: Literal["none", "block"] = Field(
        default="none",
        description="'block' keeps only each block's input and computes the rest again in the backward pass",
    )


class EvalConfig(_Part):
    """Loss on held-out text."""

    every_steps: int = Field(default=50, ge=0, description="Steps between evaluations; 0 never evaluates")
    batches: int = Field(default=4, ge=1, description="Global batches in one evaluation")


class CheckpointConfig(_Part):
    """When the run's state is written to its folder."""

    every_steps: int = Field(default=0, ge=0, description="Steps between checkpoints; 0 saves only when asked")
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay")


class TelemetryConfig(_Part):
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


class RunConfig(_Part):
    """A run: model, data, layout, ZeRO stage, precision, optimizer, batch and when to evaluate and save.

    Short forms: `model="gpt2"`, `data="stdlib"`, `zero=2`, `precision="bfloat16"`, `optimizer="sgd"`.
    """

    name: str | None = Field(default=None, description="Run name, also its folder; 'run-1', 'run-2', … when left out")
    folder: Path = Field(default=Path("runs"), description="Folder that holds the run folders")
    steps: int = Field(default=200, ge=1, description="Optimizer steps in the whole run")
    seed: int = Field(default=0, ge=0, description="Seed of initialisation, data order and dropout")
    model: ModelConfig = Field(default=ModelConfig(), description="The model")
    data: DataConfig = Field(default=DataConfig(), description="The data")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="The layout")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="ZeRO stage and buckets")
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="Compute dtype and loss scaling")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Update rule")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning-rate schedule")
    batch: BatchConfig = Field(default=BatchConfig(), description="The batch equation")
    activation: ActivationConfig = Field(default=ActivationConfig(), description="Activation checkpointing")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null never clips")
    compile: bool = Field(
        default=False, description="Whether blocks go through torch.compile (needs a C++ compiler on CPUs)"
    )
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Records and streaming")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        for key, inner, kinds in (
            ("model", "preset", str),
            ("data", "source", (str, list, tuple)),
            ("zero", "stage", int),
            ("precision", "dtype", str),
            ("optimizer", "name", str),
            ("batch", "global_size", int),
        ):
            if isinstance(data.get(key), kinds):
                data[key] = {inner: data[key]}
        return data

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and (
            not name or name.strip(".") == "" or any(c in "/\\\0\n\r\t" for c in name) or len(name) > 100
        ):
            raise ValueError(f"{name!r} cannot name a folder; use 1 to 100 letters, digits, '-', '_' or '.'")
        return name

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.data.sequence_length > self.model.context:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than model.context {self.model.context}; "
                f"shorten the sequence or raise the context"
            )
        if self.data.tokenizer == "bpe" and self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size {self.data.vocab_size} is larger than model.vocab_size {self.model.vocab_size}; "
                f"lower the first or raise the second"
            )
        return self

    def layout(self, world_size: int) -> Layout:
        """The layout on `world_size` engines. Raises LayoutError with the equation, ConfigError for axes not built yet."""
        layout = Layout.for_world(world_size, dp=self.parallel.dp, tp=self.parallel.tp, pp=self.parallel.pp)
        if layout.tp > 1 or layout.pp > 1:
            raise ConfigError(
                f"parallel: {layout} asks for tensor or pipeline parallelism, which this version does not have; "
                f"dp {world_size} with tp 1 and pp 1 runs, and zero.stage 3 partitions the parameters instead"
            )
        return layout

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with some fields changed; a part may be given as a dict of only the fields that change."""
        data = self.model_dump(exclude_unset=False)
        for key, value in changes.items():
            part = data.get(key)
            data[key] = {**part, **value} if isinstance(part, dict) and isinstance(value, Mapping) else value
            if isinstance(part, dict) and isinstance(value, int) and key == "zero":
                data[key] = {**part, "stage": value}
        return RunConfig(**data)

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Read a JSON or YAML file. Raises ConfigError that names the file, and line and column where the syntax breaks."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        data = _parse(path, text)
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path}: holds a {type(data).__name__}; expected keys and values")
        try:
            return cls(**{str(key): value for key, value in data.items()})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False, allow_unicode=True)

    def save(self, path: str | Path) -> None:
        """Write JSON or, for .yaml and .yml, YAML."""
        path = Path(path)
        text = self.to_yaml() if path.suffix in (".yaml", ".yml") else self.to_json()
        path.write_text(text, encoding="utf-8")


def _parse(path: Path, text: str) -> Any:
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None


def explain(error: ValidationError) -> str:
    """One line for each thing that is wrong: the key's path, the rule, what came."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        value = item.get("input")
        shown = (
            f" (got {value!r})"
            if isinstance(value, str | int | float | bool | None) and item["type"] != "value_error"
            else ""
        )
        lines.append(f"{where}: {message}{shown}" if where else f"{message}{shown}")
    return "\n".join(lines)
