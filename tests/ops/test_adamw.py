"""adamw: parity with torch.optim.AdamW, special values, and no dependence on where an element stands."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import assert_rounded
from torch._subclasses import FakeTensorMode

from cuda_ops.adamw import adamw, adamw_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def states(size: int, generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """A parameter, a gradient and two moments."""
    param, grad, exp_avg = (torch.randn(size, generator=generator) for _ in range(3))
    return [param, grad, exp_avg, torch.rand(size, generator=generator)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 15, 4095, 4096, 4097, 300_001])
def test_ten_steps_as_torch_takes_them(size, weight_decay) -> None:
    generator = torch.Generator().manual_seed(size)
    param = torch.randn(size, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    theirs = param.clone().requires_grad_()
    numbers = NUMBERS | {"weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 11):
        theirs.grad = torch.randn(size, generator=generator)
        adamw(param, theirs.grad * 8, exp_avg, exp_avg_sq, **numbers, step=step, factor=1 / 8)
        optimizer.step()
    # Two roundings of the parameter a step (decay, update), three of each moment, on either side.
    assert_rounded(param, theirs.detach(), roundings=10 * 4, scale=0.1)
    assert_rounded(exp_avg, optimizer.state[theirs]["exp_avg"], roundings=10 * 6, scale=0.1)
    assert_rounded(exp_avg_sq, optimizer.state[theirs]["exp_avg_sq"], roundings=10 * 6)


@pytest.mark.parametrize("copy_dtype", [None, *FLOATS])
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_gradients_and_copies_of_other_dtypes(grad_dtype, copy_dtype) -> None:
    param, grad, exp_avg, exp_avg_sq = states(5000, torch.Generator().manual_seed(1))
    grad = grad.to(grad_dtype)
    copy = None if copy_dtype is None else torch.zeros(5000, dtype=copy_dtype)
    expected = [tensor.clone() for tensor in (param, exp_avg, exp_avg_sq)]
    adamw(param, grad, exp_avg, exp_avg_sq, copy, **NUMBERS, step=3, factor=0.5)
    adamw_reference(expected[0], grad, *expected[1:], **NUMBERS, step=3, factor=0.5)
    for mine, right in zip((param, exp_avg, exp_avg_sq), expected, strict=True):
        assert_rounded(mine, right, roundings=6, scale=4.0)  # Updates are as great: these moments are random.
    if copy is not None:
        assert torch.equal(copy, param.to(copy_dtype))


def test_copies_are_rounded_as_torch_rounds_them() -> None:
    special = [
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        1e-40,
        65519.0,
        65520.0,
        1e-8,
        3.4e38,
        1 + 2**-8,
        1 + 3 * 2**-8,
    ]
    for dtype in FLOATS:
        # No gradient, no decay: the parameter stays what it is, and is copied.
        param, copy = torch.tensor(special), torch.ones(len(special), dtype=dtype)
        grad, exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param), torch.ones_like(param)
        adamw(param, grad, exp_avg, exp_avg_sq, copy, **NUMBERS | {"weight_decay": 0.0}, step=1)
        torch.testing.assert_close(copy, torch.tensor(special).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_go_through(dtype) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, -1e-45, 3e38, 0.0, -0.0, 1.0])
    grad, param = torch.cartesian_prod(values, values).T.contiguous().unbind()
    grad = grad.to(dtype)
    mine = [param.clone(), torch.zeros_like(param), torch.zeros_like(param)]
    expected = [tensor.clone() for tensor in mine]
    adamw(mine[0], grad, *mine[1:], **NUMBERS, step=1)
    adamw_reference(expected[0], grad, *expected[1:], **NUMBERS, step=1)
    for ours, theirs in zip(mine, expected, strict=True):
        assert_rounded(ours, theirs, roundings=6, scale=0.1)


def test_an_element_gets_the_same_bits_wherever_it_stands_and_on_any_number_of_threads(set_threads) -> None:
    tensors = states(600_007)

    def result(start: int, threads: int) -> torch.Tensor:
        set_threads(threads)
        param, grad, exp_avg, exp_avg_sq = (tensor[start:].clone() for tensor in tensors)
        adamw(param, grad, exp_avg, exp_avg_sq, **NUMBERS, step=7)
        return param

    whole = result(0, 1)
    assert not torch.equal(whole, tensors[0])
    for start, threads in [(0, 2), (0, 3), (1, 1), (7, 2), (4097, 1), (600_006, 1)]:
        assert torch.equal(result(start, threads), whole[start:])


def test_slices_are_updated_in_place() -> None:
    tensors = states(100)
    before = tensors[0].clone()
    adamw(*(tensor[10:20] for tensor in tensors), **NUMBERS, step=1)
    changed = tensors[0] != before
    assert changed[10:20].all()
    assert changed.sum() == 10


def test_nothing_to_do() -> None:
    nothing = [torch.zeros(0) for _ in range(4)]
    adamw(*nothing, **NUMBERS, step=1)
    assert [tensor.numel() for tensor in nothing] == [0] * 4


def test_bad_input_is_refused_by_name_and_changes_nothing() -> None:
    one = torch.ones(8)
    bad = [
        (r"grad: shape is \(7,\), expected \(8\)", {"grad": torch.ones(7)}),
        (r"grad: strides are \(2,\)", {"grad": torch.ones(16)[::2]}),
        (r"exp_avg: dtype is bfloat16, expected float32", {"exp_avg": one.bfloat16()}),
        (r"exp_avg_sq: shape is \(8, 1\), expected \(8\)", {"exp_avg_sq": one[:, None]}),
        (r"copy: dtype is float64", {"copy": one.double()}),
        (r"param: dtype is float16, expected float32", {"param": one.half()}),
        (r"step: 0, expected 1 or more", {"step": 0}),
    ]
    for message, wrong in bad:
        param = torch.ones(8)
        arguments = {"param": param, "grad": one, "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8), "step": 1}
        with pytest.raises(ValueError, match=message):
            adamw(**arguments | wrong, **NUMBERS)
        assert torch.equal(param, one)


def test_registration() -> None:
    tensors = [*states(100), torch.zeros(100, dtype=torch.bfloat16)]
    numbers = (1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5)
    torch.library.opcheck(torch.ops.cuda_ops.adamw.default, (*tensors, *numbers))
    torch.library.opcheck(torch.ops.cuda_ops.adamw.default, (*tensors[:4], None, *numbers))
    with FakeTensorMode():
        adamw(*(torch.empty(10) for _ in range(4)), **NUMBERS, step=1)
        with pytest.raises(ValueError, match="grad: shape"):
            adamw(torch.empty(10), *(torch.empty(9) for _ in range(3)), **NUMBERS, step=1)

    def step(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
        adamw(param, grad * 2, exp_avg, exp_avg_sq, **NUMBERS, step=1)
        return param + 1

    eager = [tensor.clone() for tensor in tensors[:4]]
    compiled = [tensor.clone() for tensor in tensors[:4]]
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(result, step(*eager))
    assert all(torch.equal(one, two) for one, two in zip(compiled, eager, strict=True))
