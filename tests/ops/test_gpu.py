"""What a machine without a GPU, or without the compiler for one, pays and is told."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rounding import assert_rounded

from cuda_ops import adamw, gpu, grad_stats, sgd_momentum

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def test_importing_the_operations_imports_nothing_for_gpus() -> None:
    code = (
        "import sys, cuda_ops.adamw, cuda_ops.sgd_momentum, cuda_ops.grad_stats, cuda_ops.onebit, cuda_ops.blockquant;"
        "import cuda_ops.blockwise8, cuda_ops.stochastic, cuda_ops.adam_frozen_variance, cuda_ops.lamb;"
        "print(*sorted(name for name in sys.modules if name.startswith(('numba.cuda', 'numba_cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == []


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: False)

    def kernel() -> None: ...

    with pytest.raises(RuntimeError, match=r"pip install 'speedlab\[cuda\]'"):
        gpu.launch(kernel, 1, device=torch.device("cuda", 0))
    assert gpu.kernels_in_use(torch.device("cuda", 0)) == "torch fused"


def test_whose_kernels_are_in_use(monkeypatch) -> None:
    assert gpu.kernels_in_use(torch.device("cpu")) == "numba cpu"
    monkeypatch.setattr(gpu, "available", lambda: True)
    assert gpu.kernels_in_use(torch.device("cuda", 0)) == "numba-cuda"


@pytest.mark.parametrize(("count", "blocks"), [(0, 1), (1, 1), (256, 1), (257, 2), (10_000, 40)])
def test_blocks(count, blocks) -> None:
    assert gpu.blocks_for(count) == blocks


# ---- torch's kernels, where there are no others: they have a version for CPUs, which runs here -----------------------


@pytest.fixture
def by_torch(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: False)
    monkeypatch.setattr(gpu, "_PIECE", 1000)
    monkeypatch.setattr(gpu, "launch", lambda *_, **__: pytest.fail("a Numba kernel was launched"))


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16])
def test_adamw_by_torch(copy_dtype, grad_dtype, factor, by_torch) -> None:
    draw = torch.Generator().manual_seed(1)
    param, grad, exp_avg = torch.randn(3, 2345, generator=draw).unbind()
    exp_avg_sq, grad = torch.rand(2345, generator=draw), grad.to(grad_dtype)
    before, copy = grad.clone(), None if copy_dtype is None else torch.zeros(2345, dtype=copy_dtype)
    mine, expected = ([each.clone() for each in (param, exp_avg, exp_avg_sq)] for _ in range(2))
    adamw._cuda(mine[0], grad, *mine[1:], copy, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3, factor)
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "factor": factor}
    adamw.adamw_reference(expected[0], grad, *expected[1:], **numbers)
    for ours, right in zip(mine, expected, strict=True):
        assert_rounded(ours, right, roundings=6, scale=4.0)  # As for the kernels, see test_adamw.py.
    assert torch.equal(grad, before)
    assert copy is None or torch.equal(copy, mine[0].to(copy_dtype))


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize(("first", "nesterov"), [(True, False), (False, False), (False, True)])
def test_sgd_momentum_by_torch(first, nesterov, grad_dtype, by_torch) -> None:
    param, grad, momentum = torch.randn(3, 2345, generator=torch.Generator().manual_seed(1)).unbind()
    grad, copy = grad.to(grad_dtype), torch.zeros(2345, dtype=torch.float16)
    mine, expected = ([param.clone(), momentum.clone()] for _ in range(2))
    sgd_momentum._cuda(mine[0], grad, mine[1], copy, 0.1, 0.9, 0.3, 0.1, nesterov, first, 0.5)
    numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": nesterov, "first": first}
    sgd_momentum.sgd_momentum_reference(expected[0], grad, expected[1], **numbers, factor=0.5)
    for ours, right in zip(mine, expected, strict=True):
        assert_rounded(ours, right, roundings=8, scale=1.0)
    assert torch.equal(copy, mine[0].half())


@pytest.mark.parametrize("size", [0, 1, 1000, 2345])
def test_grad_stats_by_torch(size, by_torch) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size))
    stats = grad_stats._cuda(grad)
    assert (stats.shape, stats.dtype) == ((2,), torch.float64)
    torch.testing.assert_close(stats, grad_stats.grad_stats_reference(grad), rtol=16 * 2**-24, atol=0)
    grad[::700] = torch.inf
    assert grad_stats._cuda(grad)[1] == len(range(0, size, 700))
