"""The loss over parts of the vocabulary: which targets count. With more ranks: tests/ranks/test_tensor.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_ops.linear_cross_entropy import linear_cross_entropy
from speedlab.parallel.tensor.loss import _Loss, vocabulary_cross_entropy


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
