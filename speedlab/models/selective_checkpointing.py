"""Selective recomputation (arXiv:2205.05198, section 5): backward recomputes what is cheap to compute and large to
keep.

- Recomputed in a transformer block: norms, activation functions, rotary positions, dropout masks, and attention's
  probabilities if the device materializes them.
- Kept: results of linear layers and of fused attention, by torch's selective checkpoint, which decides by operation.
- Kept, too: results of `computed_once`, which is Python code. These are mainly collectives, which no rank runs twice.
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
"""Batched products (bmm) are not kept, because they are attention scores and their results."""

_DROPPING = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""Fused attention -> index of its dropout argument. An operation with dropout is recomputed; otherwise later operations
would draw other random numbers in the recomputation.
"""


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts for the forward pass and its recomputation, as torch's `checkpoint` takes them for one
    call.
    """
    saving, reading = create_selective_checkpoint_contexts(_policy)
    results: deque[tuple[tuple[Tensor, ...], list[int]]] = deque()
    return _Forward(saving, results), _Again(reading, results)


def computed_once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the result of `compute`; a selective recomputation returns the result of the forward pass again.

    Args:
        compute: Computes tensors without an autograd graph.
    """
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
        """Return the result of `compute` in this pass."""
        raise NotImplementedError


class _Forward(_Within):
    def take(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # torch counts operations. Leave its mode, because the recomputation does not repeat these. Nested calls of
        # computed_once are part of this result.
        token = _within.set(None)
        self._mode.__exit__(None, None, None)
        try:
            found = compute()
        finally:
            self._mode.__enter__()
            _within.reset(token)
        # Keep versions, to detect in-place changes before the recomputation reads the results.
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
