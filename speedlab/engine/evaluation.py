"""Evaluation: the mean loss over all ranks' micro-batches, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from speedlab.engine.consistency_checks import SAME, DataConsistencyCheck
from speedlab.engine.drivers import Batch
from speedlab.engine.loss_weights import Count
from speedlab.parallel.mesh import Mesh


def mean_loss(
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], list[tuple[Tensor, Count]]],
    *,
    modules: Sequence[nn.Module],
    mesh: Mesh,
    over_targets: bool,
) -> float:
    """Return the mean loss over all ranks. Collective.

    Args:
        batches: Micro-batches of this rank.
        loss_of: Returns [(loss, counted targets)] of a micro-batch; [] if another rank has the loss.
        modules: The model parts, in evaluation mode meanwhile.
        mesh: The process groups.
        over_targets: Average over counted targets, if their number is known; otherwise over micro-batches.

    Raises:
        ValueError: If ranks of one data index got different micro-batches, without any micro-batch or counted target,
            and if only some numbers of targets are known.
    """
    # Per submodule, because a user may keep some of them in evaluation mode.
    modes = [(module, module.training) for part in modules for module in part.modules()]
    found: list[tuple[Tensor, Count]] = []
    data = DataConsistencyCheck(mesh, compare_first=False)
    try:
        for part in modules:
            part.eval()
        for batch in batches:
            data.look(batch)
            found += loss_of(batch)
    finally:
        for module, mode in modes:
            module.training = mode
    vector = torch.zeros(5, dtype=torch.float64, device=mesh.device)
    for loss, count in found if mesh.counts_losses else []:
        known = over_targets and count is not None
        weight = count if known and count is not None else 1.0
        # A host count becomes a number, to avoid a copy; a device count stays a tensor, to avoid a sync.
        weight = float(weight) if not isinstance(weight, Tensor) or weight.is_cpu else weight.double()
        vector[0] += loss.double() * weight
        vector[1] += weight
        vector[2] += known
        vector[3] += 1
    difference = data.take()
    if difference is not None:
        vector[4] = difference
    loss_sum, total, counted, every, differing = mesh.everyone.sum_scalars(vector.cpu()).tolist()  # The only sync.
    if difference is not None and differing != SAME:
        raise data.error()
    if not every:
        raise ValueError("evaluate: no micro-batch was given; give at least one")
    if 0 < counted < every:
        raise ValueError(
            "evaluate: some micro-batches say how many targets count, others do not; give all of them labels or "
            "targets, or set loss_over to 'micro_batches'"
        )
    if not total:
        raise ValueError("evaluate: no target counts (all are -100), so the loss is the mean of nothing; give some")
    return loss_sum / total
