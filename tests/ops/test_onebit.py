"""onebit: bits and means as defined, what is sent plus what is kept is what came, and no NaN comes out finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rounding import assert_rounded, unit
from torch._subclasses import FakeTensorMode

from cuda_ops.onebit import (
    CHUNK,
    onebit_average,
    onebit_average_reference,
    onebit_pack,
    onebit_pack_reference,
)

SUM_ROUNDINGS = 32
"""Of a chunk's mean: two orders of adding 2^14 numbers and more in 16 streams and more, in each of which errors of
either sign add up as the root of 2^10."""
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 511, 513, CHUNK - 1, CHUNK, CHUNK + 1, 20 * CHUNK + 13]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_pack_as_defined(size, dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator).to(dtype)
    error = torch.randn(size, generator=generator)
    expected_error = error.clone()
    packed, scales = onebit_pack(values, error)
    expected_packed, expected_scales = onebit_pack_reference(values, expected_error)
    assert torch.equal(packed, expected_packed)
    assert_rounded(scales, expected_scales, roundings=SUM_ROUNDINGS)
    # An element and its scale, which are up to five each, are subtracted.
    assert_rounded(error, expected_error, roundings=SUM_ROUNDINGS + 2, scale=5.0)


@pytest.mark.parametrize("chunk", [8, 24, 104, 1000, 1 << 18])
def test_other_chunks(chunk) -> None:
    values, error = torch.randn(100_003), torch.zeros(100_003)
    expected_error = error.clone()
    packed, scales = onebit_pack(values, error, chunk=chunk)
    expected_packed, expected_scales = onebit_pack_reference(values, expected_error, chunk=chunk)
    assert torch.equal(packed, expected_packed)
    assert_rounded(scales, expected_scales, roundings=SUM_ROUNDINGS)
    out = torch.empty(100_003)
    onebit_average(packed[None], scales[None], out, chunk=chunk)
    assert_rounded(out + error, values, roundings=2, scale=5.0)  # One subtraction and one addition.


def test_bits_are_where_numpy_puts_them() -> None:
    values = torch.randn(77)
    packed, _ = onebit_pack(values, torch.zeros(77))
    assert packed.numpy().tobytes() == np.packbits(values.numpy() >= 0, bitorder="little").tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", SIZES)
def test_average_as_defined(size, ranks, dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    packed = torch.randint(0, 256, (ranks, -(-size // 8)), dtype=torch.uint8, generator=generator)
    scales = torch.rand(ranks, -(-size // CHUNK), generator=generator)
    out, expected = torch.full((size,), 7.0, dtype=dtype), torch.empty(size, dtype=dtype)
    onebit_average(packed, scales, out)
    onebit_average_reference(packed, scales, expected)
    # Ours divides each scale and adds, torch adds and divides: 2 * ranks roundings in float32 below 1, then one.
    narrow = 0 if dtype is torch.float32 else 2
    slack = 2 * ranks * unit(torch.float32) / unit(dtype)
    assert_rounded(out, expected, roundings=narrow + slack, scale=1.0 if dtype is torch.float32 else slack)


def test_nothing_is_lost_over_many_rounds() -> None:
    # Error feedback: the sum of what was sent follows the sum of what came, and the rest is in the error.
    error, sent, came = torch.zeros(50_000), torch.zeros(50_000), torch.zeros(50_000)
    out = torch.empty(50_000)
    for _ in range(20):
        values = torch.randn(50_000)
        packed, scales = onebit_pack(values, error)
        onebit_average(packed[None], scales[None], out)
        sent += out
        came += values
    # Each round adds to three sums, which are below 32.
    assert_rounded(sent + error, came, roundings=3 * 20, scale=32.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_chunk_that_is_not_finite_comes_out_so(value) -> None:
    values = torch.ones(3 * CHUNK)
    values[CHUNK + 5] = value
    packed, scales = onebit_pack(values, torch.zeros_like(values))
    out = torch.empty_like(values)
    onebit_average(packed[None].repeat(2, 1), scales[None].repeat(2, 1), out)
    assert not out[CHUNK : 2 * CHUNK].isfinite().any()
    assert torch.equal(out[:CHUNK], torch.ones(CHUNK))
    assert torch.equal(out[2 * CHUNK :], torch.ones(CHUNK))


def test_zeros_and_denormals() -> None:
    values, error = torch.tensor([0.0, -0.0, 1e-40, -1e-40]), torch.zeros(4)
    packed, scales = onebit_pack(values, error)
    assert packed.tolist() == [0b0111]  # -0 is not negative.
    assert scales.item() == pytest.approx(5e-41, rel=1e-3)
    out = torch.empty(4)
    onebit_average(packed[None], scales[None], out)
    assert torch.equal(out + error, values)


def test_the_same_bits_on_any_number_of_threads(set_threads) -> None:
    values, before = torch.randn(40 * CHUNK + 5), torch.randn(40 * CHUNK + 5)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        error, out = before.clone(), torch.empty_like(values)
        packed, scales = onebit_pack(values, error)
        onebit_average(packed[None], scales[None], out)
        results.append([packed, scales, error, out])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_bad_input_is_refused_by_name() -> None:
    values, error = torch.ones(16), torch.zeros(16)
    with pytest.raises(ValueError, match=r"chunk: 12, expected a positive multiple of 8"):
        onebit_pack(values, error, chunk=12)
    with pytest.raises(ValueError, match=r"error: shape is \(15,\), expected \(16\)"):
        onebit_pack(values, error[:15])
    with pytest.raises(ValueError, match=r"values: strides are \(2,\)"):
        onebit_pack(torch.ones(32)[::2], error)
    packed, scales = onebit_pack(values, error)
    with pytest.raises(ValueError, match=r"packed: shape is \(2,\), expected \(any, 2\)"):
        onebit_average(packed, scales[None], values)
    with pytest.raises(ValueError, match=r"packed: shape is \(0, 2\), expected at least one rank"):
        onebit_average(packed[None][:0], scales[None][:0], values)
    with pytest.raises(ValueError, match=r"scales: shape is \(1, 1\), expected \(2, 1\)"):
        onebit_average(packed[None].repeat(2, 1), scales[None], values)
    with pytest.raises(ValueError, match=r"packed: strides are \(4, 2\)"):
        onebit_average(torch.zeros(2, 4, dtype=torch.uint8)[:, ::2], torch.ones(2, 1), values)


def test_registration() -> None:
    values, error = torch.randn(100), torch.randn(100)
    torch.library.opcheck(torch.ops.cuda_ops.onebit_pack.default, (values, error, 0.5, 16))
    packed, scales = onebit_pack(values, error)
    torch.library.opcheck(
        torch.ops.cuda_ops.onebit_average.default, (packed[None], scales[None], torch.empty(100), CHUNK)
    )
    with FakeTensorMode():
        packed, scales = onebit_pack(torch.empty(CHUNK + 1), torch.empty(CHUNK + 1))
        assert (packed.shape, packed.dtype, scales.shape) == ((CHUNK // 8 + 1,), torch.uint8, (2,))

    def exchange(values: torch.Tensor, error: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        packed, scales = onebit_pack(values * 2, error)
        onebit_average(packed[None], scales[None], out)
        return out + error

    compiled = torch.compile(exchange, fullgraph=True, backend="aot_eager")
    result = compiled(values, torch.zeros(100), torch.empty(100))
    assert_rounded(result, 2 * values, roundings=2, scale=10.0)
