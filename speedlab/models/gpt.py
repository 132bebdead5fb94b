"""GPT in plain PyTorch, without any knowledge of parallelism. Trainers wrap the model from outside.

Shapes: B sequences, T tokens, C = hidden, H heads of size D = C / H, V = vocabulary.

- A sequence may hold several documents; their `positions` (B, T) mark the boundaries (see `speedlab.models.packing`).
- What parallelism changes is a module of its own, some without parameters: `CausalAttention`, `Dropout`, `Positions`,
  `Rotary`, `LMHead`. Parallel code replaces their methods. Other code derives the number of heads and the sequence
  length from its tensors.
- Every module with parameters has `reset_parameters()`, and there are no buffers. A model on `meta` is complete after
  `to_empty()` and one call of `reset_parameters()` on each module.
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


@uncompiled  # A compiler would trace into this function and bypass its cache.
def layout_of(attention: AttentionConfig, length: int, *, causal: bool = True) -> BlockLayout:
    """Return the block layout of `attention` over `length` tokens; the same object for the same arguments.

    Args:
        attention: Pattern, block size and window.
        length: Number of tokens of a sequence.
        causal: Whether a query sees only earlier keys, or keys on both sides.

    Raises:
        ValueError: If a custom mask has fewer rows than `length` needs, or a sliding window is not causal.
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
    """Output of the GPT: loss or logits.

    Attributes:
        loss: Mean over the targets, float32 scalar; None without targets.
        logits: (B, T, V); None with targets.
    """

    loss: Tensor | None
    logits: Tensor | None


class Linear(nn.Linear):
    """Linear layer with weights from a normal distribution of standard deviation `std`, and a zero bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = _INIT_STD) -> None:
        self.std = std  # set first, because the constructor below calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight and set the bias to zero."""
        _start_normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Embedding with weights from a normal distribution of standard deviation 0.02."""

    def reset_parameters(self) -> None:
        """Draw the weight."""
        _start_normal(self.weight, _INIT_STD)


def _start_normal(weight: Tensor, std: float) -> None:
    # On meta there is nothing to fill, and normal_ there imports torch's compiler, which takes 1 s.
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Dropout(nn.Dropout):
    """Dropout that exposes its mask, so that parallel code can draw the mask of a larger tensor."""

    def mask(self, x: Tensor) -> Tensor:
        """Draw the mask that `forward` would draw for `x`, with the same change of the random state.

        Returns:
            Tensor of the shape of `x`: 1 where a value is kept, 0 elsewhere.
        """
        return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - self.p)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the result of `forward` for `x` with this mask.

        Args:
            x: Input of any shape.
            mask: Ones and zeros of the same shape.
        """
        return x * (mask / (1 - self.p))


class CausalAttention(nn.Module):
    """Causal attention over any number of heads, with dropout of probabilities in training.

    q, k, v (B, H, T, D) each -> (B, H, T, D). With `starts` (B, T) int32, the first token of each query's document, no
    query sees an earlier key.

    The dropout of a head depends on one seed, drawn from torch's generator on the host, and on the head's number. So a
    rank with some of the heads (from `first_head` on) draws nothing for the others. CPU and CUDA generators differ and
    drop different elements.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first_head = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend causally.

        Args:
            q: (B, H, T, D); `k` and `v` have the same shape.
            k: Keys.
            v: Values.
            starts: (B, T) int32, first token of each token's document; None for one document per sequence.

        Returns:
            (B, H, T, D).
        """
        # Without dropout, one fused kernel computes all heads.
        if not self.training or self.dropout == 0:
            if starts is not None:
                return attend_within(q, k, v, starts)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = None if starts is None else document_mask(starts, q.shape[2])
        seed = self.draw_seed()
        # One head at a time: its dropout depends only on its own seed, for any split of heads over ranks.
        heads = zip(*(each.split(1, dim=1) for each in (q, k, v)), strict=True)
        # Seeding the heads must not change the state of torch's generators.
        with torch.random.fork_rng([q.device] if q.is_cuda else []):
            each = [self._drop_one(*head, seen=seen, seed=seed + number) for number, head in enumerate(heads)]
            return torch.cat(each, dim=1)

    def draw_seed(self) -> int:
        """Draw the seed of this rank's first head from torch's generator. Each further head's seed is greater by
        one.
        """
        with unset_fake_temporarily():  # Fake tensors have no values, and tracing needs no seed value.
            return int(torch.randint(1 << 62, ())) + self.first_head

    def kept(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Return which probabilities `forward` keeps on a CPU for a head with this seed.

        Args:
            shape: (B, 1, T, T).
            seed: Seed of the head.

        Returns:
            Bool tensor of this shape.
        """
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            return torch.empty(shape, dtype=torch.bool).bernoulli_(1 - self.dropout)

    def _drop_one(self, q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None, seed: int) -> Tensor:
        """Attend with one head, (B, 1, T, D) each, whose generator starts from `seed`.

        `seen` (B, 1, T, T) bool: which keys a query sees; None: all keys up to the query.
        """
        torch.default_generator.manual_seed(seed)
        if q.is_cuda:
            torch.cuda.manual_seed(seed)  # Seeding happens on the host, without a device sync.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=self.dropout, is_causal=seen is None)


class SparseAttend(nn.Module):
    """Causal attention over the blocks of a pattern, the same for all heads.

    q, k, v (B, H, T, D) each -> (B, H, T, D). Time and memory are proportional to the number of visible blocks.

    With `starts` (B, T) int32, no query sees a key before the first token of its document. A query whose blocks all
    belong to earlier documents sees nothing and returns 0.
    """

    def __init__(self, attention: AttentionConfig) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend over the visible blocks; see `CausalAttention.forward` for arguments."""
        layout = layout_of(self.attention, q.shape[2])  # pyright: ignore[reportCallIssue]  # disable() loses its types
        starts = None if starts is None else starts_for(starts, q.shape[2])
        return block_sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), layout, starts=starts)


class Attention(nn.Module):
    """Causal self-attention within documents. Queries and keys are rotated if positions are rotary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        dense = config.attention.kind == "dense"
        self.attend = CausalAttention(config.dropout) if dense else SparseAttend(config.attention)
        self.out = Linear(config.hidden, config.hidden, bias=config.bias, std=_residual_std(config))
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor | None, starts: Tensor | None = None) -> Tensor:
        """Return attention's output, (B, T, C) -> (B, T, C).

        Args:
            x: (B, T, C).
            rotation: Cosines and sines from `Rotary`; None with learned positions.
            starts: (B, T) int32, see `CausalAttention`.
        """
        # The number of heads is -1, because a tensor-parallel rank has only some of them.
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # (B, T, 3, H, D)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D) each
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = self.attend(q, k, v) if starts is None else self.attend(q, k, v, starts)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))  # (B, T, C)


class FeedForward(nn.Module):
    """Two linear layers around GPT-2's approximation of GELU, computed for `tile` tokens of a sequence at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn_hidden, bias=config.bias)
        self.down = Linear(config.ffn_hidden, config.hidden, bias=config.bias, std=_residual_std(config))
        self.dropout = Dropout(config.dropout)
        self.tile = config.ffn_tile

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of both layers, (B, T, C) -> (B, T, C)."""
        if self.tile is None or x.shape[1] <= self.tile:
            return self.dropout(self._compute(x))
        x = in_tiles(self._compute, x, self.parameters(), self.tile)  # pyright: ignore[reportCallIssue]  # disable() loses its types
        return self.dropout(x)

    def _compute(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # (B, T, C) -> (B, T, ffn_hidden) -> (B, T, C)


class GPTBlock(nn.Module):
    """One transformer block with pre-normalization: (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, starts: Tensor | None = None) -> Tensor:
        """Add attention and feed-forward to the residual stream.

        Args:
            x: (B, T, C).
            rotation: Cosines and sines from `Rotary`; None with learned positions.
            starts: (B, T) int32, see `CausalAttention`.
        """
        x = x + self.attention(self.attention_norm(x), rotation, starts)
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """The tokens of a sequence that this rank holds: here all tokens. It has no parameters."""

    def forward(self, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
        """Return the positions of the tokens that this rank holds.

        Args:
            length: Number T of tokens on this rank.
            device: Device of the result.
            given: Positions of all tokens of the sequences, (B, T or fewer) int64.

        Returns:
            (T,) int64, or (B, T) int64 if positions are given.
        """
        if given is None:
            return torch.arange(length, device=device)
        return F.pad(given, (0, length - given.shape[1]))  # Sequences are padded at their end.

    def own(self, tokens: Tensor) -> Tensor:
        """Return the tokens that this rank holds of `tokens` (B, T, …)."""
        return tokens


class Rotary(nn.Module):
    """Cosines and sines of a sequence's positions. It has no parameters."""

    def __init__(self, head_size: int, positions: Positions) -> None:
        super().__init__()
        self.head_size, self.positions = head_size, positions

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the rotation of the tokens of `x`.

        Args:
            x: (B, T, C).
            positions: (B, T) int64, or None.

        Returns:
            (2, T, D / 2) float32; (2, B, 1, T, D / 2) if positions are given.
        """
        return rotation_table(self.positions(x.shape[1], x.device, positions), self.head_size)


class LMHead(nn.Module):
    """Head and loss in one module, because a chunked loss computes both together. The head's weight is an argument."""

    def __init__(self, *, chunked: bool) -> None:
        super().__init__()
        self.chunked = chunked
        self.product = Product()

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> GPTOutput:
        """Return the loss if there are targets, otherwise the logits.

        Args:
            x: (B, T, C).
            weight: (V, C).
            targets: (B, T) int64, or None.
        """
        if targets is None:
            return GPTOutput(None, self.logits(x, weight))
        return GPTOutput(self.loss(x, weight, targets), None)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits (B, T, V) of `x` (B, T, C) and `weight` (V, C)."""
        return self.product(x, weight)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the targets as a float32 scalar.

        Args:
            x: (B, T, C).
            weight: (V, C).
            targets: (B, T) int64; -100 does not count.
        """
        if self.chunked and x.dtype in FLOATS:
            return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
        # Use float32: the sum over the vocabulary is too inexact in 16 bits.
        return F.cross_entropy(self.logits(x, weight).float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Decoder-only transformer: `embed`, then all `blocks` with the same `rotation` and `starts`, then `output`.

    With position "learned", norm "layer", tied and bias, this is GPT-2 (the logits agree with transformers' model).
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
        """Return logits, or the loss if there are targets.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64; -100 does not count.
            positions: (B, T) int64, position of each token in its document, from 0. A document begins at each token
                whose position is not one more than the position before. Tokens do not see other documents. Without
                positions each sequence is one document.

        Raises:
            ValueError: If a sequence is longer than the context, or positions do not have the shape of the tokens.
        """
        x = self.embed(tokens, positions)
        rotation, starts = self.rotation(x, positions), self.starts(positions)
        for block in self.blocks:
            x = block(x, rotation, starts)
        return self.output(x, targets)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the input of the first block, (B, T, C).

        Args:
            tokens: (B, T) int64.
            positions: (B, T) int64, or None; see `forward`.

        Raises:
            ValueError: See `forward`.
        """
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
        """Return the rotation for every block, or None if positions are learned.

        Args:
            x: Input of the first block, (B, T, C).
            positions: (B, T) int64, or None.
        """
        return None if self.rotary is None else self.rotary(x, positions)

    def starts(self, positions: Tensor | None) -> Tensor | None:
        """Return the first token of each token's document, (B, T) int32; None if each sequence is one document.

        Args:
            positions: (B, T) int64, or None.
        """
        return None if positions is None else document_starts(positions)

    def output(self, x: Tensor, targets: Tensor | None) -> GPTOutput:
        """Return logits or loss of the last block's output.

        Args:
            x: (B, T, C).
            targets: (B, T) int64, or None.
        """
        # A tied model uses its embedding as output matrix.
        weight = self.embedding.weight if self.head is None else self.head.weight
        return self.prediction(self.norm(x), weight, targets)


def rotation_table(positions: Tensor, head_size: int) -> Tensor:
    """Return cosines and sines of the rotary angles (arXiv:2104.09864).

    The table is computed in each forward pass, which is cheap compared to a block. A buffer would be lost on `meta`,
    and rounded if the model is cast to 16 bits.

    Args:
        positions: (T,) or (B, T) int64.
        head_size: Size D of a head.

    Returns:
        (2, T, D / 2) float32 for (T,); (2, B, 1, T, D / 2) for (B, T).
    """
    pairs = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * _ROTARY_BASE ** (-pairs / head_size)
    angles = angles if positions.dim() == 1 else angles[:, None]  # One dimension for the heads.
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of `x` by the angle of its position, in float32.

    Args:
        x: (B, H, T, D).
        rotation: Result of `rotation_table`.

    Returns:
        (B, H, T, D) in the dtype of `x`.
    """
    cosine, sine = rotation
    # Pairs are (i, i + D / 2), as in GPT-NeoX and Llama.
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D / 2) each
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(x.dtype)


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=1e-5)
    return nn.LayerNorm(config.hidden, eps=1e-5, bias=config.bias)


def _residual_std(config: ModelConfig) -> float:
    """Return GPT-2's smaller standard deviation for layers that add to the residual stream.

    So the variance of the stream does not grow with the depth.
    """
    return _INIT_STD / math.sqrt(2 * config.layers)
