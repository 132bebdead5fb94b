"""adam_frozen and onebit_take: what the compressed phase of an optimizer computes on each rank, as defined."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import assert_rounded
from torch._subclasses import FakeTensorMode

from cuda_ops.adam_frozen_variance import adam_frozen, adam_frozen_reference
from cuda_ops.onebit import onebit_average, onebit_pack, onebit_take, onebit_take_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = {"size": 1e-2, "decay": 1e-3, "eps": 1e-8}
CHUNK = 64


@pytest.mark.parametrize("copy_dtype", [None, *FLOATS])
@pytest.mark.parametrize("size", [0, 1, 15, 4095, 4097, 300_001])
def test_an_update_as_defined(size, copy_dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    param, moment = (torch.randn(size, generator=generator) for _ in range(2))
    variance = torch.rand(size, generator=generator) + 0.1
    variance[size // 2 :][:1] = math.inf
    copy = None if copy_dtype is None else torch.zeros(size, dtype=copy_dtype)
    expected, kept = param.clone(), torch.full((size,), math.nan)
    adam_frozen(param, moment, kept, variance, copy, **NUMBERS)
    adam_frozen_reference(expected, moment, torch.empty(size), variance, **NUMBERS)
    # Decay, root, sum, quotient, product and difference, of values below 4.
    assert_rounded(param, expected, roundings=6, scale=4.0)
    assert torch.equal(kept, moment)
    if copy is not None:
        assert torch.equal(copy, param.to(copy_dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_stays_where_it_is(value) -> None:
    param, moment, variance = torch.ones(40), torch.zeros(40), torch.ones(40)
    moment[7] = value
    adam_frozen(param, moment, torch.empty(40), variance, **NUMBERS)
    assert param.isfinite().tolist() == [i != 7 for i in range(40)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 17, CHUNK, 5 * CHUNK + 3])
def test_what_is_taken_is_the_mean_and_what_is_kept_the_rest(size, ranks) -> None:
    generator = torch.Generator().manual_seed(size)
    packed = torch.randint(0, 256, (ranks, -(-size // 8)), dtype=torch.uint8, generator=generator)
    scales = torch.rand(ranks, -(-size // CHUNK), generator=generator)
    values = torch.randn(ranks * size, generator=generator)
    mine, expected = [values.clone(), torch.full_like(values, math.nan)], [values.clone(), torch.zeros_like(values)]
    squares = onebit_take(packed, scales, *mine, share=0.9, chunk=CHUNK)
    right = onebit_take_reference(packed, scales, *expected, share=0.9, chunk=CHUNK) if size else scales
    assert_rounded(squares, right, roundings=CHUNK)
    assert torch.equal(mine[0], expected[0])
    assert_rounded(mine[1], expected[1], roundings=2, scale=4.0)
    for rank in range(ranks):
        out = torch.empty(size)
        onebit_average(packed[rank : rank + 1], scales[rank : rank + 1], out, chunk=CHUNK)
        assert torch.equal(out, mine[0][rank * size : (rank + 1) * size])


def test_a_factor_is_on_what_becomes_the_error() -> None:
    values, given = torch.randn(300), torch.randn(300)
    one, two = 0.5 * given, given.clone()
    packed = onebit_pack(values, one, chunk=CHUNK), onebit_pack(values, two, factor=0.5, chunk=CHUNK)
    assert torch.equal(packed[0][0], packed[1][0])
    assert_rounded(two, one, roundings=3, scale=4.0)
    alone, zeros = given.clone(), given.clone()
    packed = onebit_pack(None, alone, factor=0.5, chunk=CHUNK), onebit_pack(0 * values, zeros, factor=0.5, chunk=CHUNK)
    assert torch.equal(packed[0][0], packed[1][0])
    assert_rounded(alone, zeros, roundings=CHUNK, scale=4.0)  # Of the mean, which is added up in another order.


def test_bad_input_is_refused_by_name_and_operations_are_registered() -> None:
    four = [torch.ones(8) for _ in range(4)]
    with pytest.raises(ValueError, match=r"variance: shape is \(7,\), expected \(8\)"):
        adam_frozen(*four[:3], torch.ones(7), **NUMBERS)
    with pytest.raises(ValueError, match=r"moment: dtype is float64"):
        adam_frozen(four[0], torch.ones(8).double(), *four[:2], **NUMBERS)
    signs, scales = torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"packed: shape is \(3, 1\), expected a row for each rank"):
        onebit_take(signs, scales, *four[:2], share=0.9)
    with pytest.raises(ValueError, match=r"scales: shape is \(2, 1\), expected \(3, 1\)"):
        onebit_take(signs, scales[:2], torch.ones(24), torch.ones(24), share=0.9)
    torch.library.opcheck(torch.ops.cuda_ops.adam_frozen.default, (*four, None, 0.1, 0.1, 1e-8))
    torch.library.opcheck(
        torch.ops.cuda_ops.onebit_take.default, (signs, scales, torch.ones(24), torch.ones(24), 0.9, CHUNK)
    )
    with FakeTensorMode():
        fake = onebit_take(
            torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, 1), torch.ones(24), torch.ones(24), share=0.9
        )
        assert fake.shape == (3, 1)
