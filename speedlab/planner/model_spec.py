"""Resolve what to plan: a model by name, file or sizes, and the configuration that trains it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from speedlab.config import MODEL_PRESETS, RunConfig
from speedlab.config.deepspeed.reader import recognises
from speedlab.config.model_shape import ModelShape, renamed, sizes_text
from speedlab.config.serialization import is_yaml, read
from speedlab.display.formatting import unknown
from speedlab.planner import presets
from speedlab.planner.hf_config import describes, read_shape

_FILES = (".yaml", ".yml", ".json")
_VOCABULARY, _SEQUENCE = 50257, 2048
"""Defaults of a model that is described by its sizes: GPT-2's vocabulary, GPT-3's sequence length, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that a user gave, and how its loss is computed; None: not given."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    ffn_hidden: int | None = None
    vocab_size: int | None = None
    sequence_length: int | None = None
    gated: bool | None = None
    chunked_loss: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The given sizes."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def applied(self, shape: ModelShape) -> ModelShape:
        """Return a shape with the given sizes.

        Args:
            shape: the model; its name changes if a size changes.
        """
        changed = {name: value for name, value in self.given.items() if getattr(shape, name) != value}
        after = replace(shape, **changed)
        # Another sequence length is still the same model.
        changed.pop("sequence_length", None)
        return replace(after, name=renamed(shape.name, changed, after))

    def shape(self) -> ModelShape:
        """Return a model described only by its sizes: like GPT, or like Llama if it is gated.

        Raises:
            ValueError: layers, hidden or heads are missing.
        """
        missing = [f"--{name}" for name in ("layers", "hidden", "heads") if getattr(self, name) is None]
        if self.layers is None or self.hidden is None or self.heads is None:
            raise ValueError(
                f"a model is described by --layers, --hidden and --heads at least; add {', '.join(missing)}"
            )
        # A gated layer has a third matrix: two thirds of the width for the same parameters, a multiple of 256.
        ffn = self.ffn_hidden or (-(-self.hidden * 8 // 3 // 256) * 256 if self.gated else 4 * self.hidden)
        llama: dict[str, Any] = {"position": "rotary", "norm": "rms", "tied": False, "biases": frozenset()}
        assumed = [
            *([f"a vocabulary of {_VOCABULARY:,} (--vocab sets it)"] if self.vocab_size is None else []),
            *([f"sequences of {_SEQUENCE:,} tokens (--seq sets it)"] if self.sequence_length is None else []),
        ]
        shape = ModelShape(
            name="",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            ffn_hidden=ffn,
            vocab_size=self.vocab_size or _VOCABULARY,
            sequence_length=self.sequence_length or _SEQUENCE,
            gated=bool(self.gated),
            chunked_loss=bool(self.chunked_loss),
            assumed=tuple(assumed),
            **(llama if self.gated else {}),
        )
        return replace(shape, name=sizes_text(shape))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A run's configuration, a model's shape, or a shape that a configuration trains."""

    config: RunConfig | None = None
    shape: ModelShape | None = None
    """None: the configuration's built-in GPT."""


def subject_of(model: str, file: str, sizes: ModelSizes, *, here: bool) -> ModelSpec:
    """Resolve the model and the configuration of a plan request.

    Args:
        model: name or file of a model; may be empty.
        file: file of a configuration; may be empty.
        sizes: sizes that replace those of the model, or describe it.
        here: whether this machine is planned. Then a preset's name means the run of `speedlab train`.

    Raises:
        ValueError: no model is named, or a name or file is unknown; the message lists the nearest ones.
    """
    if not model:
        model, file = file, ""
    config = _configuration(file) if file else None
    if model.lower() in presets.MODELS:
        if model.lower() in MODEL_PRESETS and here and config is None:
            return _own(RunConfig(model=model.lower()), sizes)
        return _trained(presets.model(model), config, sizes)
    if not model:
        if sizes.layers is None and sizes.hidden is None:
            raise ValueError(
                f"no model is named; known: {_names()}; or give a Hugging Face folder or config.json, a configuration "
                "file, or sizes: --layers --hidden --heads"
            )
        return _trained(None, None, sizes)
    return _of_path(model, config, sizes)


def _of_path(model: str, config: RunConfig | None, sizes: ModelSizes) -> ModelSpec:
    path = Path(model).expanduser()
    if not path.is_dir() and path.suffix not in _FILES and os.sep not in model:
        raise unknown("model", model, presets.MODELS)
    if not path.exists():
        raise ValueError(
            f"{model}: there is no such file or folder; a Hugging Face model is read from its downloaded config.json, "
            f"`speedlab config` prints a configuration, and these are known by name: {_names()}"
        )
    if path.is_dir() or (not is_yaml(path) and not recognises(path, RunConfig) and describes(read(path))):
        return _trained(read_shape(path), config, sizes)
    if config is not None:
        raise ValueError(f"{model} and --config are two configurations; give a model's name next to --config")
    config = _configuration(model)
    if not recognises(path, RunConfig):
        return _own(config, sizes)
    if sizes.layers is None and sizes.hidden is None:
        raise _no_model(model)
    return _trained(None, config, sizes)


def _configuration(file: str) -> RunConfig:
    if not Path(file).is_file():
        raise ValueError(f"{file}: there is no such file; `speedlab config` prints a configuration")
    return RunConfig.load(file)


def _own(config: RunConfig, sizes: ModelSizes) -> ModelSpec:
    """Return a configuration's built-in GPT, with the given sizes."""
    if not sizes.given:
        return ModelSpec(config=config)
    return ModelSpec(
        config=config, shape=sizes.applied(ModelShape.of_config(config.model, config.data.sequence_length))
    )


def _trained(shape: ModelShape | None, config: RunConfig | None, sizes: ModelSizes) -> ModelSpec:
    """Return a model (None: described by the sizes) that `config` trains.

    The sequence length is the configuration's if the file sets it.
    """
    if sizes.sequence_length is None and config is not None and "sequence_length" in config.data.model_fields_set:
        sizes = replace(sizes, sequence_length=config.data.sequence_length)
    return ModelSpec(config=config, shape=sizes.shape() if shape is None else sizes.applied(shape))


def _no_model(file: str) -> ValueError:
    return ValueError(
        f"{file} says how to train, and not which model; name one next to it: "
        f"speedlab plan llama-3-8b --config {file}. "
        f"Known: {_names()}; or a Hugging Face folder or config.json, or sizes: --layers --hidden --heads"
    )


def _names() -> str:
    return ", ".join(sorted(presets.MODELS))
