"""Two ranks on two GPUs: NCCL for what is on them, gloo for what is not.

NCCL refuses two ranks on one GPU, and gloo has no reduce-scatter of tensors on a GPU: with one GPU this is skipped, and
what remains is the fake world of tests/unit/test_fake_cuda.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from gpu.loops import BFLOAT16, FLOAT32, Allowed, gpu_case, waits_are_errors
from ranks.loops import Case, Trajectory, adamw, engine_for, engine_step, problems, sgd, train_cases, train_plain

from speedlab.comm import PeerLost, leave

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one"),
]

TIMEOUT_SECONDS = 240


def run(function: Any, folder: Path, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on two ranks, by rank. The first failure ends both."""
    context = multiprocessing.start_processes(
        _rank, (function, str(folder), arguments), nprocs=2, join=False, start_method="spawn"
    )
    end = time.monotonic() + TIMEOUT_SECONDS
    while not context.join(timeout=1.0):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"two ranks took longer than {TIMEOUT_SECONDS} s")
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(2)]  # Our own, just now.


def _rank(rank: int, function: Any, folder: str, arguments: tuple[Any, ...]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "SPEEDLAB_RENDEZVOUS": folder}
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.cuda.set_device(rank)
    try:
        torch.save(function(*arguments), Path(folder) / f"result-{rank}.pt")
    finally:
        leave()


def on_cpu(paths: list[Trajectory | str]) -> list[Trajectory]:
    for path in paths:
        assert isinstance(path, Trajectory), path
        for tensors in (path.parameters, path.live, path.start):
            tensors.update({name: tensor.cpu() for name, tensor in tensors.items()})
    return paths  # type: ignore[return-value]  # asserted above


def train(cases: list[Case]) -> list[Trajectory]:
    return on_cpu(train_cases(cases))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_at_all_stages(dtype, tmp_path) -> None:
    cases = [
        gpu_case(stage=stage, dtype=dtype, optimizer=optimizer, accumulation=accumulation)
        for stage in range(4)
        for optimizer, accumulation in ((sgd, 1), (adamw, 2))
    ]
    by_rank = run(train, tmp_path, cases)
    for index, case in enumerate(cases):
        (plain,) = on_cpu([train_plain(case, 2)])
        paths = [paths[index] for paths in by_rank]
        assert problems(paths, plain, FLOAT32 if dtype == "float32" else BFLOAT16) == [], str(case)


def step_without_waits(case: Case) -> list[float]:
    """Norms of three steps; between the reads of the totals nothing waits."""
    norms = []
    with pytest.MonkeyPatch.context() as patch, engine_for(case) as engine:
        for step in range(2):
            engine_step(engine, case, step)
        allowed = Allowed(patch)
        data = [[case.batch(step, 2 * micro + engine.world.rank) for micro in range(2)] for step in range(2, 5)]
        with waits_are_errors():
            for micros in data:
                for batch in micros:
                    engine.backward(engine(*batch))
                    engine.step()
                norms.append(engine.global_grad_norm)
        assert allowed.count == 3
    return norms


@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_waits_once(stage, tmp_path) -> None:
    case = gpu_case(stage=stage, accumulation=2)
    first, second = run(step_without_waits, tmp_path, case)
    assert first == second


def fail_on_one(case: Case) -> float:
    """Rank 1 leaves in the middle of a step; how long rank 0 waited to hear of it."""
    engine: Any
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        if engine.world.rank == 1:
            engine.disconnect()
            leave()
            return 0.0
        started = time.monotonic()
        with pytest.raises(PeerLost):
            engine_step(engine, case, 1)
        waited = time.monotonic() - started
        engine.disconnect()
        leave()
        return waited


def test_a_failed_rank_ends_the_others_wait(tmp_path) -> None:
    assert run(fail_on_one, tmp_path, gpu_case(stage=2))[0] < 20
