"""Define RunConfig, the complete description of a run, and convert what users pass for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from speedlab.config.attention_report import AttentionView, describe
from speedlab.config.base import ConfigSection
from speedlab.config.batch import BatchConfig
from speedlab.config.deepspeed.reader import DeepSpeedReport, recognises
from speedlab.config.deepspeed.reader import read as read_deepspeed
from speedlab.config.deepspeed.writer import as_deepspeed
from speedlab.config.errors import ConfigError
from speedlab.config.layout_rules import resolve
from speedlab.config.model import ModelConfig
from speedlab.config.optimizer import OptimizerConfig, OuterConfig, ScheduleConfig
from speedlab.config.sections import (
    ActivationConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    RecoverConfig,
    TelemetryConfig,
    ZeroConfig,
)
from speedlab.config.serialization import is_yaml, read, yaml_text
from speedlab.config.validation import (
    island_problems,
    meeting_problem,
    offload_problems,
    optimizer_problems,
    partition_problems,
    quantized_problems,
    warmup_problem,
)
from speedlab.layout import Layout

SHORT_FORMS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "model": ("preset", str),
    "data": ("source", (str, list, tuple)),
    "zero": ("stage", int),
    "precision": ("dtype", str),
    "optimizer": ("name", str),
    "batch": ("global_size", int),
    "recover": ("attempts", int),
}
"""Sections with a short form: the field that the short form sets, and the types that identify the short form."""

_NAME_BYTES = 100


class RunConfig(ConfigSection):
    """A run: model, data, layout, ZeRO stage, precision, optimizer, batch and when to evaluate and save.

    Short forms: `model="gpt2"`, `data="stdlib"`, `zero=2`, `precision="bfloat16"`, `optimizer="sgd"`, `batch=64`,
    `recover=3`.

    Raises:
        ConfigError: a value is invalid; one line for each problem.
    """

    name: str | None = Field(default=None, description="Run name, also its folder; 'run-1', 'run-2', … when left out")
    folder: Path = Field(default=Path("runs"), description="Folder that holds the run folders")
    steps: int = Field(default=200, ge=1, description="Optimizer steps in the whole run")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of initialisation, data order and dropout")
    model: ModelConfig = Field(default=ModelConfig(), description="The model")
    data: DataConfig = Field(default=DataConfig(), description="The data")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="The layout")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="ZeRO stage and buckets")
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="Compute dtype and loss scaling")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Update rule")
    outer: OuterConfig = Field(default=OuterConfig(), description="Meetings of islands, where there are several")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning-rate schedule")
    batch: BatchConfig = Field(default=BatchConfig(), description="The batch equation")
    activation: ActivationConfig = Field(default=ActivationConfig(), description="Activation checkpointing")
    offload: OffloadConfig = Field(
        default=OffloadConfig(), description="Model states away from the device: on the host, on disk"
    )
    loss_over: Literal["tokens", "micro_batches"] | None = Field(
        default=None,
        description="What the loss of a step is the mean over: the targets that count, or micro-batches of any number "
        "of them; null: over targets in runs and train_batch, over micro-batches in a loop of one's own",
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null never clips")
    compile: bool = Field(
        default=False, description="Whether blocks go through torch.compile (needs a C++ compiler on CPUs)"
    )
    timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=30 * 86400,
        allow_inf_nan=False,
        description="Longest wait of a collective for a rank that does not come; null: the cluster's, else 1,800",
    )
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints")
    recover: RecoverConfig = Field(default=RecoverConfig(), description="Bringing a run back that failed")
    proof: Literal["none", "cheap", "full"] = Field(
        default="cheap",
        description="What is checked of the first batch, and stored in the run: which tokens count, whether documents "
        "are separate, what moved; 'cheap' takes at most 5 % of the first minute, 'full' checks all, 'none' nothing",
    )
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Records and streaming")

    def __init__(self, /, **data: Any) -> None:  # Defined so that type checkers accept short forms.
        super().__init__(**data)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        return _expanded(data) if isinstance(data, Mapping) else data

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        # A leading dot would hide the folder; a leading dash would look like a command-line option.
        if name is not None and (not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > _NAME_BYTES):
            raise ValueError(
                f"{name!r} cannot name a folder; use letters, digits, '_', '-' and '.', starting with one of the "
                f"first three, at most {_NAME_BYTES} bytes"
            )
        return name

    @field_validator("folder")
    @classmethod
    def _home_folder(cls, folder: Path) -> Path:
        return folder.expanduser()

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        problems = []
        if self.recover.attempts and not self.checkpoint.every_steps:
            problems.append(
                f"recover.attempts is {self.recover.attempts} and checkpoint.every_steps is 0: a run that fails has "
                "nothing to go on from; set checkpoint.every_steps to the steps that may be lost"
            )
        if self.data.sequence_length > self.model.context:
            problems.append(
                f"data.sequence_length {self.data.sequence_length} is longer than model.context {self.model.context}; "
                f"shorten the sequence or raise the context"
            )
        if self.data.tokenizer == "bpe" and self.data.vocab_size > self.model.vocab_size:
            problems.append(
                f"data.vocab_size {self.data.vocab_size} is larger than model.vocab_size {self.model.vocab_size}; "
                f"lower the first or raise the second"
            )
        if self.precision.masters == "none" and self.precision.dtype in ("float32", "float16"):
            problems.append(
                f"precision.masters 'none' needs precision.dtype bfloat16, whose updates are rounded stochastically, "
                f"and it is {self.precision.dtype}; set precision.dtype to 'bfloat16', or precision.masters to "
                "'float32'"
            )
        if self.compile and self.activation.checkpointing == "selective":
            problems.append(
                "compile true with activation.checkpointing 'selective': a compiled block chooses itself what to keep; "
                "set activation.checkpointing to 'block' or 'none', or compile to false"
            )
        problems += partition_problems(
            asked=self.activation.partition_inputs, checkpointing=self.activation.checkpointing
        )
        problems += offload_problems(
            self.offload,
            stage=self.zero.stage,
            checkpointing=self.activation.checkpointing,
            in_backward=self.optimizer.in_backward,
            masters=self.precision.masters,
        )
        problems += optimizer_problems(
            self.optimizer,
            stage=self.zero.stage,
            offload=self.offload,
            masters=self.precision.masters,
            moments=self.precision.moments,
            cp=self.parallel.cp,
        )
        problems += island_problems(
            self.parallel.islands,
            self.optimizer,
            self.outer,
            offload=self.offload,
            masters=self.precision.masters,
            switches=self.zero.switches,
        )
        problems += quantized_problems(self.zero, self.optimizer, offload=self.offload, masters=self.precision.masters)
        if "steps" in self.model_fields_set:  # A script with its own loop does not set it.
            problems += warmup_problem(self.optimizer, self.steps)
            problems += meeting_problem(self.parallel.islands, self.outer, self.steps)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def layout(self, world_size: int, *, built_in: bool = True) -> Layout:
        """Return the layout on `world_size` engines.

        Args:
            world_size: number of ranks.
            built_in: whether the model is the built-in GPT. If not, rules about `model` do not apply.

        Raises:
            LayoutError: there is no such layout; the message has the equation and what would work.
            ConfigError: the update or the attention does not work with the layout.
        """
        return resolve(self, world_size, built_in=built_in)

    def attention_view(self, length: int | None = None) -> AttentionView:
        """Return what the queries of `model` see: work relative to dense attention, longest path, and a picture.

        Print the result, or show it in a notebook.

        Args:
            length: tokens of a sequence; None: data.sequence_length.
        """
        attention, tokens = self.model.attention, length or self.data.sequence_length
        return describe(attention, tokens, layers=self.model.layers, causal=not attention.both_ways)

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with some fields changed.

        Args:
            changes: field -> value. A section may be given in its short form, or as a dict of only the fields that
                change. A model preset sets all fields of the preset.

        Raises:
            ConfigError: the result is invalid.
        """
        data = self.model_dump()
        for key, value in _expanded(changes).items():
            if (
                isinstance(data.get(key), dict)
                and isinstance(value, Mapping)
                and not (key == "model" and "preset" in value)
            ):
                value = {**data[key], **value}
            data[key] = value
        # Unset fields stay unset: a script with its own loop has no `steps`.
        named = self.model_fields_set | _expanded(changes).keys()
        return RunConfig(**{key: value for key, value in data.items() if key in named})

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Read a JSON or YAML file. A JSON file with DeepSpeed's keys is read like `from_deepspeed`.

        Args:
            path: the file.

        Raises:
            ConfigError: the file is invalid; the message has its name, and the line of a syntax error.
        """
        path = Path(path)
        if recognises(path, cls):
            return cls.from_deepspeed(path)
        data = read(path)
        try:
            return cls(**{str(key): value for key, value in data.items()})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    @classmethod
    def from_deepspeed(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        engines: int | None = None,
        training_args: Mapping[str, Any] | None = None,
        ignore: Collection[str] = (),
    ) -> RunConfig:
        """Return the configuration that a DeepSpeed file or dict describes, with a warning about surprising keys.

        `deepspeed_reading` takes the same arguments and reports on every key.

        Args:
            source: path, text or dict.
            engines: number of ranks for which batch and layout are checked.
            training_args: arguments of Hugging Face's Trainer, which fill "auto".
            ignore: names of features to go on without.

        Raises:
            ConfigError: keys are refused, one line for each.
        """
        reading = cls.deepspeed_reading(source, engines=engines, training_args=training_args, ignore=ignore)
        config = reading.config
        if reading.warnings:
            before = f"{reading.source}: " if reading.source else "DeepSpeed configuration: "
            warnings.warn("\n".join(before + text for text in reading.warnings), UserWarning, stacklevel=2)
        return config

    @classmethod
    def deepspeed_reading(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        engines: int | None = None,
        training_args: Mapping[str, Any] | None = None,
        ignore: Collection[str] = (),
    ) -> DeepSpeedReport:
        """Return a report on every key of a DeepSpeed file, with the configuration if nothing was refused.

        Args:
            source: path, text or dict.
            engines: number of ranks for which batch and layout are checked.
            training_args: arguments of Hugging Face's Trainer, which fill "auto".
            ignore: names of features to go on without.

        Raises:
            ConfigError: the text cannot be read, or `ignore` has an unknown name.
        """
        return read_deepspeed(source, cls, engines=engines, training_args=training_args, ignore=ignore)

    def to_deepspeed(self) -> dict[str, Any]:
        """Return this configuration as DeepSpeed's JSON, as far as its keys allow; they do not cover model and data."""
        return as_deepspeed(self)

    def to_json(self) -> str:
        """Return every field, as JSON."""
        return self.model_dump_json(indent=2)

    def to_yaml(self) -> str:
        """Return every field, as YAML. `annotated_yaml` adds the descriptions."""
        return yaml_text(self.model_dump(mode="json"))

    def save(self, path: str | Path) -> None:
        """Write the configuration to a file.

        Args:
            path: the file; YAML for .yaml and .yml, otherwise JSON.
        """
        path = Path(path)
        path.write_text(self.to_yaml() if is_yaml(path) else self.to_json(), encoding="utf-8")


def _expanded(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `data` with short forms of sections written out."""
    return {
        key: {SHORT_FORMS[key][0]: value} if key in SHORT_FORMS and isinstance(value, SHORT_FORMS[key][1]) else value
        for key, value in data.items()
    }


ConfigLike = RunConfig | Mapping[str, Any] | str | Path
"""A RunConfig; a dict of its fields, or of DeepSpeed's; or the path of a JSON or YAML file of either."""


def as_config(given: ConfigLike) -> RunConfig:
    """Return the RunConfig of any accepted form.

    Raises:
        ConfigError: the configuration is invalid.
    """
    if isinstance(given, RunConfig):
        return given
    if isinstance(given, str | Path):
        return RunConfig.load(given)
    if isinstance(given, Mapping):
        fields = {str(key): value for key, value in given.items()}
        return RunConfig.from_deepspeed(fields) if recognises(fields, RunConfig) else RunConfig(**fields)
    raise ConfigError(f"config: expected a RunConfig, a dict or a path, not {type(given).__name__}")
