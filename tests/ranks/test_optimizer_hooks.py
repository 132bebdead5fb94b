"""Hooks before the optimizer's step, as the guide has them: they see the gradients that the update uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grids import thinned
from markdown_blocks import ROOT, blocks_of
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import speedlab
from ranks.loops import Case, engine_step, train_plain
from ranks.pool import Pool
from ranks.test_parity import STAGES
from speedlab.engine.proof.observation import Observation

PAGE = ROOT / "speedlab/guides/how-to/script.md"
CLIP, NOISE = (b.code for b in blocks_of(PAGE) if b.heading == "Change gradients before the update")
LEAST_NOISE = 0.0095
"""Standard deviation of the guide's noise, 0.01, as some thousand elements have it."""


def clip_by_value(optimizer: Optimizer, *_: Any) -> None:
    """As the guide has it."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.003, eps=1e-4)


def fused_adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.003, eps=1e-4, fused=True)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def hooked(make: Callable[[Any], Optimizer]) -> Callable[[Any], Optimizer]:
    def made(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(clip_by_value)
        return optimizer

    return made


FORMS: dict[str, Callable[[Any], Optimizer]] = {
    "callable": adamw,
    "callable with the hook": adamw,
    "instance": fused_adamw,
    "momentum": momentum,
    "class": adamw,
}


def case_of(form: str, stage: int, dtype: str = "float32") -> Case:
    return Case(stage=stage, steps=4, optimizer=FORMS[form], clip_norm=0.3, accumulation=2, dtype=dtype)


def train_with_a_hook(form: str, stage: int, dtype: str) -> dict[str, Tensor]:
    case = case_of(form, stage, dtype)
    model, config = case.build(), case.config()
    choice: Any = case.optimizer
    if form == "instance":
        choice = case.optimizer(model.parameters())
    elif form == "callable with the hook":
        choice = hooked(case.optimizer)
    elif form == "class":
        choice, config = AdamW, {**config, "optimizer": {"lr": 0.003, "eps": 1e-4}}
    engine, optimizer, *_ = speedlab.initialize(model=model, optimizer=choice, config=config)
    if form != "callable with the hook":
        optimizer.register_step_pre_hook(clip_by_value)
    try:
        for step in range(case.steps):
            engine_step(engine, case, step)
        assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        return engine.state_dict()
    finally:
        engine.destroy()


def plain_with_a_hook(form: str, dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """With the hook, and without it."""
    case = case_of(form, 0, dtype)
    return tuple(  # type: ignore[return-value]  # of two
        train_plain(Case(**{**vars(case), "optimizer": choice}), 2).parameters
        for choice in (hooked(case.optimizer), case.optimizer)
    )


@pytest.mark.parametrize(
    ("form", "stage"),
    thinned(itertools.product(FORMS, STAGES), lambda form, stage: (list(FORMS).index(form) + stage) % 2 == 0),
)
def test_a_hook_clips_by_value(two: Pool, stage: int, form: str) -> None:
    expected, without = two.run(plain_with_a_hook, form, "float32")[0]
    for ours in two.run(train_with_a_hook, form, stage, "float32"):
        for name, value in expected.items():
            assert (ours[name] - value).abs().max() <= 2e-5, name
    assert any((without[name] - value).abs().max() > 1e-3 for name, value in expected.items())


def test_a_hook_sees_float32_of_a_model_in_bfloat16(two: Pool) -> None:
    expected, _ = two.run(plain_with_a_hook, "class", "bfloat16")[0]
    for ours in two.run(train_with_a_hook, "class", 2, "bfloat16"):
        for name, value in expected.items():
            assert (ours[name] - value).abs().max() <= 2e-3, name


def with_the_guides_lines(stage: int, code: str) -> list[dict[str, Tensor]]:
    """Parameters after a step without momentum at a rate of 1, with the guide's hook and without it, as the forward of
    this rank sees them."""
    found = []
    for lines in (code, ""):
        case = Case(stage=stage)
        engine, optimizer, *_ = speedlab.initialize(
            model=case.build(), optimizer=lambda p: SGD(p, lr=1.0), config=case.config()
        )
        try:
            exec(lines, {"torch": torch, "engine": engine, "optimizer": optimizer})
            engine_step(engine, case, 0)
            found.append({name: speedlab.gather(p).detach().clone() for name, p in engine.module.named_parameters()})
        finally:
            engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_guides_noise_is_the_same_on_all_ranks_and_another_for_each_element(two: Pool, stage: int) -> None:
    every = []
    for noisy, without in two.run(with_the_guides_lines, stage, NOISE):
        noise = torch.cat([(noisy[name] - without[name]).flatten() for name in noisy])
        every.append(noise)
        assert LEAST_NOISE < noise.std() < 0.0105
        assert abs(noise.mean()) < 0.001
        rounded = noise.mul(1e6).round()
        assert rounded.unique().numel() > 0.9 * noise.numel(), "no part repeats another one's"
    assert torch.equal(*every)


def test_the_guides_clipping_clips(two: Pool) -> None:
    clipped, without = two.run(with_the_guides_lines, 1, CLIP)[0]
    before = Case().build().state_dict()
    steps = {name: (clipped[name] - value, without[name] - value) for name, value in before.items()}
    assert any((plain.abs() > 0.1).any() for _, plain in steps.values())
    for ours, plain in steps.values():
        torch.testing.assert_close(ours, plain.clamp(-0.1, 0.1), rtol=0, atol=1e-6)


def refusal_of_a_hook(config: dict[str, Any]) -> tuple[str, bool]:
    """What a step with a hook raises, and whether the next one without it updates."""
    case = Case(stage=1)
    engine, optimizer, *_ = speedlab.initialize(model=case.build(), config={**case.config(), **config})
    handle = optimizer.register_step_pre_hook(clip_by_value)
    try:
        with pytest.raises(RuntimeError) as raised:
            engine_step(engine, case, 0)
        handle.remove()
        engine.zero_grad()
        engine_step(engine, case, 0)
        return str(raised.value), engine.global_step == 1
    finally:
        engine.destroy()


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"name": "lamb"}},
        {"optimizer": {"name": "onebit_adam", "freeze_step": 1}},
        {"precision": {"dtype": "float32", "moments": "8bit"}},
    ],
    ids=str,
)
def test_where_no_hook_could_change_gradients_a_step_says_so(two: Pool, config: dict[str, Any]) -> None:
    for words, goes_on in two.run(refusal_of_a_hook, config):
        assert words.startswith("optimizer: a hook of register_step_pre_hook cannot change the gradients, because ")
        assert goes_on


def proof_alongside_one_bit_adam() -> int:
    """The engine's own hooks are no user's: its proof looks at the update of any optimizer."""
    case = Case(stage=0)
    config = {**case.config(), "optimizer": {"name": "onebit_adam", "freeze_step": 1}}
    engine, *_ = speedlab.initialize(model=case.build(), config=config)
    observation = Observation(engine, engine._step)
    observation.start(passes=False)
    try:
        engine_step(engine, case, 0)
        return observation.update
    finally:
        observation.stop()
        engine.destroy()


def test_the_engines_own_hooks_are_not_refused(two: Pool) -> None:
    assert two.run(proof_alongside_one_bit_adam) == [1, 1]
