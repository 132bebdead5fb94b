"""blockquant: integers and scales as defined, errors of half a level, and no NaN comes out finite."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import assert_rounded, unit
from torch._subclasses import FakeTensorMode

from cuda_ops.blockquant import (
    block_dequantize,
    block_dequantize_reference,
    block_dequantize_sum,
    block_quantize,
    block_quantize_reference,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = {8: 127, 4: 7}
SIZES = [0, 1, 2, 3, 31, 255, 256, 257, 511, 512, 100_003]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", SIZES)
def test_quantize_as_defined(size, bits, dtype) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    quantized, scales = block_quantize(values, bits=bits)
    expected, expected_scales = block_quantize_reference(values, bits=bits)
    assert quantized.dtype is (torch.int8 if bits == 8 else torch.uint8)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, expected)


@pytest.mark.parametrize("block", [32, 64, 128, 512, 1024, 2048])
@pytest.mark.parametrize("bits", [8, 4])
def test_other_blocks_and_the_error(bits, block) -> None:
    values = torch.randn(10_001) * torch.logspace(-10, 10, 10_001)
    quantized, scales = block_quantize(values, bits=bits, block=block)
    expected, expected_scales = block_quantize_reference(values, bits=bits, block=block)
    assert torch.equal(quantized, expected)
    assert torch.equal(scales, expected_scales)
    out = torch.empty_like(values)
    block_dequantize(quantized, scales, out, block=block)
    allowed = 0.5001 * scales.repeat_interleave(block)[: len(values)]
    assert ((out - values).abs() <= allowed).all()
    for piece, integers in zip(values.split(block), out.split(block), strict=True):
        largest = piece.abs().argmax()
        torch.testing.assert_close(integers[largest], piece[largest])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_sums_as_defined(size, ranks, bits, dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = [block_quantize(torch.randn(size, generator=generator), bits=bits) for _ in range(ranks)]
    quantized, scales = (torch.stack(parts) for parts in zip(*rows, strict=True))
    for average in (False, True):
        out, expected = torch.full((size,), 7.0, dtype=dtype), torch.empty(size, dtype=dtype)
        block_dequantize_sum(quantized, scales, out, average=average)
        block_dequantize_reference(quantized, scales, expected, average=average)
        # A product and a sum for each rank, of terms below 5, on either side, and one rounding to a narrower dtype.
        slack = 4 * ranks * unit(torch.float32) / unit(dtype)
        narrow = 0 if dtype is torch.float32 else 2
        assert_rounded(out, expected, roundings=narrow + slack, scale=5.0 * slack / (narrow + slack))


@pytest.mark.parametrize("bits", [8, 4])
def test_every_integer_there_and_back(bits) -> None:
    levels = LEVELS[bits]
    values = torch.arange(-levels, levels + 1).float()
    quantized, scales = block_quantize(values, bits=bits)
    assert scales.tolist() == [1.0]
    out = torch.empty_like(values)
    block_dequantize(quantized, scales, out)
    assert torch.equal(out, values)
    if bits == 4:
        assert quantized[:2].tolist() == [0xA9, 0xCB]  # -7, -6 and -5, -4; the earlier one in the lower four bits.


@pytest.mark.parametrize("bits", [8, 4])
def test_halves_go_to_even(bits) -> None:
    values = torch.tensor([LEVELS[bits], 0.5, 1.5, 2.5, -0.5, -1.5])
    quantized, scales = block_quantize(values, bits=bits)
    out = torch.empty_like(values)
    block_dequantize(quantized, scales, out)
    assert out.tolist() == [LEVELS[bits], 0, 2, 2, 0, -2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [256, 300, 511])
def test_a_block_that_is_not_finite_comes_out_as_nan(place, value, bits, dtype) -> None:
    values = torch.ones(768, dtype=dtype)
    values[place] = value
    quantized, scales = block_quantize(values, bits=bits)
    expected, expected_scales = block_quantize_reference(values, bits=bits)
    assert torch.equal(quantized, expected)
    assert torch.equal(scales.isnan(), torch.tensor([False, True, False]))
    assert torch.equal(expected_scales.isnan(), scales.isnan())
    out = torch.empty(768)
    block_dequantize(quantized, scales, out)
    assert out[256:512].isnan().all()
    torch.testing.assert_close(out[:256], torch.ones(256))
    torch.testing.assert_close(out[512:], torch.ones(256))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 2e-38, 1e-36, 3.4e38])
def test_the_ends_of_the_range(value, bits) -> None:
    values = torch.full((256,), value)
    quantized, scales = block_quantize(values, bits=bits)
    expected, expected_scales = block_quantize_reference(values, bits=bits)
    assert torch.equal(quantized, expected)
    assert torch.equal(scales, expected_scales)
    out = torch.empty(256)
    block_dequantize(quantized, scales, out)
    tiny = torch.finfo(torch.float32).tiny
    # A scale is rounded, and the product; where it would be denormal it is zero, and so is all that comes out.
    torch.testing.assert_close(out, values, rtol=2 * unit(torch.float32), atol=LEVELS[bits] * tiny)


def test_the_same_bits_on_any_number_of_threads(set_threads) -> None:
    values = torch.randn(700_001)
    for bits in (8, 4):
        results = []
        for threads in (1, 2, 3):
            set_threads(threads)
            quantized, scales = block_quantize(values, bits=bits)
            out = torch.empty_like(values)
            block_dequantize(quantized, scales, out)
            results.append([quantized, scales, out])
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_bad_input_is_refused_by_name() -> None:
    values = torch.ones(64)
    for block in (16, 48, 4096):
        with pytest.raises(ValueError, match=rf"block: {block}, expected a power of two from 32 to 2048"):
            block_quantize(values, block=block)
    with pytest.raises(ValueError, match=r"bits: 2, expected 8 or 4"):
        block_quantize(values, bits=2)
    with pytest.raises(ValueError, match=r"values: strides are \(2,\)"):
        block_quantize(values[::2])
    quantized, scales = block_quantize(values)
    with pytest.raises(ValueError, match=r"quantized: shape is \(1, 64\), expected \(any, 65\)"):
        block_dequantize(quantized, scales, torch.empty(65))
    with pytest.raises(ValueError, match=r"scales: shape is \(1, 1\), expected \(1, 2\)"):
        block_dequantize(quantized, scales, torch.empty(64), block=32)
    with pytest.raises(ValueError, match=r"quantized: dtype is int16, expected int8 or uint8"):
        block_dequantize(quantized.short(), scales, torch.empty(64))
    with pytest.raises(ValueError, match=r"expected at least one rank"):
        block_dequantize_sum(quantized[None][:0], scales[None][:0], torch.empty(64))


def test_registration() -> None:
    values = torch.randn(100)
    for bits in (8, 4):
        torch.library.opcheck(torch.ops.cuda_ops.block_quantize.default, (values, bits, 64))
        quantized, scales = block_quantize(values, bits=bits)
        arguments = (quantized[None], scales[None], torch.empty(100), 256, True)
        torch.library.opcheck(torch.ops.cuda_ops.block_dequantize.default, arguments)
    with FakeTensorMode():
        quantized, scales = block_quantize(torch.empty(1001), bits=4)
        assert (quantized.shape, quantized.dtype, scales.shape) == ((501,), torch.uint8, (4,))

    def there_and_back(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        quantized, scales = block_quantize(values * 2)
        block_dequantize(quantized, scales, out)
        return out / 2

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    half_a_level = 0.5001 * float(values.abs().max()) / LEVELS[8]
    torch.testing.assert_close(compiled(values, torch.empty(100)), values, rtol=0, atol=half_a_level)
