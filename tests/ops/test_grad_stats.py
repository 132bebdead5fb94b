"""grad_stats: accuracy over many elements, the same bits on any number of threads, and no NaN lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cuda_ops import grad_stats as module
from cuda_ops.grad_stats import grad_stats, grad_stats_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BLOCK, STRETCH = module._BLOCK, module._STRETCH
TOLERANCE = 16 * 2**-24
"""A stretch is summed in float32, in 8 streams and more of up to 256 pairs: roundings of either sign add up as the root
of their number. Stretches are summed in float64."""
SIZES = [0, 1, 2, 3, STRETCH - 1, 2 * STRETCH, 2 * STRETCH + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_as_defined(size, dtype) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    stats = grad_stats(grad)
    assert stats.shape == (2,)
    assert stats.dtype is torch.float64
    assert stats[1] == 0
    torch.testing.assert_close(stats, grad_stats_reference(grad), rtol=TOLERANCE, atol=0)


def test_many_equal_elements_cost_no_accuracy() -> None:
    # One float32 sum of these would be off by 1e-3 and more.
    grad = torch.full((20_000_003,), 0.1)
    exact = 20_000_003 * float(torch.tensor(0.1)) ** 2
    assert grad_stats(grad)[0].item() == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, STRETCH - 1, STRETCH, BLOCK - 1, BLOCK, BLOCK + 5, BLOCK + 6])
def test_one_element_that_is_not_finite(place, value, dtype) -> None:
    grad = torch.ones(BLOCK + 7, dtype=dtype)
    grad[place] = value
    squares, not_finite = grad_stats(grad).tolist()
    assert not_finite == 1
    assert math.isnan(squares) if math.isnan(value) else squares == math.inf


def test_elements_that_are_not_finite_are_counted_over_blocks() -> None:
    grad = torch.zeros(2 * BLOCK)
    grad[::1000] = torch.inf
    assert grad_stats(grad).tolist() == [math.inf, len(range(0, 2 * BLOCK, 1000))]


@pytest.mark.parametrize("value", [1e30, 3e38, 1e-30, 1e-40])
def test_squares_beyond_the_range_of_float32(value) -> None:
    grad = torch.full((1001,), value)
    squares, not_finite = grad_stats(grad).tolist()
    assert squares == pytest.approx(1001 * float(grad[0]) ** 2, rel=TOLERANCE)
    assert not_finite == 0


def test_the_same_bits_on_any_number_of_threads(set_threads) -> None:
    grad = torch.randn(7 * BLOCK + 5)
    results = set()
    for threads in (1, 2, 3, 4):
        set_threads(threads)
        results.add(tuple(grad_stats(grad).tolist()))
    assert len(results) == 1


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"grad: strides are \(2,\)"):
        grad_stats(torch.ones(8)[::2])
    with pytest.raises(ValueError, match=r"grad: dtype is float64, expected float32 or bfloat16 or float16"):
        grad_stats(torch.ones(8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"grad: shape is \(2, 4\), expected \(any\)"):
        grad_stats(torch.ones(2, 4))


def test_registration() -> None:
    torch.library.opcheck(torch.ops.cuda_ops.grad_stats.default, (torch.randn(100),))
    with FakeTensorMode():
        stats = grad_stats(torch.empty(10))
        assert (stats.shape, stats.dtype) == ((2,), torch.float64)
    compiled = torch.compile(lambda grad: grad_stats(grad * 2)[0].sqrt(), fullgraph=True, backend="aot_eager")
    grad = torch.randn(100)
    torch.testing.assert_close(compiled(grad), (2 * grad).double().norm(), rtol=1e-6, atol=0)
