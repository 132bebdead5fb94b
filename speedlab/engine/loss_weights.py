"""What the loss of each micro-batch weighs in a step that is a mean over all targets that count.

With n targets that count in a micro-batch and N in the whole step, the mean loss of the micro-batch weighs n / N. N is
known when the last backward has ended, and gradients are summed before. So

1. backward multiplies the loss with n / r, relative to a number r that all ranks know: how many targets counted in a
   micro-batch of the first step, on average over the ranks. Checkpoints keep r, so that a resumed run rounds alike.
2. The reduction that ends a step finds N (`totals`). The gradient is then multiplied with r · micro-batches / N,
   together with the factors of the loss scale and of clipping.

If all micro-batches have equally many targets, both factors are exactly 1: the step is the mean over micro-batches.
Counts of targets that are on a device stay there: no step waits for them but the first.

Which targets of a micro-batch count in its loss, for every form of batch.

A target of -100 does not count. The loss of a micro-batch is the mean over the targets that count, so a step over
several micro-batches needs their numbers to be the mean over all targets.

B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from speedlab.engine.state import TrainingState
from speedlab.models.labels import Labels, label_rule
from speedlab.models.packing import IGNORED

Count = float | Tensor | None
"""How many targets of a micro-batch count: a number, a scalar on a device, or None if nothing says so."""


class TargetCount(NamedTuple):
    """The targets of this rank in a step, for the reduction that ends it."""

    losses: list[Count]
    """How many targets each of the step's losses is the mean of."""
    added: list[float | Tensor]
    """What adds up to the number of targets of the step."""
    factor: float | None
    """r · micro-batches of this island, or None if the only loss of a step weighs 1."""


class LossWeights:
    """How many targets count in this rank's micro-batches of the present step, and what their losses weigh."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._in_own_loop = state.config.loss_over == "tokens"
        self.is_on = self._in_own_loop
        """Whether the present step is a mean over targets."""
        self._losses: list[Count] = []
        self._added: list[float | Tensor] = []
        self._forwards: list[Count] = []
        """What the engine's calls of the present micro-batch were given."""
        self.has_loss = False
        """Whether a loss of the present micro-batch has its weight."""
        self._is_whole = False
        """Whether the step is given as a whole."""

    def begin_whole_step(self) -> None:
        """`train_batch` has all micro-batches of this step."""
        self.is_on = self._state.config.loss_over != "micro_batches"
        self._is_whole = True

    def ended_micro_batch(self) -> None:
        self._forwards.clear()
        self.has_loss = False

    def forget(self) -> None:
        """The step is over."""
        self.ended_micro_batch()
        self._losses.clear()
        self._added.clear()
        self.is_on, self._is_whole = self._in_own_loop, False

    def saw_forward(self, count: Count) -> None:
        """The engine was called with so many targets that count."""
        if self.has_loss:
            self.ended_micro_batch()  # A loop that counts its backwards by itself calls no `step` in between.
        self._forwards.append(count)

    def of_backward(self, declared: Count) -> Count:
        """How many targets the loss is the mean of that `backward` was given. `declared`: as its caller says.

        Raises ValueError if nobody says it; the same calls raise it on all ranks."""
        if declared is not None or not self.is_on:
            return declared
        if len(self._forwards) == 1 and self._forwards[0] is not None:
            return self._forwards[0]
        calls = len(self._forwards)
        found = f"{calls} calls of the engine came before it" if calls != 1 else "its forward was given no targets"
        raise ValueError(
            f"backward: loss_over is 'tokens', and {found}, so the number of targets of this loss is not known. Call "
            "the engine once with labels or targets, or give engine.backward(loss, counted_targets=n)"
        )

    def weigh(self, counts: Sequence[Count], *, micro_batches: int, again: bool = False) -> list[float | Tensor]:
        """What losses of micro-batches are multiplied with, besides the factor of a mean over micro-batches.

        Collective in the first step that is a mean over targets.

        Args:
            counts: how many targets each loss is the mean of.
            micro_batches: how many there are in the whole step, over all ranks of this island.
            again: whether losses of these micro-batches have weights already, as a second loss of one forward has.

        Raises ValueError, on all ranks, if some ranks know their counts and others do not.
        """
        if not self.is_on:
            return [1.0] * len(counts)
        counts = [float(each) if isinstance(each, Tensor) and each.is_cpu else each for each in counts]
        if self._state.config.optimizer.in_backward and any(each is not None and float(each) == 0 for each in counts):
            raise none_counts(self._state.global_step + 1)  # One micro-batch is the whole step, and updates at once.
        alone = self._is_alone(micro_batches)
        if self._state.counted_per_micro_batch is None and not alone:
            self._agree(counts[0])
        self.has_loss = True
        self._losses += counts
        if not again:
            self._added += [each for each in counts if each is not None]
        reference = self._state.counted_per_micro_batch
        if alone or not reference:
            return [1.0] * len(counts)
        return [1.0 if each is None else each / reference for each in counts]

    def take(self, micro_batches: int) -> TargetCount | None:
        """What the reduction that ends the step takes; None if the step is a mean over micro-batches."""
        reference, alone = self._state.counted_per_micro_batch, self._is_alone(micro_batches)
        if not self.is_on or not (alone or reference):
            return None
        factor = None if alone else (reference or 0.0) * micro_batches
        return TargetCount(list(self._losses), list(self._added), factor)

    def _is_alone(self, micro_batches: int) -> bool:
        """Whether the step has one loss, which weighs 1. In a loop of one's own several backwards may add up."""
        return micro_batches == 1 and (self._is_whole or self._state.config.optimizer.in_backward)

    def _agree(self, count: Count) -> None:
        """Find r. Collective over all ranks, and the only time that a step waits for counts on a device."""
        own = torch.tensor([0.0, 0.0, 1.0] if count is None else [1.0, float(count), 0.0], dtype=torch.float64)
        known, total, unknown = self._state.everyone.sum_scalars(own).tolist()
        if known and unknown:
            raise some_unknown(self._state.global_step + 1)
        # 0: nothing says how many targets count, in this engine's batches.
        self._state.counted_per_micro_batch = max(1.0, total / known) if known else 0.0


def none_counts(step: int) -> ValueError:
    return ValueError(
        f"step {step}: no target of the whole step counts (all are -100), so its loss is the mean of nothing. No "
        "parameter has changed. Give at least one target that counts"
    )


def some_unknown(step: int) -> ValueError:
    return ValueError(
        f"step {step}: some micro-batches say how many targets count, others do not, so their losses cannot be "
        "weighted. No parameter has changed. Give all of them labels or targets, or set loss_over to 'micro_batches'"
    )


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
