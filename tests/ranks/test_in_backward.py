"""The update in backward: the same bits as after it, no gradients between steps, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, engine_for, engine_step, sgd
from speedlab.config import ConfigError
from speedlab.optim.errors import NonFiniteError


def both(case: Case, **more: Any) -> list[tuple[list[float], list[float], dict[str, torch.Tensor]]]:
    """(losses, norms, parameters) with the update after backward, and in it."""
    found = []
    for inside in (False, True):
        config = {**case.config(), "optimizer": {"in_backward": inside}, **more}
        losses, norms = [], []
        with engine_for(case, config=config) as engine:
            for step in range(case.steps):
                losses.append(engine_step(engine, case, step))
                norms.append(engine.global_grad_norm)
            found.append((losses, norms, engine.state_dict()))
    return found


CASES = [
    Case(optimizer=adamw),
    Case(optimizer=sgd, stage=3, checkpointing="block"),
    Case(optimizer=adamw, dtype="bfloat16", build=models.rounded_transformer, stage=1),
    Case(
        optimizer=adamw,
        dtype="bfloat16",
        build=models.rounded_transformer,
        precision=(("masters", "none"), ("moments", "8bit")),
    ),
    Case(optimizer=adamw, offload=(("optimizer", "disk"),)),
    Case(optimizer=adamw, stage=3, offload=(("optimizer", "disk"), ("parameters", "disk"))),
    Case(optimizer=torch.optim.RMSprop),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_as_after_it(pool_of: PoolOf, case: Case) -> None:
    after, inside = pool_of(1).run(both, replace(case, steps=5))[0]
    assert inside[0] == after[0]
    assert inside[1] == after[1]
    assert not [name for name, value in inside[2].items() if not value.equal(after[2][name])]


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for number, block in enumerate(self.blocks):
            if number != 2 or self.step % 2:
                x = block(x)
        return x


def sometimes(inside: bool, offload: dict[str, str]) -> dict[str, torch.Tensor]:
    zero = {"stage": 3, "bucket_bytes": 1}
    config = {"batch": {}, "zero": zero, "optimizer": {"in_backward": inside}, "offload": offload}
    engine, *_ = speedlab.initialize(model=SometimesUsed(), optimizer=adamw, config=config)
    for step in range(6):
        engine.backward(engine(torch.arange(6.0) + step).square().mean())
        engine.step()
    state = engine.state_dict()
    engine.destroy()
    return state


@pytest.mark.parametrize("offload", [{}, {"optimizer": "disk", "parameters": "disk"}], ids=["here", "on disk"])
def test_parameters_that_were_not_used_are_left_alone(pool_of: PoolOf, offload: dict[str, str]) -> None:
    """Those of a whole unit, too, whose states were on their way already."""
    after, inside = (pool_of(1).run(sometimes, each, offload)[0] for each in (False, True))
    assert not [name for name, value in inside.items() if not value.equal(after[name])]


def held(inside: bool) -> dict[str, int]:
    case = Case(optimizer=adamw)
    with engine_for(case, config={**case.config(), "optimizer": {"in_backward": inside}}) as engine:
        for step in range(2):
            engine_step(engine, case, step)
        ledger = engine.ledger()
        return {"gradients": ledger.gradients, "parameters": ledger.parameters}


def test_no_gradient_stays(pool_of: PoolOf) -> None:
    after, inside = (pool_of(1).run(held, each)[0] for each in (False, True))
    assert after["gradients"] == after["parameters"]
    assert inside == {"gradients": 0, "parameters": after["parameters"]}


class Breaks(nn.Module):
    """Fails in the backward of its first layer, behind that of its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                x.register_hook(self._hook)
        return x

    def _hook(self, gradient: torch.Tensor) -> None:
        if self.fails:
            raise ArithmeticError("in backward")


def broken_off(folder: str, offload: dict[str, str]) -> str:
    model = Breaks()
    zero = {"stage": 3, "bucket_bytes": 1}
    config = {"batch": {}, "zero": zero, "optimizer": {"in_backward": True}, "offload": offload}
    engine, *_ = speedlab.initialize(model=model, optimizer=adamw, config=config)

    def one() -> None:
        engine.backward(engine(torch.ones(4)).sum())
        engine.step()

    one()
    saved, before = engine.save_checkpoint(folder), engine.state_dict()
    model.fails = True
    with pytest.raises(ArithmeticError):
        one()
    model.fails = False
    with pytest.raises(RuntimeError) as reported:
        one()
    engine.load_checkpoint(saved)
    assert not [name for name, value in engine.state_dict().items() if not value.equal(before[name])]
    one()
    engine.destroy()
    return str(reported.value)


@pytest.mark.parametrize("offload", [{}, {"optimizer": "disk", "parameters": "disk"}], ids=["here", "on disk"])
def test_a_step_that_is_broken_off_is_told_and_can_be_taken_back(
    pool_of: PoolOf, tmp_path: Any, offload: dict[str, str]
) -> None:
    text = pool_of(1).run(broken_off, str(tmp_path), offload)[0]
    assert "update of step 2 was cut off and has changed some parameters only; go back with load_checkpoint" in text


def fails_early() -> bool:
    """In the unit whose gradients come first, of which some are here already."""
    model = Breaks()
    config = {"batch": {}, "zero": {"stage": 0, "bucket_bytes": 1}, "optimizer": {"in_backward": True}}
    engine, *_ = speedlab.initialize(model=model, optimizer=adamw, config=config)
    before = engine.state_dict()
    made = engine(torch.ones(4))
    made.register_hook(model._hook)
    model.fails = True
    with pytest.raises(ArithmeticError):
        engine.backward(made.sum())
    same = all(value.equal(before[name]) for name, value in engine.state_dict().items())
    model.fails = False
    engine.backward(engine(torch.ones(4)).sum())
    return same and engine.step()


def test_a_failure_before_the_first_update_changes_nothing(pool_of: PoolOf) -> None:
    assert pool_of(1).run(fails_early) == [True]


def ends_badly() -> str:
    """The update is made, and the end of the step fails."""
    engine, *_ = speedlab.initialize(model=Breaks(), config={"batch": {}, "optimizer": {"in_backward": True}})
    engine.backward(engine(torch.ones(4)).sum())
    sums = engine._step._reduce_step

    def fail(signals: Any) -> Any:
        raise ConnectionError("no totals")

    engine._step._reduce_step = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        engine.step()
    engine._step._reduce_step = sums  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as reported:
        engine.backward(engine(torch.ones(4)).sum())
    return str(reported.value)


def test_a_step_whose_end_fails_is_not_taken_for_one_that_was_not_made(pool_of: PoolOf) -> None:
    assert "go back with load_checkpoint" in pool_of(1).run(ends_badly)[0]


def not_finite() -> str:
    engine, *_ = speedlab.initialize(model=nn.Linear(2, 2), config={"batch": {}, "optimizer": {"in_backward": True}})
    engine.backward(engine(torch.full((2,), torch.inf)).sum())
    with pytest.raises(NonFiniteError) as reported:
        engine.step()
    return str(reported.value)


def test_a_gradient_that_is_not_finite_is_told(pool_of: PoolOf) -> None:
    text = pool_of(1).run(not_finite)[0]
    assert text.startswith("step 1: the loss is not finite on rank 0; a gradient was not finite, and")
    assert "Go back with load_checkpoint" in text


def second_backward() -> str:
    engine, *_ = speedlab.initialize(model=nn.Linear(2, 2), config={"batch": {}, "optimizer": {"in_backward": True}})
    losses = [engine(torch.ones(2)).sum() for _ in range(2)]
    engine.backward(losses[0])
    with pytest.raises(RuntimeError) as reported:
        engine.backward(losses[1])
    return str(reported.value)


def test_a_second_backward_of_a_step_is_refused(pool_of: PoolOf) -> None:
    assert "in_backward has updated the parameters in this step's first backward" in pool_of(1).run(second_backward)[0]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as reported:
        speedlab.initialize(model=nn.Linear(2, 2), config={"optimizer": {"in_backward": True}, **config})
    return str(reported.value)


def test_what_cannot_be_is_refused(pool_of: PoolOf) -> None:
    config = {"clip_norm": 1.0, "batch": {"accumulation": 2, "micro_size": 1}}
    assert pool_of(2).run(refused, config)[0].splitlines() == [
        "optimizer.in_backward cannot be with clip_norm 1.0: the global norm is known when all gradients are; set "
        "clip_norm to null",
        "optimizer.in_backward cannot be with batch.accumulation 2: gradients of several micro-batches have to be "
        "summed before; set it to 1",
        "optimizer.in_backward cannot be with parallel.dp 2: what no rank used is known when the backward has "
        "ended; use one dp rank, with tp for more devices",
    ]


def read_bytes(case: Case) -> tuple[int, int]:
    """(bytes that a later step reads from disk, elements of the flats)."""
    config = {**case.config(), "optimizer": {"in_backward": True}}
    with engine_for(case, config=config) as engine:
        for step in range(2):
            engine_step(engine, case, step)
        engine.traffic.take()
        engine_step(engine, case, 2)
        return engine.traffic.take().moved_bytes["disk read"], sum(flat.padded for flat in engine.flats)


def test_gathered_parameters_are_not_read_again(pool_of: PoolOf) -> None:
    """From disk come parameters for forward and for backward, what stays between the two only once, and two moments."""
    case = Case(optimizer=adamw, stage=3, offload=(("optimizer", "disk"), ("parameters", "disk")))
    read, elements = pool_of(1).run(read_bytes, case)[0]
    assert 4 * (1 + 2) * elements < read <= 4 * (2 + 2) * elements
