"""Stochastic rounding: unbiased, exact where it can be, a function of seed, step and place, and as defined in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from cuda_ops.adamw import adamw
from cuda_ops.kernel_usage import meter
from cuda_ops.stochastic import random_bits_reference, round_stochastically, round_stochastically_reference

SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1.0, -3.0, 3.3895e38, 3.4028e38]


def rounded(values: torch.Tensor, seed: int, step: int, offset: int = 0) -> torch.Tensor:
    out = torch.full(values.shape, 7.0, dtype=torch.bfloat16)
    round_stochastically(values, out, seed=seed, step=step, offset=offset)
    return out


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), two.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
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


@pytest.mark.parametrize("offset", [5, 2**32 - 300_000])
def test_the_same_bits_on_any_number_of_threads_and_in_any_pieces(offset, set_threads) -> None:
    values = torch.randn(1_100_003)
    expected = round_stochastically_reference(values, 11, 3, offset)
    for threads in (1, 2, 3):
        set_threads(threads)
        assert same(rounded(values, 11, 3, offset), expected)


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


def test_updates_too_small_for_bfloat16_arrive_on_average() -> None:
    size, steps = 4096, 64
    param = torch.ones(size, dtype=torch.bfloat16)
    first, second = torch.zeros(2, size)
    # A sixteenth of the spacing below 1.
    numbers: dict[str, Any] = {"lr": 2**-12, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    for step in range(1, steps + 1):
        value = param.float()
        adamw(value, torch.ones(size), first, second, **numbers, step=step)
        round_stochastically(value, param, seed=0, step=step)
    moved = 1 - param.float().mean()
    assert moved == pytest.approx(steps * 2**-12, rel=0.02)
    assert 1 - param.float().min() > 2 * moved / 3, "and they are numbers of bfloat16"


def test_bytes_of_one_call() -> None:
    meter.take()
    rounded(torch.zeros(1000), 0, 1)
    assert meter.take()["round_stochastically"].nbytes == 1000 * (4 + 2)


def test_bad_input_is_refused_by_name_and_changes_nothing() -> None:
    values, out = torch.ones(300), torch.zeros(300, dtype=torch.bfloat16)
    bad = [
        (r"values: dtype is bfloat16, expected float32", {"values": values.bfloat16()}),
        (r"values: dtype is float64, expected float32", {"values": values.double()}),
        (r"values: shape is \(3, 100\), expected \(any\)", {"values": values.view(3, 100)}),
        (r"values: strides are \(2,\)", {"values": values.repeat(2)[::2]}),
        (r"out: dtype is float16, expected bfloat16", {"out": out.half()}),
        (r"out: shape is \(299,\), expected \(300\)", {"out": out[1:]}),
        (r"out: strides are \(2,\)", {"out": out.repeat(2)[::2]}),
        (r"out: device is meta, expected cpu", {"out": out.to("meta")}),
        (r"seed: -1, expected 0 or more", {"seed": -1}),
        (r"step: -1, expected the number of an update, 0 or more", {"step": -1}),
        (r"offset: -1, expected the place of the first element in its flat, 0 or more", {"offset": -1}),
    ]
    for message, wrong in bad:
        with pytest.raises(ValueError, match=message):
            round_stochastically(**{"values": values, "out": out, "seed": 0, "step": 1} | wrong)
    assert not out.any()


def test_registration() -> None:
    operation = torch.ops.cuda_ops.round_stochastically.default
    torch.library.opcheck(operation, (torch.randn(600), torch.zeros(600, dtype=torch.bfloat16), 3, 1, 2**33))
    with FakeTensorMode():
        assert rounded(torch.empty(600), 0, 1).shape == (600,)
        with pytest.raises(ValueError, match="offset: -1"):
            rounded(torch.empty(600), 0, 1, -1)
