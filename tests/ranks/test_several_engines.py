"""Engines of the same ranks, beside one another and one behind the other: each trains as if it were alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.loops import Case, engine_for, engine_step, sgd
from ranks.pool import Pool, RanksFailed

CASE = Case(stage=3, bucket_bytes=1)
"""Blocks come one by one, each while the one before it computes."""

# ---- a pass that nobody ends -----------------------------------------------------------------------------------------


def a_failed_look(engine: Any) -> None:
    """The module fails in a forward of its own, with a gather ahead."""
    hook = engine.module.blocks[0].up.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ArithmeticError):
        engine.module(*CASE.batch(0, 0))
    hook.remove()


def fail(module: nn.Module, inputs: object) -> None:
    raise ArithmeticError


def a_part_alone(engine: Any) -> None:
    with torch.no_grad():
        engine.module.embedding(CASE.batch(0, 0)[0])


def losses_after(case: Case, leave_open: Callable[[Any], None], end: Callable[[Any], None]) -> list[float]:
    """The losses of an engine that comes after one whose pass was left open."""
    earlier = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    for step in range(2):  # From then on units are gathered ahead.
        engine_step(earlier, case, step)
    leave_open(earlier)
    end(earlier)
    del earlier
    return losses_of(case)


def losses_of(case: Case) -> list[float]:
    with engine_for(case) as engine:
        return [engine_step(engine, case, step) for step in range(2)]


def drop(engine: Any) -> None: ...


def destroy(engine: Any) -> None:
    engine.destroy()


def forget(engine: Any) -> None:
    engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("end", [forget, destroy, drop])
@pytest.mark.parametrize("leave_open", [a_failed_look, a_part_alone])
def test_an_engine_behind_an_open_pass(two: Pool, leave_open: Any, end: Any) -> None:
    """Where a peer's parameters were on their way, its next engine would wait for them to be read."""
    assert two.run(losses_after, CASE, leave_open, end, timeout=30) == two.run(losses_of, CASE, timeout=30)


def compare_losses(case: Case, leave_open: Callable[[Any], None]) -> tuple[list[float], list[float]]:
    """The losses of an engine, and of another one that trains while a pass of the first is open."""
    with engine_for(case) as one, engine_for(case) as other:
        losses = [engine_step(one, case, step) for step in range(2)]
        leave_open(one)
        alongside = [engine_step(other, case, step) for step in range(2)]
        return [*losses, engine_step(one, case, 2)], [*alongside, engine_step(other, case, 2)]


@pytest.mark.parametrize("leave_open", [a_failed_look, a_part_alone])
def test_an_engine_beside_an_open_pass(two: Pool, leave_open: Any) -> None:
    for here in two.run(compare_losses, CASE, leave_open, timeout=30):
        assert here[0] == here[1]


def by_its_parts(model: Any, batch: Any) -> Tensor:
    """As the model's forward, which is not called."""
    return models.cross_entropy(model.logits(batch[0]), batch[1])


def trained_by_parts(case: Case, offloaded: bool) -> list[float]:
    """The norms of steps whose loss is made below the root, where another engine trains before backward."""
    if offloaded:
        case = dataclasses.replace(case, offload=(("parameters", "host"), ("optimizer", "host")))
    with engine_for(case) as one, engine_for(case) as other:
        norms = []
        for step in range(4):
            loss = by_its_parts(one.module, case.batch(step, dist.get_rank()))
            engine_step(other, case, step)
            one.backward(loss)
            one.step()
            norms += [one.global_grad_norm, other.global_grad_norm]
    return norms


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "away"])
def test_a_loss_from_below_the_root_with_another_engines_step_before_its_backward(two: Pool, offloaded: bool) -> None:
    """What was gathered for its forward is gone then, of the root's, too."""
    for norms in two.run(trained_by_parts, CASE, offloaded, timeout=30):
        assert norms[::2] == pytest.approx(norms[1::2], rel=1e-6)


# ---- a generator and its critic --------------------------------------------------------------------------------------


def player(seed: int) -> nn.Module:
    return models.seeded(Player, seed=seed)


class Player(nn.Module):
    """(B, C) → (B, C)"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(models.WIDTH, 21), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(21, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x[:, : models.WIDTH])
        return self.last(x)


def critics_loss(critic: Any, generator: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = generator(x)
    return F.softplus(-critic(x)).mean() + F.softplus(critic(made)).mean()


def generators_loss(critic: Any, generator: Any, x: Tensor) -> Tensor:
    return F.softplus(-critic(generator(x))).mean()


def share_of(step: int, rank: int) -> Tensor:
    return models.points(step, rank)[0]


def played(stage: int, frozen: bool) -> list[Tensor]:
    """The parameters of both after three steps."""
    config = {"clip_norm": None, "zero": {"stage": stage, "bucket_bytes": 1}, "batch": {"micro_size": 6}}
    config |= {"precision": {"dtype": "float32"}}
    generator, critic = (speedlab.initialize(model=player(seed), optimizer=sgd, config=config)[0] for seed in (1, 2))
    for step in range(3):
        x = share_of(step, dist.get_rank())
        critic.backward(critics_loss(critic, generator, x))
        critic.step()
        critic.module.requires_grad_(not frozen)
        generator.backward(generators_loss(critic, generator, x))
        generator.step()
        critic.module.requires_grad_(True)
    found = [each.clone() for engine in (generator, critic) for each in engine.state_dict().values()]
    generator.destroy()
    critic.destroy()
    return found


def played_plainly(ranks: int) -> list[Tensor]:
    generator, critic = player(1), player(2)
    optimizers = {each: sgd(each.parameters()) for each in (generator, critic)}
    for step in range(3):
        for who, loss in ((critic, critics_loss), (generator, generators_loss)):
            for rank in range(ranks):
                (loss(critic, generator, share_of(step, rank)) / ranks).backward()
            optimizers[who].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
    return [each.detach() for module in (generator, critic) for each in module.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_through_another_engines_frozen_module(two: Pool, stage: int) -> None:
    for found in two.run(played, stage, True, timeout=30):
        torch.testing.assert_close(found, played_plainly(2), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("stage", "frozen"), [(1, False), (3, True)])
def test_a_loss_that_would_give_another_engine_gradients_is_refused(two: Pool, stage: int, frozen: bool) -> None:
    said = "requires_grad_\\(False\\)" if stage < 3 else "gradient was asked for outside engine.backward"
    with pytest.raises(RanksFailed, match=said):
        two.run(played, stage, frozen, timeout=30)
