"""What `train_batch` and `evaluate` make of micro-batches: pairs, dicts, and anything that a loss function takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import speedlab
from ranks import models
from ranks.loops import Case, engine_for, engine_step
from ranks.pool import Pool
from speedlab.config import ConfigError


def from_logits(model: Any, batch: dict[str, Any]) -> Tensor:
    """A loss of a batch that no forward knows; the model is the user's own, with all that it has."""
    pair = batch["pair"]
    assert isinstance(model, models.Transformer)
    return models.cross_entropy(_through_forward(model, pair), pair[1])


def _through_forward(model: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Logits by way of the model's own call."""
    seen: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda module, args, output: seen.append(output))
    model(*pair)
    hook.remove()
    return seen[0]


def losses(case: Case, kind: str) -> list[float]:
    """Mean losses over the ranks of a few steps, then that of an evaluation."""
    loss = from_logits if kind == "function" else None
    with engine_for(case, loss=loss) as engine:
        found = []
        for step in range(case.steps):
            if kind == "calls":
                engine_step(engine, case, step)
            else:
                engine.train_batch([_as(kind, case.batch(step, engine.world.rank))])
            found.append(engine.totals.loss)
        if kind != "calls":
            found.append(engine.evaluate([_as(kind, case.batch(0, engine.world.rank))]))
        return found


def _as(kind: str, pair: tuple[Tensor, Tensor]) -> Any:
    inputs, targets = pair
    return {"pair": pair, "dict": {"inputs": inputs, "targets": targets}, "function": {"pair": pair}}[kind]


@pytest.mark.parametrize("stage", [0, 3])
def test_each_kind_of_batch_gives_the_same_steps(two: Pool, stage: int) -> None:
    case = Case(stage=stage, steps=3)
    expected, again = two.run(losses, case, "calls", timeout=60)
    assert expected == again
    evaluated = set()
    for kind in ("pair", "dict", "function"):
        for found in two.run(losses, case, kind, timeout=60):
            assert found[:-1] == pytest.approx(expected, rel=1e-6)
            evaluated.add(round(found[-1], 5))
    assert len(evaluated) == 1


def refused(case: Case) -> list[str]:
    reported = []
    with engine_for(case) as engine:
        before = engine.global_step
        for batch in (torch.zeros(2, 3), {"inputs": torch.zeros(2, 3, dtype=torch.int64)}):
            try:
                engine.train_batch([batch])
            except (ConfigError, TypeError) as error:
                reported.append(str(error))
        engine_step(engine, case, 0)
        assert engine.global_step == before + 1
    return reported


def test_a_batch_that_gives_no_loss_is_refused_and_the_next_step_is_made(two: Pool) -> None:
    for first, second in two.run(refused, Case(stage=2, steps=1)):
        assert "batch: it is a Tensor; give (tokens, targets), a dict" in first
        assert "missing 1 required positional argument: 'targets'" in second


def of_pipeline() -> str:
    try:
        speedlab.initialize(model=models.transformer(), loss=from_logits, config={"parallel": {"pp": 2}})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_loss_function_needs_the_whole_model(two: Pool) -> None:
    assert all("no rank holds the whole model" in reported for reported in two.run(of_pipeline))
