"""The training step: micro-batches, gradient scaling, and the update at the end.

1. `begin_micro_batch` announces each micro-batch; `ended_micro_batch` counts it after its backward.
2. `end` reduces a few numbers over the ranks in one call: the gradient norm, the loss, counted targets
   (`loss_weights.py`), signals, unused parameters, and the consistency checks of batches and gradients.
3. A gradient that is not finite ends the step without an update.
4. Parameters that no rank used stay unchanged. All others are updated, clipped together. An optimizer that reduces
   gradients itself does so before; its errors leave the state unchanged. Islands meet if the interval is over.
5. In every case `reset` restores the state between two steps, or `updating` marks the step as interrupted.

With `optimizer.in_backward`, backward updates each unit as soon as its gradient is reduced, and the end has nothing to
update. With `offload.delayed_update` the end of a step finishes the previous update and starts its own on a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from speedlab.engine.consistency_checks import DataConsistencyCheck, GradientConsistencyCheck, UntrackedWriteCheck
from speedlab.engine.gradient_accumulation import Accumulation
from speedlab.engine.loss_weights import Count, LossWeights, none_counts, some_unknown
from speedlab.engine.rng import RandomStreams
from speedlab.engine.state import TrainingState
from speedlab.engine.step_reduction import (
    StepReduction,
    find_non_finite,
    loss_of_no_targets,
    reduce_step,
    too_large_to_exchange,
    updated_non_finite,
)
from speedlab.optim.communicating_protocols import kept_by, sums_itself, updates_unused
from speedlab.parallel.zero import FlatParam, Gradient, used_by_any
from speedlab.parallel.zero.units import UnitPhase

Update = Callable[[], AbstractContextManager[object]]

_MOST_EXCHANGED = 1e30
"""Largest gradient norm that an optimizer may reduce itself.

Sums of larger values might not be finite, and only some ranks of a pipeline or tensor group would notice.
"""


class StepState:
    """The progress of this rank in its current step."""

    def __init__(
        self, state: TrainingState, streams: RandomStreams, *, accumulation: int, around_update: Update, trains: bool
    ) -> None:
        """Create the checks and counters of a step.

        Args:
            state: The training state that steps update.
            streams: Random streams, set per micro-batch.
            accumulation: Micro-batches per step.
            around_update: Context manager entered around the end of a step.
            trains: Whether any rank has a parameter to train.
        """
        self.trains = trains
        self.micro_batches = Accumulation(accumulation, lambda: sum(zero.gathers.forwards for zero in state.zeros))
        """Counter of the micro-batches of the step."""
        self.sync = True
        """Whether the last backward of a step reduces gradients over the ranks."""
        self.totals: StepReduction | None = None
        """Reduced numbers of the last step."""
        self._state, self._streams = state, streams
        self.weights = LossWeights(state)
        """Weights of the losses of this step."""
        self.data = DataConsistencyCheck(state.mesh)
        """Check that ranks which compute one batch together got the same micro-batches."""
        self._same_gradients = GradientConsistencyCheck(state.mesh, state.zeros)
        self._unseen_writes = UntrackedWriteCheck(
            state.zeros,
            state.everyone,
            # Otherwise masters and parameters belong to different updates at the end of a step.
            compares_masters=not (state.config.optimizer.in_backward or kept_by(type(state.optimizer))),
        )
        self._losses: list[Tensor] = []
        self.in_backward = False
        """Whether a backward is running."""
        self._fed = False
        """Whether a backward of this step has ended."""
        self.only_looked_at = False
        """Whether a notebook cell uses the engine between two steps; then calls that advance the run are refused."""
        self._around_update = around_update
        self._in_backward = state.config.optimizer.in_backward
        for zero in state.zeros:
            zero.reductions.optimizer_reduces = partial(sums_itself, state.optimizer)
        if self._in_backward:
            for flat, gradient in zip(
                state.partitioned_optimizer.flats, state.partitioned_optimizer.gradients, strict=True
            ):
                gradient.use = partial(self._use, flat, gradient)

    @property
    def scale(self) -> float:
        """Return the factor on the loss of a micro-batch, so that summed gradients are means over the global batch.

        The factor contains the float16 loss scale. It divides by the micro-batches of a step and by `Layout.replicas`.
        """
        return self._state.loss_scale.value / (self.micro_batches.size * self._state.layout.replicas)

    def scales(self, counts: Sequence[Count], *, again: bool = False) -> list[float | Tensor]:
        """Return the factor for each loss, weighted by its number of counted targets.

        Args:
            counts: Counted targets of each loss, in micro-batch order; None if unknown.
            again: As for `LossWeights.weigh`: more losses of a micro-batch that is already counted.

        Returns:
            One factor per loss.
        """
        weights = self.weights.weigh(counts, micro_batches=self._whole_step, again=again)
        return [self.scale * weight for weight in weights]

    @property
    def _whole_step(self) -> int:
        """Return the number of different micro-batches of a step in one island."""
        layout = self._state.layout
        return self.micro_batches.size * layout.data_size // layout.islands

    @property
    def at_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step."""
        return self.micro_batches.at_boundary

    @property
    def loss_dtype(self) -> str | None:
        """Return the dtype name of the losses of this step; None without losses on this rank."""
        return str(self._losses[0].dtype).removeprefix("torch.") if self._losses else None

    @property
    def under_way(self) -> bool:
        """Return whether some micro-batches of a step have ended, or some of its gradients exist."""
        return self.micro_batches.ended > 0 or self._fed

    def refuse_after_cut(self) -> None:
        """Raise RuntimeError after an interrupted update or backward, and inside a backward."""
        if self.in_backward:
            raise RuntimeError(
                "the engine was called inside engine.backward, as by torch.utils.checkpoint around it; checkpoint "
                "engine.module, or its blocks, instead"
            )
        # With in_backward, `updating` is normal between the end of backward and the end of the step.
        if self._state.updating and not (self._in_backward and self._fed):
            number = self._state.partitioned_optimizer.late or self._state.global_step + 1
            raise RuntimeError(
                f"the update of step {number} was cut off and has changed some parameters only; go back with "
                "load_checkpoint"
            )
        if any(zero.current is UnitPhase.BACKWARD for zero in self._state.zeros):
            raise RuntimeError(
                f"a backward of step {self._state.global_step + 1} was cut off on this rank, and other ranks may stand "
                "elsewhere; let all ranks meet again and call engine.reconnect(), or set up the engine again"
            )

    def refuse_frozen(self, what: str) -> None:
        """Raise an error if the model has no parameter to train.

        Args:
            what: Name of the refused call.

        Raises:
            RuntimeError: If no parameter is trained.
        """
        if not self.trains:
            raise RuntimeError(
                f"{what}: no parameter of this engine's model requires a gradient, so that it computes (a call, "
                "evaluate) and is never stepped. To train it, set requires_grad of its parameters and call initialize "
                "again; a student's loss goes through the student's engine alone"
            )

    def refuse_inside(self, what: str) -> None:
        """Raise an error inside a step.

        Args:
            what: Name of the refused call.

        Raises:
            RuntimeError: Inside a step, and in a notebook cell between two steps of a run.
        """
        self.refuse_in_a_look(what)
        if self.under_way:
            raise RuntimeError(f"{what}: {self._under_way()}; do it between two steps")

    def refuse_in_a_look(self, what: str) -> None:
        """Raise an error in a notebook cell between two steps of a run.

        Args:
            what: Name of the refused call.

        Raises:
            RuntimeError: In such a cell.
        """
        if self.only_looked_at:
            raise RuntimeError(
                f"{what}: this cell runs between two steps of a run and may only look, and change values; "
                "run.advance(), run.reshape(), run.save() and run.resume() do the rest"
            )

    def begin_backward(self) -> None:
        """Count a backward of the caller's loop.

        Raises RuntimeError, after giving up the step, if the backward belongs to another micro-batch.
        """
        try:
            self.micro_batches.begin_backward(sync=self.sync)
        except RuntimeError:
            self.reset()
            raise

    def ends(self) -> bool:
        """Return whether the caller's `step` ends the whole step, or only its micro-batch.

        Raises RuntimeError, after giving up the step, if gradients would be divided by a wrong number of micro-batches.
        """
        try:
            self.micro_batches.check_end()
        except RuntimeError:
            self.reset()
            raise
        return self.at_boundary

    def refuse_to_forget(self, what: str) -> None:
        """Raise an error if a call would lose accumulated gradients.

        Args:
            what: Name of the refused call.

        Raises:
            RuntimeError: Inside an accumulation.
        """
        if self.micro_batches.size > 1 and self.under_way:
            raise RuntimeError(
                f"{what}: {self._under_way()}, and its gradients so far would be lost. Leave the call out: "
                "engine.step() clears gradients when it updates. engine.abandon_step() gives the step up, and its "
                "micro-batches have to be run again"
            )

    @contextmanager
    def gradients_shown(self) -> Iterator[None]:
        """Show, inside, torch's own `.grad` of the optimizer's tensors, which is None in a step."""
        self._state.partitioned_optimizer.hold_gradients(False)
        try:
            yield
        finally:
            self._state.partitioned_optimizer.hold_gradients(self._fed)

    def _under_way(self) -> str:
        return f"micro-batch {self.micro_batches.ended + 1} of {self.micro_batches.size} of a step is under way"

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    def begin_micro_batch(self, index: int | None = None) -> None:  # 1
        """Set the random streams for the next forward.

        Args:
            index: The micro-batch of this rank in the step; None takes the current one.
        """
        layout = self._state.layout
        # A frozen model never ends a step: count each forward as one, so that no stream state is kept.
        frozen = None if self.trains else sum(zero.gathers.forwards for zero in self._state.zeros)
        number = self.micro_batches.next if index is None else index
        # The global number of the micro-batch: equal under all layouts, so that all layouts drop the same elements.
        place = number * layout.data_size + self._state.mesh.data_index
        self._streams.begin(self._state.global_step if frozen is None else frozen, place)

    def ended_backward(self, losses: Sequence[Tensor]) -> None:
        """Record a backward whose gradients are now in the flat parameters.

        Args:
            losses: The losses of this backward, one per micro-batch.
        """
        # The losses stay on the device until the end of the step, to avoid a sync.
        self._losses += [loss.detach() for loss in losses]
        self._fed = True
        self._state.partitioned_optimizer.hold_gradients(True)

    def ended_micro_batch(self) -> None:
        """Count a micro-batch whose backward has ended."""
        self.micro_batches.end_micro_batch()
        self.weights.ended_micro_batch()

    def reset(self) -> None:
        """Drop what the step has gathered: losses, gradients, counters."""
        for zero in self._state.zeros:
            zero.clear_gradients()
        self._state.partitioned_optimizer.hold_gradients(False)
        if self._in_backward:
            self._state.partitioned_optimizer.end_visits()
        self._state.stores.trim()
        self._losses.clear()
        self.weights.forget()
        self.data.forget()
        self._same_gradients.forget()
        self._unseen_writes.forget()
        self._streams.forget()
        self.micro_batches.forget()
        self._fed = False

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, signals: Sequence[float], clip_norm: float | None) -> bool:
        """Update the parameters.

        Args:
            signals: Numbers to sum over the ranks.
            clip_norm: Largest gradient norm; None does not clip.

        Returns:
            True if the parameters were updated.

        Raises:
            NonFiniteError: If the gradient is not finite and a smaller loss scale cannot help.
            RuntimeError: If the last backward ran inside `no_sync`.
        """
        self.refuse_in_a_look("step")
        state = self._state
        if any(zero.unsummed for zero in state.zeros):
            raise RuntimeError(
                "step: the last backward ran inside no_sync, so that no gradients were summed over the ranks; run the "
                "last backward of a step outside it"
            )
        state.partitioned_optimizer.refuse_new_groups()
        state.partitioned_optimizer.refuse_hooks()
        with self._around_update():
            try:
                self.totals = totals = self._reduce_step(signals)  # 2
                self._refuse(totals)
                exchanged = sums_itself(state.optimizer)
                if not totals.finite or (exchanged and totals.grad_norm > _MOST_EXCHANGED):
                    self._overflow(totals)  # 3
                    return False
                self._same_gradients.took(totals.unseen)
                self._unseen_writes.took()
                # `totals.unused` is equal on all ranks, so all of them skip or make the next collective together.
                left_alone = totals.unused and not self._in_backward and not updates_unused(state.optimizer)
                unused = self._unused() if left_alone else {}
                state.before_change()
                state.islands.before_update()
                # Ctrl-C may interrupt an exchange after part of its feedback changed. An Exception leaves it unchanged.
                state.updating = state.updating or exchanged
                state.partitioned_optimizer.hold_gradients(False)
                factor = state.partitioned_optimizer.exchange(self._factor(totals, clip_norm), unused)
            except Exception:
                # With in_backward, backward has already changed parameters, so the step stays marked as interrupted.
                state.updating = self._in_backward and state.updating
                self.reset()
                raise
            state.apply_late()
            state.updating = True
            if not self._in_backward:
                self._update(factor, unused)  # 4
            state.partitioned_optimizer.tell_updated(state.everyone)
            for zero in state.zeros:
                zero.learn_order()
            self.reset()  # 5
            self._unseen_writes.updated()
            state.islands.stepped(state.global_step + 1)
            state.wait_until_read()
        state.global_step += 1
        state.loss_scale.update(overflow=False)
        state.updating = False
        if state.scheduler is not None:
            state.scheduler.step()
        return True

    def _update(self, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        state = self._state
        # Double-buffered gradients belong to a delayed update, which runs on a thread.
        if not state.zeros[0].zero_policy.grads_double_buffered:
            state.partitioned_optimizer.step(factor, unused, number=state.global_step)
            return
        state.partitioned_optimizer.step_late(factor, unused, number=state.global_step)
        first = state.config.offload.delayed_update
        # Before step `delayed_update` the update is applied at once, as without a delay.
        if first is None or state.global_step + 1 < first:
            state.partitioned_optimizer.publish()

    def _use(self, flat: FlatParam, gradient: Gradient) -> None:
        """Update a flat parameter in the middle of a backward, after its gradient is reduced."""
        self.refuse_in_a_look("backward, which updates with optimizer.in_backward")
        state = self._state
        # Peers in the reduce group may have used parameters that this rank did not.
        used = used_by_any([gradient])[0] if gradient.summed_first else gradient.used
        unused = {index for index, is_used in enumerate(used) if not is_used}
        if len(unused) == len(flat.slots):
            state.partitioned_optimizer.end_visits([flat])
            return
        state.partitioned_optimizer.refuse_hooks()
        with self._around_update():
            flat.take_changes()
            state.updating = True
            state.partitioned_optimizer.step(
                unused={flat.name: unused}, number=state.global_step, flats=[flat], ahead=self._next(flat)
            )

    def _next(self, flat: FlatParam) -> FlatParam | None:
        """Return the flat parameter whose gradient is reduced next, to prefetch its states."""
        order = [
            each for zero in self._state.zeros for unit in zero.backward_order for each in unit.flats if each.trainable
        ]
        place = order.index(flat)
        return order[place + 1] if place + 1 < len(order) else None

    def _factor(self, totals: StepReduction, clip_norm: float | None) -> float:
        factor = totals.weight / self._state.loss_scale.value
        # No rank knows the norm of the sum, so nothing is clipped.
        if sums_itself(self._state.optimizer):
            return factor
        if clip_norm is not None and totals.grad_norm > clip_norm:
            # The same epsilon as in torch.nn.utils.clip_grad_norm_.
            factor *= clip_norm / (totals.grad_norm + 1e-6)
        return factor

    def _reduce_step(self, signals: Sequence[float]) -> StepReduction:
        state = self._state
        # Peers along tp and cp have the same losses, which count once.
        losses = self._losses if state.mesh.counts_losses else []
        counted = self.weights.take(self._whole_step)
        unused = sum(gradient.used.count(False) for gradient in state.partitioned_optimizer.gradients)
        squares = torch.zeros((), dtype=torch.float64, device=state.world.device)
        if self._fed:  # Without a backward the buffers hold gradients of the previous step.
            squares += state.partitioned_optimizer.sum_of_squares()
        return reduce_step(
            state.everyone,
            losses,
            squares,
            scale=state.loss_scale.value,
            signals=signals,
            island=(state.islands.index, state.layout.islands),
            unused=unused,
            written=len(state.written_too_early()),
            difference=self.data.take(),
            gradients=self._same_gradients.take(),
            lost=self._unseen_writes.take(state.world.device),
            counted=counted,
        )

    def _refuse(self, totals: StepReduction) -> None:
        """Raise, on all ranks, an error that must prevent the update."""
        if not totals.same_data:
            raise self.data.error()
        if totals.some_unknown:
            raise some_unknown(self._state.global_step + 1)
        if totals.none_counts:
            raise none_counts(self._state.global_step + 1)
        # A NaN loss with a finite gradient comes from a micro-batch without counted targets.
        if totals.finite and math.isnan(totals.loss):
            raise loss_of_no_targets(
                self._state.everyone, self._losses, step=self._state.global_step + 1, updated=self._in_backward
            )
        if totals.differing:
            raise self._same_gradients.error(self._state.global_step + 1, updated=self._in_backward)
        if totals.written:
            raise RuntimeError(f"step: {self._state.words_of_early_writes()}")
        # `end` handles a gradient that is not finite next.
        if totals.lost and totals.finite:
            raise self._unseen_writes.error(self._state.global_step + 1, updated=self._in_backward)

    def _unused(self) -> dict[str, set[int]]:
        """Return slots, by name of flat parameter, that no rank of any island used in this step. Collective.

        Over all islands, because optimizer states must have the same history in all of them.
        """
        optimizer = self._state.partitioned_optimizer
        found = used_by_any(optimizer.gradients, self._state.islands.group)
        return {
            flat.name: {index for index, used in enumerate(own) if not used}
            for flat, own in zip(optimizer.flats, found, strict=True)
        }

    def _overflow(self, totals: StepReduction) -> None:
        """Skip the update. In float16 the scale shrinks and training continues; otherwise raise an error."""
        state, error = self._state, None
        if self._in_backward:
            error = updated_non_finite(state.everyone, self._losses, step=state.global_step + 1)
        # Finite, so the norm is above _MOST_EXCHANGED.
        elif state.loss_scale.exhausted and totals.finite:
            error = too_large_to_exchange(totals.grad_norm, step=state.global_step + 1)
        elif state.loss_scale.exhausted:
            flats = state.partitioned_optimizer.flats
            error = find_non_finite(state.everyone, self._losses, flats, step=state.global_step + 1)
        state.loss_scale.update(overflow=True)
        self.reset()
        if error is not None:
            raise error
        # A skipped step must not leave the previous delayed update pending.
        if state.partitioned_optimizer.late:
            state.before_change()
            state.apply_late()
            state.wait_until_read()
            state.updating = False
