"""A model's shape: what follows from a configuration, a preset or a foreign model's own file. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from speedlab.config.model import ModelConfig

Bias = Literal["norms", "attention in", "attention out", "feed-forward", "head"]
"""Where a transformer may have biases; 'attention in' is queries, keys and values, 'feed-forward' both ways."""

BIASES: frozenset[Bias] = frozenset({"norms", "attention in", "attention out", "feed-forward"})
"""Those of a GPT that has any."""


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
            name=model.described(),
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
