"""Learning-rate schedule, as a torch scheduler."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from speedlab.config import RunConfig, ScheduleConfig


def rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the share of the top rate: linear warm-up, then cosine or linear decay to the floor, or constant.

    Args:
        config: The `schedule` section of the configuration.
        step: Number of the step, from 0.
        steps: Number of steps of the run.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    height = 1 - progress if config.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.floor + (1 - config.floor) * height


def make_schedule(config: ScheduleConfig, optimizer: Optimizer, steps: int) -> LambdaLR:
    """Return a scheduler that multiplies each group's rate by `rate_factor`.

    Args:
        config: The `schedule` section of the configuration.
        optimizer: The torch optimizer.
        steps: Number of steps of the run.
    """
    return LambdaLR(optimizer, lambda step: rate_factor(config, step, steps))


def follow_schedule(scheduler: LambdaLR, config: RunConfig) -> None:
    """Set a scheduler to the present configuration, from the next step on; the number of steps may have changed.

    Args:
        scheduler: A scheduler from `make_schedule`.
        config: The configuration of the run.
    """
    scheduler.lr_lambdas = [lambda step: rate_factor(config.schedule, step, config.steps)] * len(scheduler.base_lrs)
    rates = [base * scheduler.lr_lambdas[0](scheduler.last_epoch) for base in scheduler.base_lrs]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
