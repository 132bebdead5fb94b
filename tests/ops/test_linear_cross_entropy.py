"""linear_cross_entropy: loss and gradients of full logits, with any chunk, and never a whole matrix of them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cuda_ops import linear_cross_entropy as module
from cuda_ops.compile import kernel
from cuda_ops.kernel_math import exp2
from cuda_ops.kernel_usage import meter
from cuda_ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BLOCK, GROUP = module._BLOCK, module._GROUP
# Of the norm of the exact gradient: what rounding to the dtype costs, not more than twice that of torch's full logits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def example(tokens: int, vocabulary: int, hidden: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(tokens * vocabulary)
    return (
        torch.randn(tokens, hidden, generator=draw).to(dtype).requires_grad_(),
        torch.randn(vocabulary, hidden, generator=draw).mul(0.5).to(dtype).requires_grad_(),
        torch.randint(0, vocabulary, (tokens,), generator=draw),
    )


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64."""
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    loss = F.cross_entropy(F.linear(*wide), targets, ignore_index=ignore_index)
    return loss.detach(), *torch.autograd.grad(loss, wide)


def assert_near(actual: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert actual is not None
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"),
    [
        (1, 1, None),
        (1, GROUP + 1, None),
        (15, GROUP - 1, 4),
        (16, GROUP, 16),
        (17, 2 * GROUP + 1, 16),
        (33, BLOCK - 1, 16),
        (64, BLOCK, 17),
        (40, BLOCK + 1, None),
        (300, 2 * BLOCK + GROUP + 3, None),
    ],
)
def test_as_defined(tokens, vocabulary, chunk, dtype) -> None:
    hidden, weight, targets = example(tokens, vocabulary, dtype=dtype)
    targets[1::5] = -100
    loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    loss.backward()
    expected, grad_hidden, grad_weight = exact(hidden, weight, targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss, linear_cross_entropy_reference(hidden, weight, targets), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=TOLERANCE[dtype] * 4)
    assert hidden.grad is not None
    assert hidden.grad.dtype is dtype
    assert_near(hidden.grad, grad_hidden, TOLERANCE[dtype])
    assert_near(weight.grad, grad_weight, TOLERANCE[dtype])
    assert hidden.grad[targets == -100].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_chunks_cost_little_accuracy(dtype) -> None:
    hidden, weight, targets = example(512, 1000, dtype=dtype)
    linear_cross_entropy(hidden, weight, targets, chunk=16).backward()
    _, grad_hidden, grad_weight = exact(hidden, weight, targets)
    assert_near(hidden.grad, grad_hidden, TOLERANCE[dtype])
    assert_near(weight.grad, grad_weight, 2 * TOLERANCE[dtype])


def drawn(tokens: int, vocabulary: int, scale: float, mean: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden vectors with a `mean` in common, and targets as often as the model expects: what training ends in."""
    draw = torch.Generator().manual_seed(tokens)
    hidden = (torch.randn(tokens, 64, generator=draw) + mean).to(dtype)
    weight = (torch.randn(vocabulary, 64, generator=draw) * scale).to(dtype)
    targets = (hidden.float() @ weight.float().t()).softmax(1).multinomial(1, generator=draw).squeeze(1)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "scale", "mean"),
    [
        (1024, 500, 0.1, 0.0),
        (2048, 2000, 0.02, 0.0),
        (512, 1000, 0.5, 0.0),
        (1600, 300, 0.1, 1.0),
        (1600, 300, 0.5, 1.0),
    ],
)
def test_sixteen_chunks_lose_no_more_than_full_logits(tokens, vocabulary, scale, mean, dtype) -> None:
    hidden, weight, targets = drawn(tokens, vocabulary, scale, mean, dtype)
    _, _, right = exact(hidden, weight, targets)
    errors = []
    for loss in (
        linear_cross_entropy_reference(hidden, weight, targets) * 1024,  # A scale, as float16 needs it.
        linear_cross_entropy(hidden, weight, targets, chunk=tokens // 16) * 1024,
    ):
        weight.grad = None
        loss.backward()
        assert weight.grad is not None
        errors.append(((weight.grad.double() / 1024 - right).norm() / right.norm()).item())
    full, ours = errors
    assert ours <= 1.1 * full


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0, 65536.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_incoming_gradient_scales_gradients(dtype, scale) -> None:
    hidden, weight, targets = example(20, 200, dtype=dtype)
    (linear_cross_entropy(hidden, weight, targets) * scale).backward()
    _, grad_hidden, grad_weight = exact(hidden, weight, targets)
    assert_near(hidden.grad, grad_hidden * scale, 2 * TOLERANCE[dtype])
    assert_near(weight.grad, grad_weight * scale, 2 * TOLERANCE[dtype])


def test_small_gradients_survive_float16_with_a_loss_scale() -> None:
    # A share of 1 / 4,096 tokens in probabilities of 1 / 4,096 is 6e-8, float16's smallest number.
    hidden, weight, targets = (each.detach() for each in example(4096, 4096, hidden=8, dtype=torch.float16))
    weight = (weight * 0.01).requires_grad_()
    (linear_cross_entropy(hidden, weight, targets) * 65536).backward()
    _, _, grad_weight = exact(hidden, weight, targets)
    assert_near(weight.grad, grad_weight * 65536, 2e-3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tied_weight(dtype) -> None:
    _, weight, targets = example(9, 70, dtype=dtype)
    tokens = torch.arange(9) * 3
    linear_cross_entropy(weight[tokens], weight, targets).backward()
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(wide[tokens] @ wide.t(), targets).backward()
    assert wide.grad is not None
    assert_near(weight.grad, wide.grad, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("need_hidden", "need_weight"), [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_needed(need_hidden, need_weight, dtype) -> None:
    hidden, weight, targets = example(20, BLOCK + 30, dtype=dtype)
    hidden.requires_grad_(need_hidden)
    weight.requires_grad_(need_weight)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.requires_grad == (need_hidden or need_weight)
    expected, grad_hidden, grad_weight = exact(hidden, weight, targets)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=0, atol=TOLERANCE[dtype] * 4)
    _, first, second, _ = torch.ops.cuda_ops.linear_cross_entropy(
        hidden.detach(), weight.detach(), targets, -100, 16, need_hidden, need_weight
    )
    assert (first.numel() > 0, second.numel() > 0) == (need_hidden, need_weight)
    if loss.requires_grad:
        loss.backward()
    if need_hidden:
        assert_near(hidden.grad, grad_hidden, TOLERANCE[dtype])
    if need_weight:
        assert_near(weight.grad, grad_weight, TOLERANCE[dtype])


def test_without_gradients_no_more_than_a_block_of_logits_is_kept(monkeypatch) -> None:
    hidden, weight, targets = example(16, 3 * BLOCK)
    seen = []
    whole = module._chunk_exponentials
    monkeypatch.setattr(module, "_chunk_exponentials", lambda *each: seen.append(each[-1].shape) or whole(*each))
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad
    linear_cross_entropy(hidden, weight, targets)
    assert seen == [(BLOCK, 16), (3 * BLOCK, 16)]


def test_default_chunks_keep_a_tenth_of_large_logits() -> None:
    for tokens, vocabulary, dtype in [
        (2048, 50257, torch.float32),
        (2048, 50257, torch.bfloat16),
        (8192, 16384, torch.float32),
    ]:
        assert module.default_chunk(tokens, vocabulary, dtype) <= 0.1 * tokens
    assert module.default_chunk(512, 16384, torch.float32) == 256
    assert module.default_chunk(1 << 20, 50257, torch.float32) == 1024
    assert module.default_chunk(0, 1 << 23, torch.float32) == 16


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_targets_ignored(dtype) -> None:
    hidden, weight, targets = example(20, 100, dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, targets.fill_(7), ignore_index=7)
    loss.backward()
    assert math.isnan(loss.item())
    for each in (hidden, weight):
        assert each.grad is not None
        assert each.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_tokens(dtype) -> None:
    hidden, weight, targets = example(0, 100, dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert math.isnan(loss.item())
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 24)
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("offset", [-1e4, -200.0, 200.0, 1e4])
def test_a_great_logit_after_the_first_block(offset) -> None:
    # Beyond exp's range, so that the greatest of the first block will not do as reference.
    hidden, weight, targets = example(20, BLOCK + 200)
    with torch.no_grad():
        hidden[:, 0] = 1
        weight[BLOCK:, 0] = offset
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    expected, grad_hidden, grad_weight = exact(hidden, weight, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    tolerance = 1e-7 * abs(offset)  # what rounding such logits to float32 costs
    assert_near(hidden.grad, grad_hidden, tolerance)
    assert_near(weight.grad, grad_weight, tolerance)


def test_greater_logits_but_within_range_do_not_start_again(monkeypatch) -> None:
    hidden, weight, targets = example(20, BLOCK + 200)
    with torch.no_grad():
        hidden[:, 0] = 1
        weight[BLOCK:, 0] = 40
    monkeypatch.setattr(module, "_chunk_greatest", lambda *_: pytest.fail("the chunk was done twice"))
    linear_cross_entropy(hidden, weight, targets).backward()
    _, grad_hidden, grad_weight = exact(hidden, weight, targets)
    assert_near(hidden.grad, grad_hidden, 1e-5)
    assert_near(weight.grad, grad_weight, 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", [0, 3, BLOCK + 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_as_torch(value, row, dtype) -> None:
    hidden, weight, targets = (each.detach() for each in example(20, BLOCK + 30, dtype=dtype))
    hidden.fill_(1)
    weight[row, 0] = value  # one logit of every token
    targets[:] = 5
    ours = [each.clone().requires_grad_() for each in (hidden, weight)]
    torchs = [each.clone().requires_grad_() for each in (hidden, weight)]
    loss = linear_cross_entropy(*ours, targets)
    reference = linear_cross_entropy_reference(*torchs, targets)
    torch.testing.assert_close(loss, reference, equal_nan=True)
    loss.backward()
    reference.backward()
    for mine, other in zip(ours, torchs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.isfinite(), other.grad.isfinite())


def test_a_vocabulary_of_minus_infinities_is_nan() -> None:
    hidden, targets = torch.ones(3, 1), torch.zeros(3, dtype=torch.int64)
    assert math.isnan(linear_cross_entropy(hidden, torch.full((5, 1), -math.inf), targets).item())


def test_denormals() -> None:
    hidden, weight, targets = example(20, 100)
    with torch.no_grad():
        hidden.fill_(1e-40)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.item() == pytest.approx(math.log(100), rel=1e-6)


def test_the_same_bits_on_any_number_of_threads(set_threads) -> None:
    # One chunk's products are torch's and may differ with threads; the kernel's sums may not.
    logits = torch.randn(11 * GROUP + 5, 256)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        e = logits.clone()
        sums, picked = torch.empty(12, 256), torch.zeros(256)
        arguments = [each.numpy() for each in (e, torch.full((256,), 2.0), torch.arange(256), sums, picked)]
        module.share(module._exponentials, 12, *arguments, multiple=1, worth=1)
        results.append((e, sums, picked))
        torch.testing.assert_close(picked, logits[torch.arange(256), torch.arange(256)], rtol=0, atol=0)
    for first, second in pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets = example(5, 10)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed over by an earlier backward pass"):
        loss.backward()


@pytest.mark.parametrize("value", [-1, 100, -101])
def test_targets_out_of_range(value) -> None:
    hidden, weight, targets = example(20, 100)
    targets[13] = value
    with pytest.raises(ValueError, match=rf"targets: {value} at position 13, expected 0 to 99"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("value", [-1, 90, 1 << 40])
def test_where_nobody_looks_targets_out_of_range_are_ignored(value) -> None:
    hidden, weight, targets = (each.detach() for each in example(50, 90))
    targets[7:9] = value
    results = module._by_torch(hidden, weight, targets, -100, 16, True, True)
    targets[7:9] = -100
    expected = module._by_torch(hidden, weight, targets, -100, 16, True, True)
    assert all(torch.equal(one, two) for one, two in zip(results, expected, strict=True))


def test_bad_input_is_refused_by_name() -> None:
    hidden, weight, targets = (each.detach() for each in example(20, 100))
    with pytest.raises(ValueError, match=r"hidden: strides are"):
        linear_cross_entropy(hidden.t().contiguous().t(), weight, targets)
    with pytest.raises(ValueError, match=r"weight: strides are"):
        linear_cross_entropy(hidden, weight.t().contiguous().t(), targets)
    with pytest.raises(ValueError, match=r"targets: strides are"):
        linear_cross_entropy(hidden, weight, targets.repeat_interleave(2)[::2])
    with pytest.raises(ValueError, match=r"hidden: dtype is float64"):
        linear_cross_entropy(hidden.double(), weight.double(), targets)
    with pytest.raises(ValueError, match=r"weight: dtype is bfloat16, expected float32"):
        linear_cross_entropy(hidden, weight.bfloat16(), targets)
    with pytest.raises(ValueError, match=r"targets: dtype is int32, expected int64"):
        linear_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(ValueError, match=r"weight: shape is \(100, 23\), expected \(any, 24\)"):
        linear_cross_entropy(hidden, weight[:, 1:].contiguous(), targets)
    with pytest.raises(ValueError, match=r"targets: shape is \(19,\), expected \(20\)"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match=r"chunk: 0, expected 1 or more"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)


def test_kernels_are_counted() -> None:
    hidden, weight, targets = (each.detach() for each in example(20, BLOCK + 1))
    meter.take()
    linear_cross_entropy(hidden, weight, targets, chunk=20)
    use = meter.take()["linear_cross_entropy"]
    assert (use.calls, use.nbytes) == (2, 2 * 4 * 20 * (BLOCK + 1))


# Not float16, whose backward pass changes the operation's second and third result; only opcheck looks at them.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registration(dtype) -> None:
    hidden, weight, targets = example(20, 50, dtype=dtype)
    op = torch.ops.cuda_ops.linear_cross_entropy.default
    torch.library.opcheck(op, (hidden, weight, targets, -100, 16, True, True), rtol=1e-2, atol=1e-2)
    torch.library.opcheck(op, (hidden.detach(), weight, targets, -100, 16, False, True), rtol=1e-2, atol=1e-2)
    with FakeTensorMode():
        fakes = torch.empty(20, 24, dtype=dtype, requires_grad=True), torch.empty(50, 24, dtype=dtype)
        loss = linear_cross_entropy(*fakes, torch.zeros(20, dtype=torch.int64))
        loss.backward()
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        assert fakes[0].grad is not None


def test_compiled() -> None:
    hidden, weight, targets = example(20, 50)

    def model(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(torch.tanh(hidden), weight, targets) * 2

    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(hidden)
    loss.backward()
    compiled, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    expected = model(hidden)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(compiled, (hidden.grad, weight.grad))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_version_in_torch(dtype) -> None:
    hidden, weight, targets = (each.detach() for each in example(50, 90, dtype=dtype))
    targets[::3] = -100
    loss, *gradients, factor = module._by_torch(hidden, weight, targets, -100, 16, True, True)
    for mine, other in zip((loss, *gradients), exact(hidden, weight, targets), strict=True):
        assert_near(mine * (1 if mine is loss else factor), other, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(dtype) -> None:
    hidden, weight, targets = example(300, 5000, dtype=dtype)
    targets[::3] = -100
    on_gpu = [each.detach().cuda().requires_grad_() for each in (hidden, weight)]
    loss = linear_cross_entropy(*on_gpu, targets.cuda())
    (loss * 3).backward()
    for mine, other in zip((loss * 3, *(each.grad for each in on_gpu)), exact(hidden, weight, targets), strict=True):
        assert mine is not None
        assert_near(mine.detach().cpu() / 3, other, 2 * TOLERANCE[dtype])


def test_powers_of_two() -> None:
    @kernel()
    def fill(x, y):
        for i in range(x.shape[0]):
            y[i] = exp2(x[i])

    x = np.linspace(-126.49, 127.49, 1_000_003).astype(np.float32)
    y = np.empty_like(x)
    fill(x, y)
    expected = np.exp2(x.astype(np.float64))
    assert (np.abs(y - expected) / np.spacing(expected.astype(np.float32))).max() < 2.1
    x = np.array([0, -0.0, 1e-40, -127, -1e30, -np.inf, 128, 1e30, np.inf, np.nan], dtype=np.float32)
    y = np.empty_like(x)
    fill(x, y)
    np.testing.assert_array_equal(y, np.array([1, 1, 1, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], dtype=np.float32))
