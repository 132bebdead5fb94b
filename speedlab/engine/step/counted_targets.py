"""Which targets of a micro-batch count in its loss, for every form of batch.

A target of -100 does not count. The loss of a micro-batch is the mean over the targets that count, so a step over
several micro-batches needs their numbers to be the mean over all targets.

B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from speedlab.models.documents import IGNORED
from speedlab.models.labels import Labels, label_rule

TARGETS = ("shift_labels", "targets", "labels")
"""Names of keyword arguments that hold targets; the first one that is given counts."""


class Targets(NamedTuple):
    """The targets of a micro-batch."""

    name: str
    """The keyword argument that holds them in a dict; 'targets' for the second of (tokens, targets)."""
    values: Tensor
    """As they were given: (B, T) int64 of language models; of any shape, also floats, of others."""
    counts: Tensor
    """Bool, of the same shape: which of them count in the loss."""

    @property
    def number(self) -> Tensor:
        """How many count: a scalar on the device of `values`."""
        return self.counts.sum()


def targets_of(model: nn.Module, batch: Any) -> Targets | None:
    """Find the targets of a micro-batch, and which of them count in the loss.

    Args:
        model: tells whether its own loss moves `labels` by one place: the first label of a sequence then never counts.
        batch: (tokens, targets), (tokens, targets, positions), or a dict of the model's keyword arguments.

    Returns None if the batch has no tensor of targets, or if the model's loss is no mean over them.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if batch.get(name) is not None), None)
        values = None if name is None else batch[name]
    elif isinstance(batch, list | tuple) and len(batch) in (2, 3):
        name, values = "targets", batch[1]
    else:
        return None
    if name is None or not isinstance(values, Tensor) or not values.dim():
        return None
    moved = False
    if name == "labels":
        rule = label_rule(model)
        if rule is Labels.UNKNOWN:
            return None
        moved = rule is not Labels.ALIGNED and values.dim() > 1
    if values.is_floating_point() or values.dtype == torch.bool:
        return Targets(name, values, torch.ones_like(values, dtype=torch.bool))
    counts = values != IGNORED
    if moved:
        counts[..., 0] = False
    return Targets(name, values, counts)


def with_one_counted(batch: Any, targets: Targets) -> Any:
    """The same batch, in which one target counts if none did: the mean of no targets is not a number.

    The loss of such a micro-batch is to be multiplied by 0. Does not wait for a device.
    """
    values = targets.values
    if isinstance(values, FakeTensor) or not values.numel() or values.is_floating_point():
        return batch
    number = targets.number
    if number.is_cpu and number > 0:
        return batch
    # The second label of a sequence is the first that counts where labels are moved by one place.
    place = (0,) * (values.dim() - 1) + (min(1, values.shape[-1] - 1) if targets.name == "labels" else 0,)
    changed = values.clone()
    changed[place] = torch.where(number > 0, values[place], 0)
    if isinstance(batch, Mapping):
        return {**batch, targets.name: changed}
    tokens, _, *positions = batch
    return (tokens, changed, *positions)
