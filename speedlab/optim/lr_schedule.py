"""The learning rate over the steps, as a torch scheduler."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from speedlab.config import RunConfig, ScheduleConfig


def rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Share of the top rate that step `step` (from 0) of `steps` uses: linear warm-up, then a cosine or a line
    to the floor, or constant."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    height = 1 - progress if config.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.floor + (1 - config.floor) * height


def make_schedule(config: ScheduleConfig, optimizer: Optimizer, steps: int) -> LambdaLR:
    """A scheduler that multiplies each group's rate by `rate_factor`."""
    return LambdaLR(optimizer, lambda step: rate_factor(config, step, steps))


def follow_schedule(scheduler: LambdaLR, config: RunConfig) -> None:
    """Let a run's rate be that of its present configuration, whose number of steps may have changed, from the next step
    on. It changes nothing where it is."""
    scheduler.lr_lambdas = [lambda step: rate_factor(config.schedule, step, config.steps)] * len(scheduler.base_lrs)
    rates = [base * scheduler.lr_lambdas[0](scheduler.last_epoch) for base in scheduler.base_lrs]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
