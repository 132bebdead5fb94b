"""Selective recomputation of one function: what is kept, what is computed again, and what is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from speedlab.models.selective_checkpointing import _policy, computed_once, selective_contexts


class Doubled(Function):
    """As an exchange between ranks: Python that is to run once."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            Doubled.calls += 1
            return (computed_once(lambda: (F.linear(x, torch.eye(x.shape[-1])) * 2,))[0],)

        return computed_once(compute)[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 2


def block(x: Tensor, weight: Tensor, second: Tensor, calls: list[str]) -> Tensor:
    calls.append("block")
    y = Doubled.apply(F.linear(F.gelu(x), weight))
    return F.linear(F.gelu(y * 3), second).tanh()


def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((5, 8), (8, 8), (8, 8))]
    calls: list[str] = []
    y = run(*given, calls)
    found = torch.autograd.grad(y.square().sum(), given)
    assert calls == ["block"] * (1 if run is block else 2)
    return y, *found


def test_python_runs_once_and_nothing_changes() -> None:
    """Operations inside of it, and a call in a call, are not counted among those that are computed again."""
    plain = gradients(block)
    Doubled.calls = 0
    for mine, expected in zip(
        gradients(partial(checkpoint, block, use_reentrant=False, context_fn=selective_contexts)), plain, strict=True
    ):
        assert torch.equal(mine, expected)
    assert Doubled.calls == 1


def test_an_exception_leaves_no_mode_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        return computed_once(lambda: (1 / 0, x)[1:])[0]

    with pytest.raises(ZeroDivisionError):
        checkpoint(fails, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=selective_contexts)
    assert _get_current_dispatch_mode() is None
    test_python_runs_once_and_nothing_changes()


def test_a_result_that_was_changed_in_place_is_told() -> None:
    def changes(x: Tensor) -> Tensor:
        return Doubled.apply(x.sin()).add_(1).cos()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(changes, x, use_reentrant=False, context_fn=selective_contexts)
    with pytest.raises(RuntimeError, match="a block changed in place what an exchange between ranks gave; use 'block'"):
        y.sum().backward()


def test_attention_that_drops_is_computed_again() -> None:
    """Each place of `dropout_p` is that of the operation's schema."""
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        operation = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
        place = [each.name for each in operation._schema.arguments].index("dropout_p")
        kept, again = ([None] * place + [dropped] for dropped in (0.0, 0.1))
        assert _policy(None, operation, *kept) is CheckpointPolicy.MUST_SAVE
        assert _policy(None, operation, *again) is CheckpointPolicy.PREFER_RECOMPUTE
        assert _policy(None, operation, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE
        assert _policy(None, operation) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, torch.ops.aten.bmm.default) is CheckpointPolicy.PREFER_RECOMPUTE
