"""Loss weights: the weight of each micro-batch's loss, so that a step is a mean over all counted targets.

With n counted targets in a micro-batch and N in the whole step, the weight of its mean loss is n / N. N is known only
after the last backward, but gradients are reduced before. So:

1. backward multiplies the loss by n / r. All ranks know r: the mean number of counted targets in a micro-batch of the
   first step. Checkpoints store r, so that a resumed run rounds equally.
2. The reduction at the end of a step finds N (`totals`). Then the gradient is multiplied by r · micro-batches / N,
   together with loss scale and clipping.

If all micro-batches have equally many targets, both factors are exactly 1, and the step is the mean over micro-batches.
Counts on a device stay there: only the first step syncs for them.

`targets_of` finds the counted targets in every form of batch. A target of -100 does not count.

Shapes: B sequences, T tokens.
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
"""Counted targets of a micro-batch: a number, a scalar tensor on a device, or None if unknown."""


class TargetCount(NamedTuple):
    """This rank's targets in a step, for the reduction at its end."""

    losses: list[Count]
    """Counted targets of each loss of the step."""
    added: list[float | Tensor]
    """Terms of the step's number of targets."""
    factor: float | None
    """r · micro-batches of this island, or None if the step's only loss has weight 1."""


class LossWeights:
    """The counted targets of this rank's micro-batches in the current step, and the weights of their losses."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._in_own_loop = state.config.loss_over == "tokens"
        self.is_on = self._in_own_loop
        """Whether the current step is a mean over targets."""
        self._losses: list[Count] = []
        self._added: list[float | Tensor] = []
        self._forwards: list[Count] = []
        """Counted targets in each engine call of the current micro-batch."""
        self.has_loss = False
        """Whether a loss of the current micro-batch already has a weight."""
        self._is_whole = False
        """Whether `train_batch` gave the whole step."""

    def begin_whole_step(self) -> None:
        """Start a step of `train_batch`, which has all micro-batches."""
        self.is_on = self._state.config.loss_over != "micro_batches"
        self._is_whole = True

    def ended_micro_batch(self) -> None:
        """Clear the counts of the micro-batch."""
        self._forwards.clear()
        self.has_loss = False

    def forget(self) -> None:
        """Clear the step."""
        self.ended_micro_batch()
        self._losses.clear()
        self._added.clear()
        self.is_on, self._is_whole = self._in_own_loop, False

    def saw_forward(self, count: Count) -> None:
        """Record an engine call.

        Args:
            count: Its counted targets; None if unknown.
        """
        if self.has_loss:
            self.ended_micro_batch()  # A loop that counts its backwards itself does not call `step` in between.
        self._forwards.append(count)

    def of_backward(self, declared: Count) -> Count:
        """Return the counted targets of the loss given to `backward`.

        Args:
            declared: The caller's number, or None.

        Raises:
            ValueError: If the number is needed and unknown; equal calls raise it on all ranks.
        """
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
        """Return the weights of losses, relative to a mean over micro-batches.

        Collective in the first step that is a mean over targets.

        Args:
            counts: Counted targets of each loss.
            micro_batches: Micro-batches of the whole step, over all ranks of this island.
            again: Whether losses of these micro-batches already have weights, as for a second loss of one forward.

        Raises:
            ValueError: On all ranks, if only some ranks know their counts.
        """
        if not self.is_on:
            return [1.0] * len(counts)
        # A CPU tensor costs no sync; counts on a device stay tensors.
        counts = [float(each) if isinstance(each, Tensor) and each.is_cpu else each for each in counts]
        if self._state.config.optimizer.in_backward and any(each is not None and float(each) == 0 for each in counts):
            # One micro-batch is the whole step, and backward updates at once.
            raise none_counts(self._state.global_step + 1)
        alone = self._is_alone(micro_batches)
        if self._state.counted_per_micro_batch is None and not alone:
            self._agree(counts[0])
        self.has_loss = True
        self._losses += counts
        if not again:
            self._added += [each for each in counts if each is not None]
        reference = self._state.counted_per_micro_batch
        # Weight 1 for a single loss, and without any counts.
        if alone or not reference:
            return [1.0] * len(counts)
        return [1.0 if each is None else each / reference for each in counts]

    def take(self, micro_batches: int) -> TargetCount | None:
        """Return this rank's part of the reduction at the end of a step.

        Args:
            micro_batches: Micro-batches of the whole step, over all ranks of this island.

        Returns:
            The targets; None if the step is a mean over micro-batches.
        """
        reference, alone = self._state.counted_per_micro_batch, self._is_alone(micro_batches)
        if not self.is_on or not (alone or reference):
            return None
        factor = None if alone else (reference or 0.0) * micro_batches
        return TargetCount(list(self._losses), list(self._added), factor)

    def _is_alone(self, micro_batches: int) -> bool:
        """Return whether the step has one loss, with weight 1.

        In the caller's own loop several backwards may add up.
        """
        return micro_batches == 1 and (self._is_whole or self._state.config.optimizer.in_backward)

    def _agree(self, count: Count) -> None:
        """Compute r. Collective over all ranks, and the only sync for counts on a device."""
        own = torch.tensor([0.0, 0.0, 1.0] if count is None else [1.0, float(count), 0.0], dtype=torch.float64)
        known, total, unknown = self._state.everyone.sum_scalars(own).tolist()
        if known and unknown:
            raise some_unknown(self._state.global_step + 1)
        # 0: the batches of this engine do not contain the number of targets.
        self._state.counted_per_micro_batch = max(1.0, total / known) if known else 0.0


def none_counts(step: int) -> ValueError:
    """Return the error for a step without counted targets.

    Args:
        step: Number of the step.
    """
    return ValueError(
        f"step {step}: no target of the whole step counts (all are -100), so its loss is the mean of nothing. No "
        "parameter has changed. Give at least one target that counts"
    )


def some_unknown(step: int) -> ValueError:
    """Return the error for a step with some known and some unknown numbers of targets.

    Args:
        step: Number of the step.
    """
    return ValueError(
        f"step {step}: some micro-batches say how many targets count, others do not, so their losses cannot be "
        "weighted. No parameter has changed. Give all of them labels or targets, or set loss_over to 'micro_batches'"
    )


TARGETS = ("shift_labels", "targets", "labels")
"""Keyword arguments that hold targets; the first one present is used."""


class Targets(NamedTuple):
    """The targets of a micro-batch."""

    name: str
    """The keyword argument in a dict; 'targets' for the second of (tokens, targets)."""
    values: Tensor
    """As given: (B, T) int64 in language models; in others any shape, also floats."""
    counts: Tensor
    """Bool, of the same shape: which targets count in the loss."""

    @property
    def number(self) -> Tensor:
        """Return the number of counted targets, a scalar tensor on the device of `values`."""
        return self.counts.sum()


def targets_of(model: nn.Module, batch: Any) -> Targets | None:
    """Find the targets of a micro-batch, and which of them count in the loss.

    Args:
        model: Shows whether its loss shifts `labels`: then the first label of a sequence never counts.
        batch: (tokens, targets), (tokens, targets, positions), or a dict of the model's keyword arguments.

    Returns:
        The targets; None if the batch has no tensor of targets, or if the model's loss is no mean over them.
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
    """Return the batch with one counted target if it had none, because the mean of no targets is NaN.

    The caller must multiply the loss of such a micro-batch by 0. Causes no sync.

    Args:
        batch: The micro-batch.
        targets: Its targets, from `targets_of`.
    """
    values = targets.values
    if isinstance(values, FakeTensor) or not values.numel() or values.is_floating_point():
        return batch
    number = targets.number
    if number.is_cpu and number > 0:
        return batch
    # With shifted labels, the second label of a sequence is the first that counts.
    place = (0,) * (values.dim() - 1) + (min(1, values.shape[-1] - 1) if targets.name == "labels" else 0,)
    changed = values.clone()
    changed[place] = torch.where(number > 0, values[place], 0)
    if isinstance(batch, Mapping):
        return {**batch, targets.name: changed}
    tokens, _, *positions = batch
    return (tokens, changed, *positions)
