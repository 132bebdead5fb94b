"""Around a step: errors, NaN, evaluation, no_sync, several backwards, ranks of different speed."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.loops import (
    Case,
    Trajectory,
    adamw,
    engine_for,
    engine_step,
    finish,
    problems,
    train_engine,
    train_plain,
)
from ranks.pool import Pool
from ranks.test_parity import FLOAT32, STAGES

pytestmark = pytest.mark.parametrize("stage", STAGES)


def assert_same(ours: list[Trajectory], plain: Trajectory) -> None:
    wrong = problems(ours, plain, FLOAT32)
    assert not wrong, "\n".join(wrong)


# ---- errors ----------------------------------------------------------------------------------------------------------


def fail_then_train(case: Case, where: str) -> tuple[Trajectory, dict[str, Any]]:
    """Every rank's forward (or backward) raises before step 2; the step is then made as if nothing had been."""
    path, seen = Trajectory(), {}
    with engine_for(case, model=models.failing()) as engine:
        for step in range(case.steps):
            if step == 2:
                try:
                    break_pass(engine, case, where)
                except ZeroDivisionError as error:
                    seen = {"notes": error.__notes__, "module": error.speedlab_module, "step": error.speedlab_step}  # type: ignore[attr-defined]  # set by the engine
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path, seen


def break_pass(engine: Any, case: Case, where: str) -> None:
    inputs, targets = case.batch(99, engine.world.rank)
    if where == "forward":
        engine.module.fail = True
        try:
            engine(inputs, targets)
        finally:
            engine.module.fail = False
    else:
        engine.backward(RaisesInBackward.apply(engine(inputs, targets)))


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward pass")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_then_another_step(two: Pool, plain, stage: int, where: str) -> None:
    case = Case(stage=stage, steps=5)
    results = two.run(fail_then_train, case, where, timeout=30)
    assert_same([path for path, _ in results], plain(case, 2))
    for rank, (_, seen) in enumerate(results):
        assert seen["step"] == 3, "the error names the step, counted from 1"
        if where == "forward":
            assert f"rank {rank}, step 3" in " ".join(seen["notes"])


def fail_at_different_times(case: Case, flag: Path) -> list[float]:
    """Rank 0 raises and returns from its forward while rank 1 is still in an early block of its own."""
    with engine_for(case, model=models.failing()) as engine:
        losses = [engine_step(engine, case, 0)]
        model = engine.module
        model.fail, model.wait_for = True, flag if engine.world.rank == 1 else None
        with contextlib.suppress(ZeroDivisionError):
            engine(*case.batch(99, engine.world.rank))
        flag.touch()
        model.fail, model.wait_for = False, None
        losses += [engine_step(engine, case, step) for step in range(1, case.steps)]
    return losses


def test_exception_while_another_rank_is_slower(two: Pool, plain, stage: int, tmp_path: Path) -> None:
    """The faster rank must not take back what the slower one still needs to come to its own exception."""
    case = Case(stage=stage, steps=3)
    first, second = two.run(fail_at_different_times, case, tmp_path / "raised", timeout=15)
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert means == pytest.approx(plain(case, 2).losses, rel=FLOAT32.loss)


def evaluate_at_different_times(case: Case, flag: Path, mode: str) -> float:
    """Rank 0 has evaluated, and goes on, while rank 1 is still in an early block of the same evaluation."""
    with engine_for(case, model=models.failing()) as engine:
        engine_step(engine, case, 0)
        engine.module.wait_for = flag if engine.world.rank == 1 else None
        with torch.no_grad():
            loss = engine(*case.batch(77, 0)).item()
        flag.touch()
        engine.module.wait_for = None
        if mode == "next step":
            engine_step(engine, case, 1)
    return loss


@pytest.mark.parametrize("mode", ["destroy", "next step"])
def test_evaluation_on_a_slower_rank(two: Pool, stage: int, tmp_path: Path, mode: str) -> None:
    """A rank that is done with a pass must not take back what a slower one still needs from it."""
    losses = two.run(evaluate_at_different_times, Case(stage=stage), tmp_path / "evaluated", mode, timeout=20)
    assert losses[0] == losses[1]


def nan_on_rank_one(case: Case) -> tuple[dict[str, Any], Trajectory]:
    """At step 3 (index 2) rank 1's loss is not a number; afterwards training goes on as if that batch had not been."""
    path, seen = Trajectory(), {}
    with engine_for(case) as engine:
        for step in range(case.steps):
            if step == 2:
                before = engine.state_dict()
                loss = engine(*case.batch(50, engine.world.rank))
                engine.backward(loss * float("nan") if engine.world.rank == 1 else loss)
                try:
                    engine.step()
                except speedlab.engine.NonFiniteError as error:
                    seen = {"message": str(error), "ranks": error.ranks, "tensors": error.tensors}
                after = engine.state_dict()
                seen["unchanged"] = all(before[name].equal(after[name]) for name in before)
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return seen, path


def test_nan_loss_names_rank_step_and_tensor(two: Pool, plain, stage: int) -> None:
    case = Case(stage=stage, steps=4, optimizer=adamw)
    results = two.run(nan_on_rank_one, case, timeout=30)
    for seen, _ in results:
        assert seen["ranks"] == [1]
        assert "step 3" in seen["message"]
        assert "rank 1" in seen["message"]
        assert any(name in seen["message"] for name, _ in models.transformer().named_parameters())
        assert seen["unchanged"]
    assert_same([path for _, path in results], plain(case, 2))


# ---- between and inside steps ----------------------------------------------------------------------------------------


def evaluate_between(case: Case, mode: str) -> tuple[Trajectory, list[float]]:
    """Before every step: evaluation of a batch that is the same on all ranks."""
    path, evaluations = Trajectory(), []
    context = torch.no_grad if mode == "no_grad" else torch.inference_mode
    with engine_for(case) as engine:
        for step in range(case.steps):
            engine.eval()
            with context():
                evaluations.append(case.loss(engine, case.batch(77, 0)).item())
            engine.train()
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path, evaluations


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_steps(two: Pool, plain, stage: int, mode: str) -> None:
    case = Case(stage=stage, steps=5, optimizer=adamw)
    results = two.run(evaluate_between, case, mode, timeout=30)
    assert_same([path for path, _ in results], plain(case, 2))
    assert results[0][1] == results[1][1], "the same parameters and data give the same loss on every rank"
    with torch.no_grad():
        first = case.loss(models.transformer(), case.batch(77, 0)).item()
    assert results[0][1][0] == pytest.approx(first, rel=1e-6)
    assert len(set(results[0][1])) == case.steps, "the evaluated parameters are those of the step"


def evaluate_in_the_middle(case: Case) -> Trajectory:
    """Evaluation between the micro-batches of one step."""
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            losses = []
            for micro in range(case.accumulation):
                loss = engine(*case.batch(step, micro * engine.world.size + engine.world.rank))
                with torch.no_grad():
                    engine(*case.batch(77, 0))
                engine.backward(loss)
                with torch.no_grad():
                    engine(*case.batch(78, 0))
                engine.step()
                losses.append(loss.item())
            path.losses.append(sum(losses) / len(losses))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


def test_evaluation_inside_a_step(two: Pool, plain, stage: int) -> None:
    """Also between forward and backward: what backward needs must still be there."""
    case = Case(stage=stage, steps=4, accumulation=2)
    assert_same(two.run(evaluate_in_the_middle, case, timeout=30), plain(case, 2))


def train_without_sync(case: Case) -> tuple[Trajectory, list[int]]:
    """All micro-batches but the last under no_sync."""
    path, sent = Trajectory(), []
    with engine_for(case) as engine:
        for step in range(case.steps):
            losses = []
            for micro in range(case.accumulation):
                last = micro == case.accumulation - 1
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = engine(*case.batch(step, micro * engine.world.size + engine.world.rank))
                    engine.traffic.take()
                    engine.backward(loss)
                    counts = engine.traffic.take()[0]
                    sent.append(counts.get("reduce_scatter", 0) + counts.get("all_reduce", 0))
                assert engine.is_gradient_accumulation_boundary() == last
                engine.step()
                losses.append(loss.item())
            path.losses.append(sum(losses) / len(losses))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path, sent


def test_no_sync(two: Pool, plain, stage: int) -> None:
    case = Case(stage=stage, steps=4, accumulation=3)
    results = two.run(train_without_sync, case, timeout=30)
    assert_same([path for path, _ in results], plain(case, 2))
    for _, sent in results:
        assert sent[0] == sent[1] == 0, "gradients stay with each rank inside no_sync"
        assert sent[2] > 0


def backward_twice(case: Case) -> Trajectory:
    """Two losses, each with its own forward and backward, before one step."""
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            losses = []
            for part in (0, 2):
                loss = engine(*case.batch(step, part + engine.world.rank))
                engine.backward(loss)
                losses.append(loss.item())
            assert engine.step()
            path.losses.append(sum(losses) / 2)
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


def sum_of_halves(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Twice the mean: what two backwards of means add up to."""
    return 2 * model(*batch)


def test_two_backwards_before_a_step_add_up(two: Pool, stage: int) -> None:
    case = Case(stage=stage, steps=4)
    expected = two.run(train_plain, replace(case, loss=sum_of_halves), 4)[0]
    expected.losses = [loss / 2 for loss in expected.losses]
    assert_same(two.run(backward_twice, case, timeout=30), expected)


def both_outputs(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    loss, side = model(*batch)
    return loss + 0.01 * side.float()


def test_block_used_again_after_the_others(two: Pool, plain, stage: int) -> None:
    """Both outputs of a module whose second one calls a block again, late."""
    case = Case(stage=stage, steps=4, build=models.half_used, loss=both_outputs, whole=False)
    assert_same(two.run(train_engine, case, timeout=30), plain(case, 2))


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_one_rank_sends_nothing(pool_of: PoolOf, plain, stage: int) -> None:
    case = Case(stage=stage, steps=3)
    paths = pool_of(1).run(train_counting, case)
    assert_same([path for path, _ in paths], plain(case, 1))
    assert paths[0][1] == {}


def train_counting(case: Case) -> tuple[Trajectory, dict[str, int]]:
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
        return path, {name: count for name, count in engine.traffic.take()[0].items() if count}


def test_copy_of_the_model_trains_apart(two: Pool, stage: int) -> None:
    """A deep copy made before is another model: training one leaves the other as it was."""
    assert all(two.run(train_alongside_copy, Case(stage=stage, steps=2)))


def train_alongside_copy(case: Case) -> bool:
    model = case.build()
    twin: nn.Module = copy.deepcopy(model)
    values = {name: p.detach().clone() for name, p in twin.named_parameters()}
    with engine_for(case, model=model) as engine:
        for step in range(case.steps):
            engine_step(engine, case, step)
    return all(p.equal(values[name]) for name, p in twin.named_parameters())


def deepspeed_dict(stage: int) -> dict[str, object]:
    """What a script that moves over passes as config, under DeepSpeed's keys."""
    given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5}
    engine = speedlab.initialize(model=models.transformer(), config=given)[0]
    try:
        config = engine.config
        return {"stage": engine.zero_stage, "clip": config.clip_norm, "micro": config.batch.micro_size}
    finally:
        engine.destroy()


def test_a_dict_of_deepspeed_keys(two: Pool, stage: int) -> None:
    assert two.run(deepspeed_dict, stage) == [{"stage": stage, "clip": 0.5, "micro": 2}] * 2
