"""Losses that differentiate the model before `engine.backward` does: right where parameters stay, refused in words
where nobody would gather them for it (they would be read where they were released)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import speedlab
from ranks import models
from ranks.models import WIDTH
from ranks.pool import Pool

Loss = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Descending(Block):
    """A step down its own energy, whose gradient ends where the block before it does."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x - 0.1 * slope


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def penalised(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + slope.square().mean()


def perturbed(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    return model((x + 0.1 * slope.sign()).detach()).square().mean()


def functional(model: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: model(x).square().mean())(x).square().sum()


def mapped(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x).square().mean()


def forward_mode(model: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


def plain(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


LOSSES = [penalised, perturbed, functional, mapped, forward_mode]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def points(step: int, index: int) -> Tensor:
    return models.points(step, index)[0]


def by_hand(losses: list[Loss], block: type[nn.Module]) -> dict[str, Tensor]:
    """The parameters after a step with each of the losses of both ranks' points."""
    model = models.seeded(Net, block)
    optimizer = sgd(model.parameters())
    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        torch.stack([loss(model, points(step, index)) for index in range(2)]).mean().backward()
        optimizer.step()
    return model.state_dict()


def farthest(stage: int, losses: list[Loss], block: type[nn.Module]) -> tuple[float, list[str]]:
    """How far a parameter is from where it is by hand, and what was refused; those losses count as not there."""
    config = {"zero": {"stage": stage, "bucket_bytes": 1}, "precision": "float32", "batch": {"micro_size": 6}}
    engine = speedlab.initialize(model=models.seeded(Net, block), optimizer=sgd, config=config)[0]
    made, refused = list[Loss](), list[str]()
    try:
        for loss in losses:
            try:
                engine.backward(loss(engine, points(len(made), dist.get_rank())))
            except RuntimeError as error:
                refused.append(str(error))
                continue
            engine.step()
            made.append(loss)
        expected, own = by_hand(made, block), engine.state_dict()
        return max(float((own[name] - value).abs().max()) for name, value in expected.items()), refused
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("stage", [0, 2])
def test_losses_of_gradients(two: Pool, stage: int) -> None:
    for separate, refused in two.run(farthest, stage, [*LOSSES, plain], Block, timeout=40):
        assert separate < 2e-5
        assert refused == []


def test_losses_of_gradients_of_partitioned_parameters_are_refused(two: Pool) -> None:
    """Before the order of calls is known and after; steps between them are made as if they had not been tried."""
    for separate, refused in two.run(farthest, 3, [*LOSSES, plain, plain, *LOSSES, plain], Block, timeout=40):
        assert separate < 2e-5
        assert len(refused) == 2 * len(LOSSES)
        assert all("Use a stage below 3 for such a loss" in reported for reported in refused)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_that_differentiates_itself(two: Pool, stage: int) -> None:
    """Its gradients go no further than its input, and its parameters are here meanwhile."""
    for separate, refused in two.run(farthest, stage, [plain, plain, plain], Descending, timeout=40):
        assert separate < 2e-5
        assert refused == []


def decayed(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) + 0.01 * torch.stack([p.square().sum() for p in model.module.parameters()]).sum()


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def train(engine: Any, loss: Loss) -> bool:
    engine.backward(loss(engine, points(0, 0)))
    return engine.step()


def reported_of(loss: Loss) -> str:
    """What an engine says of the loss; it trains on afterwards."""
    config = {"zero": {"stage": 3, "bucket_bytes": 1}, "precision": "float32", "batch": {"micro_size": 6}}
    engine = speedlab.initialize(model=models.seeded(Net), optimizer=sgd, config=config)[0]
    try:
        train(engine, loss)
    except (RuntimeError, FloatingPointError) as error:
        assert train(engine, plain)
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)
    return ""


@pytest.mark.parametrize(
    ("loss", "words"),
    [(decayed, "A loss that reads parameters itself"), (checkpointed, "was called inside engine.backward")],
)
def test_losses_that_are_told_why(two: Pool, loss: Loss, words: str) -> None:
    for reported in two.run(reported_of, loss, timeout=30):
        assert words in reported
