"""The pipeline of one rank: carries out the actions of a plan over the rank's stages (arXiv:1811.06965).

A step, with the numbers used below:

1. Each rank goes through its plan: forwards, backwards (whole, or the halves of zero-bubble), sends and receives. Sends
   wait for nobody; what a forward or backward needs is waited for where it is needed.
2. Every forward and every backward of a micro-batch is a pass of the stage's Zero, so partitioned parameters are
   gathered for each of them: this is ZeRO-3's price in a pipeline. Gradients stay on the rank until a stage's last
   backward. So with partitioned gradients too, a rank holds a whole gradient of its stages during a step; what stages 2
   and 3 save of it, they save between steps.
3. In the last backward of a stage its gradients are summed over the dp ranks, unit by unit; those of the root unit only
   when the rank has gone through its plan, because tied embeddings are summed between the first and the last stage
   before, and the first one ends last.

torch.distributed.pipelining gives the orders and computes the halves of a backward. Its own loop is not used: it sends
shapes as pickles, gives its messages no tags, and waits where nobody can measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from speedlab.comm import Group, Transfer
from speedlab.parallel.pipeline.partition import StageModule
from speedlab.parallel.pipeline.schedules import Action, ActionKind, forward_plan, training_plan
from speedlab.parallel.pipeline.stage import PipelineStage
from speedlab.parallel.pipeline.timeline import PhaseTimeline
from speedlab.parallel.zero import Zero
from speedlab.telemetry.records import Span

_TAGS = 2**30

_COMPUTED_BY = {
    ActionKind.RECEIVE_ACTIVATION: ActionKind.SEND_ACTIVATION,
    ActionKind.RECEIVE_GRADIENT: ActionKind.SEND_GRADIENT,
}

Timing = Callable[[str], AbstractContextManager[object]]


@dataclass
class _Step:
    """What a step is given, and what it has made so far."""

    inputs: list[Tensor]
    labels: list[Tensor]
    positions: Sequence[Tensor | None]
    shape: tuple[int, ...]
    """Of what goes between stages."""
    scales: Sequence[float | Tensor]
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By micro-batch, where the last stage is."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """What this rank has computed and not sent yet, by stage."""


class Pipeline:
    """This rank's pipeline stages, and their connections to the other pipeline ranks."""

    def __init__(
        self,
        stages: Sequence[StageModule],
        zeros: Sequence[Zero],
        group: Group,
        *,
        schedule: str,
        dtype: torch.dtype,
        own_length: Callable[[int], int] = lambda length: length,
        split_backward: bool = True,
        on_forward: Callable[[int], None] = lambda micro_batch: None,
        phase: Timing = lambda name: nullcontext(),
    ) -> None:
        """Args:
        stages: this rank's, first one first: stage s of the model is on pipeline rank s % pp. Each with its Zero.
        group: the pipeline ranks of this rank's dp and tp index. Whoever made it reconnects it.
        dtype: of activations between stages.
        own_length: tokens of an activation between stages on this rank, of sequences of so many.
        split_backward: whether zero-bubble computes the halves of a backward apart. Say no where blocks are
            recomputed in backward or compiled: there, either half would do the work of both.
        on_forward: called with the number of a micro-batch before each of its forwards in `train`.
        phase: entered as phase("forward") and phase("backward") around what a step's parts take.
        """
        self.pp, self.index = group.size, group.index
        self.schedule = schedule
        split = schedule == "zero-bubble" and split_backward
        self._stages = {
            self.index + chunk * self.pp: PipelineStage(module, zero, split=split)
            for chunk, (module, zero) in enumerate(zip(stages, zeros, strict=True))
        }
        self._count = self.pp * len(stages)
        self._group = group
        self._device, self._dtype = group.device, dtype
        self._hidden, self._own_length = stages[0].hidden, own_length
        self._on_forward, self._phase = on_forward, phase
        self._timeline = PhaseTimeline(group.device)
        for number, stage in self._stages.items():
            stage.zero.around_reductions(partial(self._timeline.span, "reduce", number))
        self._training_plan = cache(
            lambda micro_batches: training_plan(schedule, pp=self.pp, chunks=len(stages), micro_batches=micro_batches)[
                self.index
            ]
        )
        self._first_tag = self._next_tag = 0
        self._arriving: dict[tuple[ActionKind, int, int], tuple[Tensor, Transfer]] = {}
        self._leaving: dict[tuple[ActionKind, int, int], Transfer] = {}
        """Sends whose tensors must stay. On shared memory none: a message is copied when it is sent."""
        self._cut_off: list[object] = []
        """What passes that raised had under way, which peers that are still in them may need."""

    @property
    def timeline(self) -> list[Span]:
        """What this rank did in the last `train`, in order and without overlaps, from `began` on."""
        return self._timeline.spans()

    @property
    def began(self) -> float:
        """When the last `train` began, in seconds since the epoch."""
        return self._timeline.began

    def update(self) -> AbstractContextManager[object]:
        """To be entered around the optimizer's update, which belongs to the timeline of the step."""
        return self._timeline.span("optimizer")

    # ---- the step ----------------------------------------------------------------------------------------------------

    def train(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        *,
        micro_batches: int,
        scales: Sequence[float | Tensor],
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients of the sum of loss × scale are in the flats, summed over
        the dp ranks, when this returns.

        `tokens`, `targets`, `positions` of documents: (A·B, T) int64, the same on all pipeline ranks, in A =
        `micro_batches` equal parts. Target t belongs to output t, also of Hugging Face's models.
        `scales`: of each micro-batch, what its loss is multiplied with; only read where the last stage is.
        Returns the losses by micro-batch where the last stage is, [] elsewhere.
        Raises ValueError where the schedule does not exist for so many micro-batches.
        """
        plan = self._training_plan(micro_batches)
        inputs = _parts(tokens, micro_batches)
        labels = _parts(targets, micro_batches)
        places = _parts_of(positions, micro_batches)
        step = _Step(inputs, labels, places, self._activation_shape(inputs[0]), scales)
        self._take_tags(micro_batches)
        last = {a.stage: a for a in plan if a.kind in self._last_kinds(a.stage)}
        self._timeline.begin()
        try:
            for action in plan:  # 1
                self._carry_out(action, step, sync=action == last[action.stage])
            self._finish_sends()
            with self._phase("backward"):
                for stage in self._stages.values():  # 3
                    stage.zero.reduce_root()
            self._cut_off.clear()  # Every neighbour has sent something of this pass, so it has left those before.
        except Exception:
            self.abandon()
            raise
        return [step.losses[k] for k in sorted(step.losses)]

    def _carry_out(self, action: Action, step: _Step, *, sync: bool) -> None:
        """In a function of its own, whose names let go of what they stand for when it ends."""
        kind, number, k = action
        if kind in _COMPUTED_BY:
            self._receive(action, step.shape)
        elif kind in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT):
            self._send(action, step.made.pop(number), step.shape)
        elif kind is ActionKind.FORWARD:
            result = self._forward(action, step.inputs[k], step.labels[k], step.positions[k])
            if self._stages[number].module.is_last:
                step.losses[k] = result
            else:
                step.made[number] = result
        else:
            gradient = self._backward(action, scale=step.scales[k], sync=sync)  # 2
            if gradient is not None:
                step.made[number] = gradient

    def _last_kinds(self, number: int) -> tuple[ActionKind, ...]:
        """The kinds of action that make a stage's gradients."""
        first_half, second_half = self._stages[number].halves
        if second_half:
            return ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT
        return (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) if first_half else (ActionKind.BACKWARD,)

    def _forward(self, action: Action, tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        _, number, k = action
        stage = self._stages[number]
        with self._phase("forward"):
            given = tokens if stage.module.is_first else self._arrived(ActionKind.RECEIVE_ACTIVATION, number, k)
            self._on_forward(k)
            with self._timeline.span("F", number, k):
                return stage.forward(k, given, targets if stage.module.is_last else None, positions)

    def _backward(self, action: Action, *, scale: float | Tensor, sync: bool) -> Tensor | None:
        kind, number, k = action
        stage = self._stages[number]
        if kind is not ActionKind.BACKWARD and not stage.halves[kind is ActionKind.BACKWARD_WEIGHT]:
            return None  # The other half does it all.
        with self._phase("backward"):
            gradient = None
            if not stage.module.is_last and (kind is not ActionKind.BACKWARD_WEIGHT or stage.module.is_first):
                gradient = self._arrived(ActionKind.RECEIVE_GRADIENT, number, k)
            whole = kind is ActionKind.BACKWARD or not stage.split
            with self._timeline.span("B" if whole else kind.value, number, k):
                if whole:
                    return stage.backward(k, gradient, scale=scale, sync=sync)
                if kind is ActionKind.BACKWARD_INPUT:
                    return stage.backward_input(k, gradient, scale=scale)
                stage.backward_weight(k, sync=sync)
                return None

    def evaluate(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        micro_batches: int = 1,
    ) -> list[Tensor]:
        """Forwards only: where the last stage is, the losses by micro-batch, or without `targets` the logits
        (B, T, V); [] elsewhere. `tokens`, `targets`, `positions` as in `train`, of any size."""
        plan = forward_plan(pp=self.pp, chunks=len(self._stages), micro_batches=micro_batches)[self.index]
        inputs = _parts(tokens, micro_batches)
        labels = _parts_of(targets, micro_batches)
        places = _parts_of(positions, micro_batches)
        shape = self._activation_shape(inputs[0])
        self._take_tags(micro_batches)
        results: list[Tensor] = []
        made: dict[int, Tensor] = {}
        try:
            for action in plan:
                kind, number, k = action
                if kind is ActionKind.FORWARD:
                    stage = self._stages[number]
                    given = (
                        inputs[k] if stage.module.is_first else self._arrived(ActionKind.RECEIVE_ACTIVATION, number, k)
                    )
                    made[number] = stage.evaluate(given, labels[k], places[k])
                    if stage.module.is_last:
                        results.append(made.pop(number))
                elif kind in _COMPUTED_BY:
                    self._receive(action, shape)
                else:
                    self._send(action, made.pop(number), shape)
            self._finish_sends()
        except Exception:
            self.abandon()
            raise
        return results

    # ---- between ranks -----------------------------------------------------------------------------------------------

    def _activation_shape(self, tokens: Tensor) -> tuple[int, ...]:
        batch, length = tokens.shape
        return batch, self._own_length(length), self._hidden

    def _tag(self, sent: ActionKind, stage: int, micro_batch: int) -> int:
        """The same on both sides, and another one in every step."""
        way = 0 if sent is ActionKind.SEND_ACTIVATION else 1
        return (self._first_tag + (2 * micro_batch + way) * self._count + stage) % _TAGS

    def _send(self, action: Action, tensor: Tensor, shape: tuple[int, ...]) -> None:
        kind, number, k = action
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise RuntimeError(
                f"pipeline stage {number} made {tuple(tensor.shape)} {tensor.dtype}, but {shape} {self._dtype} goes "
                f"between pipeline stages; the model must keep the shape and the dtype of what its blocks are given"
            )
        peer = (number + (1 if kind is ActionKind.SEND_ACTIVATION else -1)) % self.pp
        with self._timeline.span("send", number, k):
            self._leaving[kind, number, k] = self._group.send(tensor, peer, self._tag(kind, number, k))
        self._leaving = {action: pending for action, pending in self._leaving.items() if not pending.over}

    def _receive(self, action: Action, shape: tuple[int, ...]) -> None:
        """Make a place for what another rank sends, and go on."""
        kind, number, k = action
        sender = number + (-1 if kind is ActionKind.RECEIVE_ACTIVATION else 1)
        place = torch.empty(shape, dtype=self._dtype, device=self._device)
        pending = self._group.receive(place, sender % self.pp, self._tag(_COMPUTED_BY[kind], sender, k))
        self._arriving[action.kind, number, k] = place, pending

    def _arrived(self, kind: ActionKind, number: int, micro_batch: int) -> Tensor:
        """Wait for what was sent to this stage."""
        place, pending = self._arriving.pop((kind, number, micro_batch))
        with self._timeline.span("wait", number, micro_batch):
            pending.wait()
            if kind is ActionKind.RECEIVE_GRADIENT:
                # Its gradient is here, so the activation has arrived; not every backend says so by itself.
                sent = self._leaving.pop((ActionKind.SEND_ACTIVATION, number, micro_batch), None)
                if sent is not None:
                    sent.wait()
        return place

    def _take_tags(self, micro_batches: int) -> None:
        """Tags of this step's own, however it ends: what a broken one has left is never taken for another's."""
        self._first_tag = self._next_tag
        self._next_tag = (self._first_tag + 2 * self._count * micro_batches) % _TAGS

    def _finish_sends(self) -> None:
        with self._phase("backward"), self._timeline.span("send"):
            for pending in self._leaving.values():
                pending.wait()
        self._leaving.clear()

    def abandon(self) -> None:
        """After an exception: drop what is under way and all gradients of the step, on this rank.

        Messages that were started are let go on: gloo sends from this rank's memory when the receiver asks for it, and
        a connection on which something comes that nobody has a place for any more reads nothing else."""
        self._cut_off += [*self._arriving.values(), *self._leaving.values()]
        self._arriving.clear()
        self._leaving.clear()
        for stage in self._stages.values():
            stage.zero.abandon_pass()
            stage.forget()

    def reconnect(self) -> None:
        """The group and the Zeros have the present world's connections; a step that was cut off is forgotten."""
        self._arriving.clear()
        self._leaving.clear()
        self._cut_off.clear()
        self._first_tag = self._next_tag = 0
        for stage in self._stages.values():
            stage.forget()


def _parts(whole: Tensor, count: int) -> list[Tensor]:
    if len(whole) % count:
        raise ValueError(f"{len(whole)} sequences do not divide by {count} micro-batches")
    return list(whole.split(len(whole) // count))


def _parts_of(whole: Tensor | None, count: int) -> Sequence[Tensor | None]:
    return [None] * count if whole is None else _parts(whole, count)
