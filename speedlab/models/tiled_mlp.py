"""Compute a per-token layer tile by tile, so that its intermediate results never exist for a whole sequence.

Feed-forward tiling of arXiv:2305.19370; as a single operation, ALST, arXiv:2506.13996. Shapes: B sequences, T tokens, C
= hidden; a tile has n tokens of each sequence.

1. Forward: compute tile by tile without a graph. Only the input (B, T, C) is kept.
2. Backward: repeat a tile's forward pass with a graph and run its backward pass at once. The graph is freed. The tile's
   part of the input gradient is written into the whole.
3. Parameter gradients are summed over the tiles, in float32 if they have 16 bits, and returned once. So ZeRO, which
   counts arriving gradients, sees an ordinary layer.
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
"""Dimension of (B, T, C) that is split."""

_FLOAT32_BYTES = 4


@uncompiled  # The backward pass builds graphs of its own, which a compiler cannot trace.
def in_tiles(layer: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[nn.Parameter], tile: int) -> Tensor:
    """Compute `layer(x)` for `tile` tokens of each sequence at a time. The result is differentiable once.

    Args:
        layer: (B, n, C) -> (B, n, any) for any n, each token by itself and without random numbers. Backward calls it
            again.
        x: (B, T, C).
        parameters: All parameters that `layer` uses. Those that require gradients get them once, after the last tile.
        tile: Tokens per tile, at least 1.

    Returns:
        (B, T, any).
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
            "cache_enabled": False,  # A cached cast of one tile's graph would be reused in the next graph.
        }
        # Save parameters only for autograd's version check. In a recomputed block, saved tensors are not the parameters
        # themselves, so backward uses ctx.parameters.
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
            # A detached tile is a leaf, so its graph ends here and is freed after this tile.
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
    """Yield each tile with the index of its first token."""
    return ((number * tile, part) for number, part in enumerate(x.split(tile, _TOKENS)))
