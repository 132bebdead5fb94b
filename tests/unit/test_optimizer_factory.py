"""The user's optimizer and what a configuration says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedlab.config import ConfigError, OptimizerConfig
from speedlab.optim.factory import OptimizerFactory
from speedlab.optim.onebit_adam import OneBitAdam


class TakesAnything(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def built(kind: type[torch.optim.Optimizer] | None, **named: Any) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    recipe = OptimizerFactory(kind, [model], OptimizerConfig(**named))
    return recipe.build([[torch.zeros(6)] for _ in range(recipe.group_count)])


def test_what_the_configuration_names_reaches_any_constructor() -> None:
    assert built(TakesAnything, lr=0.5, momentum=0.25).param_groups[0]["momentum"] == 0.25
    assert built(torch.optim.SGD, lr=0.5, momentum=0.25).param_groups[0]["lr"] == 0.5


def test_what_a_class_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.betas: SGD takes no betas; it takes lr, momentum, dampening"):
        built(torch.optim.SGD, lr=0.5, betas=(0.5, 0.9))


def test_what_sends_signs_is_given_all_settings_at_once_also_as_a_class() -> None:
    for kind in (OneBitAdam, None):
        optimizer = built(kind, name="onebit_adam", lr=0.5, betas=(0.5, 0.75), freeze_step=7, variance_floor=0.0)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.75), 0.1)
        assert isinstance(optimizer, OneBitAdam)
        assert (optimizer._freeze_step, optimizer._floor) == (7, 0.0)
