"""Where optimizers keep their count of updates: a kernel that reads it on a GPU fails when it is on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from speedlab.optim.fused import FusedAdamW, step_device


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_torchs_own_optimizers_keep_their_count_where_we_say(options, device) -> None:
    with FakeTensorMode():
        parameter = torch.empty(4, device=device)
        parameter.grad = torch.empty(4, device=device)
        optimizer = torch.optim.AdamW([parameter], **options)
        (group,) = optimizer.param_groups
        lists: list[list[Any]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)
        assert optimizer.state[parameter]["step"].device == step_device(optimizer, group, parameter)
        assert step_device(optimizer, group, parameter).type == (device if options else "cpu")


def test_our_own_keeps_it_on_the_host_whatever_its_groups_say() -> None:
    with FakeTensorMode():
        parameter = torch.empty(4, device="cuda")
        optimizer = FusedAdamW([parameter])
        (group,) = optimizer.param_groups
        for options in ({}, {"fused": True}):
            assert step_device(optimizer, group | options, parameter) == torch.device("cpu")
