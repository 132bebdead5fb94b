"""Define `ModelShape`, the sizes of a transformer, from a configuration, a preset or a foreign model file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig

Bias = Literal["norms", "attention in", "attention out", "feed-forward", "head"]
"""Places of biases in a transformer: 'attention in' is queries, keys and values, 'feed-forward' both layers."""

MOST_LAYERS = 10_000
"""Ten times the deepest published model (arXiv:2203.00555).

Predictions visit every layer, so the limit keeps a typing error from blocking a panel or a plan.
"""

BIASES: frozenset[Bias] = frozenset({"norms", "attention in", "attention out", "feed-forward"})
"""The biases of a GPT that has any."""


class Sized(Protocol):
    """Protocol of objects with a model's sizes: a configuration or a shape."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def ffn_hidden(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The planner's description of a transformer. Counts are of the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn_hidden: int
    vocab_size: int
    sequence_length: int
    decoder_layers: int = 0
    """For an encoder-decoder (T5): layers that also attend to the encoder; `layers` are the encoder's."""
    kv_heads: int | None = None
    """None: equal to heads."""
    head_size: int | None = None
    """None: hidden / heads."""
    context: int | None = None
    """Rows of a learned position table; None: the sequence length."""
    gated: bool = False
    """Whether the feed-forward layer has a third matrix."""
    stepwise: bool = False
    """Whether the activation function is computed in steps, of which three save a tensor (Hugging Face's gelu_new)."""
    position: Literal["learned", "rotary", "relative"] = "learned"
    norm: Literal["rms", "layer"] = "layer"
    norms: int = 2
    """Norms of each block. 2: before attention and feed-forward; 4: also after both; 1: one before both (Phi)."""
    head_norms: bool = False
    """Whether each head's queries and keys are normalised, with one weight for all heads."""
    parallel: bool = False
    """Whether attention and feed-forward read the same residual stream, rather than one after the other."""
    tied: bool = True
    biases: frozenset[Bias] = BIASES
    causal: bool = True
    dropout: float = 0.0
    chunked_loss: bool = False
    """Whether head and loss are computed in chunks of tokens, so that whole logits never exist."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """Assumptions for what the description of the model left open."""

    def __post_init__(self) -> None:
        if self.depth > MOST_LAYERS:
            raise ValueError(f"{self.name} has {self.depth:,} layers; at most {MOST_LAYERS:,} are planned")

    @property
    def depth(self) -> int:
        """Layers of encoder and decoder together."""
        return self.layers + self.decoder_layers

    @property
    def positions(self) -> int:
        """Rows of the position table, if it is learned."""
        return self.sequence_length if self.context is None else self.context

    @classmethod
    def of_config(cls, model: ModelConfig, sequence_length: int) -> ModelShape:
        """Return the shape of the built-in GPT.

        Args:
            model: its configuration.
            sequence_length: tokens of a sequence.
        """
        return cls(
            name=renamed(model.preset, model.changes(), model),
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            ffn_hidden=model.ffn_hidden,
            vocab_size=model.vocab_size,
            sequence_length=sequence_length,
            context=model.context,
            position=model.position,
            norm=model.norm,
            tied=model.tied,
            biases=BIASES if model.bias else frozenset(),
            dropout=model.dropout,
            chunked_loss=model.loss == "chunked",
        )


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn_hidden", "vocab_size", "gated")


def renamed(name: str, changed: Mapping[str, object], after: Sized) -> str:
    """Return the name of a model after changes of its sizes.

    A model with another depth and width is named by its sizes alone.

    Args:
        name: the name before.
        changed: field -> new value.
        after: the model after the changes.
    """
    sizes = {field: value for field, value in changed.items() if field in _SIZES}
    if {"layers", "hidden"} <= sizes.keys():
        return sizes_text(after)
    return f"{name} with {', '.join(f'{field} {value}' for field, value in sizes.items())}" if sizes else name


def sizes_text(model: Sized) -> str:
    """Return the sizes as text: '24 layers of 1,024, 16 heads, feed-forward 4,096, vocabulary 50,257'.

    Args:
        model: a configuration or a shape.
    """
    return (
        f"{model.layers} layers of {model.hidden:,}, {model.heads} heads, feed-forward {model.ffn_hidden:,}, "
        f"vocabulary {model.vocab_size:,}"
    )
