"""Ranks in different calls of the engine: each raises within `timeout_seconds` and says which rank is in which."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import speedlab
from ranks.conftest import PoolOf
from ranks.small_steps import batch, step_of
from ranks.tensor_models import gpt
from ranks.test_after_a_loss import meet_again
from speedlab.comm import leave

LIMIT_SECONDS = 1.5
MOST_SECONDS = 15.0
"""The limit, and what a busy machine takes beside it: less than the world's own limit of a minute."""

Call = Callable[[Any, str], Any]


def forward(engine: Any, folder: str) -> None:
    with torch.no_grad():
        for number in range(3):
            engine(*batch(number, 0))


CALLS: dict[str, Call] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "module_state_dict": lambda engine, folder: engine.module_state_dict(),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "evaluate": lambda engine, folder: engine.evaluate([batch(0, 0)]),
    "reshape": lambda engine, folder: engine.reshape(zero=1),
    "gather": lambda engine, folder: speedlab.gather(list(engine.module.parameters())),
    "forward without gradients": forward,
    "update": lambda engine, folder: step_of(engine, 1),
}


def engine_of(stage: int, **more: Any) -> Any:
    config = {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "batch": {"micro_size": 2},
        "precision": {"dtype": "float32"},
        **more,
    }
    return speedlab.initialize(model=gpt(tied=True), config=config)[0]


def in_different_calls(folder: str, backend: str, stage: int, pairs: list[tuple[str, str]]) -> list[tuple[str, float]]:
    """What this rank hears, and after how many seconds, where rank 0 makes the first call of a pair and the others the
    second one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for number, pair in enumerate(pairs):
        engine = engine_of(stage, timeout_seconds=LIMIT_SECONDS)
        step_of(engine, 0)
        dist.barrier()
        began = time.monotonic()
        try:
            CALLS[pair[min(rank, 1)]](engine, folder)
            said = "nothing was raised"
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            said = f"{type(error).__name__}: {error}"
        found.append((said, time.monotonic() - began))
        engine.disconnect()
        leave(failed=True)
        engine.destroy(keep_parameters=False)
        meeting = Path(folder) / str(number)
        meeting.mkdir(exist_ok=True)
        meet_again(meeting, backend, rank, size)
    dist.barrier()  # A rank that leaves at once may close connections that the other one is still making.
    leave()
    return found


def check(
    pool_of: PoolOf, folder: Path, backend: str, stage: int, pairs: list[tuple[str, str]], said: list[str]
) -> None:
    pool = pool_of(2, backend)
    found = pool.run(in_different_calls, str(folder), backend, stage, pairs, timeout=60)
    pool.new_group()
    for by_pair in found:
        for (text, seconds), expected in zip(by_pair, said, strict=True):
            assert expected in text, text
            assert seconds < MOST_SECONDS, text


_SAID = "rank 0 is in {} after step 1; rank 1 is in step 2 (train_batch)"
ALONE = {
    **{name: _SAID.format(name) for name in ("save_checkpoint", "state_dict", "evaluate")},
    "forward without gradients": "is in step 2 (forward without gradients)",
    "gather": "rank 0 is in gather; rank 1 is in step 2 (train_batch)",
}
"""What rank 0 calls while rank 1 makes a step, and a part of what both hear."""


@pytest.mark.parametrize(
    ("backend", "stage", "names"),
    [
        ("shared", 3, ["save_checkpoint", "forward without gradients", "gather"]),  # Each but a forward takes 3 s.
        ("gloo", 1, ["state_dict", "evaluate"]),
        *(pytest.param(backend, 3, list(ALONE), marks=pytest.mark.nightly) for backend in ("shared", "gloo")),
    ],
)
def test_a_call_of_one_rank_alone(pool_of: PoolOf, tmp_path: Path, backend: str, stage: int, names: list[str]) -> None:
    check(pool_of, tmp_path, backend, stage, [(name, "update") for name in names], [ALONE[name] for name in names])


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_two_calls_between_steps_are_told_apart_at_once(pool_of: PoolOf, tmp_path: Path, backend: str) -> None:
    pairs = [
        ("save_checkpoint", "evaluate"),
        ("state_dict", "module_state_dict"),
        ("load_checkpoint", "save_16bit_model"),
        ("reshape", "state_dict"),
    ]
    said = [f"RuntimeError: rank 0 is in {one} after step 1; rank 1 is in {other} after step 1" for one, other in pairs]
    said[2] = "RuntimeError: rank 0 is in load_checkpoint; rank 1 is in save_16bit_model after step 1"
    check(pool_of, tmp_path, backend, 3, pairs, said)
