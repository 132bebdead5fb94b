"""Stochastic rounding: unbiased, exact where it can be, a function of seed, step and place, and as defined in torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_ops.compile import kernel
from cuda_ops.stochastic import keys, random_bits_reference, round_block, round_stochastically_reference
from cuda_ops.tensors import array

SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1.0, -3.0, 3.3895e38, 3.4028e38]


@kernel()
def _round(values: Any, target: Any, index: Any, first: Any, second: Any) -> None:
    round_block(values, target, index, first, second)


def rounded(values: torch.Tensor, seed: int, step: int, offset: int = 0) -> torch.Tensor:
    target = torch.zeros(values.shape, dtype=torch.bfloat16)
    _round(array(values), array(target), np.uint64(offset), *keys(seed, step))
    return target


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), two.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(1, 2**40),
    offset=st.integers(0, 2**40) | st.integers(2**32 - 600, 2**32 + 600),
    size=st.integers(0, 700),
)
def test_as_defined(seed, step, offset, size) -> None:
    draw = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=draw) * 10 ** (60 * torch.rand(size, generator=draw) - 40)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)[:size]
    assert same(rounded(values, seed, step, offset), round_stochastically_reference(values, seed, step, offset))


@pytest.mark.parametrize("offset", [0, 1, 255, 256, 2**32 - 300, 2**32 - 1, 2**32, 2**33 + 17])
def test_an_element_is_rounded_by_its_place_in_the_flat(offset) -> None:
    values = torch.randn(1000)
    whole = rounded(values, 3, 5, offset)
    for start, stop in [(0, 1), (1, 400), (299, 301), (999, 1000)]:
        assert same(rounded(values[start:stop].clone(), 3, 5, offset + start), whole[start:stop])


def test_another_seed_step_or_place_rounds_otherwise() -> None:
    values = torch.full((4096,), 1 + 2**-8)  # In the middle between two neighbours.
    first = rounded(values, 0, 1)
    others = [rounded(values, 1, 1), rounded(values, 0, 2), rounded(values, 0, 1, 4096), rounded(values, 0, 1, 2**32)]
    for other in others:
        # As many equal as of fair coins, within five standard deviations.
        assert abs((other == first).sum() - 2048) < 5 * 32
    for shift in range(1, 40):
        assert abs((first[shift:] == first[:-shift]).sum() - (4096 - shift) / 2) < 5 * 32


def test_on_average_nothing_is_lost() -> None:
    shares = torch.tensor([0, 1 / 65536, 0.01, 0.25, 0.5, 0.75, 0.99, 65535 / 65536])
    for low, spacing in [
        (1.0, 2**-7),
        (-1.0, -(2**-7)),
        (3 * 2.0**-130, 2.0**-133),
        (0.0, 2.0**-133),
        (2.0**100, 2.0**93),
    ]:
        values = (torch.tensor(low, dtype=torch.float64) + shares.double() * spacing).float()
        seeds = 4000
        columns = torch.stack([rounded(values.repeat(16), seed, 1).float().view(16, -1) for seed in range(seeds)])
        up = ((columns.double() - low) / spacing).mean((0, 1))
        deviation = (shares.double() * (1 - shares.double()) / (16 * seeds)).sqrt()
        assert ((up - shares).abs() <= 5 * deviation + 1e-12).all(), (low, up)


def test_what_bfloat16_holds_stays() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    kept = every[~every.isnan()]
    for seed in range(20):
        assert same(rounded(kept.float(), seed, 1), kept)
    assert rounded(every[every.isnan()].float(), 0, 1).isnan().all()


def test_nothing_finite_becomes_infinite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    values = torch.full((1000,), torch.finfo(torch.float32).max)
    values[::2] *= -1
    found = rounded(values, 0, 1).float()
    assert (found == values.sign() * largest).all()
    assert rounded(torch.full((300,), math.inf), 0, 1).isinf().all()


def test_neighbours_only() -> None:
    values = torch.randn(5000)
    truncated = (values.view(torch.int32) & -65536).view(torch.float32)
    away = (truncated.view(torch.int32) + 65536).view(torch.float32)
    found = rounded(values, 1, 2).float()
    assert ((found == truncated) | (found == away)).all()


def test_random_bits_are_even() -> None:
    """Each of the 32 bits is set in half of the elements, and any two of them are equal in half."""
    bits = random_bits_reference(1 << 16, 7, 9, 0)
    columns = torch.stack([(bits >> place & 1).double() for place in range(32)]) - 0.5
    assert columns.mean(1).abs().max() < 5 * 0.5 / 2**8
    correlation = columns @ columns.T * 4 / 2**16 - torch.eye(32)
    assert correlation.abs().max() < 5.5 / 2**8
