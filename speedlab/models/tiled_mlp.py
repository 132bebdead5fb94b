"""A layer that treats each token by itself, computed a tile of tokens at a time: what it makes inside never exists for
a whole sequence (the feed-forward tiling of arXiv:2305.19370; as a single operation, ALST, arXiv:2506.13996).

B sequences, T tokens, C = hidden; a tile has n tokens of each sequence.

1. Forward: tile by tile, without a graph; its input (B, T, C) is all that is kept.
2. Backward: a tile's forward again, now with a graph, its backward at once, and the graph is gone. The tile's part of
   the input's gradient has its place in the whole.
3. Gradients of parameters are summed over the tiles, in float32 where they are of 16 bits, and handed over once: so
   whoever counts what arrives (ZeRO) sees a layer as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from cuda_ops.torch_compat import uncompiled
from speedlab.models.selective_checkpointing import computed_once

_TOKENS = 1
"""The dimension of (B, T, C) that is cut."""

_FLOAT32_BYTES = 4


@uncompiled  # Its backward makes graphs of its own, which a compiler does not trace.
def in_tiles(layer: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[nn.Parameter], tile: int) -> Tensor:
    """`layer(x)`, `tile` tokens of each sequence at a time: differentiable once.

    Args:
        layer: (B, n, C) -> (B, n, any) for any n, each token by itself and without random numbers; it is called again
            in backward.
        x: (B, T, C).
        parameters: all that `layer` uses; those that require gradients get theirs once, after the last tile.
        tile: tokens, at least 1.
    """
    return _Tiles.apply(layer, tile, x, *parameters)


class _Tiles(Function):
    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], tile: int, x: Tensor, *parameters: Tensor) -> Tensor:
        kind = x.device.type
        ctx.layer, ctx.tile, ctx.parameters = layer, tile, parameters
        ctx.autocast = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,  # A cast that a tile's graph had made would be used without it by the next.
        }
        # Of parameters only the version is asked for: what a recomputed block has saved is not the parameter itself.
        ctx.save_for_backward(x, *parameters)
        return computed_once(lambda: (_forward(layer, x, tile),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = ctx.saved_tensors
        wants_input, *wants = ctx.needs_input_grad[2:]
        trained = [p for p, wanted in zip(ctx.parameters, wants, strict=True) if wanted]
        of_input = torch.empty_like(x) if wants_input else None
        sums: list[Tensor] = []
        for start, part in _cut(x, ctx.tile):  # 2
            count = part.shape[_TOKENS]
            part = part.detach().requires_grad_(wants_input)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                result = ctx.layer(part)
            sources = [part, *trained] if wants_input else trained
            found = list(torch.autograd.grad(result, sources, gradient.narrow(_TOKENS, start, count)))
            if of_input is not None:
                of_input.narrow(_TOKENS, start, count).copy_(found.pop(0))
            if sums:  # 3
                for total, more in zip(sums, found, strict=True):
                    total.add_(more)
            else:
                sums = [each.float() if each.element_size() < _FLOAT32_BYTES else each for each in found]
        ready = iter(total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return None, None, of_input, *(next(ready) if wanted else None for wanted in wants)


def _forward(layer: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    whole = None
    for start, part in _cut(x, tile):  # 1
        result = layer(part)
        if whole is None:
            whole = result.new_empty(*x.shape[:-1], result.shape[-1])
        whole.narrow(_TOKENS, start, part.shape[_TOKENS]).copy_(result)
    assert whole is not None, "split gives at least one tile"
    return whole


def _cut(x: Tensor, tile: int) -> Iterable[tuple[int, Tensor]]:
    """Each tile with the number of its first token."""
    return ((number * tile, part) for number, part in enumerate(x.split(tile, _TOKENS)))
