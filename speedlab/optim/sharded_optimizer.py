"""Any elementwise torch optimizer, over the partitions of flats that a rank owns.

The optimizer sees one-dimensional float32 segments of master weights instead of parameters; what it has of them is
`OptimizerStates`, and what updates them `FlatUpdate`. Here is when that is done, and what comes before and behind it.

A parameter that no rank used in a step is left alone, as plain torch leaves one without a gradient: its segment is cut
out, and from then on has a history of its own (its count of steps, or no state yet).
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
from speedlab.optim.compressed_optimizer import (
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
from speedlab.parallel.zero.comm_groups import Work
from speedlab.placement import Placement, Replication, ZeroPolicy


class PartitionedOptimizer:
    """The optimizer over what this rank owns. `inner` is the torch optimizer that schedulers and users see."""

    def __init__(
        self,
        flats: list[FlatParam],
        placement: Placement,
        axes: Mapping[str, Group],
        build: Callable[[list[list[Tensor]]], Optimizer],
        *,
        group_count: int,
        apart: bool,
        forms: ParameterForms = EVERY_FORM,
    ) -> None:
        """`axes`: groups by the names that rows of the table have for them, beside that of a flat. `build` makes the
        inner optimizer of the segments of each of its groups; `apart`: each segment is of one parameter.
        `forms`: those in which the inner optimizer may have parameters."""
        self.forms = forms
        self.flats = [flat for flat in flats if flat.gradient is not None]
        self._gradients = {flat.name: flat.gradient for flat in flats if flat.gradient is not None}
        self._partitioned = placement.zero_policy.optimizer_states is Replication.PARTITIONED
        """Whether states are, on every rank; a rank may have no flats that tell."""
        self._others = {row.name for row in placement.rows if not row.answers}
        """Parameters that other tensor or pipeline ranks count."""
        self._sums = ParameterSums(self.flats, placement, axes)
        self._states = OptimizerStates(self.flats, build, group_count=group_count, apart=apart)
        self.inner = self._states.inner
        self._twin: OptimizerSnapshot | None = None
        """What makes an update that is late."""
        self._late: DelayedUpdate | None = None
        """The update that is under way on a thread, or waits for `publish`."""
        for flat in self.flats:
            self._gradients[flat.name].measure = partial(self._squares, flat)
        self._number = 0
        """Of the present update."""
        self._update: FlatUpdate | None = None
        """The present one."""
        self._hooks = [
            self.inner.register_step_pre_hook(self._refuse_others),
            self.inner.register_load_state_dict_pre_hook(self._settle_before),
            self.inner.register_state_dict_pre_hook(self._settle_before),
            self.inner.register_load_state_dict_post_hook(self._loaded),
        ]

    def forget(self) -> None:
        """Drop every tensor; the optimizer is of no use afterwards."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._states.forget()
        self._gradients.clear()
        self._update = None

    @property
    def gradients(self) -> list[Gradient]:
        """Of `flats`, in their order."""
        return list(self._gradients.values())

    def sum_of_squares(self) -> Tensor:
        """Of the gradients that this rank counts, as a float64 scalar on the device; each parameter counts on one
        rank of the tensor and pipeline axes."""
        squares = []
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            squares.append(self._squares(flat, *gradient.counted) if gradient.squares is None else gradient.squares)
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def _squares(self, flat: FlatParam, start: int, values: Tensor) -> Tensor:
        """Of `values`, a gradient of `flat` from element `start` on, as far as this rank counts it."""
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        for low, high in owned_ranges(flat, (start, start + values.numel()), self._others):
            total += _squares(flat, values[low - start : high - start])
        gradient = self._gradients[flat.name]
        # Terms that nobody has summed: so their norm is the sum's where all ranks have the same.
        return total * gradient.group.size if gradient.optimizer_reduces else total

    def refuse_new_groups(self) -> None:
        """Raises RuntimeError where the caller has added groups, whose parameters are in no flat."""
        if len(self.inner.param_groups) != self._states.group_count:
            raise RuntimeError(
                f"optimizer: it has {len(self.inner.param_groups)} groups of parameters, and had "
                f"{self._states.group_count} at initialize; what was added would not be trained. Put all of them in "
                "before, with lr=0 if need be"
            )

    def refuse_hooks(self) -> None:
        """Raises RuntimeError if the caller has hooks before the inner optimizer's step, which would see no gradients,
        or others than those that it uses."""
        if not has_hooks(self.inner):
            return
        reason = ""
        if isinstance(self.inner, LayerwiseOptimizer | CommunicatingOptimizer):
            reason = f"{type(self.inner).__name__} uses gradients before its step"
        elif isinstance(self.inner, FusedOptimizer) and any(flat.lies_away for flat in self.flats):
            reason = "states are away from the device, or in few bits, and gradients are used flat by flat"
        if reason:
            raise RuntimeError(
                f"optimizer: a hook of register_step_pre_hook cannot change the gradients, because {reason}. Remove "
                "the hook, or use AdamW with float32 states on the device"
            )

    # ---- sums that are the inner optimizer's own to take -------------------------------------------------------------

    def prepare(self) -> None:
        """Before the first step: let an optimizer that may sum gradients itself make its connections. Collective."""
        if isinstance(self.inner, NeedsSetup):
            self.inner.prepare(self._exchanged())

    @torch.no_grad()
    def exchange(self, factor: float, unused: Mapping[str, Collection[int]] | None = None) -> float:
        """Where the inner optimizer sums gradients itself, let it do so, `factor` in it; the factor that is left for
        `step`, which has the same `unused`. Nothing has changed when it raises. Collective."""
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
            if take_back is not None:
                take_back()
            raise
        return 1.0

    @torch.no_grad()
    def tell_updated(self, everyone: Group) -> None:
        """Tell an optimizer that may sum gradients itself that an update was made. Collective over all ranks."""
        if isinstance(self.inner, CommunicatingOptimizer):
            flats = self._exchanged()
            if isinstance(self.inner, ParamSyncOptimizer):
                self.inner.restage(flats, partitioned=self._partitioned)
            self.inner.updated(flats, everyone)

    @torch.no_grad()
    def meet(self) -> None:
        """Between two steps, where ranks of the inner optimizer are apart: give all of them one model. Collective."""
        if not isinstance(self.inner, LocalStepOptimizer):
            return
        self.inner.meet(self._exchanged())
        for flat in self.flats:
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def told(self) -> dict[str, float]:
        """What an optimizer that may sum gradients itself says of the last step's exchange; {} of others."""
        return self.inner.told() if isinstance(self.inner, CommunicatingOptimizer) else {}

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
        """Multiply gradients by `factor`, update the masters, and bring the parameters of all ranks up to date.

        `unused`: for flats by name, the slots that no rank used; they and their states stay as they are. `number`: how
        many updates there were, of which depends what is rounded at random. `flats`: those that are updated, all when
        left out; `ahead`: the one that will be next, whose states are then on their way.
        """
        unused = unused or {}
        self._begin(unused, number)
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

    # ---- an update beside the next step ------------------------------------------------------------------------------

    @property
    def late(self) -> int | None:
        """The step, counted from 1, whose update `step_late` has begun and nobody has published; None without one."""
        return None if self._late is None else self._number + 1

    def step_late(self, factor: float, unused: Mapping[str, Collection[int]], *, number: int) -> None:
        """As `step`, of residencies whose gradients wait: a thread updates the masters, beside whatever comes next, and
        `publish` brings them to the parameters."""
        self._begin(unused, number)
        for moving in [gradient.lay_by() for gradient in self.gradients]:
            if moving is not None:
                moving.wait()  # The next backward writes over what they come from.
        for flat in self.flats:
            flat.ahead = True
        self._twin = OptimizerSnapshot(self.inner)
        self._update = self._update_by(self._twin.optimizer, self.flats, None)
        self._late = DelayedUpdate(partial(self._make_late, self._update, factor, unused))
        self._late.start()

    def _make_late(self, update: FlatUpdate, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """On the thread."""
        if self.flats:
            group = self.flats[0].gather_group
            if group.device.type == "cuda":  # New threads begin with the first one.
                torch.cuda.set_device(group.device)
            with group.traffic.beside_the_step(), updating_on_this_thread():
                update.make(factor, unused)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring what `step_late` has updated to the parameters of all ranks. Collective. Raises what `wait` does."""
        self.wait()
        if self._twin is not None:
            self._twin.take_back()
        pending: list[Work] = []
        following = [*self.flats[1:], None]
        try:
            for flat, ahead in zip(self.flats, following, strict=False):  # Of no flats there is one that follows.
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
        """Until the thread has updated the masters. Raises what it failed with: some are updated then, some not."""
        if self._late is not None:
            self._late.wait()

    @property
    def untold(self) -> BaseException | None:
        """What an update that has ended failed with, where nobody has heard of it."""
        return None if self._late is None else self._late.untold

    def settle(self) -> None:
        """Until no thread updates anything, however it ended."""
        if self._late is not None:
            self._late.settle()

    def _give_late_up(self) -> None:
        """Masters and parameters are one again: they were published, or loaded."""
        self.settle()
        for flat in self.flats:
            flat.ahead = False
        self._late = None

    # ---- the inner optimizer in other hands --------------------------------------------------------------------------

    @engine_hook
    def _refuse_others(self, stepped: Optimizer, *_: object) -> None:
        """A hook on the inner optimizer's step: who calls it past the engine would update nothing."""
        ours = self._update is not None and self._update.steps(stepped)
        if stepped is self.inner and not ours:
            raise RuntimeError(
                "optimizer.step(): the gradients are with the engine, which scales and sums them over the ranks; call "
                "engine.step() instead"
            )

    def _settle_before(self, *_: object) -> None:
        """A hook before the inner optimizer's state_dict and load_state_dict: nothing updates states meanwhile."""
        self.settle()

    def _loaded(self, *_: object) -> None:
        """A hook behind the inner optimizer's load_state_dict."""
        self._states.adopt_anew()

    def hold_gradients(self, held: bool) -> None:
        """Whether the tensors in the optimizer's groups refuse `.grad` from now on: between a backward and the update
        gradients are in the engine, and clipping those tensors would do nothing."""
        self._states.hold(held)

    # ---- states: what `OptimizerStates` says of them -----------------------------------------------------------------

    def states_of(self, flat: FlatParam) -> dict[str, Tensor]:
        """Elementwise states of `flat` over its state range, by name ('exp_avg', …). Empty before the first step."""
        return self._states.of(flat)

    def scalars_of(self, flat: FlatParam) -> Scalars:
        """The states that are not elementwise, of each parameter of `flat` that has some of its states here."""
        return self._states.scalars_of(flat)

    def visit(self, flat: FlatParam, *, changed: bool = False) -> AbstractContextManager[None]:
        """Inside, what `flat` has away from the device has its values. What was `changed` goes back."""
        return self._states.visit(flat, changed=changed)

    def end_visits(self, flats: Iterable[FlatParam] | None = None) -> None:
        """Of an update that was broken off, or is not made: nothing of it (or of these `flats`) is under way any
        more."""
        self._states.end_visits(flats)

    def new_state(self, flat: FlatParam, key: str, dtype: torch.dtype) -> Tensor:
        """A state of a `flat` that is visited, zeros over the state range; visited as well."""
        return self._states.new_state(flat, key, dtype)

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: Mapping[str, Scalars]) -> None:
        """After flats have moved or were loaded: as of `OptimizerStates`. Nothing is left of an update that is late."""
        self._give_late_up()
        self._states.rebuild(flat_states, scalars)

    def move(self, before: ZeroPolicy, after: ZeroPolicy) -> None:
        """Follow flats that were placed elsewhere; `before` is where they were. Collective when states come
        together."""
        self._partitioned = after.optimizer_states is Replication.PARTITIONED
        self.rebuild(*self._states.moved(before))


def _squares(flat: FlatParam, gradient: Tensor) -> Tensor:
    if has_kernels(flat.master):
        return grad_stats(gradient)[0]
    wide = torch.float32 if gradient.dtype.itemsize < 8 else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
