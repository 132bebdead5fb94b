"""lamb_moments: moments as AdamW's, squares of whole norms, special values."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import assert_rounded

from cuda_ops.adamw import adamw
from cuda_ops.lamb import lamb_moments, lamb_moments_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "step": 3, "factor": 0.5}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 15, 4095, 4096, 4097, 300_001])
def test_as_defined(size, dtype, set_threads) -> None:
    set_threads(2)
    generator = torch.Generator().manual_seed(size)
    param, grad, exp_avg = (torch.randn(size, generator=generator) for _ in range(3))
    grad, exp_avg_sq = grad.to(dtype), torch.rand(size, generator=generator) + 0.01
    mine, right = ([param.clone(), grad, exp_avg.clone(), exp_avg_sq.clone()] for _ in range(2))
    squares = lamb_moments(*mine, **NUMBERS)
    expected = lamb_moments_reference(*right, **NUMBERS)
    # Squares of a block are added up in float32, in which errors of either sign meet; blocks in float64.
    torch.testing.assert_close(squares, expected, rtol=64 * 2**-24, atol=0)
    for one, other in zip(mine[2:], right[2:], strict=True):
        assert_rounded(one, other, roundings=4, scale=4.0)
    assert torch.equal(mine[0], param)
    theirs = [param.clone(), grad, exp_avg.clone(), exp_avg_sq.clone()]
    adamw(*theirs, lr=1.0, **NUMBERS)
    assert torch.equal(theirs[2], mine[2])
    assert torch.equal(theirs[3], mine[3])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_in_the_norm(value) -> None:
    param, grad = torch.ones(50), torch.zeros(50)
    param[3] = value
    assert not math.isfinite(lamb_moments(param, grad, torch.zeros(50), torch.ones(50), **NUMBERS)[0])
    grad[3] = value
    assert not math.isfinite(lamb_moments(torch.ones(50), grad, torch.zeros(50), torch.ones(50), **NUMBERS)[1])


def test_bad_input_is_refused_by_name_and_the_operation_is_registered() -> None:
    four = [torch.ones(8) for _ in range(4)]
    with pytest.raises(ValueError, match=r"exp_avg_sq: shape is \(7,\), expected \(8\)"):
        lamb_moments(*four[:3], torch.ones(7), **NUMBERS)
    with pytest.raises(ValueError, match=r"step: 0, expected 1 or more"):
        lamb_moments(*four, **{**NUMBERS, "step": 0})
    torch.library.opcheck(torch.ops.cuda_ops.lamb_moments.default, (*four, 0.9, 0.95, 1e-6, 0.1, 3, 0.5))
