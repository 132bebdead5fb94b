"""GPT in plain PyTorch. It knows nothing of parallelism: whoever trains it wraps it from outside.

Shapes: B sequences, T tokens, C = hidden, H heads of D = C / H, V = vocabulary.

Several documents may stand in one sequence: their `positions` (B, T) say so (see `documents`).

What parallelism changes are modules, some without parameters (`CausalAttention`, `Dropout`, `Positions`, `Rotary`,
`LMHead`), whose methods others may replace; nothing here reads the number of heads or the length of a sequence
where another value would do.

Every module that owns parameters has `reset_parameters()`, and there are no buffers, so that a model built on `meta` is
whole after `to_empty()` and one call of `reset_parameters()` on each module.

The blocks of attention as kernels take them, from the configuration of a model.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from cuda_ops.block_layout import BlockLayout, as_usual
from cuda_ops.block_sparse_attention import block_sparse_attention
from cuda_ops.linear_cross_entropy import linear_cross_entropy
from cuda_ops.onednn_matmul import Product
from cuda_ops.tensor_checks import FLOATS
from cuda_ops.torch_compat import uncompiled
from speedlab.config import AttentionConfig, ModelConfig
from speedlab.config.attention import seen_blocks
from speedlab.models.packing import attend_within, check_positions, document_mask, document_starts, starts_for
from speedlab.models.tiled_mlp import in_tiles


@uncompiled  # It would be traced past its cache.
def layout_of(attention: AttentionConfig, length: int, *, causal: bool = True) -> BlockLayout:
    """The layout of `attention` over `length` tokens, causal or both ways; the same object for the same arguments.

    Raises ValueError where a custom mask has fewer rows than `length` needs, and for a sliding window both ways.
    """
    return _made(attention, length, causal)


@lru_cache(maxsize=64)
def _made(attention: AttentionConfig, length: int, causal: bool) -> BlockLayout:
    rows = seen_blocks(attention, length, causal=causal)
    with as_usual():
        mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        for row, seen in zip(mask, rows, strict=True):
            row[list(seen)] = True
        window = attention.window if attention.pattern == "sliding" else None
        return BlockLayout.from_mask(mask, causal=causal, block=attention.block, window=window)


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
        _start_normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table that starts from a normal distribution of standard deviation 0.02."""

    def reset_parameters(self) -> None:
        _start_normal(self.weight, _INIT_STD)


def _start_normal(weight: Tensor, std: float) -> None:
    if not weight.is_meta:  # There is nothing to fill, and torch's way of doing so imports its compiler: a second.
        nn.init.normal_(weight, std=std)


class Dropout(nn.Dropout):
    """torch's, which also tells what it draws, so that others may draw for more than is here."""

    def mask(self, x: Tensor) -> Tensor:
        """What `forward` draws for `x`: 1 where a value stays. The random state moves as there."""
        return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - self.p)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """What `forward` makes of `x` with this mask."""
        return x * (mask / (1 - self.p))


class CausalAttention(nn.Module):
    """Causal attention of any number of heads, probabilities dropped in training: q, k, v (B, H, T, D) each -> the
    same. With `starts` (B, T) int32, no query sees a key before its own, the first of its document.

    What a head drops depends on one number, which is drawn from torch's generator on the host, and on the head's own
    number: whoever has some of the heads only (`first_head` on) draws nothing for the others, and a head's scores are
    those of no other. Each kind of device has a generator of its own, and drops other elements.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first_head = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        if not self.training or self.dropout == 0:
            if starts is not None:
                return attend_within(q, k, v, starts)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = None if starts is None else document_mask(starts, q.shape[2])
        seed = self.draw_seed()
        heads = zip(*(each.split(1, dim=1) for each in (q, k, v)), strict=True)
        with torch.random.fork_rng([q.device] if q.is_cuda else []):
            each = [self._drop_one(*head, seen=seen, seed=seed + number) for number, head in enumerate(heads)]
            return torch.cat(each, dim=1)

    def draw_seed(self) -> int:
        """A seed for the first head that is here, drawn from torch's generator; each further head's is greater by
        one."""
        with unset_fake_temporarily():  # A plan's fake tensors have no values, and need none of this one.
            return int(torch.randint(1 << 62, ())) + self.first_head

    def kept(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Which probabilities (B, 1, T, T) of a head with this seed `forward` keeps on a CPU: bool."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            return torch.empty(shape, dtype=torch.bool).bernoulli_(1 - self.dropout)

    def _drop_one(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None, seed: int) -> Tensor:
        """Attention of one head, (B, 1, T, D) each, whose generator starts from `seed`. `seen` (B, 1, T, T) bool: which
        keys a query sees; None: all before it."""
        torch.default_generator.manual_seed(seed)
        if q.is_cuda:
            torch.cuda.manual_seed(seed)  # On the host: nothing waits.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=self.dropout, is_causal=seen is None)


class SparseAttend(nn.Module):
    """Causal attention over a pattern's blocks, the same for all heads: q, k, v (B, H, T, D) each -> the same.

    Time and memory are in proportion to the blocks that are seen. With `starts` (B, T) int32, no query sees a key
    before its own, the first of its document; one whose blocks are all of earlier documents sees nothing, and gives 0.
    """

    def __init__(self, attention: AttentionConfig) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        layout = layout_of(self.attention, q.shape[2])  # pyright: ignore[reportCallIssue]  # disable() loses its types
        starts = None if starts is None else starts_for(starts, q.shape[2])
        return block_sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), layout, starts=starts)


class Attention(nn.Module):
    """Causal self-attention, within documents where these begin at `starts`; queries and keys are turned by `rotation`
    where positions are rotary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        dense = config.attention.kind == "dense"
        self.attend = CausalAttention(config.dropout) if dense else SparseAttend(config.attention)
        self.out = Linear(config.hidden, config.hidden, bias=config.bias, std=_residual_std(config))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor | None, starts: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # (B, T, 3, H, D)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D) each
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = self.attend(q, k, v) if starts is None else self.attend(q, k, v, starts)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))  # (B, T, C)


class FeedForward(nn.Module):
    """Two linear layers with GPT-2's approximation of GELU between, for `tile` tokens of a sequence at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn_hidden, bias=config.bias)
        self.down = Linear(config.ffn_hidden, config.hidden, bias=config.bias, std=_residual_std(config))
        self.dropout = Dropout(config.dropout)
        self.tile = config.ffn_tile

    def forward(self, x: Tensor) -> Tensor:
        if self.tile is None or x.shape[1] <= self.tile:
            return self.dropout(self._compute(x))
        x = in_tiles(self._compute, x, self.parameters(), self.tile)  # pyright: ignore[reportCallIssue]  # disable() loses its types
        return self.dropout(x)

    def _compute(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # (B, T, C) -> (B, T, ffn_hidden) -> (B, T, C)


class GPTBlock(nn.Module):
    """One transformer block, normalised before each part: (B, T, C) -> (B, T, C). `starts`: see `CausalAttention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, starts: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, starts)
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """Which tokens of a sequence are here, without parameters: all of them."""

    def forward(self, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
        """Positions of the T = `length` tokens that are here: (T,) int64, or (B, T) of those `given` for all tokens."""
        if given is None:
            return torch.arange(length, device=device)
        return F.pad(given, (0, length - given.shape[1]))  # Where sequences were padded, behind them.

    def own(self, tokens: Tensor) -> Tensor:
        """Of all tokens of the sequences (B, T, …) those that are here."""
        return tokens


class Rotary(nn.Module):
    """The rotation of a sequence's positions, without parameters."""

    def __init__(self, head_size: int, positions: Positions) -> None:
        super().__init__()
        self.head_size, self.positions = head_size, positions

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(2, T, D / 2) float32 for the tokens of `x` (B, T, C); (2, B, 1, T, D / 2) where positions are given."""
        return rotation_table(self.positions(x.shape[1], x.device, positions), self.head_size)


class LMHead(nn.Module):
    """The head and the loss together, without parameters: the head's weight is an argument."""

    def __init__(self, *, chunked: bool) -> None:
        super().__init__()
        self.chunked = chunked
        self.product = Product()

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> GPTOutput:
        """The loss where there are targets, else the logits."""
        if targets is None:
            return GPTOutput(None, self.logits(x, weight))
        return GPTOutput(self.loss(x, weight, targets), None)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """(B, T, V) of `x` (B, T, C) and `weight` (V, C)."""
        return self.product(x, weight)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of `targets` (B, T): float32 scalar."""
        if self.chunked and x.dtype in FLOATS:
            return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
        # In float32: the sum over the vocabulary loses too much in 16 bits.
        return F.cross_entropy(self.logits(x, weight).float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """A decoder-only transformer: `embed`, then each of `blocks` with the same `rotation` and `starts`, then `output`.

    With position "learned", norm "layer", tied and bias, it is GPT-2 (the logits agree with transformers' model).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.position == "learned"
        self.embedding = Embedding(config.vocab_size, config.hidden)
        self.positions = Embedding(config.context, config.hidden) if learned else None
        self.places = Positions()
        self.rotary = None if learned else Rotary(config.hidden // config.heads, self.places)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = None if config.tied else Linear(config.hidden, config.vocab_size, bias=False)
        self.prediction = LMHead(chunked=config.loss == "chunked")

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> GPTOutput:
        """Logits of `tokens` (B, T) int64, or, with `targets` (B, T) int64, the loss; targets of -100 do not count.

        `positions` (B, T) int64: where each token stands in its document, from 0. A document begins where they do not
        go on by one from the token before, and none of its tokens sees one of another document. Without them each
        sequence is one document.

        Raises ValueError when a sequence is longer than the context, or positions are not of the tokens' shape.
        """
        x = self.embed(tokens, positions)
        rotation, starts = self.rotation(x, positions), self.starts(positions)
        for block in self.blocks:
            x = block(x, rotation, starts)
        return self.output(x, targets)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the first block takes, (B, T, C), of `tokens` (B, T) int64."""
        if positions is not None:
            check_positions(positions, tokens)
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's context of {self.config.context}; "
                f"cut the sequence, or build the model with a larger context"
            )
        tokens = self.places.own(tokens)
        x = self.embedding(tokens)  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions(self.places(tokens.shape[-1], tokens.device, positions))
        return self.dropout(x)

    def rotation(self, x: Tensor, positions: Tensor | None = None) -> Tensor | None:
        """What every block takes beside its input `x` (B, T, C): the rotation of the positions, if they are rotary."""
        return None if self.rotary is None else self.rotary(x, positions)

    def starts(self, positions: Tensor | None) -> Tensor | None:
        """And (B, T) int32, where the documents of all tokens begin in their sequences; None where each is one."""
        return None if positions is None else document_starts(positions)

    def output(self, x: Tensor, targets: Tensor | None) -> GPTOutput:
        """Logits, or the loss, of what the last block gave, `x` (B, T, C)."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return self.prediction(self.norm(x), weight, targets)


def rotation_table(positions: Tensor, head_size: int) -> Tensor:
    """Cosines and sines of the rotary angles (arXiv:2104.09864) at `positions`: (2, T, D / 2) float32 of (T,), and
    (2, B, 1, T, D / 2) of (B, T).

    Computed anew in each forward pass, which costs nothing beside a block, rather than kept in a buffer: a buffer would
    be lost on `meta`, and rounded when the model is cast to 16 bits.
    """
    pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * _ROTARY_BASE ** (-pairs / head_size)
    angles = angles if positions.dim() == 1 else angles[:, None]  # For all heads.
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
