"""blockwise8: the maps of the paper, codes and scales as defined, the same again after a way there and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_rounded
from torch._subclasses import FakeTensorMode

from cuda_ops.adamw import adamw
from cuda_ops.blockwise8 import (
    BLOCK,
    SMALLEST_SCALE,
    blockwise8_decode,
    blockwise8_decode_reference,
    blockwise8_encode,
    blockwise8_encode_reference,
    dynamic_map,
)
from cuda_ops.kernel_usage import meter
from cuda_ops.stochastic import round_stochastically

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize("signed", [True, False])
SIZES = [0, 1, 31, 255, 256, 257, 511, 512, 100_003]


def spread(size: int, seed: int, *, signed: bool) -> torch.Tensor:
    """Values over twelve powers of ten, so that every code is met."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=draw) * 10 ** (12 * torch.rand(size, generator=draw) - 10)
    return values if signed else values.abs()


def encoded(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.full(values.shape, 7, dtype=torch.uint8), torch.full([-(-len(values) // BLOCK)], 7.0)
    blockwise8_encode(values, codes, scales, signed=signed)
    return codes, scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool, dtype=torch.float32) -> torch.Tensor:
    out = torch.full(codes.shape, 7.0, dtype=dtype)
    blockwise8_decode(codes, scales, out, signed=signed)
    return out


def tree(decades: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges and middles of the paper's bins from 1 on, stretched so that the last middle is 1, in double precision."""
    edges, middles = [], []
    for i in range(decades):
        every = 10.0 ** (i + 1 - decades) * np.linspace(0.1, 1, 2**i + 1)
        edges += every[:-1].tolist()
        middles += ((every[1:] + every[:-1]) / 2).tolist()
    return np.array([*edges, 1.0]) / middles[-1], np.array(middles) / middles[-1]


@BOTH
def test_the_maps_are_the_papers_trees(signed) -> None:
    values = dynamic_map(signed=signed).double().numpy()
    middles = tree(7 if signed else 8)[1]
    positive = values[1:128] if signed else values[1:]
    # A line loses a bit or four where its offset is taken off again: 0.8 of what was there leaves 0.1.
    np.testing.assert_allclose(positive, middles, rtol=40 * 2**-24)
    assert positive[-1] == 1
    assert (np.diff(positive) > 0).all()
    if signed:
        assert (values[128:] == -values[:128]).all()
        assert math.copysign(1, values[128]) == -1
    assert values[0] == 0 if signed else values[0] == pytest.approx(values[1] * 0.5 / 5.5, rel=1e-5)


@BOTH
def test_an_element_is_in_the_bin_of_its_code(signed) -> None:
    values = spread(1 << 18, 0, signed=signed)
    codes, scales = encoded(values, signed=signed)
    shares = (values.abs().view(-1, BLOCK).double() / scales[:, None].double()).flatten().numpy()
    edges = tree(7 if signed else 8)[0]
    numbers = (codes & 127 if signed else codes).numpy()
    assert set(numbers.tolist()) == set(range(128 if signed else 256)), "every code is met"
    low, high = np.concatenate([[0.0], edges])[numbers], edges[numbers]
    slack = (high - low) / 2**11  # A position has twelve binary places.
    assert (shares >= low - slack).all()
    assert (shares <= high + slack).all()
    if signed:
        assert torch.equal(codes >= 128, torch.signbit(values))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
@BOTH
def test_as_defined(signed, size, dtype) -> None:
    values = spread(size, size, signed=signed).to(dtype)
    codes, scales = encoded(values, signed=signed)
    expected, expected_scales = blockwise8_encode_reference(values, signed=signed)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected)
    out, right = decoded(codes, scales, signed=signed, dtype=dtype), torch.empty(size, dtype=dtype)
    blockwise8_decode_reference(codes, scales, right, signed=signed)
    assert torch.equal(out, right)


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 1.1 * 2.0**-100, 3.4e38])
@BOTH
def test_every_code_there_and_back(signed, scale) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decoded(codes, torch.tensor([scale]), signed=signed)
    assert torch.equal(values, dynamic_map(signed=signed) * scale)
    again, scales = encoded(values, signed=signed)
    assert torch.equal(scales, torch.tensor([scale]))
    assert torch.equal(again, codes)


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 2**31),
    power=st.floats(-37, 37),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_is_decoded_is_encoded_to_the_same(signed, size, seed, power, zeros) -> None:
    values = (spread(size, seed, signed=signed).clamp(-10, 10) * 10**power).float()
    values[torch.rand(size, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    codes, scales = encoded(values, signed=signed)
    once = decoded(codes, scales, signed=signed)
    again, same_scales = encoded(once, signed=signed)
    assert torch.equal(same_scales, scales)
    assert torch.equal(again, codes)
    for block, back in zip(values.split(BLOCK), once.split(BLOCK), strict=True):
        largest = block.abs().argmax()
        if block[largest].abs() >= SMALLEST_SCALE:
            assert back[largest] == block[largest], "the largest comes back as it was"
        else:
            assert (back == 0).all()


def test_a_second_moment_beside_larger_ones_does_not_become_zero() -> None:
    values = torch.tensor([1.0, 0.0, 1e-20])
    codes, scales = encoded(values, signed=False)
    out = decoded(codes, scales, signed=False)
    assert out[0] == 1
    assert (out[1:] > 4.9e-9).all()
    assert decoded(*encoded(torch.zeros(300), signed=False), signed=False).eq(0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [256, 300, 511])
@BOTH
def test_a_block_that_is_not_finite_comes_out_as_nan(signed, place, value, dtype) -> None:
    values = torch.ones(768, dtype=dtype)
    values[place] = value
    codes, scales = encoded(values, signed=signed)
    expected, expected_scales = blockwise8_encode_reference(values, signed=signed)
    assert torch.equal(codes, expected)
    assert not codes[256:512].any()
    assert scales.isnan().tolist() == expected_scales.isnan().tolist() == [False, True, False]
    out = decoded(codes, scales, signed=signed)
    assert out[256:512].isnan().all()
    assert (out[:256] == 1).all()
    assert (out[512:] == 1).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 1e-38, 7e-31, 8e-31, 1e-20, 1.8e38, 3.4e38])
@BOTH
def test_the_ends_of_the_range(signed, value) -> None:
    values = torch.full((256,), value)
    codes, scales = encoded(values, signed=signed)
    expected, expected_scales = blockwise8_encode_reference(values, signed=signed)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, expected_scales)
    kept = values if value >= 2.0**-100 else torch.zeros(256)
    assert_rounded(decoded(codes, scales, signed=signed), kept, roundings=0)


@BOTH
def test_the_same_bits_on_any_number_of_threads_and_however_a_flat_is_cut(signed, set_threads) -> None:
    size = 700_001
    values = spread(size, 1, signed=signed)
    set_threads(1)
    codes, scales = encoded(values, signed=signed)
    out = decoded(codes, scales, signed=signed)
    for threads in (2, 3):
        set_threads(threads)
        for one, two in zip(encoded(values, signed=signed), (codes, scales), strict=True):
            assert torch.equal(one, two)
        assert torch.equal(decoded(codes, scales, signed=signed), out)
    for cut in (256, 1024, 300_032):
        again, same_scales, back = torch.zeros_like(codes), torch.zeros_like(scales), torch.zeros_like(out)
        for low, high in ((0, cut), (cut, size)):
            part = again[low:high], same_scales[low // BLOCK : -(-high // BLOCK)]
            blockwise8_encode(values[low:high], *part, signed=signed)
            blockwise8_decode(*part, back[low:high], signed=signed)
        assert all(torch.equal(*each) for each in ((again, codes), (same_scales, scales), (back, out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_steps_of_adamw_stay_near_torchs(dtype) -> None:
    """With moments in codes, and a parameter rounded at random too, the path is noisy, not another one: it ends where
    torch's ends within a few updates."""
    size = 2000
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(size, generator=draw).bfloat16()
    theirs = start.float().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    numbers: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    param = start.to(dtype, copy=True)
    codes, other_codes = torch.zeros(2, size, dtype=torch.uint8)
    scales, other_scales = torch.zeros(2, -(-size // BLOCK))
    for step in range(1, 101):
        grad = torch.randn(size, generator=draw) + 0.5
        theirs.grad = grad
        optimizer.step()
        first, second = decoded(codes, scales, signed=True), decoded(other_codes, other_scales, signed=False)
        value = param.float()
        adamw(value, grad, first, second, **numbers, step=step)
        blockwise8_encode(first, codes, scales, signed=True)
        blockwise8_encode(second, other_codes, other_scales, signed=False)
        if dtype is torch.bfloat16:
            round_stochastically(value, param, seed=11, step=step)
        else:
            param = value
    moved = (theirs.detach() - start.float()).abs().mean()
    separate = (param.float() - theirs.detach()).abs().mean()
    assert moved > 0.3
    assert separate < 0.05 * moved


def test_bytes_of_one_call() -> None:
    values = torch.zeros(2560, dtype=torch.bfloat16)
    meter.take()
    decoded(*encoded(values, signed=True), signed=True)
    uses = meter.take()
    assert uses["blockwise8_encode"].nbytes == 2560 * (2 + 1) + 10 * 4
    assert uses["blockwise8_decode"].nbytes == 2560 * (1 + 4) + 10 * 4


def test_bad_input_is_refused_by_name_and_changes_nothing() -> None:
    values = torch.ones(300)
    codes, scales = torch.full((300,), 7, dtype=torch.uint8), torch.full((2,), 7.0)
    both_refuse = [
        (r"codes: dtype is int8, expected uint8", (codes.view(torch.int8), scales)),
        (r"codes: shape is \(299,\), expected \(300\)", (codes[1:], scales)),
        (r"codes: strides are \(2,\)", (codes.repeat(2)[::2], scales)),
        (r"codes: device is meta, expected cpu", (codes.to("meta"), scales)),
        (r"scales: shape is \(1,\), expected \(2\)", (codes, scales[:1])),
        (r"scales: dtype is float64, expected float32", (codes, scales.double())),
    ]
    for message, (wrong_codes, wrong_scales) in both_refuse:
        with pytest.raises(ValueError, match=message):
            blockwise8_encode(values, wrong_codes, wrong_scales, signed=True)
        with pytest.raises(ValueError, match=message):
            blockwise8_decode(wrong_codes, wrong_scales, values, signed=True)
    bad_values = [
        (r"dtype is float64", values.double()),
        (r"strides are \(2,\)", values.repeat(2)[::2]),
        (r"shape is \(3, 100\), expected \(any\)", values.view(3, 100)),
    ]
    for message, wrong in bad_values:
        with pytest.raises(ValueError, match=f"values: {message}"):
            blockwise8_encode(wrong, codes, scales, signed=True)
        with pytest.raises(ValueError, match=f"out: {message}"):
            blockwise8_decode(codes, scales, wrong, signed=True)
    assert all((each == each[0]).all() for each in (values, codes, scales))


def test_registration() -> None:
    values = torch.randn(600)
    codes, scales = encoded(values, signed=True)
    torch.library.opcheck(torch.ops.cuda_ops.blockwise8_encode.default, (values, codes, scales, True))
    torch.library.opcheck(torch.ops.cuda_ops.blockwise8_decode.default, (codes, scales, values, True))
    with FakeTensorMode():
        values = torch.empty(600)
        decoded(*encoded(values, signed=False), signed=False)
        with pytest.raises(ValueError, match="codes: shape"):
            blockwise8_encode(values, torch.empty(7, dtype=torch.uint8), torch.empty(3), signed=False)


def test_what_is_lost_of_a_normal_distribution() -> None:
    """Half the width of the widest bin, 0.45 / 64 of the largest; by far most elements lose less."""
    values = torch.randn(BLOCK * 100)
    out = decoded(*encoded(values, signed=True), signed=True)
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    lost = (out - values).abs() / largest
    assert lost.max() <= 0.45 / 64 * tree(7)[0][-1] * (1 + 2**-10)  # Twelve binary places.
    assert lost.mean() < 0.004
