"""The learning rate of a run whose number of steps changes while it is on."""

from __future__ import annotations

import pytest
import torch

from speedlab.config import RunConfig
from speedlab.optim.lr_schedule import follow_schedule, make_schedule


def rates(steps: int, count: int, longer: int | None = None) -> list[float]:
    """The rates of `count` steps of a run of `steps`, which from its end on is a run of `longer`."""
    config = RunConfig(steps=steps, schedule={"warmup_steps": 2})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make_schedule(config.schedule, optimizer, steps)
    seen = []
    for step in range(count):
        if longer is not None and step == steps:
            follow_schedule(scheduler, config.replace(steps=longer))
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("longer", [24, 48])
def test_a_run_made_longer_has_the_rates_of_a_run_of_that_length_from_then_on(longer: int) -> None:
    assert rates(12, longer, longer)[12:] == rates(longer, longer)[12:]
    assert rates(12, 24, longer)[:12] == rates(12, 12)
