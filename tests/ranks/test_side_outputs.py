"""Tensors that leave a block by other paths than its output: gradients are those of plain torch at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import speedlab
from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.random_graphs import (
    ALLOWED,
    ROWS,
    STEPS,
    WIDTH,
    Scale,
    ScaleByView,
    data,
    differences,
    filled_and_released,
    graph,
    net,
)
from speedlab.parallel.zero.flat_param import FlatParam


@contextmanager
def engine_of(module: nn.Module, stage: int, **more: Any) -> Iterator[Any]:
    config = {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "precision": {"dtype": "float32"},
        "batch": {"micro_size": ROWS},
        **more,
    }
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    engine, *_ = speedlab.initialize(model=module, optimizer=optimizer, config=config)
    try:
        yield engine
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize(("backend", "count", "stages"), [("shared", 30, [0, 3]), ("gloo", 10, [3])])
def test_random_graphs(pool_of: PoolOf, backend: str, count: int, stages: list[int]) -> None:
    wrong = pool_of(2, backend).run(differences, list(range(count)), stages, timeout=120)
    assert not wrong[0], "\n".join(wrong[0])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "backend"), [(1, "shared"), (2, "shared"), (2, "gloo")])
def test_many_random_graphs(pool_of: PoolOf, size: int, backend: str) -> None:
    for first in range(1000, 1300, 50):
        wrong = pool_of(size, backend).run(differences, list(range(first, first + 50)), [0, 1, 2, 3], timeout=600)
        assert not wrong[0], "\n".join(wrong[0])


# ---- single paths ----------------------------------------------------------------------------------------------------


def a_loss_of_before_a_step(stage: int) -> list[str]:
    """What engine.backward says of a loss that left by a hook before the parameters changed."""
    module, kept = net(graph(0), 0), list[torch.Tensor]()
    hook = module.head.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with engine_of(module, stage) as engine:
        engine(data(graph(0), 0, 0))
        engine.backward(engine(data(graph(0), 0, 0)))
        loss = kept[0].square().mean()
        engine.step()
        hook.remove()
        with pytest.raises(RuntimeError) as refused:
            engine.backward(loss)
    return [str(refused.value)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_side_output_of_before_a_step_is_refused(two: Pool, stage: int) -> None:
    for (message,) in two.run(a_loss_of_before_a_step, stage):
        assert "modified by an inplace operation" in message or "the parameters were changed" in message


class Whole(nn.Module):
    """A block whose forward is a module of the caller's: compiled, or checkpointed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.down(torch.tanh(self.up(x)))


def around_the_module(way: str, stage: int) -> tuple[list[float], list[float]]:
    """Losses of a plain loop and of an engine, whose module is called within torch's checkpoint, or with the caller's
    own hooks on saved tensors inside a block."""

    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        if way == "checkpoint":
            return checkpoint(module, x, use_reentrant=False).square().mean()
        return module(x).square().mean()

    def losses(module: Any, whole: nn.Module, step: Callable[[torch.Tensor], None]) -> list[float]:
        found = []
        if way == "hooks inside":
            whole.blocks[1].forward = partial(in_hooks, whole.blocks[1].forward)  # type: ignore[union-attr]
        for number in range(STEPS):
            loss = call(module, data(graph(0), number, 0))
            step(loss)
            found.append(loss.item())
        return found

    torch.manual_seed(3)
    plain, module = Whole(), Whole()
    module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)

    def plain_step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    wanted = losses(plain, plain, plain_step)
    with engine_of(module, stage) as engine:

        def engine_step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return wanted, losses(engine.module, module, engine_step)


def in_hooks(forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return forward(x)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", ["checkpoint", "hooks inside"])
def test_the_callers_own_hooks_see_every_tensor(two: Pool, way: str, stage: int) -> None:
    for wanted, found in two.run(around_the_module, way, stage):
        assert found == pytest.approx(wanted, abs=ALLOWED)


class Custom(Pair):
    """A block that calls itself, or that has a custom autograd function, which keeps a parameter as an attribute."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.stored = way, torch.zeros(())

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        match self.way:
            case "recursion":
                y = super().forward(self(x, again=False) if again else x)
            case "attribute":
                y = super().forward(x)
                self.stored = Scale.apply(y, self.scale.view(-1)).sum()
            case "view":
                y = super().forward(x)
                self.stored = ScaleByView.apply(y, self.scale).sum()
            case "detached":  # Its backward comes after all gradients of the block.
                y = super().forward(Scale.apply(x, self.scale.detach()))
            case _:  # The same for a tensor that autograd saves, below the hooks of torch.utils.checkpoint.
                y = super().forward(x + 0.1 * torch.tanh(x @ self.up.weight.detach().T) @ self.up.weight.detach())
        return y


def with_custom_functions(way: str) -> tuple[list[float], list[float]]:
    """Losses of a plain loop over one micro-batch, and of an engine at stage 3."""

    def losses(module: Any, blocks: nn.ModuleList, step: Callable[[torch.Tensor], None]) -> list[float]:
        found = []
        for number in range(STEPS):
            output = module(data(graph(0), number, 0)).square().mean()
            loss = output + sum(0.1 * block.stored for block in blocks)  # type: ignore[misc]  # a tensor
            step(loss)
            found.append(loss.item())
        return found

    torch.manual_seed(3)
    plain, module = Whole(), Whole()
    plain.blocks = nn.ModuleList(Custom(way) for _ in range(4))
    module.blocks = copy.deepcopy(plain.blocks)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)

    def plain_step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    wanted = losses(plain, plain.blocks, plain_step)
    checkpointing = "block" if way == "checkpoint" else "none"
    released = patch.object(FlatParam, "release", filled_and_released)
    with released, engine_of(module, 3, activation={"checkpointing": checkpointing}) as engine:

        def engine_step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return wanted, losses(engine, module.blocks, engine_step)


@pytest.mark.parametrize("way", ["recursion", "attribute", "view", "detached", "checkpoint"])
def test_late_reads_find_unsharded_parameters(pool_of: PoolOf, way: str) -> None:
    for wanted, found in pool_of(2, "gloo").run(with_custom_functions, way):
        assert found == pytest.approx(wanted, abs=ALLOWED)


def gradients_after_destroy() -> str:
    """What a loss says whose engine is gone, and with it the partitioned parameters of its forward."""
    module = net(graph(0), 0)
    with engine_of(module, 3) as engine:
        output = engine(data(graph(0), 0, 0))
    with pytest.raises(RuntimeError) as refused:
        output.backward()
    return str(refused.value)


def test_a_graph_that_outlives_its_engine_is_refused(two: Pool) -> None:
    for message in two.run(gradients_after_destroy):
        assert "destroyed" in message or "outside engine.backward" in message
