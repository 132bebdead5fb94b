"""A step on a real GPU: what the host waits for, which kernels run, what memory comes back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.loops import Allowed, waits_are_errors
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import speedlab
from cuda_ops import gpu
from speedlab.comm import CommStats, Group, join
from speedlab.config import ModelConfig
from speedlab.engine.engine import Engine
from speedlab.models import GPT

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]

MICRO, LENGTH = 2, 64


def gpt() -> GPT:
    shape = {"layers": 3, "hidden": 128, "heads": 4, "ffn_hidden": 256, "vocab_size": 512, "context": LENGTH}
    return GPT(ModelConfig(**shape, dropout=0.1))


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config: dict[str, Any] = {
        "zero": {"stage": 3, "bucket_bytes": 1},
        "precision": {"dtype": request.param, "initial_loss_scale": 128.0},
        "batch": {"micro_size": MICRO, "accumulation": 2},
    }
    engine = speedlab.initialize(model=gpt, config=config)[0]
    yield engine
    engine.destroy(keep_parameters=False)


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """On the CPU, as a sampler gives them."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(512, (MICRO, LENGTH + 1), generator=generator) for _ in range(2)]
    return [(each[:, :-1], each[:, 1:]) for each in rows]


def test_the_host_waits_once(engine, monkeypatch) -> None:
    for step in range(2):  # Kernels are compiled, moments and buffers are made.
        engine.train_batch(batches(step))
    allowed = Allowed(monkeypatch)
    with waits_are_errors():
        for step in range(2, 5):
            engine.train_batch(batches(step))
            engine.clock.take()
            engine.ledger()
    assert allowed.count == 3


def test_the_debug_mode_would_notice() -> None:
    """The judge itself."""
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


def test_phases_of_all_steps_come(engine) -> None:
    spent: dict[str, float] = {}
    for step in range(4):
        engine.train_batch(batches(step))
        for name, seconds in engine.clock.take().phases.items():
            spent[name] = spent.get(name, 0.0) + seconds
    torch.cuda.synchronize()
    for name, seconds in engine.clock.take().phases.items():
        spent[name] = spent.get(name, 0.0) + seconds
    assert {"forward", "backward", "optimizer"} <= {name for name, seconds in spent.items() if seconds > 0}


@pytest.mark.skipif(not gpu.available(), reason="numba-cuda is not installed: torch's kernels update")
def test_our_kernels_run(engine, tmp_path) -> None:
    """By their names in the profiler's trace."""
    engine.train_batch(batches(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The profiler's own, of the driver.
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            engine.train_batch(batches(1))
            torch.cuda.synchronize()
    names = {event.key for event in trace.key_averages()}
    assert any("_update_cuda" in name for name in names), sorted(names)
    assert any("_sum_cuda" in name for name in names), sorted(names)
    assert {"speedlab::forward", "speedlab::backward", "speedlab::optimizer"} <= names


def test_a_save_in_the_background_does_not_wait(engine, tmp_path) -> None:
    engine.train_batch(batches(0))
    engine.save_checkpoint(tmp_path, "first", wait=False)  # Pinned memory is made.
    engine.saving.wait(60)
    engine.train_batch(batches(1))
    torch.cuda._sleep(1_000_000_000)  # About half a second.
    event = torch.cuda.Event()
    event.record()
    engine.save_checkpoint(tmp_path, "second", wait=False)
    assert not event.query(), "the save waited for the device"
    assert engine.saving.wait(60) == tmp_path / "second"


def test_memory_comes_back(engine) -> None:
    """A change of stage gives what it freed back to the device, and an engine that ended holds nothing."""
    engine.train_batch(batches(0))
    before = torch.cuda.memory_reserved()
    filler = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del filler
    engine.reshape(zero=0)
    assert torch.cuda.memory_reserved() <= before
    engine.destroy(keep_parameters=False)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 1 << 20


def test_a_barrier_holds_the_host() -> None:
    """Of one rank there is nothing to wait for, and it must not fail."""
    world = join()
    Group([0], CommStats(), world.device).barrier()
