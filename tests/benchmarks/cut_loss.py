"""torch's cross-entropy over full logits, also where each rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

LossOf = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of logits (B, T, V) and targets (B, T)."""


def loss_over(mesh: DeviceMesh | None) -> LossOf:
    """Mean cross-entropy of logits, which are of this rank's share of the vocabulary where there is a `mesh`; then
    inside `loss_parallel`, the backward too."""

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float().flatten(0, 1)
        if mesh is None:
            return F.cross_entropy(logits, targets.flatten())
        loss = F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(-1)]), targets.flatten())
        assert isinstance(loss, DTensor)
        return loss.to_local()

    return loss_of


def loss_of_head(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same of what the head gets, `x` (B, T, C), and the rank's rows of its `weight` (V / tp, C), by the operations
    that a head under ColwiseParallel takes."""
    loss_of = loss_over(mesh)

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        return loss_of(F.linear(x, weight), targets)

    return loss
