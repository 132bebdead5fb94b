"""GPT in plain PyTorch. It knows nothing of parallelism: whoever trains it wraps it from outside.

Shapes: B sequences, T tokens, C = hidden, H heads of D = C / H, V = vocabulary.

Every module that owns parameters has `reset_parameters()`, and there are no buffers, so that a model built on `meta` is
whole after `to_empty()` and one call of `reset_parameters()` on each module.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuda_ops.linear_cross_entropy import linear_cross_entropy
from cuda_ops.tensors import FLOATS
from speedlab.config import ModelConfig

_INIT_STD = 0.02
_ROTARY_BASE = 10_000.0


class GPTOutput(NamedTuple):
    """`loss`: float32 scalar, mean over the targets, when there are any; `logits`: (B, T, V) when there are none."""

    loss: Tensor | None
    logits: Tensor | None


class Linear(nn.Linear):
    """A linear layer whose weights start from a normal distribution of standard deviation `std`, its bias from zero."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = _INIT_STD) -> None:
        self.std = std  # first, because the constructor below calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table that starts from a normal distribution of standard deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_INIT_STD)


class Attention(nn.Module):
    """Causal self-attention; queries and keys are turned by `rotation` where positions are rotary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.out = Linear(config.hidden, config.hidden, bias=config.bias, std=_residual_std(config))

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)  # (B, T, 3, H, D)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D) each
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, H, T, D)
        y = self.out(y.transpose(1, 2).reshape(batch, length, hidden))  # (B, T, C)
        return F.dropout(y, self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with GPT-2's approximation of GELU between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = Linear(config.hidden, config.ffn_hidden, bias=config.bias)
        self.down = Linear(config.ffn_hidden, config.hidden, bias=config.bias, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))  # (B, T, C) -> (B, T, ffn_hidden) -> (B, T, C)
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """One transformer block, normalised before each part: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer.

    With position "learned", norm "layer", tied and bias, it is GPT-2 (the logits agree with transformers' model).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden)
        self.positions = Embedding(config.context, config.hidden) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = None if config.tied else Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Logits of `tokens` (B, T) int64, or, with `targets` (B, T) int64, the loss; targets of -100 do not count.

        Raises ValueError when a sequence is longer than the context.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's context of {self.config.context}; "
                f"cut the sequence, or build the model with a larger context"
            )
        x = self.embedding(tokens)  # (B, T, C)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        else:
            rotation = rotation_table(length, self.config.hidden // self.config.heads, tokens.device)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        if targets is not None and self.config.loss == "chunked" and x.dtype in FLOATS:
            weight = self.embedding.weight if self.head is None else self.head.weight
            return GPTOutput(linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten()), None)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)  # (B, T, V)
        if targets is None:
            return GPTOutput(None, logits)
        # In float32: the sum over the vocabulary loses too much in 16 bits.
        return GPTOutput(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), None)


def rotation_table(length: int, head_size: int, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary angles (arXiv:2104.09864): (2, T, D / 2) float32.

    Computed anew in each forward pass, which costs nothing beside a block, rather than kept in a buffer: a buffer would
    be lost on `meta`, and rounded when the model is cast to 16 bits.
    """
    frequencies = _ROTARY_BASE ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (i, i + D / 2) of `x` (B, H, T, D) by its position's angle, in float32."""
    cosine, sine = rotation
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D / 2) each
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(x.dtype)


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=1e-5)
    return nn.LayerNorm(config.hidden, eps=1e-5, bias=config.bias)


def _residual_std(config: ModelConfig) -> float:
    """GPT-2 shrinks what is added to the residual stream, so that its variance does not grow with the depth."""
    return _INIT_STD / math.sqrt(2 * config.layers)
