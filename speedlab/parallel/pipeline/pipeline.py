"""The pipeline of one rank: runs the actions of a plan on the rank's stages (arXiv:1811.06965).

A step, with the numbers that the code uses:

1. Each rank runs its plan: forwards, backwards (complete, or the halves of zero-bubble), sends and receives. Sends do
   not wait. A forward or backward waits for its input only when it needs the input.
2. Each forward and each backward of a micro-batch is a pass of the stage's Zero. So partitioned parameters are
   gathered for each micro-batch: the price of ZeRO-3 in a pipeline. Gradients stay local until the last backward of a
   stage. So a rank holds full gradients of its stages during a step, even if gradients are partitioned. Stages 2 and 3
   save gradient memory only between steps.
3. The last backward of a stage reduces its gradients over the dp ranks, unit by unit. The root unit waits until the
   end of the plan: tied embeddings are first summed between the first and the last stage, and the first stage ends
   last.

torch.distributed.pipelining provides the orders and the halves of a backward. We do not use its loop: it sends shapes
as pickles, sends messages without tags, and waits where no timer can measure the wait.
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
from speedlab.parallel.pipeline.span_recorder import PhaseTimeline
from speedlab.parallel.pipeline.stage import PipelineStage
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
    """The inputs of a step, and its results so far."""

    inputs: list[Tensor]
    labels: list[Tensor]
    positions: Sequence[Tensor | None]
    shape: tuple[int, ...]
    """Shape of activations between stages."""
    scales: Sequence[float | Tensor]
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses by micro-batch, on the last stage."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """Outputs that are computed and not sent yet, by stage."""


class Pipeline:
    """This rank's pipeline stages, and its connections to the other pipeline ranks."""

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
        """Connect the stages. The caller, which created `group`, also reconnects it.

        Args:
            stages: This rank's stages, in model order. Stage s of the model is on pipeline rank s % pp.
            zeros: The Zero of each stage.
            group: The pipeline ranks with this rank's other coordinates.
            schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".
            dtype: Dtype of activations between stages.
            own_length: Returns the number of tokens of an activation on this rank, given the sequence length.
            split_backward: Whether zero-bubble splits backwards into halves. Use False if blocks are recomputed in
                backward or compiled: there, each half would do the work of both.
            on_forward: Called with the micro-batch number before each forward of `train`.
            phase: Entered as phase("forward") and phase("backward") around the parts of a step.
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
        """Pending sends, whose tensors must stay alive. Empty on shared memory, which copies a message at the send."""
        self._cut_off: list[object] = []
        """Pending transfers of passes that raised. Peers that are still in these passes may need them."""

    @property
    def timeline(self) -> list[Span]:
        """Spans of this rank in the last `train`, in order and without overlaps, relative to `began`."""
        return self._timeline.spans()

    @property
    def began(self) -> float:
        """Start of the last `train`, in seconds since the epoch."""
        return self._timeline.began

    def update(self) -> AbstractContextManager[object]:
        """Return a context for the optimizer's update, so that the timeline of the step includes the update."""
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
        """Run forward and backward of all micro-batches. On return, the gradients of the sum of loss × scale are in
        the flats, reduced over the dp ranks.

        Args:
            tokens: (A·B, T) int64, the same on all pipeline ranks; split into A = `micro_batches` equal parts.
            targets: (A·B, T) int64. Target t belongs to output t, also for Hugging Face models.
            positions: (A·B, T) positions in documents.
            micro_batches: A.
            scales: Factor on the loss of each micro-batch; read only on the last stage.

        Returns:
            The losses by micro-batch on the last stage; [] on other stages.

        Raises:
            ValueError: The schedule does not exist for this number of micro-batches.
        """
        plan = self._training_plan(micro_batches)
        inputs = _parts(tokens, micro_batches)
        labels = _parts(targets, micro_batches)
        places = _parts_of(positions, micro_batches)
        step = _Step(inputs, labels, places, self._activation_shape(inputs[0]), scales)
        self._take_tags(micro_batches)
        # Per stage, the last action of the plan that computes gradients. It also reduces them.
        last = {a.stage: a for a in plan if a.kind in self._last_kinds(a.stage)}
        self._timeline.begin()
        try:
            for action in plan:  # 1
                self._carry_out(action, step, sync=action == last[action.stage])
            self._finish_sends()
            with self._phase("backward"):
                for stage in self._stages.values():  # 3
                    stage.zero.reduce_root()
            self._cut_off.clear()  # Every neighbour has sent a message of this pass, so it has left the earlier passes.
        except Exception:
            self.abandon()
            raise
        return [step.losses[k] for k in sorted(step.losses)]

    def _carry_out(self, action: Action, step: _Step, *, sync: bool) -> None:
        """Run one action. A separate function, so that its local variables release their tensors at its end."""
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
        """Return the kinds of action that compute a stage's parameter gradients."""
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
            return None  # The other half computes everything.
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
        """Run forwards only.

        Args:
            tokens: (A·B, T) int64, as in `train`, of any size.
            targets: (A·B, T) int64; None: return logits.
            positions: (A·B, T) positions in documents.
            micro_batches: A.

        Returns:
            On the last stage: losses by micro-batch, or logits (B, T, V); [] on other stages.
        """
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
        """Return the message tag: equal on both sides, and different in every step."""
        way = 0 if sent is ActionKind.SEND_ACTIVATION else 1
        return (self._first_tag + (2 * micro_batch + way) * self._count + stage) % _TAGS

    def _send(self, action: Action, tensor: Tensor, shape: tuple[int, ...]) -> None:
        kind, number, k = action
        # Messages carry neither shape nor dtype, so the receiver has allocated exactly these.
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise RuntimeError(
                f"pipeline stage {number} made {tuple(tensor.shape)} {tensor.dtype}, but {shape} {self._dtype} goes "
                f"between pipeline stages; the model must keep the shape and the dtype of what its blocks are given"
            )
        peer = (number + (1 if kind is ActionKind.SEND_ACTIVATION else -1)) % self.pp
        with self._timeline.span("send", number, k):
            self._leaving[kind, number, k] = self._group.send(tensor, peer, self._tag(kind, number, k))
        # Free the tensors of sends that have ended.
        self._leaving = {action: pending for action, pending in self._leaving.items() if not pending.over}

    def _receive(self, action: Action, shape: tuple[int, ...]) -> None:
        """Start to receive a message, without waiting."""
        kind, number, k = action
        sender = number + (-1 if kind is ActionKind.RECEIVE_ACTIVATION else 1)
        place = torch.empty(shape, dtype=self._dtype, device=self._device)
        pending = self._group.receive(place, sender % self.pp, self._tag(_COMPUTED_BY[kind], sender, k))
        self._arriving[action.kind, number, k] = place, pending

    def _arrived(self, kind: ActionKind, number: int, micro_batch: int) -> Tensor:
        """Wait for a message of this stage."""
        place, pending = self._arriving.pop((kind, number, micro_batch))
        with self._timeline.span("wait", number, micro_batch):
            pending.wait()
            if kind is ActionKind.RECEIVE_GRADIENT:
                # The gradient arrived, so the activation has arrived at the next stage. Not every backend reports the
                # end of a send by itself.
                sent = self._leaving.pop((ActionKind.SEND_ACTIVATION, number, micro_batch), None)
                if sent is not None:
                    sent.wait()
        return place

    def _take_tags(self, micro_batches: int) -> None:
        """Reserve tags for this step, so that messages of a broken step are never received as messages of another."""
        self._first_tag = self._next_tag
        self._next_tag = (self._first_tag + 2 * self._count * micro_batches) % _TAGS

    def _finish_sends(self) -> None:
        with self._phase("backward"), self._timeline.span("send"):
            for pending in self._leaving.values():
                pending.wait()
        self._leaving.clear()

    def abandon(self) -> None:
        """Drop the step on this rank after an exception: pending work and all gradients.

        Messages that were started continue. gloo sends from this rank's memory when the receiver asks. And a
        connection stops reading if a message arrives that no buffer waits for.
        """
        self._cut_off += [*self._arriving.values(), *self._leaving.values()]
        self._arriving.clear()
        self._leaving.clear()
        for stage in self._stages.values():
            stage.zero.abandon_pass()
            stage.forget()

    def reconnect(self) -> None:
        """Drop a step that was cut off. Call it after the group and the Zeros have reconnected."""
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
