"""Optimizers in every form, schedules, loaders, and the loss scale of float16."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import thinned
from torch import Tensor
from torch.utils.data import TensorDataset

import speedlab
from ranks import models
from ranks.loops import (
    Case,
    Trajectory,
    engine_for,
    engine_step,
    finish,
    problems,
    sgd,
    train_plain,
)
from ranks.pool import Pool
from ranks.test_parity import FLOAT32, STAGES
from speedlab.engine.checkpoint.read import take_whole

at_every_stage = pytest.mark.parametrize("stage", STAGES)


def at_every_second_stage(name: str, values: Iterable[str]) -> Any:
    """Neighbours among the values at the even stages and at the odd ones; nightly, each at all."""
    values = list(values)
    return pytest.mark.parametrize(
        (name, "stage"),
        thinned(itertools.product(values, STAGES), lambda value, stage: (values.index(value) + stage) % 2 == 0),
    )


def assert_same(ours: list[Trajectory], plain: Trajectory) -> None:
    wrong = problems(ours, plain, FLOAT32)
    assert not wrong, "\n".join(wrong)


# ---- forms and schedules ----------------------------------------------------------------------------------


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


def adagrad_groups(parameters: Any) -> torch.optim.Optimizer:
    """It has state from its making on."""
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2], "weight_decay": 0.1}]
    return torch.optim.Adagrad(groups, lr=0.07, initial_accumulator_value=0.5)


CHOICES = {
    "callable": sgd,
    "callable with groups": two_groups,
    "callable with adamw groups": adamw_groups,
    "callable with state": adagrad_groups,
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


@at_every_second_stage("form", CHOICES)
def test_optimizer_forms_with_a_scheduler(two: Pool, stage: int, form: str) -> None:
    case = Case(stage=stage, steps=6, optimizer=CHOICES[form], clip_norm=0.5)
    expected, rates = two.run(train_plain_with_schedule, case, 2)[0]
    results = two.run(train_with_optimizer, case, form, timeout=30)
    assert_same([path for path, _, _ in results], expected)
    for _, ours, same in results:
        assert same, "the instance and its scheduler are the objects that the user made"
        assert ours == rates
    assert len({rate[0] for rate in rates}) == 3


def train_with_states_from_the_beginning(case: Case, folder: str) -> Trajectory:
    """Before the first step the stage is changed and a checkpoint is written, which is loaded behind two steps more;
    weights alone are then taken, with which the optimizer begins again, and taken back by another load."""
    path = Trajectory()
    with engine_for(case) as engine:
        engine.reshape(zero=(case.stage + 1) % 4)
        saved = engine.save_checkpoint(folder, "first")
        for step in range(2):
            engine_step(engine, case, step)
        weights = engine.state_dict()
        take_whole(engine, lambda name, _: weights[name])
        engine_step(engine, case, 2)
        engine.load_checkpoint(saved)
        for step in range(case.steps):
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


@at_every_stage
@pytest.mark.parametrize("build", [models.never_uses_middle, models.skips_by_data])
def test_states_that_are_there_before_the_first_step(two: Pool, plain, tmp_path: Path, stage: int, build: Any) -> None:
    """Adagrad makes them when it is made, and never again: also of parameters that nobody uses in the first step."""
    case = Case(stage=stage, build=build, optimizer=adagrad_groups, steps=4, whole=False)
    assert_same(two.run(train_with_states_from_the_beginning, case, str(tmp_path), timeout=30), plain(case, 2))


OPTIMIZER_CONFIG = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.2, "momentum": 0.7}


class ByHand(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675), or AdamW without bias correction, as the papers write them; a user's own class, too."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        eps: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    p -= group["lr"] * (self.direction(p.grad, state, group) + group["weight_decay"] * p)

    def direction(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        first, second = group["betas"]
        m = state.get("exp_avg", torch.zeros_like(gradient))
        state["exp_avg"] = second * m + (1 - second) * gradient
        return torch.sign(first * m + (1 - first) * gradient)


class AdamWByHand(ByHand):
    def direction(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        first, second = group["betas"]
        state["m"] = first * state.get("m", torch.zeros_like(gradient)) + (1 - first) * gradient
        state["v"] = second * state.get("v", torch.zeros_like(gradient)) + (1 - second) * gradient**2
        return state["m"] / (state["v"].sqrt() + group["eps"])


NAMED: dict[str, dict[str, Any]] = {
    "config sgd": {"name": "sgd"},
    "config lion": {"name": "lion"},
    "config uncorrected": {"name": "adamw", "bias_correction": False},
}


def train_from_config(stage: int, kind: str) -> tuple[list[float], list[list[float]], Any]:
    """`optimizer`: a class takes its arguments from the configuration; None makes optimizer and schedule of it."""
    case = Case(stage=stage, steps=6)
    classes = {"class AdamW": torch.optim.AdamW, "class SGD": torch.optim.SGD, "class Lion of a user": ByHand}
    chosen = classes.get(kind)
    taken = OPTIMIZER_CONFIG if chosen is None else inspect.signature(chosen).parameters
    named = {key: value for key, value in OPTIMIZER_CONFIG.items() if key in taken}
    config = {
        **case.config(),
        "optimizer": {"name": "adamw", **named, **NAMED.get(kind, {})},
        "schedule": {"kind": "cosine", "warmup_steps": 2, "floor": 0.1},
        "steps": case.steps,
    }
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
    elif kind in ("class Lion of a user", "config lion", "config uncorrected"):
        by_hand = AdamWByHand if kind == "config uncorrected" else ByHand
        optimizer = by_hand(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
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


@at_every_second_stage(
    "kind",
    [
        "class AdamW",
        "class SGD",
        "class Lion of a user",
        "config adamw",
        "config sgd",
        "config lion",
        "config uncorrected",
    ],
)
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


@at_every_stage
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


@at_every_stage
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


@at_every_stage
def test_float16_that_cannot_shrink_further_is_an_error(two: Pool, stage: int) -> None:
    for message, unchanged in two.run(exhaust, Case(stage=stage), timeout=30):
        assert "rank 0, 1" in message
        assert "step 1" in message
        assert unchanged
