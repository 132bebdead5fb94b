"""A model's shape: what follows from a configuration, a preset or a foreign model's own file. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig

Bias = Literal["norms", "attention in", "attention out", "feed-forward", "head"]
"""Where a transformer may have biases; 'attention in' is queries, keys and values, 'feed-forward' both ways."""

MOST_LAYERS = 10_000
"""Ten times the deepest that was published (arXiv:2203.00555). Whoever predicts something of a model looks at each of
them: a slip of the hand must not keep a panel or a plan busy for ever."""

BIASES: frozenset[Bias] = frozenset({"norms", "attention in", "attention out", "feed-forward"})
"""Those of a GPT that has any."""


class Sized(Protocol):
    """What has a model's sizes: a configuration, a shape."""

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
    """A transformer as the planner sees it. Counts are of the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn_hidden: int
    vocab_size: int
    sequence_length: int
    decoder_layers: int = 0
    """Of an encoder and decoder (T5): layers with attention to the encoder besides; `layers` are the encoder's."""
    kv_heads: int | None = None
    """None: as many as heads."""
    head_size: int | None = None
    """None: hidden / heads."""
    context: int | None = None
    """Rows of a learned table of positions. None: the sequence length."""
    gated: bool = False
    """Whether the feed-forward layer has a third matrix."""
    stepwise: bool = False
    """Whether the activation function is computed in steps, of which three keep a tensor (Hugging Face's gelu_new)."""
    position: Literal["learned", "rotary", "relative"] = "learned"
    norm: Literal["rms", "layer"] = "layer"
    norms: int = 2
    """Of each block: before attention and feed-forward; 4: behind both too; 1: one before both (Phi)."""
    head_norms: bool = False
    """Whether each head's queries and keys are normalised, with one weight for all heads."""
    parallel: bool = False
    """Whether attention and feed-forward read the same residual stream, rather than one after the other."""
    tied: bool = True
    biases: frozenset[Bias] = BIASES
    causal: bool = True
    dropout: float = 0.0
    chunked_loss: bool = False
    """Whether head and loss are computed a few tokens at a time, so that logits are never whole."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """What was left open by whoever described the model, and taken as usual."""

    def __post_init__(self) -> None:
        if self.depth > MOST_LAYERS:
            raise ValueError(f"{self.name} has {self.depth:,} layers; at most {MOST_LAYERS:,} are planned")

    @property
    def depth(self) -> int:
        """Layers of encoder and decoder together."""
        return self.layers + self.decoder_layers

    @property
    def positions(self) -> int:
        """Rows of the table of positions, where it is learned."""
        return self.sequence_length if self.context is None else self.context

    @classmethod
    def of_config(cls, model: ModelConfig, sequence_length: int) -> ModelShape:
        """The built-in GPT's shape."""
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
    """What a model is called whose fields are `changed`: by its name as far as that still says what it is. Without the
    depth and the width of the model of that name it is another one."""
    sizes = {field: value for field, value in changed.items() if field in _SIZES}
    if {"layers", "hidden"} <= sizes.keys():
        return sizes_text(after)
    return f"{name} with {', '.join(f'{field} {value}' for field, value in sizes.items())}" if sizes else name


def sizes_text(model: Sized) -> str:
    """'24 layers of 1,024, 16 heads, feed-forward 4,096, vocabulary 50,257'."""
    return (
        f"{model.layers} layers of {model.hidden:,}, {model.heads} heads, feed-forward {model.ffn_hidden:,}, "
        f"vocabulary {model.vocab_size:,}"
    )
