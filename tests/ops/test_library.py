"""Registration survives a module whose import was broken off and begun again."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.library import register


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


def test_the_second_registration_counts() -> None:
    schema = "registered_twice(Tensor x) -> Tensor"
    register(schema, cpu=double, fake=torch.empty_like)
    operation = register(schema, cpu=triple, fake=torch.empty_like)
    assert operation(torch.ones(2)).tolist() == [3.0, 3.0]
    assert torch.ops.cuda_ops.registered_twice(torch.ones(2)).tolist() == [3.0, 3.0]


def test_no_kernel_uses_a_threading_layer_of_numba() -> None:
    """One of them aborts the process when two Python threads enter it; `threads.share` needs none."""
    from cuda_ops import (
        adam_frozen_variance,
        adamw,
        blockquant,
        blockwise8,
        grad_stats,
        lamb,
        onebit,
        reduce,
        sgd_momentum,
        shared_flags,
        stochastic,
    )

    modules = (adam_frozen_variance, adamw, blockquant, blockwise8, shared_flags, grad_stats, lamb)
    modules += (onebit, onebit, reduce, sgd_momentum, stochastic)
    kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "targetoptions")]
    assert len(kernels) >= 11
    assert [kernel.py_func.__name__ for kernel in kernels if kernel.targetoptions.get("parallel")] == []
