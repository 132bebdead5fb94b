"""What a training step computes on a GPU never makes the host wait for it: no number, shape or copy depends on values.

Fake tensors on a device "cuda" stand for a GPU: they have no values, so that an operation which needs one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._prims_common import wrappers
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuda_ops import (
    adam_frozen_variance,
    adamw,
    blockquant,
    blockwise8,
    gpu,
    grad_stats,
    lamb,
    onebit,
    sgd_momentum,
    stochastic,
)
from cuda_ops import linear_cross_entropy as loss_module
from cuda_ops.kernel_usage import meter
from speedlab.parallel.tensor.vocab_parallel_loss import _Loss, vocabulary_cross_entropy

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


class CrossingError(AssertionError):
    """A tensor went from one device to the other."""


class RefuseCrossings(TorchDispatchMode):
    """Raises where an operation copies between host and GPU. A number in elementwise arithmetic is a kernel's
    argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        by_argument = torch.Tag.pointwise in func.tags
        if len({each.device.type for each in tensors if not by_argument or each.ndim > 0}) > 1:
            raise CrossingError(f"{func}: {[(tuple(each.shape), each.device.type) for each in tensors]}")
        return result


@contextmanager
def gpu_without_values() -> Iterator[None]:
    # What torch's stand-ins for `out=` end in is a copy that asks for the device.
    stand_in = patch.object(wrappers, "_safe_copy_out", lambda *, copy_from, copy_to, exact_dtype=False: copy_to)
    with stand_in, FakeTensorMode(), RefuseCrossings():
        yield


def example(dtype: torch.dtype, tokens: int = 40, vocabulary: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (torch.empty(rows, 24, dtype=dtype, device="cuda") for rows in (tokens, vocabulary))
    return hidden, weight, torch.empty(tokens, dtype=torch.int64, device="cuda")


class Context(SimpleNamespace):
    """What forward and backward of a torch Function share. Called by hand: torch's own engine asks the GPU for a
    stream."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("wait", "error"),
    [
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: bool((x > 0).any()), DataDependentOutputException),
        (torch.ops.aten.nonzero, DynamicOutputShapeException),
        (lambda x: x.cpu(), CrossingError),
        (lambda x: x + torch.tensor(1.0, device="cuda"), CrossingError),
    ],
)
def test_waiting_would_be_seen(wait: Callable[[Tensor], Any], error: Any) -> None:
    with gpu_without_values(), pytest.raises(error):
        wait(torch.empty(5, device="cuda"))


def test_arithmetic_with_numbers_is_no_waiting() -> None:
    with gpu_without_values():
        x = torch.empty(5, device="cuda")
        assert ((1 / x.clamp(min=1)).masked_fill(x > 0, 0) * 2 + x.sum()).is_cuda


def assert_on_gpu(*tensors: Any) -> None:
    assert [each.device.type for each in tensors] == ["cuda"] * len(tensors)


def on_gpu(size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


UPDATE = (0.1, 0.9, 0.99, 1e-8, 0.1, 3, 0.5)
MOMENTUM = (0.1, 0.9, 0.0, 0.1, True, False, 0.5)


OPERATIONS: dict[str, Callable[[torch.dtype], Any]] = {
    "adamw": lambda dtype: adamw._cuda(on_gpu(9), on_gpu(9, dtype), on_gpu(9), on_gpu(9), on_gpu(9, dtype), *UPDATE),
    "adamw, no copy": lambda dtype: adamw._cuda(on_gpu(9), on_gpu(9, dtype), on_gpu(9), on_gpu(9), None, *UPDATE),
    "sgd": lambda dtype: sgd_momentum._cuda(on_gpu(9), on_gpu(9, dtype), on_gpu(9), on_gpu(9, dtype), *MOMENTUM),
    "grad_stats": lambda dtype: grad_stats._cuda(on_gpu(9, dtype)),
}
PACKED: dict[str, Callable[[torch.dtype], Any]] = {
    "onebit_pack": lambda dtype: onebit._cuda_pack(on_gpu(40, dtype), on_gpu(40), 1.0, 16),
    "lamb_moments": lambda dtype: lamb._cuda(
        on_gpu(9), on_gpu(9, dtype), on_gpu(9), on_gpu(9), 0.9, 0.99, 1e-8, 0.1, 1, 1.0
    ),
    "onebit_take": lambda _: onebit._cuda(on_gpu((3, 1), torch.uint8), on_gpu((3, 1)), on_gpu(24), on_gpu(24), 0.9, 8),
    "adam_frozen": lambda dtype: adam_frozen_variance._cuda(
        on_gpu(9), on_gpu(9, dtype), on_gpu(9), on_gpu(9), on_gpu(9, dtype), 0.1, 0.1, 1e-8
    ),
    "block_quantize": lambda dtype: blockquant._cuda_quantize(on_gpu(70, dtype), 8, 32),
    "blockwise8_encode": lambda dtype: blockwise8._cuda_encode(
        on_gpu(70, dtype), on_gpu(70, torch.uint8), on_gpu(1), True
    ),
    "blockwise8_decode": lambda dtype: blockwise8._cuda_decode(
        on_gpu(70, torch.uint8), on_gpu(1), on_gpu(70, dtype), True
    ),
    "round_stochastically": lambda dtype: stochastic._cuda(on_gpu(70), on_gpu(70, torch.bfloat16), 0, 3, 5),
}


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """Kernels are neither launched nor timed: that takes a GPU."""
    monkeypatch.setattr(gpu, "launch", lambda *_, **__: None)
    monkeypatch.setattr(meter, "record", lambda *_: nullcontext())
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)  # The one kernel of which torch has no fake.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("kernels", "name"),
    [*product(["numba-cuda", "torch fused"], OPERATIONS), *product(["numba-cuda"], PACKED)],
)
def test_operations_over_flats(name, kernels, dtype, unmeasured, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: kernels == "numba-cuda")
    with gpu_without_values():
        results = (OPERATIONS | PACKED)[name](dtype)
        assert_on_gpu(*(each for each in tree_leaves(results) if each is not None))


@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_cross_entropy(dtype) -> None:
    with gpu_without_values():
        inputs = (*example(dtype), -100, 16, True, True)
        outputs = loss_module._by_torch(*inputs)  # What is registered for CUDA.
        context = Context()
        loss_module._setup_context(context, inputs, outputs)
        grad_hidden, grad_weight, *_ = loss_module._backward(context, torch.ones((), device="cuda"))
        assert_on_gpu(outputs[0], grad_hidden, grad_weight)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_vocabulary_cross_entropy(dtype, size) -> None:
    group: Any = SimpleNamespace(size=size, index=0, gather_along=lambda x, dim: torch.cat([x] * size, dim))
    with gpu_without_values():
        context = Context()
        inputs = (*example(dtype, tokens=600), group, size * 100, (True, True))
        loss = _Loss.forward(context, *inputs)
        grad_hidden, grad_weight, *_ = _Loss.backward(context, torch.ones((), device="cuda"))
        assert_on_gpu(loss, grad_hidden, grad_weight)
        assert vocabulary_cross_entropy(*inputs[:5]).is_cuda
