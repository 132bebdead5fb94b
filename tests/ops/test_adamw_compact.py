"""adamw_compact: what its parts make one after the other, parity with torch.optim.AdamW, and no dependence on how the
work is cut."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from rounding import assert_rounded
from torch._subclasses import FakeTensorMode

from cuda_ops.adamw import adamw
from cuda_ops.adamw_compact import adamw_compact, adamw_compact_reference
from cuda_ops.blockwise8 import blockwise8_decode, blockwise8_encode
from cuda_ops.meter import meter
from cuda_ops.stochastic import round_stochastically_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PARAMS = [torch.float32, torch.bfloat16]
STATES = list(product(PARAMS, [False, True]))
NUMBERS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = [0, 1, 255, 256, 257, 1023, 1024, 1025, 5003]


def states(size: int, dtype: torch.dtype, *, coded: bool, seed: int = 0) -> list[Any]:
    """A parameter, two moments, and their scales or None."""
    draw = torch.Generator().manual_seed(seed)
    param = torch.randn(size, generator=draw).to(dtype)
    exp_avg, exp_avg_sq = torch.randn(size, generator=draw), torch.rand(size, generator=draw)
    if not coded:
        return [param, exp_avg, exp_avg_sq, None]
    first, first_scales = blockwise8_encode(exp_avg, signed=True)
    second, second_scales = blockwise8_encode(exp_avg_sq, signed=False)
    return [param, first, second, (first_scales, second_scales)]


def cloned(held: list[Any]) -> list[Any]:
    return [*(tensor.clone() for tensor in held[:3]), held[3] and tuple(scale.clone() for scale in held[3])]


def flat(held: list[Any]) -> list[torch.Tensor]:
    return [*held[:3], *(held[3] or ())]


def update(held: list[Any], grad: torch.Tensor, copy: torch.Tensor | None = None, **numbers: Any) -> None:
    """One step, number 3 of seed 11 unless something else is said."""
    adamw_compact(held[0], grad, held[1], held[2], held[3], copy, **NUMBERS | {"step": 3, "seed": 11} | numbers)


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    out = torch.empty(codes.shape)
    blockwise8_decode(codes, scales, out, signed=signed)
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize(("dtype", "coded"), STATES)
def test_one_pass_computes_what_decoding_updating_and_encoding_do(dtype, coded, grad_dtype, size) -> None:
    held = states(size, dtype, coded=coded)
    grad = torch.randn(size).to(grad_dtype)
    value, moments = held[0].float(), [held[1].clone(), held[2].clone()]
    if coded:
        moments = [decoded(held[1], held[3][0], signed=True), decoded(held[2], held[3][1], signed=False)]
    adamw(value, grad, *moments, **NUMBERS, step=3, factor=0.5)
    update(held, grad, factor=0.5)
    if dtype is torch.bfloat16:
        value = round_stochastically_reference(value, 11, 3, 0)
    assert torch.equal(held[0], value)
    if not coded:
        assert torch.equal(held[1], moments[0])
        assert torch.equal(held[2], moments[1])
        return
    for codes, scales, moment, signed in zip(held[1:3], held[3], moments, (True, False), strict=True):
        expected, expected_scales = blockwise8_encode(moment, signed=signed)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes, expected)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("dtype", "coded"), STATES)
def test_as_defined(dtype, coded, bias_correction) -> None:
    held = states(3001, dtype, coded=coded, seed=4)
    expected = cloned(held)
    grad = torch.randn(3001)
    numbers = {"step": 5, "seed": 1, "offset": 77, "bias_correction": bias_correction}
    update(held, grad, **numbers)
    adamw_compact_reference(expected[0], grad, *expected[1:], **NUMBERS | numbers)
    if dtype is torch.float32:
        assert_rounded(held[0], expected[0], roundings=6, scale=4.0)  # As for `adamw`.
    else:
        # A float32 rounding earlier, one in about a thousand goes to the other neighbour.
        assert (held[0] != expected[0]).float().mean() < 0.01
        assert_rounded(held[0], expected[0], roundings=2)
    for (
        own,
        right,
    ) in zip(held[1:3], expected[1:3], strict=True):
        if coded:
            assert (own.int() - right.int()).abs().max() <= 1
            assert (own != right).float().mean() < 0.01
        else:
            assert_rounded(own, right, roundings=6, scale=4.0)


def test_without_bias_correction_a_step_is_lr_times_the_moments_alone() -> None:
    held = states(10, torch.float32, coded=False)
    held[1].zero_()
    held[2].zero_()
    before = held[0].clone()
    grad = torch.full((10,), 2.0)
    update(held, grad, step=1, weight_decay=0.0, bias_correction=False)
    expected = before - 1e-2 * 0.2 / (math.sqrt(0.05 * 4) + 1e-8)
    assert_rounded(held[0], expected, roundings=6, scale=4.0)


@pytest.mark.parametrize("dtype", PARAMS)
def test_a_hundred_steps_stay_near_torchs(dtype) -> None:
    """With everything small the path is noisy, not another one: it ends where torch's ends within a few updates."""
    size = 2000
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(size, generator=draw).bfloat16()
    theirs = start.float().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    held: list[Any] = [start.clone().to(dtype), *torch.zeros(2, size, dtype=torch.uint8), tuple(torch.zeros(2, 8))]
    for step in range(1, 101):
        grad = torch.randn(size, generator=draw) + 0.5
        theirs.grad = grad
        update(held, grad, step=step)
        optimizer.step()
    moved = (theirs.detach() - start.float()).abs().mean()
    apart = (held[0].float() - theirs.detach()).abs().mean()
    assert moved > 0.3
    assert apart < 0.05 * moved


@pytest.mark.parametrize("copy_dtype", FLOATS)
@pytest.mark.parametrize("dtype", PARAMS)
def test_the_copy_is_what_the_parameter_holds(dtype, copy_dtype) -> None:
    held = states(3000, dtype, coded=True)
    copy = torch.zeros(3000, dtype=copy_dtype)
    update(held, torch.randn(3000), copy)
    assert torch.equal(copy, held[0].to(copy_dtype))


@pytest.mark.parametrize(("dtype", "coded"), STATES)
def test_the_same_bits_on_any_number_of_threads_and_however_a_flat_is_cut(dtype, coded, set_threads) -> None:
    size = 600_007
    whole, grad = states(size, dtype, coded=coded), torch.randn(size)
    begin = cloned(whole)
    set_threads(1)
    update(whole, grad, offset=5)
    assert not torch.equal(whole[0], begin[0])
    for threads in (2, 3):
        set_threads(threads)
        other = cloned(begin)
        update(other, grad, offset=5)
        assert all(torch.equal(one, two) for one, two in zip(flat(other), flat(whole), strict=True))
    for cut in (256, 1024, 300_032):
        other = cloned(begin)
        for low, high in ((0, cut), (cut, size)):
            scales = other[3] and tuple(scale[low // 256 : -(-high // 256)] for scale in other[3])
            update([*(tensor[low:high] for tensor in other[:3]), scales], grad[low:high], offset=5 + low)
        assert all(torch.equal(one, two) for one, two in zip(flat(other), flat(whole), strict=True))


def test_bfloat16_is_rounded_by_the_place_in_the_flat_wherever_it_is_cut() -> None:
    whole, grad = states(5000, torch.bfloat16, coded=False), torch.randn(5000)
    parts = cloned(whole)
    update(whole, grad)
    for low, high in ((0, 1), (1, 777), (777, 5000)):
        update([*(tensor[low:high] for tensor in parts[:3]), None], grad[low:high], offset=low)
    assert torch.equal(parts[0], whole[0])


def test_updates_too_small_for_bfloat16_arrive_on_average() -> None:
    size, steps = 4096, 64
    param = torch.ones(size, dtype=torch.bfloat16)
    moments = torch.zeros(2, size)
    numbers = NUMBERS | {"lr": 2**-12, "weight_decay": 0.0}  # A sixteenth of the spacing below 1.
    for step in range(1, steps + 1):
        adamw_compact(param, torch.ones(size), *moments, **numbers, step=step, seed=0)
    moved = 1 - param.float().mean()
    assert moved == pytest.approx(steps * 2**-12, rel=0.02)
    assert 1 - param.float().min() > 2 * moved / 3, "and they are numbers of bfloat16"


@pytest.mark.parametrize("dtype", PARAMS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_own_block_nan(value, dtype) -> None:
    held, grad = states(768, dtype, coded=True), torch.ones(768)
    grad[300] = value
    update(held, grad)
    for scales in held[3]:
        assert scales.isnan().tolist() == [False, True, False]
    assert held[0].isnan().nonzero().flatten().tolist() == [300]
    update(held, torch.ones(768))
    assert held[0][256:512].isnan().all()
    assert held[0][:256].isfinite().all()
    assert held[0][512:].isfinite().all()


def test_bytes_of_one_call() -> None:
    held = states(2560, torch.bfloat16, coded=True)
    meter.take()
    update(held, torch.zeros(2560, dtype=torch.bfloat16), torch.zeros(2560, dtype=torch.float16))
    (use,) = [use for name, use in meter.take().items() if name == "adamw_compact"]
    assert (
        use.nbytes == 2560 * (2 + 2 + 2 + 2 + 2 + 2) + 2 * 2 * 10 * 4
    )  # Codes, scales and param are read and written.


def test_bad_input_is_refused_by_name_and_changes_nothing() -> None:
    one = torch.ones(300)
    codes, scales = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    small = {"exp_avg": codes, "exp_avg_sq": codes, "scales": (scales, scales)}
    bad = [
        (r"param: dtype is float16, expected float32 or bfloat16", {"param": one.half()}),
        (r"grad: shape is \(7,\), expected \(300\)", {"grad": torch.ones(7)}),
        (r"exp_avg: dtype is uint8, expected float32", {"exp_avg": codes}),
        (r"exp_avg_sq: dtype is bfloat16, expected float32", {"exp_avg_sq": one.bfloat16()}),
        (r"exp_avg: dtype is float32, expected uint8", {"scales": (scales, scales)}),
        (r"exp_avg_scales: shape is \(3,\), expected \(2\)", small | {"scales": (torch.ones(3), scales)}),
        (r"exp_avg_sq_scales: dtype is float64", small | {"scales": (scales, scales.double())}),
        (r"scales: expected two tensors", small | {"scales": (scales, None)}),
        (r"copy: strides are \(2,\)", {"copy": torch.ones(600)[::2]}),
        (r"step: 0, expected 1 or more", {"step": 0}),
        (r"seed: None, expected an integer: a bfloat16 parameter", {"param": one.bfloat16(), "seed": None}),
        (r"offset: -1, expected", {"offset": -1}),
    ]
    for message, wrong in bad:
        arguments = {"param": torch.ones(300), "grad": one, "exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300)}
        arguments |= {"step": 1, "seed": 0} | wrong
        with pytest.raises(ValueError, match=message):
            adamw_compact(**arguments, **NUMBERS)
        assert (arguments["param"] == 1).all()


def test_registration() -> None:
    numbers = (1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5, True)
    for dtype, coded in STATES:
        held = states(600, dtype, coded=coded)
        tensors = (held[0], torch.ones(600), *held[1:3], *(held[3] or (None, None)))
        for copy in (None, torch.zeros(600, dtype=torch.bfloat16)):
            arguments = (*tensors, copy, *numbers, 7, 3)
            torch.library.opcheck(torch.ops.cuda_ops.adamw_compact.default, arguments)
    with FakeTensorMode():
        update([*(torch.empty(10) for _ in range(3)), None], torch.empty(10))
        with pytest.raises(ValueError, match="seed: None"):
            update([torch.empty(10).bfloat16(), torch.empty(10), torch.empty(10), None], torch.empty(10), seed=None)
