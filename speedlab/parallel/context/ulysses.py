"""Exchange tokens for heads, and back (Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from speedlab.comm import Group
from speedlab.models.selective_checkpointing import computed_once


def share_heads(x: Tensor, group: Group) -> Tensor:
    """Return all tokens of some heads, (…, H / n, T, D). Collective.

    Args:
        x: (…, H, T / n, D), this rank's tokens of all heads.
        group: The n ranks, whose tokens are in rank order.
    """
    return _HeadExchange.apply(x, group, _to_heads, _to_tokens)


def share_tokens(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of all heads, (…, H, T / n, D): the inverse of `share_heads`. Collective.

    Args:
        x: (…, H / n, T, D), all tokens of some heads.
        group: The n ranks.
    """
    return _HeadExchange.apply(x, group, _to_tokens, _to_heads)


class _HeadExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return computed_once(lambda: (there(x, group),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.group), None, None, None


def _to_heads(x: Tensor, group: Group) -> Tensor:
    received = group.exchange(x.unflatten(-3, (group.size, -1)).movedim(-4, 0))  # (n, …, H / n, T / n, D), by sender
    return received.movedim(0, -3).flatten(-3, -2)


def _to_tokens(x: Tensor, group: Group) -> Tensor:
    received = group.exchange(x.unflatten(-2, (group.size, -1)).movedim(-3, 0))
    return received.movedim(0, -4).flatten(-4, -3)
