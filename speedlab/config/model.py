"""Configure the built-in GPT: its shape and its size presets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from speedlab.config.attention import AttentionConfig, attention_problems
from speedlab.config.base import ConfigSection
from speedlab.config.errors import ConfigError
from speedlab.config.model_shape import MOST_LAYERS
from speedlab.config.presets import MODELS

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    name: preset.of_config() for name, preset in MODELS.items() if preset.built_in
}
"""The presets of the built-in GPT, as fields of its configuration."""

_TINY = MODEL_PRESETS["gpt-tiny"]

_MOST_HIDDEN = 2**20


class ModelConfig(ConfigSection):
    """The built-in GPT: a preset, of which any field may be changed."""

    preset: str = Field(
        default="gpt-tiny", description=f"Size preset: {', '.join(MODEL_PRESETS)}; the first is for CPUs"
    )
    layers: int = Field(default=_TINY["layers"], ge=1, le=MOST_LAYERS, description="Number of transformer blocks")
    hidden: int = Field(
        default=_TINY["hidden"], ge=1, le=_MOST_HIDDEN, description="Width of the residual stream, elements"
    )
    heads: int = Field(default=_TINY["heads"], ge=1, description="Attention heads; must divide hidden")
    ffn_hidden: int = Field(
        default=_TINY["ffn_hidden"], ge=1, description="Width inside the feed-forward layer, elements"
    )
    vocab_size: int = Field(
        default=_TINY["vocab_size"], ge=2, description="Number of distinct tokens the embedding holds"
    )
    context: int = Field(default=_TINY["context"], ge=2, description="Longest sequence the model accepts, tokens")
    position: Literal["rotary", "learned"] = Field(
        default="rotary", description="How positions enter: rotary angles or a learned table"
    )
    norm: Literal["rms", "layer"] = Field(default="rms", description="Normalisation: RMSNorm or LayerNorm")
    tied: bool = Field(default=True, description="Whether the output head shares the embedding's weights")
    bias: bool = Field(default=False, description="Whether linear layers have a bias")
    loss: Literal["chunked", "full"] = Field(
        default="chunked",
        description="Head and cross-entropy: a few tokens at a time, or through all logits at once (the same numbers)",
    )
    ffn_tile: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of a sequence for which the feed-forward layer is computed at once, and again in backward, "
        "so that its inner activation never exists whole; null: all, and nothing again (the same numbers)",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Probability with which an activation is dropped in training"
    )
    attention: AttentionConfig = Field(default=AttentionConfig(), description="Dense or block-sparse attention")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # Explicit fields win over those of the preset.
        name = data.get("preset", "gpt-tiny")
        return {**MODEL_PRESETS[name], "preset": name, **data} if _is_preset(name) else data

    @field_validator("preset", mode="before")
    @classmethod
    def _known_preset(cls, name: Any) -> Any:
        if _is_preset(name):
            return name
        if isinstance(name, str) and name in MODELS:
            raise ValueError(
                f"{name} is a preset for plans (`speedlab plan {name}`), and nothing that the built-in GPT can be; to "
                f"train it give a module of your own as the model. The built-in GPT's: {', '.join(MODEL_PRESETS)}"
            )
        near = difflib.get_close_matches(str(name), MODEL_PRESETS, n=1)
        hint = f"nearest: {near[0]!r}; " if near else ""
        raise ValueError(f"unknown model preset {name!r}; {hint}known: {', '.join(MODEL_PRESETS)}")

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        # Rotary angles rotate pairs of elements, so a head needs an even number of elements.
        multiple = 2 if self.position == "rotary" else 1
        possible = [n for n in range(1, self.hidden + 1) if self.hidden % (n * multiple) == 0]
        if not possible:
            raise ValueError(f"rotary positions need an even head size, and hidden {self.hidden} is odd; make it even")
        if self.heads not in possible:
            fault = (
                f"hidden {self.hidden} does not divide by heads {self.heads}"
                if self.hidden % self.heads
                else f"rotary positions need an even head size; hidden {self.hidden} / heads {self.heads} is odd"
            )
            raise ValueError(f"{fault}; heads {min(possible, key=lambda n: abs(n - self.heads))} would work")
        return self

    @model_validator(mode="after")
    def _attention_fits(self) -> ModelConfig:
        problems = attention_problems(
            self.attention, hidden=self.hidden, heads=self.heads, dropout=self.dropout, context=self.context
        )
        if problems:
            raise ConfigError(problems=problems)
        return self

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from the preset's."""
        preset = ModelConfig(preset=self.preset)
        return {
            name: value for name in type(self).model_fields if (value := getattr(self, name)) != getattr(preset, name)
        }


def _is_preset(name: Any) -> bool:
    return isinstance(name, str) and name in MODEL_PRESETS
