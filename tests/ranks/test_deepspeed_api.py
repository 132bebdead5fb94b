"""What scripts that were written for DeepSpeed do with an engine, and with the loader that initialize returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, batches, gpt
from ranks.loops import Case, adamw, engine_for, engine_step, sgd
from ranks.pool import Pool
from speedlab.config import ConfigError
from speedlab.layout import Layout

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


# ---- names -----------------------------------------------------------------------------------------------------------


def ask_names(stage: int) -> dict[str, Any]:
    """All of them, after two steps of two micro-batches."""
    case = Case(stage=stage, accumulation=2, optimizer=adamw)
    rate = torch.optim.lr_scheduler.StepLR
    with engine_for(case, lr_scheduler=lambda optimizer: rate(optimizer, step_size=1, gamma=0.5)) as engine:
        before = engine.get_global_grad_norm()
        for step in range(2):
            engine_step(engine, case, step)
        return {
            "device": engine.device,
            "ranks": (engine.local_rank, engine.global_rank, engine.world_size),
            "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
            "lr": engine.get_lr(),
            "scheduler": engine.lr_scheduler is engine.scheduler,
            "batch": (
                engine.train_batch_size(),
                engine.train_micro_batch_size_per_gpu(),
                engine.gradient_accumulation_steps(),
            ),
            "stage": engine.zero_optimization_stage(),
            "norms": (before, engine.get_global_grad_norm() == engine.global_grad_norm),
        }


@STAGES
def test_names_that_scripts_ask_for(two: Pool, stage: int) -> None:
    for rank, reported in enumerate(two.run(ask_names, stage)):
        assert reported == {
            "device": torch.device("cpu"),
            "ranks": (rank, rank, 2),
            "steps": (2, 16, 0),
            "lr": [0.003 / 4],
            "scheduler": True,
            "batch": (8, 2, 2),
            "stage": stage,
            "norms": (None, True),
        }


def skip_steps(folder: Path) -> list[tuple[int, int, int, int]]:
    """(updates, steps, skipped steps, samples) after a float16 step that overflows and one that does not; then after a
    load into a new engine."""
    case = Case(dtype="float16", stage=1)
    reported = []
    with engine_for(case) as engine:
        engine.loss_scale.value = 2.0**100
        while engine.global_step == 0:
            engine_step_or_skip(engine, case)
            engine.loss_scale.value = min(engine.loss_scale.value, 256.0)
        reported.append((engine.global_step, engine.global_steps, engine.skipped_steps, engine.global_samples))
        engine.save_checkpoint(folder, "a")
    with engine_for(case) as engine:
        engine.load_checkpoint(folder, "a")
        reported.append((engine.global_step, engine.global_steps, engine.skipped_steps, engine.global_samples))
    return reported


def engine_step_or_skip(engine: Any, case: Case) -> None:
    batch = case.batch(0, engine.world.rank)
    engine.backward(case.loss(engine, batch))
    engine.step()


def test_skipped_steps_count_as_in_deepspeed_and_are_saved(two: Pool, tmp_path: Path) -> None:
    for reported in two.run(skip_steps, tmp_path):
        assert reported == [(1, 2, 1, 8)] * 2


# ---- weights ---------------------------------------------------------------------------------------------------------


def save_weights(folder: Path, layout: Layout, stage: int, dtype: str) -> dict[str, Any]:
    """After a step: the masters, `module_state_dict` in its forms, and what the files hold."""
    case = LayoutCase(layout=layout, stage=stage, dtype=dtype, build=frozen_gpt, accumulation=2)
    with engine_for(case) as engine:
        engine.train_batch(batches(case, 0, engine.mesh.data_index))
        masters = engine.state_dict()
        state = engine.module_state_dict(prefix="model.")
        into: dict[str, Any] = {"mine": 1}
        same = engine.module_state_dict(into, "", False, True) is into
        saved = (
            engine.save_16bit_model(folder),
            engine.save_16bit_model(str(folder / "again"), "weights.safetensors", exclude_frozen_parameters=True),
            engine.save_16bit_model(folder),  # Over the first one.
        )
    return {"masters": masters, "state": state, "into": into, "same": same, "saved": saved}


def frozen_gpt() -> torch.nn.Module:
    model = gpt()
    model.get_submodule("norm").requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("layout", "stage", "dtype"),
    [
        (Layout(dp=2), 0, "bfloat16"),
        (Layout(dp=2), 2, "float32"),
        (Layout(dp=2), 3, "bfloat16"),
        (Layout(tp=2), 1, "bfloat16"),
        (Layout(pp=2), 2, "bfloat16"),
    ],
    ids=str,
)
def test_weights_are_whole_under_every_layout(
    two: Pool, tmp_path: Path, layout: Layout, stage: int, dtype: str
) -> None:
    reported = two.run(save_weights, tmp_path, layout, stage, dtype)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in reported[0]["masters"].items()}
    frozen = {name for name in expected if name.startswith("norm.")}
    assert frozen
    for rank in reported:
        assert rank["saved"] == (True, True, True)
        assert rank["same"]
        assert rank["into"].pop("mine") == 1
        assert_equal(rank["state"], {f"model.{name}": tensor for name, tensor in expected.items()})
        assert_equal(rank["into"], {name: t for name, t in expected.items() if name not in frozen})
    file = tmp_path / "pytorch_model.bin"
    assert_equal(torch.load(file, weights_only=True), expected)
    assert_equal(
        load_file(tmp_path / "again/weights.safetensors"), {n: t for n, t in expected.items() if n not in frozen}
    )
    plain = gpt()
    plain.load_state_dict(torch.load(file, weights_only=True))
    held = sum(p.numel() for p in plain.parameters()) * getattr(torch, dtype).itemsize
    assert file.stat().st_size < 1.2 * held + 20_000, "tied weights once, no padding"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "pytorch_model.bin"]


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


# ---- the loader ------------------------------------------------------------------------------------------------------

SIZE = 37


def engine_and_loader(config: dict[str, Any]) -> tuple[Any, Any]:
    engine, _, loader, _ = speedlab.initialize(
        model=models.transformer(),
        optimizer=sgd,
        training_data=TensorDataset(torch.arange(SIZE)),
        config={**Case(stage=1, accumulation=2).config(), **config},
    )
    return engine, loader


def train_on(engine: Any, indices: Tensor) -> list[int]:
    """A micro-batch whose content does not matter; returns the items that it stands for."""
    engine.backward(models.plain_loss(engine, models.tokens(0, 0)))
    engine.step()
    return indices.tolist()


def stop_and_go_on(folder: Path) -> tuple[list[list[int]], list[list[int]], int]:
    """Items of an epoch and a half in one go; the same with a stop after 3 steps, a look at the data, a new engine."""
    engine, loader = engine_and_loader({"seed": 3})
    whole = []
    for _ in range(2):
        for number, (indices,) in enumerate(loader):
            whole.append(train_on(engine, indices))
            if len(whole) == 6:
                engine.save_checkpoint(folder, "three-steps")
            if number == 3 and len(whole) > 8:
                break
    length = len(loader)
    engine.destroy()
    engine, loader = engine_and_loader({"seed": 3})
    engine.load_checkpoint(folder)
    first = next(iter(loader))  # Looking takes nothing away.
    rest = []
    for _ in range(2):
        for number, (indices,) in enumerate(loader):
            if not rest:
                assert torch.equal(indices, first[0])
            rest.append(train_on(engine, indices))
            if number == 3 and len(rest) > 4:
                break
    engine.destroy()
    return whole, rest, length


def test_the_loader_goes_on_where_the_checkpoint_was_written(two: Pool, tmp_path: Path) -> None:
    reported = two.run(stop_and_go_on, tmp_path)
    for whole, rest, length in reported:
        assert length == 9
        assert len(whole) == 13
        assert rest == whole[6:]
    seen = [item for whole, _, _ in reported for batch in whole[:9] for item in batch]
    assert len(seen) == len(set(seen)) == 36, "an item comes once an epoch; of 37 one is left for another"
    assert [whole[:4] for whole, _, _ in reported] != [whole[9:] for whole, _, _ in reported], (
        "each epoch has its own order"
    )


def read_from(folder: Path, tag: str | None) -> list[list[int]]:
    engine, loader = engine_and_loader({"seed": 3})
    if tag is not None:
        engine.load_checkpoint(folder, tag)
    try:
        return [indices.tolist() for (indices,) in loader]
    finally:
        engine.destroy()


def test_another_layout_goes_on_behind_the_same_items(pool_of: PoolOf, tmp_path: Path) -> None:
    """24 items are done: 3 steps of 2 micro-batches of 2 on 2 ranks."""
    pool_of(2).run(stop_and_go_on, tmp_path)
    (whole,) = pool_of(1).run(read_from, tmp_path, None)
    (rest,) = pool_of(1).run(read_from, tmp_path, "three-steps")
    assert len(whole) == 18
    assert rest == whole[12:]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def refused_data() -> list[str]:
    messages = []
    for data in (TensorDataset(torch.arange(3)), Endless()):
        with pytest.raises(ConfigError) as caught:
            speedlab.initialize(
                model=models.transformer(), training_data=data, config={"batch": {"micro_size": 2}, "zero": 1}
            )
        messages.append(str(caught.value))
    return messages


def test_data_that_cannot_be_shared_out_are_refused(pool_of: PoolOf) -> None:
    few, endless = pool_of(4).run(refused_data)[0]
    assert few == (
        "training_data has 3 items, and a micro-batch of all ranks takes 8: batch.micro_size 2 × 4; lower it, or give "
        "more data"
    )
    assert endless.startswith("training_data: a Endless has no length")
