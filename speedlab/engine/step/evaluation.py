"""The mean loss over all ranks' micro-batches, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from speedlab.engine.step.drivers import Batch
from speedlab.engine.step.same_data import SAME, SameData
from speedlab.parallel.mesh import Mesh


def mean_loss(
    batches: Iterable[Batch], loss_of: Callable[[Batch], list[Tensor]], *, modules: Sequence[nn.Module], mesh: Mesh
) -> float:
    """Of what `loss_of` gives for each of this rank's micro-batches ([] where another rank has it); `modules` are in
    their evaluation mode meanwhile. Collective.

    Raises ValueError where ranks of one data index were given different micro-batches, or nobody any."""
    modes = [(module, module.training) for part in modules for module in part.modules()]
    losses: list[Tensor] = []
    data = SameData(mesh, compare_first=False)
    try:
        for part in modules:
            part.eval()
        for batch in batches:
            data.look(batch)
            losses += loss_of(batch)
    finally:
        for module, mode in modes:
            module.training = mode
    counted = losses if mesh.counts_losses else []
    vector = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    if counted:
        vector[0], vector[1] = torch.stack([loss.double() for loss in counted]).sum(), len(counted)
    difference = data.take()
    if difference is not None:
        vector[2] = difference
    loss_sum, count, differing = mesh.everyone.sum_scalars(vector.cpu()).tolist()  # The one wait for the device.
    if difference is not None and differing != SAME:
        raise data.error()
    if not count:
        raise ValueError("evaluate: no micro-batch was given; give at least one")
    return loss_sum / count
