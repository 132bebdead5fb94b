"""Parity on a real GPU: one rank, ten steps, beside the plain loop on the same GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.loops import BFLOAT16, FLOAT32, gpu_case
from ranks.loops import Trajectory, adamw, engine_for, engine_step, finish, problems, sgd, train_engine, train_plain

from cuda_ops import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_loop(stage, dtype, optimizer) -> None:
    for accumulation, checkpointing in ((1, "none"), (2, "block")):
        case = gpu_case(
            stage=stage, dtype=dtype, optimizer=optimizer, accumulation=accumulation, checkpointing=checkpointing
        )
        assert problems([train_engine(case)], train_plain(case, 1), FLOAT32 if dtype == "float32" else BFLOAT16) == []


def fused(parameters: Any) -> torch.optim.Optimizer:
    """torch's own kernel: amsgrad is an option that ours does not have."""
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-5, weight_decay=0.05, fused=True, amsgrad=True)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-5, weight_decay=0.05, foreach=True)


@pytest.mark.parametrize("optimizer", [fused, adamw])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_after_a_load(optimizer, dtype, tmp_path) -> None:
    """Five steps, a checkpoint, and five more by an engine that read it, whose counters must be where the kernel reads
    them."""
    case = gpu_case(dtype=dtype, optimizer=optimizer)
    path = Trajectory()
    for first in (0, 5):
        with engine_for(case) as engine:
            if first:
                engine.load_checkpoint(tmp_path)
            for step in range(first, first + 5):
                path.losses.append(engine_step(engine, case, step))
                path.norms.append(engine.global_grad_norm)
            if not first:
                engine.save_checkpoint(tmp_path)
            else:
                finish(path, engine)
    assert problems([path], train_plain(case, 1), FLOAT32 if dtype == "float32" else BFLOAT16) == []


def test_stages_give_the_same_bits_while_they_change() -> None:
    """With one rank the partition is the whole: nothing of a change of stage may be seen."""
    case = gpu_case(optimizer=adamw)
    expected = train_engine(case)
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            engine.reshape(zero=step % 4)
            path.losses.append(engine_step(engine, case, step))
        finish(path, engine)
    assert path.losses == expected.losses
    assert all(torch.equal(value, expected.parameters[name]) for name, value in path.parameters.items())


@pytest.mark.skipif(not gpu.available(), reason="numba-cuda is not installed: torch's kernels update")
def test_our_kernels_and_torchs_agree() -> None:
    case = gpu_case(optimizer=adamw)
    with_torchs = replace(
        case, optimizer=lambda p: torch.optim.AdamW(p, 0.003, eps=1e-5, weight_decay=0.05, foreach=True)
    )
    assert problems([train_engine(case)], train_plain(with_torchs, 1), FLOAT32) == []
