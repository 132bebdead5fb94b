"""The sharded optimizer: any elementwise torch optimizer over the flat-parameter partitions of a rank.

The torch optimizer sees one-dimensional float32 segments of master weights instead of parameters. `OptimizerStates`
holds its states and `FlatUpdate` runs one update. This file orders the calls around an update.

A parameter that no rank used in a step stays unchanged, as in plain torch without a gradient. Its segment is cut out
and then has its own history (its own step count, or no state yet).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from cuda_ops.grad_stats import grad_stats
from speedlab.comm import Group
from speedlab.optim.communicating_protocols import (
    CommunicatingOptimizer,
    ExchangedState,
    LocalStepOptimizer,
    NeedsSetup,
    ParamSyncOptimizer,
    sums_itself,
)
from speedlab.optim.delayed_update import DelayedUpdate, OptimizerSnapshot
from speedlab.optim.fused import FusedOptimizer, LayerwiseOptimizer
from speedlab.optim.lamb import ParameterSums
from speedlab.optim.offload_fetch import publishing
from speedlab.optim.optimizer_state import OptimizerStates, Scalars, has_kernels, owned_ranges, updating_on_this_thread
from speedlab.optim.parameter_forms import EVERY_FORM, ParameterForms
from speedlab.optim.sharded_update import FlatUpdate, engine_hook, has_hooks
from speedlab.parallel.zero import FlatParam, Gradient
from speedlab.parallel.zero.comm_groups import PendingWork
from speedlab.placement import Placement, Replication, ZeroPolicy


class PartitionedOptimizer:
    """The optimizer over the partitions of this rank. `inner` is the torch optimizer that schedulers and users see."""

    def __init__(
        self,
        flats: list[FlatParam],
        placement: Placement,
        axes: Mapping[str, Group],
        build: Callable[[list[list[Tensor]]], Optimizer],
        *,
        group_count: int,
        separate: bool,
        forms: ParameterForms = EVERY_FORM,
    ) -> None:
        """Make the inner optimizer over the segments of all trained flat parameters.

        Args:
            flats: All flat parameters of this rank.
            placement: The placement table of this rank.
            axes: Reduce groups by the names that the placement table uses, besides the group of a flat parameter.
            build: Makes the inner optimizer from the segments of each parameter group.
            group_count: Number of parameter groups.
            apart: Whether each segment holds one parameter only.
            forms: The parameter forms that the inner optimizer supports.
        """
        self.forms = forms
        self.flats = [flat for flat in flats if flat.gradient is not None]
        self._gradients = {flat.name: flat.gradient for flat in flats if flat.gradient is not None}
        self._partitioned = placement.zero_policy.optimizer_states is Replication.PARTITIONED
        """Whether optimizer states are partitioned; stored, because a rank may have no flat parameters to ask."""
        self._others = {row.name for row in placement.rows if not row.answers}
        """Parameters that other tensor or pipeline ranks count."""
        self._sums = ParameterSums(self.flats, placement, axes)
        self._states = OptimizerStates(self.flats, build, group_count=group_count, separate=separate)
        self.inner = self._states.inner
        self._twin: OptimizerSnapshot | None = None
        """The optimizer copy that runs a delayed update."""
        self._late: DelayedUpdate | None = None
        """The delayed update that runs on a thread or waits for `publish`."""
        for flat in self.flats:
            self._gradients[flat.name].measure = partial(self._squares, flat)
        self._number = 0
        """Number of the current update."""
        self._update: FlatUpdate | None = None
        """The current update."""
        self._hooks = [
            self.inner.register_step_pre_hook(self._refuse_others),
            self.inner.register_load_state_dict_pre_hook(self._settle_before),
            self.inner.register_state_dict_pre_hook(self._settle_before),
            self.inner.register_load_state_dict_post_hook(self._loaded),
        ]

    def forget(self) -> None:
        """Drop every tensor; the optimizer cannot be used afterwards."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._states.forget()
        self._gradients.clear()
        self._update = None

    @property
    def gradients(self) -> list[Gradient]:
        """Return the gradients of `flats`, in the same order."""
        return list(self._gradients.values())

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares of this rank's gradients, () float64 on the device.

        Each parameter counts on one rank of the tensor and pipeline axes.
        """
        squares = []
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            squares.append(self._squares(flat, *gradient.counted) if gradient.squares is None else gradient.squares)
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def _squares(self, flat: FlatParam, start: int, values: Tensor) -> Tensor:
        """Return the sum of squares of `values`, a gradient of `flat` from element `start` on, if this rank
        counts it.
        """
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        for low, high in owned_ranges(flat, (start, start + values.numel()), self._others):
            total += _squares(flat, values[low - start : high - start])
        gradient = self._gradients[flat.name]
        # Unreduced terms: this equals the squared norm of the sum if all ranks have equal terms.
        return total * gradient.group.size if gradient.optimizer_reduces else total

    def refuse_new_groups(self) -> None:
        """Raise RuntimeError if the caller added parameter groups, because no flat parameter holds them."""
        if len(self.inner.param_groups) != self._states.group_count:
            raise RuntimeError(
                f"optimizer: it has {len(self.inner.param_groups)} groups of parameters, and had "
                f"{self._states.group_count} at initialize; what was added would not be trained. Put all of them in "
                "before, with lr=0 if need be"
            )

    def refuse_hooks(self) -> None:
        """Raise RuntimeError if the caller's pre-step hooks would see no gradients, or not those of the update."""
        if not has_hooks(self.inner):
            return
        reason = ""
        if isinstance(self.inner, LayerwiseOptimizer | CommunicatingOptimizer):
            reason = f"{type(self.inner).__name__} uses gradients before its step"
        elif isinstance(self.inner, FusedOptimizer) and any(flat.is_offloaded for flat in self.flats):
            reason = "states are away from the device, or in few bits, and gradients are used flat by flat"
        if reason:
            raise RuntimeError(
                f"optimizer: a hook of register_step_pre_hook cannot change the gradients, because {reason}. Remove "
                "the hook, or use AdamW with float32 states on the device"
            )

    # ---- reductions by the inner optimizer ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Let an optimizer that reduces gradients itself open its connections, before the first step. Collective."""
        if isinstance(self.inner, NeedsSetup):
            self.inner.prepare(self._exchanged())

    @torch.no_grad()
    def exchange(self, factor: float, unused: Mapping[str, Collection[int]] | None = None) -> float:
        """Let an inner optimizer that reduces gradients itself do so. Collective. On an error nothing has changed.

        Args:
            factor: Factor on the gradients.
            unused: Slots that no rank used, by name of flat parameter; as for `step`.

        Returns:
            The factor left for `step`: 1 after an exchange, else `factor`.
        """
        if not sums_itself(self.inner):
            return factor
        assert isinstance(self.inner, CommunicatingOptimizer)  # See `sums_itself`.
        flats = self._exchanged(unused)
        take_back = None
        if isinstance(self.inner, ParamSyncOptimizer):
            take_back = self.inner.restage(flats, partitioned=self._partitioned)
        try:
            self.inner.exchange(flats, factor)
        except BaseException:
            # Undo the restage, so that a failed exchange changes nothing.
            if take_back is not None:
                take_back()
            raise
        return 1.0

    @torch.no_grad()
    def tell_updated(self, everyone: Group) -> None:
        """Notify an optimizer that reduces gradients itself of an update. Collective over all ranks.

        Args:
            everyone: All ranks.
        """
        if isinstance(self.inner, CommunicatingOptimizer):
            flats = self._exchanged()
            if isinstance(self.inner, ParamSyncOptimizer):
                self.inner.restage(flats, partitioned=self._partitioned)
            self.inner.updated(flats, everyone)

    @torch.no_grad()
    def meet(self) -> None:
        """Give all ranks of an optimizer with local steps one model, between two steps. Collective."""
        if not isinstance(self.inner, LocalStepOptimizer):
            return
        self.inner.meet(self._exchanged())
        for flat in self.flats:
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def reported(self) -> dict[str, float]:
        """Return figures of the last step's exchange, for its record; {} for other optimizers."""
        return self.inner.reported() if isinstance(self.inner, CommunicatingOptimizer) else {}

    def _exchanged(self, unused: Mapping[str, Collection[int]] | None = None) -> list[ExchangedState]:
        unused = unused or {}
        return [
            ExchangedState(
                gradient,
                self._states.of(flat),
                flat.state_range == (0, flat.padded),
                [(segment.first, segment.master) for segment in self._states.segments[flat.name]],
                flat.master,
                flat.full,
                unused.get(flat.name, ()),
            )
            for flat, gradient in zip(self.flats, self.gradients, strict=True)
        ]

    # ---- the update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        factor: float = 1.0,
        unused: Mapping[str, Collection[int]] | None = None,
        *,
        number: int = 0,
        flats: Sequence[FlatParam] | None = None,
        ahead: FlatParam | None = None,
    ) -> None:
        """Multiply gradients by `factor`, update the masters, and gather the new parameters on all ranks.

        Args:
            factor: Factor on the gradients: unscaling and clipping.
            unused: Slots that no rank used, by name of flat parameter. These slots and their states stay unchanged.
            number: Number of earlier updates; stochastic rounding depends on it.
            flats: The flat parameters to update; None updates all.
            ahead: The flat parameter that is updated next; its offloaded states are prefetched.
        """
        unused = unused or {}
        self._begin(unused, number)
        # Such an optimizer sends parameter changes itself; then the update gathers nothing.
        publishes = isinstance(self.inner, ParamSyncOptimizer) and sums_itself(self.inner) and self.inner.publishes
        every = self.flats if flats is None else flats
        self._update = self._update_by(self.inner, every, ahead, publishes=not publishes)
        for work in self._update.make(factor, unused):
            work.wait()
        if publishes:
            assert isinstance(self.inner, ParamSyncOptimizer)  # See above.
            self.inner.publish(self._exchanged(unused), number)

    def _begin(self, unused: Mapping[str, Collection[int]], number: int) -> None:
        self._number = number
        # Before the update: unused slots keep their own step counts.
        self._states.cut_out(unused)

    def _update_by(
        self, optimizer: Optimizer, flats: Sequence[FlatParam], ahead: FlatParam | None, *, publishes: bool = True
    ) -> FlatUpdate:
        return FlatUpdate(
            self._states,
            self._gradients,
            self._sums,
            optimizer=optimizer,
            number=self._number,
            flats=flats,
            ahead=ahead,
            publishes=publishes,
            in_pieces=self.forms.pieces,
        )

    # ---- delayed update ----------------------------------------------------------------------------------------------

    @property
    def late(self) -> int | None:
        """Return the step, from 1, of the delayed update that is not yet published; None without one."""
        return None if self._late is None else self._number + 1

    def step_late(self, factor: float, unused: Mapping[str, Collection[int]], *, number: int) -> None:
        """Update the masters on a thread, during the next step; `publish` copies them to the parameters.

        For ZeRO policies with double-buffered gradients.

        Args:
            factor: As for `step`.
            unused: As for `step`.
            number: As for `step`.
        """
        self._begin(unused, number)
        for moving in [gradient.lay_by() for gradient in self.gradients]:
            if moving is not None:
                moving.wait()  # The next backward overwrites the source buffers.
        for flat in self.flats:
            # Masters are newer than parameters until `publish`.
            flat.ahead = True
        # A scheduler may change options of the original during the next step.
        self._twin = OptimizerSnapshot(self.inner)
        self._update = self._update_by(self._twin.optimizer, self.flats, None)
        self._late = DelayedUpdate(partial(self._make_late, self._update, factor, unused))
        self._late.start()

    def _make_late(self, update: FlatUpdate, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """Run the update on its thread."""
        if self.flats:
            group = self.flats[0].gather_group
            if group.device.type == "cuda":  # New threads start with device 0.
                torch.cuda.set_device(group.device)
            with group.traffic.alongside_the_step(), updating_on_this_thread():
                update.make(factor, unused)

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the result of `step_late` as parameters on all ranks. Collective. Raises the error of the update."""
        self.wait()
        if self._twin is not None:
            self._twin.take_back()
        pending: list[PendingWork] = []
        # The masters of the next flat parameter are prefetched.
        following = [*self.flats[1:], None]
        try:
            # Without flats, `following` still has one entry.
            for flat, ahead in zip(self.flats, following, strict=False):
                with publishing(flat, ahead):
                    work = flat.publish(update=self._number)
                if work is not None:
                    pending.append(work)
        except BaseException:
            self._states.end_visits()
            raise
        for work in pending:
            work.wait()
        self._give_late_up()

    def wait(self) -> None:
        """Wait until the thread has updated the masters. Raises its error; then only some masters are updated."""
        if self._late is not None:
            self._late.wait()

    @property
    def untold(self) -> BaseException | None:
        """Return the error of a finished delayed update that no caller has received; None without one."""
        return None if self._late is None else self._late.untold

    def settle(self) -> None:
        """Wait until no thread updates anything; ignores the result."""
        if self._late is not None:
            self._late.settle()

    def _give_late_up(self) -> None:
        """Drop the delayed update: masters and parameters are equal again after a publish or a load."""
        self.settle()
        for flat in self.flats:
            flat.ahead = False
        self._late = None

    # ---- calls of the inner optimizer by others ----------------------------------------------------------------------

    @engine_hook
    def _refuse_others(self, stepped: Optimizer, *_: object) -> None:
        """Hook before the inner optimizer's step: raise if the caller steps it without the engine."""
        ours = self._update is not None and self._update.steps(stepped)
        if stepped is self.inner and not ours:
            raise RuntimeError(
                "optimizer.step(): the gradients are with the engine, which scales and sums them over the ranks; call "
                "engine.step() instead"
            )

    def _settle_before(self, *_: object) -> None:
        """Hook before the inner optimizer's state_dict and load_state_dict: wait for a delayed update."""
        self.settle()

    def _loaded(self, *_: object) -> None:
        """Hook after the inner optimizer's load_state_dict: copy loaded states into the engine's memory."""
        self._states.adopt_again()

    def hold_gradients(self, held: bool) -> None:
        """Set whether the tensors in the optimizer's groups refuse `.grad`.

        Between a backward and the update the engine holds the gradients, and clipping those tensors would do nothing.

        Args:
            held: True refuses `.grad` from now on.
        """
        self._states.hold(held)

    # ---- states, delegated to `OptimizerStates` ----------------------------------------------------------------------

    def states_of(self, flat: FlatParam) -> dict[str, Tensor]:
        """Return the elementwise states of a flat parameter.

        Args:
            flat: The flat parameter.

        Returns:
            By name ('exp_avg', …), 1-D over the state range of `flat`. Empty before the first step.
        """
        return self._states.of(flat)

    def scalars_of(self, flat: FlatParam) -> Scalars:
        """Return the states that are not elementwise, such as step counts.

        Args:
            flat: The flat parameter.

        Returns:
            The states of each parameter of `flat` that has a part on this rank.
        """
        return self._states.scalars_of(flat)

    def visit(self, flat: FlatParam, *, changed: bool = False) -> AbstractContextManager[None]:
        """Return a context in which offloaded states of a flat parameter are on the device.

        Args:
            flat: The flat parameter.
            changed: Whether to write the values back at the end.
        """
        return self._states.visit(flat, changed=changed)

    def end_visits(self, flats: Iterable[FlatParam] | None = None) -> None:
        """End the visits of an interrupted update.

        Args:
            flats: The flat parameters; None takes all.
        """
        self._states.end_visits(flats)

    def new_state(self, flat: FlatParam, key: str, dtype: torch.dtype) -> Tensor:
        """Return a new state of zeros over the state range of a visited flat parameter; the state is visited too.

        Args:
            flat: The flat parameter, inside a `visit`.
            key: Name of the state.
            dtype: Dtype of the state.
        """
        return self._states.new_state(flat, key, dtype)

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: Mapping[str, Scalars]) -> None:
        """Rebuild segments and states after flat parameters moved or were loaded. Drops a delayed update.

        Args:
            flat_states: As for `OptimizerStates.rebuild`.
            scalars: As for `OptimizerStates.rebuild`.
        """
        self._give_late_up()
        self._states.rebuild(flat_states, scalars)

    def move(self, before: ZeroPolicy, after: ZeroPolicy) -> None:
        """Move the optimizer states after the flat parameters moved. Collective if states are gathered.

        Args:
            before: The old placement.
            after: The new placement.
        """
        self._partitioned = after.optimizer_states is Replication.PARTITIONED
        self.rebuild(*self._states.moved(before))


def _squares(flat: FlatParam, gradient: Tensor) -> Tensor:
    if has_kernels(flat.master):
        return grad_stats(gradient)[0]
    wide = torch.float32 if gradient.dtype.itemsize < 8 else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
