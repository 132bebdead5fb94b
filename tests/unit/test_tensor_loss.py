"""The loss over parts of the vocabulary: targets that count, what chunks cost. More: tests/ranks/test_tensor.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cuda_ops.linear_cross_entropy import linear_cross_entropy
from speedlab.parallel.tensor import vocab_parallel_loss as loss_module
from speedlab.parallel.tensor.vocab_parallel_loss import _Loss, vocabulary_cross_entropy


def group(size: int, index: int) -> Any:
    """All that is asked of a group before anything is sent."""
    return SimpleNamespace(size=size, index=index, gather_along=lambda tensor, dim: tensor)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("value", [-1, 100, -101])
def test_targets_out_of_range_are_refused_as_without_tensor_parallelism(value, index) -> None:
    hidden, weight, targets = torch.ones(20, 4), torch.ones(100, 4), torch.zeros(20, dtype=torch.int64)
    targets[13] = value
    with pytest.raises(ValueError, match=rf"targets: {value} at position 13, expected 0 to 99") as without:
        linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(ValueError, match="targets") as under_tp:
        vocabulary_cross_entropy(hidden, weight[:50], targets, group(2, index), 100)
    assert str(under_tp.value) == str(without.value)


def test_where_nobody_looks_targets_out_of_range_are_ignored() -> None:
    """What a GPU computes, in float16, which takes the same way on a CPU."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=generator).half() for n in (40, 30))
    targets = torch.randint(30, (40,), generator=generator)
    results = []
    for others in (-100, -1, 30, 1 << 40):
        own = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = _Loss.apply(*own, targets.index_fill(0, torch.tensor([3, 17]), others), group(1, 0), 30, (True, True))
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in own)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_sixteen_chunks_lose_no_more_than_full_logits(dtype, scale, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(1024, 64, generator=draw).to(dtype)
    weight = (torch.randn(500, 64, generator=draw) * scale).to(dtype).requires_grad_()
    targets = torch.randint(500, (1024,), generator=draw)
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.double() @ wide.t(), targets).backward()
    assert wide.grad is not None
    monkeypatch.setattr(loss_module, "default_chunk", lambda tokens, vocabulary, dtype: tokens // 16)
    errors = []
    for loss in (
        F.cross_entropy(F.linear(hidden, weight).float(), targets) * 1024,  # A scale, as float16 needs it.
        vocabulary_cross_entropy(hidden, weight, targets, group(1, 0), 500) * 1024,
    ):
        weight.grad = None
        loss.backward()
        assert weight.grad is not None
        errors.append(((weight.grad.double() / 1024 - wide.grad).norm() / wide.grad.norm()).item())
    full, ours = errors
    assert ours <= 1.1 * full
