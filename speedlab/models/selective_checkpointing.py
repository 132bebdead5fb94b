"""Selective recomputation (arXiv:2205.05198, section 5): backward computes again what is cheap to compute and large to
keep, which in a transformer's block are norms, activation functions, rotary positions, dropout's masks, and attention's
probabilities where a device makes them whole.

What is kept are results of linear layers and of fused attention, by torch's selective checkpoint, which decides by
operation; and what `computed_once` was given, which is Python: collectives above all, which no rank then runs twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import cuda_ops.block_sparse_attention
import cuda_ops.linear_cross_entropy  # noqa: F401  # both register the operations that are named below

_aten, _ours = torch.ops.aten, torch.ops.cuda_ops

_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.convolution.default,
    _ours.block_sparse_attention.default,
    _ours.linear_cross_entropy.default,
}
"""Products of batches (bmm) are not among them: those are scores and what is made of them."""

_DROPPING = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Fused attention -> which argument says how much is dropped. One that draws is computed again: else whoever draws
after it would draw something else the second time."""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """(around the forward, around its recomputation), as torch's `checkpoint` takes them for one call of a block."""
    saving, reading = create_selective_checkpoint_contexts(_policy)
    results: deque[tuple[tuple[Tensor, ...], list[int]]] = deque()
    return _Forward(saving, results), _Again(reading, results)


def computed_once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `compute` gives, without a graph; in a selective recomputation what it gave in the forward."""
    within = _within.get()
    return compute() if within is None else within.take(compute)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    place = _DROPPING.get(operation)
    dropped = kwargs.get("dropout_p", args[place] if place is not None and len(args) > place else 0.0)
    kept = operation in _KEPT or (place is not None and not dropped)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Within(AbstractContextManager["_Within"]):
    """One of the two passes through a block."""

    def __init__(self, mode: Any, results: deque[tuple[tuple[Tensor, ...], list[int]]]) -> None:
        self._mode, self._results = mode, results
        self._token: Token[_Within | None] | None = None

    def __enter__(self) -> _Within:
        self._token = _within.set(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self._token is not None  # It was entered.
        self._mode.__exit__(*raised)
        _within.reset(self._token)

    def take(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        raise NotImplementedError


class _Forward(_Within):
    def take(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # torch counts operations, of which these are none the second time; what is inside of this is in it.
        token = _within.set(None)
        self._mode.__exit__(None, None, None)
        try:
            found = compute()
        finally:
            self._mode.__enter__()
            _within.reset(token)
        self._results.append((tuple(each.detach() for each in found), [each._version for each in found]))
        return found


class _Again(_Within):
    def take(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        found, versions = self._results.popleft()
        if [each._version for each in found] != versions:
            raise RuntimeError(
                "activation.checkpointing 'selective': a block changed in place what an exchange between ranks gave; "
                "use 'block' for this model"
            )
        return found


_within: ContextVar[_Within | None] = ContextVar("recomputation", default=None)
