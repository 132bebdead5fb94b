"""sgd_momentum: parity with torch.optim.SGD, special values, and no dependence on where an element stands."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import assert_rounded
from torch._subclasses import FakeTensorMode

from cuda_ops.sgd_momentum import sgd_momentum, sgd_momentum_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
RECIPES = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    {"momentum": 0.0},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 4095, 4096, 4097, 300_001])
def test_ten_steps_as_torch_takes_them(size, recipe) -> None:
    generator = torch.Generator().manual_seed(size)
    param = torch.randn(size, generator=generator)
    momentum_buffer = torch.full((size,), math.nan)  # The first update must not read it.
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.1, **recipe)
    for step in range(10):
        theirs.grad = torch.randn(size, generator=generator)
        sgd_momentum(param, theirs.grad * 8, momentum_buffer, lr=0.1, first=step == 0, factor=1 / 8, **recipe)
        optimizer.step()
    # A step: decay and factor, momentum, dampening, and the sum of terms that are below 4, on either side; of that the
    # parameter takes a tenth.
    assert_rounded(param, theirs.detach(), roundings=10 * 4, scale=4.0)
    if recipe["momentum"]:
        momentum = optimizer.state[theirs]["momentum_buffer"]
        assert_rounded(momentum_buffer, momentum, roundings=10 * 6, scale=4.0)


@pytest.mark.parametrize("copy_dtype", [None, *FLOATS])
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_gradients_and_copies_of_other_dtypes(grad_dtype, copy_dtype) -> None:
    param, momentum_buffer = torch.randn(5000), torch.randn(5000)
    grad = torch.randn(5000).to(grad_dtype)
    copy = None if copy_dtype is None else torch.zeros(5000, dtype=copy_dtype)
    expected = [param.clone(), momentum_buffer.clone()]
    numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "factor": 0.5}
    sgd_momentum(param, grad, momentum_buffer, copy, **numbers)
    sgd_momentum_reference(expected[0], grad, expected[1], **numbers)
    for mine, right in zip((param, momentum_buffer), expected, strict=True):
        assert_rounded(mine, right, roundings=8, scale=1.0)
    if copy is not None:
        assert torch.equal(copy, param.to(copy_dtype))


@pytest.mark.parametrize("nesterov", [False, True])
def test_special_values_go_through(nesterov) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1e-40, -1e-45, 3e38, 0.0, -0.0])
    grad, param = torch.cartesian_prod(values, values).T.contiguous().unbind()
    momentum_buffer = torch.zeros_like(param)
    expected = [param.clone(), momentum_buffer.clone()]
    numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    sgd_momentum(param, grad, momentum_buffer, **numbers)
    sgd_momentum_reference(expected[0], grad, expected[1], **numbers)
    # One fused rounding where torch has two: they may differ in the last bits, a denormal's too.
    for mine, right in zip((param, momentum_buffer), expected, strict=True):
        assert_rounded(mine, right, roundings=8)


def test_an_element_gets_the_same_bits_wherever_it_stands_and_on_any_number_of_threads(set_threads) -> None:
    tensors = [torch.randn(600_007) for _ in range(3)]

    def result(start: int, threads: int) -> torch.Tensor:
        set_threads(threads)
        param, grad, momentum_buffer = (tensor[start:].clone() for tensor in tensors)
        sgd_momentum(param, grad, momentum_buffer, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
        return param

    whole = result(0, 1)
    for start, threads in [(0, 2), (0, 3), (1, 1), (7, 2), (4097, 1)]:
        assert torch.equal(result(start, threads), whole[start:])


def test_nothing_to_do() -> None:
    sgd_momentum(torch.zeros(0), torch.zeros(0), torch.zeros(0), lr=0.1, momentum=0.9)


def test_bad_input_is_refused_by_name_and_changes_nothing() -> None:
    one = torch.ones(8)
    bad = [
        (r"grad: shape is \(7,\), expected \(8\)", {"grad": torch.ones(7)}),
        (r"grad: strides are \(2,\)", {"grad": torch.ones(16)[::2]}),
        (r"momentum_buffer: dtype is bfloat16, expected float32", {"momentum_buffer": one.bfloat16()}),
        (r"copy: dtype is int8", {"copy": one.to(torch.int8)}),
        (r"param: dtype is float16", {"param": one.half()}),
    ]
    for message, wrong in bad:
        param = torch.ones(8)
        arguments = {"param": param, "grad": one, "momentum_buffer": torch.ones(8), "copy": None} | wrong
        with pytest.raises(ValueError, match=message):
            sgd_momentum(**arguments, lr=0.1, momentum=0.9)
        assert torch.equal(param, one)


def test_registration() -> None:
    tensors = [torch.randn(100) for _ in range(4)]
    numbers = (0.1, 0.9, 0.0, 0.1, True, False, 1.0)
    torch.library.opcheck(torch.ops.cuda_ops.sgd_momentum.default, (*tensors, *numbers))
    with FakeTensorMode():
        sgd_momentum(*(torch.empty(10) for _ in range(3)), lr=0.1, momentum=0.9)

    def step(param: torch.Tensor, grad: torch.Tensor, momentum_buffer: torch.Tensor) -> torch.Tensor:
        sgd_momentum(param, grad * 2, momentum_buffer, lr=0.1, momentum=0.9)
        return param + 1

    eager = [tensor.clone() for tensor in tensors[:3]]
    compiled = [tensor.clone() for tensor in tensors[:3]]
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(result, step(*eager))
    assert torch.equal(compiled[0], eager[0])
