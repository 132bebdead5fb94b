"""reduce: sums and means of n buffers in their order, rounded once, in place, for every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cuda_ops.reduce import reduce, reduce_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SIZES = [0, 1, 2047, 2048, 2049, 300_001]


def sources_of(count: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    if dtype.is_floating_point:
        return [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]
    return [torch.randint(0, 100, (size,), generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_floats_as_defined(count, dtype, average, accumulate) -> None:
    for size in SIZES:
        sources = sources_of(count, size, dtype)
        out = torch.ones(size, dtype=dtype)
        expected = out.clone()
        reduce(sources, out, average=average, accumulate=accumulate)
        reduce_reference(sources, expected, average=average, accumulate=accumulate)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_of_two_is_torchs_to_the_bit(dtype) -> None:
    one, other = sources_of(2, 300_001, dtype)
    out = torch.empty_like(one)
    reduce([one, other], out)
    assert torch.equal(out, one + other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_float32_and_rounded_once(dtype) -> None:
    # One after the other, rounded each time, the small ones would all be lost.
    sources = [torch.full((3,), 256.0, dtype=dtype), *(torch.full((3,), 0.9, dtype=dtype) for _ in range(7))]
    exact = sum(float(source[0]) for source in sources)
    out, wide = torch.zeros(3, dtype=dtype), torch.zeros(3)
    reduce(sources, out)
    reduce(sources, wide)
    assert wide.tolist() == [exact] * 3
    assert out.tolist() == [float(torch.tensor(exact).to(dtype))] * 3


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_integers_as_defined(count, dtype) -> None:
    for size in (0, 1, 5000):
        sources = sources_of(count, size, dtype)
        for average, accumulate in [(False, False), (True, False), (False, True)]:
            out = torch.ones(size, dtype=dtype)
            reduce(sources, out, average=average, accumulate=accumulate)
            wide = sum(source.long() for source in sources)
            expected = (wide // count if average else wide) + (1 if accumulate else 0)
            assert torch.equal(out, expected.to(dtype))


def test_integers_wrap_around_and_their_mean_is_rounded_down() -> None:
    out = torch.zeros(2, dtype=torch.int8)
    reduce([torch.tensor([100, -3], dtype=torch.int8), torch.tensor([100, 0], dtype=torch.int8)], out)
    assert out.tolist() == [200 - 256, -3]
    reduce([torch.tensor([1, -3], dtype=torch.int8), torch.tensor([2, 0], dtype=torch.int8)], out, average=True)
    assert out.tolist() == [1, -2]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_out_may_be_a_source(place, count) -> None:
    sources = sources_of(count, 10_001, torch.float32)
    place = min(place, count - 1)
    expected = torch.empty(10_001)
    reduce(sources, expected)
    reduce(sources, sources[place])
    assert torch.equal(sources[place], expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3])
def test_special_values_go_through(count, dtype) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, 3e38, 0.0, -0.0])
    one, other = torch.cartesian_prod(values, values).T.contiguous().to(dtype).unbind()
    sources = [one, other, one][:count]
    out, expected = torch.empty_like(one), torch.empty_like(one)
    reduce(sources, out)
    reduce_reference(sources, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_an_element_gets_the_same_bits_wherever_it_stands_and_on_any_number_of_threads(set_threads) -> None:
    sources = sources_of(3, 600_007, torch.bfloat16)

    def result(start: int, threads: int) -> torch.Tensor:
        set_threads(threads)
        out = torch.empty(600_007 - start, dtype=torch.bfloat16)
        reduce([source[start:] for source in sources], out, average=True)
        return out

    whole = result(0, 1)
    for start, threads in [(0, 2), (0, 3), (1, 1), (7, 2), (2049, 1)]:
        assert torch.equal(result(start, threads), whole[start:])


def test_bad_input_is_refused_by_name() -> None:
    one = torch.ones(8)
    bad = [
        (r"sources: an empty list", [], one),
        (r"sources\[1\]: shape is \(7,\), expected \(8\)", [one, one[:7]], one),
        (r"sources\[1\]: dtype is float16, expected float32", [one, one.half()], one),
        (r"sources\[0\]: strides are \(2,\)", [torch.ones(16)[::2]], one),
        (r"sources\[0\]: dtype is bool", [one > 0], one),
        (r"out: shape is \(7,\)", [one], torch.ones(7)),
        (r"out: dtype is bfloat16, expected float32 or float32", [one], one.bfloat16()),
        (r"out: dtype is float32, expected int32", [one.int()], one),
    ]
    for message, sources, out in bad:
        with pytest.raises(ValueError, match=message):
            reduce(sources, out)


def test_registration() -> None:
    sources = sources_of(3, 100, torch.float32)
    torch.library.opcheck(torch.ops.cuda_ops.reduce.default, (sources, torch.ones(100), True, True))
    with FakeTensorMode():
        reduce([torch.empty(10), torch.empty(10)], torch.empty(10))

    def total(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        reduce([one * 2, other], out)
        return out + 1

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    out = torch.zeros(100)
    torch.testing.assert_close(compiled(sources[0], sources[1], out), 2 * sources[0] + sources[1] + 1)
    torch.testing.assert_close(out, 2 * sources[0] + sources[1])
