"""A parameter that a plan for tensor parallelism forgets, and of whose gradients each rank has its part, is told before
an update is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from ranks.pool import Pool

HEAD = 4


class Scaled(nn.Module):
    """What learns between two layers has the same values for each of four heads, of which a rank has two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = nn.Linear(6, 4 * HEAD), nn.RMSNorm(HEAD), nn.Linear(4 * HEAD, 6)
        self.after, self.unused = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.norm(self.up(inputs).unflatten(-1, (-1, HEAD)))
        return self.after(self.down(heads.flatten(-2)))


class LateScaled(Scaled):
    """The head's gain has a gradient of nought as long as `down` is nought, which it is at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


CUT = {"up": "colwise", "down": "rowwise"}
WHOLE = CUT | {"norm": "replicated_with_grad_allreduce"}
STEPS = 4


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 6, generator=generator)


def engine_of(kind: type[nn.Module], plan: dict[str, str], changes: dict[str, Any]) -> Any:
    config = {"parallel": {"tp": 2}, "precision": {"dtype": "float32"}} | changes
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return speedlab.initialize(model=model, optimizer=optimizer, config=config, tp_plan=plan)[0]


def trained(kind: type[nn.Module], plan: dict[str, str], changes: dict[str, Any]) -> tuple[list[str], Any]:
    """What was said in each step, and the parameters at last."""
    reported = []
    engine = engine_of(kind, plan, changes)
    for step in range(STEPS):
        inputs, targets = batch(step)
        try:
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(F.mse_loss(engine(inputs), targets))
                engine.step()
            reported.append("")
        except (RuntimeError, ValueError) as error:
            reported.append(str(error))
    state = engine.state_dict()
    engine.destroy()
    return reported, state


def plain(kind: type[nn.Module]) -> dict[str, Tensor]:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        inputs, targets = batch(step)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


CHANGES: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 3": {"zero": {"stage": 3}},
    "two micro-batches": {"zero": {"stage": 2}, "batch": {"accumulation": 2}},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_the_plan_forgets_is_told_before_any_update(two: Pool, changes: dict[str, Any]) -> None:
    before = Scaled().state_dict()
    for reported, state in two.run(trained, Scaled, CUT, changes):
        assert len({*reported}) == 1, "no step may pass"
        assert "step 1: the gradients of norm.weight differ between the ranks of tp 2" in reported[0]
        assert "No update was made" in reported[0]
        assert "tp_plan={…, 'norm': 'replicated_with_grad_allreduce'}" in reported[0]
        torch.testing.assert_close(state, before)


def test_one_whose_gradient_is_nought_at_first_is_told_in_the_next_step(two: Pool) -> None:
    for reported, _ in two.run(trained, LateScaled, CUT, {}):
        assert reported[0] == ""
        assert "step 2: the gradients of norm.weight differ" in reported[1]


def test_in_backward_the_update_is_made_before_and_nothing_goes_on(two: Pool) -> None:
    for reported, _ in two.run(trained, Scaled, CUT, {"optimizer": {"in_backward": True}}):
        assert "step 1: the gradients of norm.weight differ" in reported[0]
        assert "optimizer.in_backward has made the update: set up the engine again" in reported[0]
        assert all("the update of step 1 was cut off" in later for later in reported[1:])


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_with_a_whole_plan_nothing_is_told(two: Pool, changes: dict[str, Any]) -> None:
    for reported, state in two.run(trained, Scaled, WHOLE, changes):
        assert reported == [""] * STEPS
        torch.testing.assert_close(state, plain(Scaled), atol=2e-6, rtol=2e-5)
