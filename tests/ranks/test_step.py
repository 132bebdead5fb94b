"""Around a step: errors, evaluation, no_sync, several backwards, optimizers, schedules, loaders, float16, NaN."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

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
    sgd,
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
                    engine._traffic.take()
                    engine.backward(loss)
                    sent.append(engine._traffic.take()[0].get("reduce_scatter", 0))
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


# ---- optimizers, schedules, loaders ----------------------------------------------------------------------------------


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Every second parameter in a group of its own rate, so that groups alternate inside every flat."""
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.07, momentum=0.9)


def adamw_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.003, eps=1e-5)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def foreach_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True)


CHOICES = {
    "callable": sgd,
    "callable with groups": two_groups,
    "callable with adamw groups": adamw_groups,
    "instance": sgd,
    "instance with groups": two_groups,
    "foreach": foreach_sgd,
}


def train_with_optimizer(case: Case, form: str) -> tuple[Trajectory, list[list[float]], bool]:
    """With a scheduler; an instance keeps being the same object."""
    model, choice = case.build(), CHOICES[form]
    instance = choice(model.parameters()) if form.startswith("instance") else None
    scheduler = step_lr(instance) if instance is not None else step_lr
    engine, optimizer, loader, schedule = speedlab.initialize(
        model=model, optimizer=instance or choice, lr_scheduler=scheduler, config=case.config()
    )
    path, rates = Trajectory(), list[list[float]]()
    try:
        assert loader is None
        for step in range(case.steps):
            rates.append([group["lr"] for group in optimizer.param_groups])
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm or 0.0)
        finish(path, engine)
        same = instance is None or (optimizer is instance and schedule is scheduler)
    finally:
        engine.destroy()
    return path, rates, same


def train_plain_with_schedule(case: Case, dp: int) -> tuple[Trajectory, list[list[float]]]:
    """The oracle with StepLR: the optimizer's step is followed by the scheduler's."""
    rates: list[list[float]] = []

    def choice(parameters: Any) -> torch.optim.Optimizer:
        optimizer = case.optimizer(parameters)
        schedule = step_lr(optimizer)
        rates.append([group["lr"] for group in optimizer.param_groups])

        def after(*_: Any) -> None:
            schedule.step()
            rates.append([group["lr"] for group in optimizer.param_groups])

        optimizer.register_step_post_hook(after)
        return optimizer

    return train_plain(replace(case, optimizer=choice), dp), rates[:-1]


@pytest.mark.parametrize("form", CHOICES)
def test_optimizer_forms_with_a_scheduler(two: Pool, stage: int, form: str) -> None:
    case = Case(stage=stage, steps=6, optimizer=CHOICES[form], clip_norm=0.5)
    expected, rates = two.run(train_plain_with_schedule, case, 2)[0]
    results = two.run(train_with_optimizer, case, form, timeout=30)
    assert_same([path for path, _, _ in results], expected)
    for _, ours, same in results:
        assert same, "the instance and its scheduler are the objects that the user made"
        assert ours == rates
    assert len({rate[0] for rate in rates}) == 3


OPTIMIZER_CONFIG = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.2, "momentum": 0.7}


def train_from_config(stage: int, kind: str) -> tuple[list[float], list[list[float]], Any]:
    """`optimizer`: a class takes its arguments from the configuration; None makes optimizer and schedule of it."""
    case = Case(stage=stage, steps=6)
    name = "sgd" if kind == "config sgd" else "adamw"
    config = {
        **case.config(),
        "optimizer": {"name": name, **OPTIMIZER_CONFIG},
        "schedule": {"kind": "cosine", "warmup_steps": 2, "floor": 0.1},
        "steps": case.steps,
    }
    chosen = {"class AdamW": torch.optim.AdamW, "class SGD": torch.optim.SGD}.get(kind)
    engine, optimizer, _, schedule = speedlab.initialize(model=case.build(), optimizer=chosen, config=config)
    rates, losses = [], []
    try:
        for step in range(case.steps):
            rates.append([group["lr"] for group in optimizer.param_groups])
            losses.append(engine_step(engine, case, step))
        parameters = engine.state_dict()
    finally:
        engine.destroy()
    return losses, rates, (parameters, schedule is None)


def plain_from_config(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    """By hand: matrices decay, vectors do not; linear warm-up over 2 steps, then a cosine to a tenth."""
    case = Case(steps=6)
    factors = [1 / 3, 2 / 3, 1.0, 0.8681980515339464, 0.55, 0.23180194846605366]
    model = case.build()
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    if kind.startswith("class"):
        groups, factors = [{"params": parameters}], [1.0] * 6
    else:
        groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    if kind.endswith("SGD") or kind == "config sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=0.01, momentum=0.7, weight_decay=0.2)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
    for step, factor in enumerate(factors):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        batches = [case.batch(step, index) for index in range(2)]
        model(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, [0.01 * factor for factor in factors]


@pytest.mark.parametrize("kind", ["class AdamW", "class SGD", "config adamw", "config sgd"])
def test_optimizer_from_the_configuration(two: Pool, stage: int, kind: str) -> None:
    expected, rates = two.run(plain_from_config, kind)[0]
    for _, ours, (parameters, no_schedule) in two.run(train_from_config, stage, kind, timeout=30):
        assert [rate[0] for rate in ours] == pytest.approx(rates, rel=1e-9)
        assert no_schedule == kind.startswith("class")
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def read_loader(stage: int) -> tuple[list[list[int]], float]:
    """One epoch of 11 samples in micro-batches of 2, through the loader that initialize makes, and one step on it."""
    data = TensorDataset(torch.arange(11), torch.randn(11, models.LENGTH))
    config = {**Case(stage=stage).config(), "seed": 3}
    engine, _, loader, _ = speedlab.initialize(
        model=models.transformer(), optimizer=sgd, training_data=data, config=config, collate_fn=collate
    )
    try:
        assert loader is not None
        batches = [batch["index"].tolist() for batch in loader]
        loss = engine(*next(iter(loader))["tokens"])
        engine.backward(loss)
        engine.step()
    finally:
        engine.destroy()
    return batches, loss.item()


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    index = torch.stack([row[0] for row in rows])
    return {"index": index, "tokens": models.tokens(0, int(index[0]))}


def test_loader_shares_the_data_out(two: Pool, stage: int) -> None:
    (first, loss_0), (second, loss_1) = two.run(read_loader, stage, timeout=30)
    assert {len(batch) for batch in first + second} == {2}, "micro-batches of the configured size"
    seen = [index for batch in first + second for index in batch]
    assert len(first) == len(second) == 3
    assert len(set(seen)) >= 11, "every sample comes, and only padding comes twice"
    assert sorted(seen) != seen, "shuffled"
    assert loss_0 != loss_1


# ---- float16 ---------------------------------------------------------------------------------------------------------


def train_float16(case: Case, initial: float, window: int) -> dict[str, Any]:
    """Steps until `case.steps` were updates; what the scale, the parameters and the scheduler did."""
    config = {
        **case.config(),
        "precision": {"dtype": "float16", "initial_loss_scale": initial, "loss_scale_window": window},
    }
    engine, optimizer, *_ = speedlab.initialize(
        model=case.build(), optimizer=case.optimizer, lr_scheduler=step_lr, config=config
    )
    log, losses, data_step = [], [], 0
    try:
        while engine.global_step < case.steps and len(log) < 60:
            before = engine.state_dict()
            scale, rate = engine.loss_scale.value, optimizer.param_groups[0]["lr"]
            loss = engine(*case.batch(data_step, engine.world.rank))
            engine.backward(loss)
            updated = engine.step()
            after = engine.state_dict()
            unchanged = all(before[name].equal(after[name]) for name in before)
            log.append((updated, scale, engine.loss_scale.value, unchanged, rate == optimizer.param_groups[0]["lr"]))
            if updated:
                losses.append(loss.item())
                data_step += 1  # A skipped batch is shown again, so that the oracle sees the same data.
        return {"log": log, "losses": losses, "parameters": engine.state_dict()}
    finally:
        engine.destroy()


def test_float16_overflow_skips_the_step_and_halves_the_scale(two: Pool, stage: int) -> None:
    case = Case(stage=stage, steps=6, build=models.rounded_transformer)
    results = two.run(train_float16, case, 2.0**24, 4, timeout=40)
    log = results[0]["log"]
    assert log == results[1]["log"], "all ranks decide alike"
    assert not log[0][0], "a loss scaled by 2^24 overflows float16"
    good = 0
    for updated, before, after, unchanged, rate_kept in log:
        if updated:
            good += 1
            assert after == (2 * before if good % 4 == 0 else before)
            assert not unchanged
        else:
            good = 0
            assert after == before / 2
            assert unchanged, "a skipped step changes nothing"
            assert rate_kept, "nor does it move the schedule"
    expected, _ = two.run(train_plain_with_schedule, replace(case, dtype="float32"), 2)[0]
    losses = [(a + b) / 2 for a, b in zip(results[0]["losses"], results[1]["losses"], strict=True)]
    # float16 keeps 11 bits: 5e-4 of a value, a few of them in a loss.
    assert losses == pytest.approx(expected.losses, rel=2e-3)


def exhaust(case: Case) -> tuple[str, bool]:
    config = {**case.config(), "precision": {"dtype": "float16", "initial_loss_scale": 4.0, "min_loss_scale": 2.0}}
    engine = speedlab.initialize(model=case.build(), optimizer=sgd, config=config)[0]
    before = engine.state_dict()
    results: list[Any] = []
    try:
        for _ in range(2):
            loss = engine(*case.batch(0, engine.world.rank))
            engine.backward(loss * float("inf"))
            results.append(engine.step())
    except speedlab.engine.NonFiniteError as error:
        results.append(str(error))
    after = engine.state_dict()
    engine.destroy()
    assert results[0] is False, results
    return results[-1], all(before[name].equal(after[name]) for name in before)


def test_float16_that_cannot_shrink_further_is_an_error(two: Pool, stage: int) -> None:
    for message, unchanged in two.run(exhaust, Case(stage=stage), timeout=30):
        assert "rank 0, 1" in message
        assert "step 1" in message
        assert unchanged


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
        return path, {name: count for name, count in engine._traffic.take()[0].items() if count}


def test_copy_of_the_model_trains_apart(two: Pool, stage: int) -> None:
    """A deep copy made before is another model: training one leaves the other as it was."""
    assert all(two.run(train_beside_copy, Case(stage=stage, steps=2)))


def train_beside_copy(case: Case) -> bool:
    model = case.build()
    twin: nn.Module = copy.deepcopy(model)
    values = {name: p.detach().clone() for name, p in twin.named_parameters()}
    with engine_for(case, model=model) as engine:
        for step in range(case.steps):
            engine_step(engine, case, step)
    return all(p.equal(values[name]) for name, p in twin.named_parameters())
