"""Any elementwise torch optimizer, over the partitions of flats that a rank owns.

The optimizer sees one-dimensional float32 segments of master weights instead of parameters. Its state tensors of a
segment's shape are kept end to end in one tensor for each flat, so that they can be cut, gathered and written like it.

A parameter that no rank used in a step is left alone, as plain torch leaves one without a gradient: its segment is cut
out, and from then on has a history of its own (its count of steps, or no state yet).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from cuda_ops.grad_stats import grad_stats
from speedlab.comm import Group
from speedlab.engine.step.communicating import Communicating, Exchanged, Prepares, StepsApart, sums_itself
from speedlab.engine.step.fused import FusedOptimizer, Given, LooksAtParameters, step_device
from speedlab.engine.step.late import LateUpdate, Twin
from speedlab.engine.step.parameter_sums import ParameterSums
from speedlab.engine.step.segments import Segment, cut, elementwise, has_kernels, owned_ranges
from speedlab.engine.step.visits import leave, publishing, visit
from speedlab.parallel.zero import Flat, Gradient
from speedlab.parallel.zero.ways import Waited
from speedlab.placement import Holders, Placement, Residency

_CAST_BYTES = 64 * 2**20
"""Gradients in low precision are widened for the update in pieces of this many bytes."""

Scalars = dict[str, dict[str, float] | None]
"""Of the parameters of a flat of which this rank has states: their states that are not elementwise ('step'), by full
name; None for one that was never updated."""


class PartitionedOptimizer:
    """The optimizer over what this rank owns. `inner` is the torch optimizer that schedulers and users see."""

    def __init__(
        self,
        flats: list[Flat],
        placement: Placement,
        axes: Mapping[str, Group],
        build: Callable[[list[list[Tensor]]], Optimizer],
        *,
        group_count: int,
        apart: bool,
    ) -> None:
        """`axes`: groups by the names that rows of the table have for them, beside that of a flat. `build` makes the
        inner optimizer of the segments of each of its groups; `apart`: each segment is of one parameter."""
        self.flats = [flat for flat in flats if flat.gradient is not None]
        self._gradients = {flat.name: flat.gradient for flat in flats if flat.gradient is not None}
        self._group_count = group_count
        self._others = {row.name for row in placement.rows if not row.answers}
        """Parameters that other tensor or pipeline ranks count."""
        self._sums = ParameterSums(self.flats, placement, axes)
        self._apart = apart
        self._begins: dict[str, set[int]] = {flat.name: self._always(flat) for flat in self.flats}
        """Slots before which a flat is cut, because their histories differ, or may."""
        self._segments = {flat.name: cut(flat, self._begins[flat.name]) for flat in self.flats}
        self.inner = build(self._by_group())
        self._stepped = self.inner
        """What makes the present update: `inner`, or the same with the options of the step whose update it is."""
        self._twin: Twin | None = None
        """Of which `_stepped` is, for an update that is late."""
        self._late: LateUpdate | None = None
        """The update that is under way on a thread, or waits for `publish`."""
        self._states: dict[str, dict[str, Tensor]] = {flat.name: {} for flat in self.flats}
        """For each flat, its elementwise states (name → tensor over the flat's state range)."""
        for flat in self.flats:
            self._gradients[flat.name].measure = partial(self._squares, flat)
        self._adopted: set[Tensor] = set()
        """Masters of segments whose elementwise states are views of those."""
        self._updating = False
        """Whether the inner optimizer's step is ours."""
        self._number = 0
        """Of the present update."""
        self._now: Sequence[Flat] = ()
        """What it updates."""
        self._ahead: Flat | None = None
        """What the next one does."""
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
        self._segments.clear()
        self._states.clear()
        self._adopted.clear()
        self.flats.clear()
        self._gradients.clear()
        self._now, self._ahead = (), None

    def _always(self, flat: Flat) -> set[int]:
        """Slots before which a flat is cut whatever their histories are."""
        return set(range(1, len(flat.slots))) if self._apart else set()

    def _by_group(self) -> list[list[Tensor]]:
        groups: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        for segments in self._segments.values():
            for segment in segments:
                groups[segment.group].append(segment.master)
        return groups

    @property
    def gradients(self) -> list[Gradient]:
        """Of `flats`, in their order."""
        return list(self._gradients.values())

    def states_of(self, flat: Flat) -> dict[str, Tensor]:
        """Elementwise states of `flat` over its state range, by name ('exp_avg', …). Empty before the first step."""
        return self._states[flat.name]

    def sum_of_squares(self) -> Tensor:
        """Of the gradients that this rank counts, as a float64 scalar on the device; each parameter counts on one
        rank of the tensor and pipeline axes."""
        squares = []
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            squares.append(self._squares(flat, *gradient.counted) if gradient.squares is None else gradient.squares)
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def _squares(self, flat: Flat, start: int, values: Tensor) -> Tensor:
        """Of `values`, a gradient of `flat` from element `start` on, as far as this rank counts it."""
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        for low, high in owned_ranges(flat, (start, start + values.numel()), self._others):
            total += _squares(flat, values[low - start : high - start])
        gradient = self._gradients[flat.name]
        # Terms that nobody has summed: so their norm is the sum's where all ranks have the same.
        return total * gradient.group.size if gradient.left_to_optimizer else total

    def refuse_new_groups(self) -> None:
        """Raises RuntimeError where the caller has added groups, whose parameters are in no flat."""
        if len(self.inner.param_groups) != self._group_count:
            raise RuntimeError(
                f"optimizer: it has {len(self.inner.param_groups)} groups of parameters, and had {self._group_count} "
                "at initialize; what was added would not be trained. Put all of them in before, with lr=0 if need be"
            )

    # ---- sums that are the inner optimizer's own to take -------------------------------------------------------------

    def prepare(self) -> None:
        """Before the first step: let an optimizer that may sum gradients itself make its connections. Collective."""
        if isinstance(self.inner, Prepares):
            self.inner.prepare(self._exchanged())

    @torch.no_grad()
    def exchange(self, factor: float) -> float:
        """Where the inner optimizer sums gradients itself, let it do so, `factor` in it; the factor that is left for
        `step`. Nothing has changed when it raises. Collective."""
        if not sums_itself(self.inner):
            return factor
        assert isinstance(self.inner, Communicating)  # See `sums_itself`.
        self.inner.exchange(self._exchanged(), factor)
        return 1.0

    @torch.no_grad()
    def tell_updated(self, everyone: Group) -> None:
        """Tell an optimizer that may sum gradients itself that an update was made. Collective over all ranks."""
        if isinstance(self.inner, Communicating):
            self.inner.updated(self._exchanged(), everyone)

    @torch.no_grad()
    def meet(self) -> None:
        """Between two steps, where ranks of the inner optimizer are apart: give all of them one model. Collective."""
        if not isinstance(self.inner, StepsApart):
            return
        self.inner.meet(self._exchanged())
        for flat in self.flats:
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def told(self) -> dict[str, float]:
        """What an optimizer that may sum gradients itself says of the last step's exchange; {} of others."""
        return self.inner.told() if isinstance(self.inner, Communicating) else {}

    def _exchanged(self) -> list[Exchanged]:
        return [
            Exchanged(
                gradient,
                self.states_of(flat),
                flat.state_range == (0, flat.padded),
                [(segment.first, segment.master) for segment in self._segments[flat.name]],
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
        flats: Sequence[Flat] | None = None,
        ahead: Flat | None = None,
    ) -> None:
        """Multiply gradients by `factor`, update the masters, and bring the parameters of all ranks up to date.

        `unused`: for flats by name, the slots that no rank used; they and their states stay as they are. `number`: how
        many updates there were, of which depends what is rounded at random. `flats`: those that are updated, all when
        left out; `ahead`: the one that will be next, whose states are then on their way.
        """
        unused = unused or {}
        self._begin(unused, number)
        self._now, self._ahead = self.flats if flats is None else flats, ahead
        self._stepped = self.inner
        for work in self._make(factor, unused):
            work.wait()

    def _begin(self, unused: Mapping[str, Collection[int]], number: int) -> None:
        self._number = number
        for flat in self.flats:
            self._cut_out(flat, unused.get(flat.name, ()))

    @torch.no_grad()
    def _make(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Waited]:
        """Update the masters; parameters that are on their way to other ranks."""
        fused = isinstance(self._stepped, FusedOptimizer)
        try:
            return self._step_fused(factor, unused) if fused else self._step_plain(factor, unused)
        except BaseException:
            self.end_visits()
            raise

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
        self._twin = Twin(self.inner)
        self._now, self._ahead, self._stepped = self.flats, None, self._twin.optimizer
        self._late = LateUpdate(partial(self._make_late, factor, unused))
        self._late.start()

    def _make_late(self, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """On the thread."""
        if self.flats:
            group = self.flats[0].gather_group
            if group.device.type == "cuda":  # New threads begin with the first one.
                torch.cuda.set_device(group.device)
            with group.traffic.beside_the_step():
                self._make(factor, unused)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring what `step_late` has updated to the parameters of all ranks. Collective. Raises what `wait` does."""
        self.wait()
        if self._twin is not None:
            self._twin.take_back()
        pending: list[Waited] = []
        following = [*self.flats[1:], None]
        try:
            for flat, ahead in zip(self.flats, following, strict=False):  # Of no flats there is one that follows.
                with publishing(flat, ahead):
                    work = flat.publish(update=self._number)
                if work is not None:
                    pending.append(work)
        except BaseException:
            self.end_visits()
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

    # ---- the update's way --------------------------------------------------------------------------------------------

    def _step_fused(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Waited]:
        assert isinstance(self._stepped, FusedOptimizer)
        pending: list[Waited] = []
        if isinstance(self._stepped, LooksAtParameters):
            self._measure(self._stepped, factor, unused)
        given = self._given(factor, unused, pending)
        self._stepped.given = given
        try:
            self._step_inner()
        finally:
            self._stepped.given = ()  # It holds gradients; those of an update that failed must not stay.
            given.close()
        return pending

    def _given(self, factor: float, unused: Mapping[str, Collection[int]], pending: list[Waited]) -> Generator[Given]:
        """Segment by segment what its update uses. Parameters of a flat are on their way to the other ranks, as
        `pending`, while the next flat is updated."""
        turns = list(self._turns(unused))
        following = [*(flats[0] for flats, _ in turns[1:]), self._ahead]
        for (flats, segments), ahead in zip(turns, following, strict=False):  # Of no turns there is one that follows.
            first = flats[0]
            with self.visit(first if segments else None, ahead, update=True):
                for segment in segments:
                    yield self._given_of(first, segment, factor)
                if segments:
                    self._adopt_states(first)
                for flat in flats:
                    untouched = flat is not first or not segments
                    # What was written anew has nothing of the parameters that nobody used.
                    partly = "parameter" in flat.away and bool(unused.get(flat.name))
                    written = flat.written_by_update is not None and not partly
                    pending += self._published(flat, copied=untouched or written)

    def _given_of(self, flat: Flat, segment: Segment, factor: float) -> Given:
        base, narrow = flat.state_range[0], flat.written_by_update
        here = slice(segment.start - base, segment.end - base)
        gradient = self._gradients[flat.name].update.to(segment.master.device)
        copy = None if narrow is None else narrow[here]
        return Given(segment.master, gradient[here], copy, factor, self._sums.first[flat.name] + segment.first)

    def _measure(self, inner: LooksAtParameters, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """What the update has to know of whole parameters, from the parts that ranks have. Collective."""
        group_of = {segment: group for group in inner.param_groups for segment in group["params"]}
        own = self._sums.zeros(inner.sums)
        for flats, segments in self._turns(unused):
            for segment in segments:
                given = self._given_of(flats[0], segment, factor)
                own[given.parameter] = inner.measure(given, group_of[segment.master])
        inner.learn(self._sums.over_ranks(own, inner.combine))

    def _turns(self, unused: Mapping[str, Collection[int]]) -> Iterator[tuple[list[Flat], list[Segment]]]:
        """What is published together, and the segments of the first of these flats, after whose update that is done.

        All ranks publish in the order of flats. Behind one that is updated here come those of which this rank has only
        parameters that nobody used; such flats may also stand at the beginning, without segments."""
        flats: list[Flat] = []
        segments: list[Segment] = []
        for flat in self._now:
            left_out = unused.get(flat.name, ())
            own = [segment for segment in self._segments[flat.name] if segment.first not in left_out]
            if own:
                if flats:
                    yield flats, segments
                flats, segments = [flat], own
            elif len(left_out) < len(flat.slots):  # Else it changes on no rank.
                flats = [*flats, flat]
        if flats:
            yield flats, segments

    def _step_plain(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Waited]:
        scaled_inside = factor != 1.0 and bool(getattr(self._stepped, "_step_supports_amp_scaling", False))
        if scaled_inside:
            # A fused kernel divides by a scale on the way; it is handed over as torch's GradScaler does.
            scale = torch.full((), 1.0 / factor, device=self.flats[0].master.device if self.flats else "cpu")
            self._stepped.grad_scale = scale  # type: ignore[attr-defined]  # see the line above
        try:
            return self._step_pieces(None if scaled_inside else factor, unused)
        finally:
            if scaled_inside:
                del self._stepped.grad_scale  # type: ignore[attr-defined]  # as above

    def _step_pieces(self, factor: float | None, unused: Mapping[str, Collection[int]]) -> list[Waited]:
        """`factor`: None where the inner optimizer scales by itself."""
        pending: list[Waited] = []
        pieces = list(self._pieces())
        following = [*(flats[0] for flats in pieces[1:]), self._ahead]
        for flats, ahead in zip(pieces, following, strict=False):  # Of no pieces there is one that follows.
            with self.visit(flats[0], ahead, update=True):  # What lies away is a piece of its own.
                for flat in flats:
                    self._give_gradients(flat, factor, unused.get(flat.name, ()))
                self._step_inner()
                for flat in flats:
                    for segment in self._segments[flat.name]:
                        segment.master.grad = None
                    self._adopt_states(flat)
                    pending += self._published(flat)
        return pending

    def _published(self, flat: Flat, *, copied: bool = False) -> list[Waited]:
        """The parameters of an updated flat, on their way to the other ranks; an update beside a step sends nothing."""
        work = None if flat.ahead else flat.publish(copied=copied, update=self._number)
        return [] if work is None else [work]

    def _give_gradients(self, flat: Flat, factor: float | None, left_out: Collection[int]) -> None:
        gradient = self._gradients[flat.name].update.to(flat.master.device)
        if gradient.dtype != flat.master.dtype:
            gradient = gradient.to(flat.master.dtype)
        if factor is not None and factor != 1.0:
            gradient.mul_(factor)
        base = flat.state_range[0]
        for segment in self._segments[flat.name]:
            if segment.first not in left_out:
                segment.master.grad = gradient[segment.start - base : segment.end - base]

    def _step_inner(self) -> None:
        self._updating = self._stepped is self.inner
        try:
            self._stepped.step()
        finally:
            self._updating = False

    def _refuse_others(self, stepped: Optimizer, *_: object) -> None:
        """A hook on the inner optimizer's step: who calls it past the engine would update nothing."""
        if stepped is self.inner and not self._updating:
            raise RuntimeError(
                "optimizer.step(): the gradients are with the engine, which scales and sums them over the ranks; call "
                "engine.step() instead"
            )

    def _settle_before(self, *_: object) -> None:
        """A hook before the inner optimizer's state_dict and load_state_dict: nothing updates states meanwhile."""
        self.settle()

    def _loaded(self, *_: object) -> None:
        """A hook behind the inner optimizer's load_state_dict: its new states go where flats have theirs."""
        self._adopted.clear()
        for flat in self.flats:
            with self.visit(flat, changed=True):
                self._adopt_states(flat)

    def _pieces(self) -> Iterator[list[Flat]]:
        """All flats at once, or in pieces where a widened copy of the gradients has to be made; one that lies away is a
        piece."""
        piece: list[Flat] = []
        held = 0
        for flat in self._now:
            size = flat.master.nbytes if self._gradients[flat.name].dtype != flat.master.dtype else 0
            if piece and (flat.lies_away or held + size > _CAST_BYTES):
                yield piece
                piece, held = [], 0
            piece.append(flat)
            held += size
        if piece:
            yield piece

    # ---- states ------------------------------------------------------------------------------------------------------

    def visit(
        self, flat: Flat | None, ahead: Flat | None = None, *, changed: bool = False, update: bool = False
    ) -> AbstractContextManager[None]:
        """Inside, what `flat` has away from the device has its values; that of `ahead` is on its way. What was
        `changed` goes back. `update`: masters and moments change, from the gradient, which is visited too; narrow
        parameters are written anew."""
        return visit(flat, ahead, changed=changed, update=update, point=self._point)

    def end_visits(self, flats: Iterable[Flat] | None = None) -> None:
        """Of an update that was broken off, or is not made: nothing of it (or of these `flats`) is under way any
        more."""
        for flat in self.flats if flats is None else flats:
            leave(flat, changed=False, point=self._point)

    def _point(self, flat: Flat) -> None:
        """The optimizer's tensors of `flat` are views of what its states are in memory now."""
        base, states = flat.state_range[0], self._states.get(flat.name, {})
        for segment in self._segments.get(flat.name, ()):
            here = slice(segment.start - base, segment.end - base)
            segment.master.data = flat.master[here]
            if segment.master in self._adopted:
                own = self.inner.state[segment.master]
                for key, whole in states.items():
                    if key in own:
                        own[key].data = whole[here]

    def _adopt_states(self, flat: Flat) -> None:
        """Lay states that the optimizer has newly made of `flat`, which is visited, end to end in one tensor; the
        optimizer keeps views."""
        states, base = self._states[flat.name], flat.state_range[0]
        for segment in self._segments[flat.name]:
            own = self.inner.state.get(segment.master, {})
            if segment.master in self._adopted or not own:
                continue
            self._adopted.add(segment.master)
            for key in [key for key, value in own.items() if elementwise(value, segment)]:
                comes = flat.comes(key, own[key].dtype)
                if key not in states and segment.master.shape == flat.master.shape and not comes:
                    states[key] = own[key]  # It is the whole already.
                    continue
                if key not in states:
                    states[key] = self.new_state(flat, key, own[key].dtype)
                here = states[key][segment.start - base : segment.end - base]
                own[key] = here.copy_(own[key])

    @staticmethod
    def new_state(flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
        """A state of a `flat` that is visited, zeros over the state range; visited as well."""
        state = flat.room(key, dtype)
        if key in flat.away:
            flat.away[key].fetch(values=False)
            flat.away[key].arrive().zero_()
        return state

    def _cut_out(self, flat: Flat, unused: Collection[int]) -> None:
        """From now on the slots `unused`, and those between them, have histories of their own."""
        if not unused:
            return
        begins = self._begins[flat.name]
        new = {
            index
            for index in range(1, len(flat.slots))
            if (index in unused) != (index - 1 in unused) and index not in begins
        }
        if not new:
            return
        scalars = self.scalars_of(flat)
        begins |= new
        self._renew([flat], {flat.name: scalars})

    def scalars_of(self, flat: Flat) -> Scalars:
        """The states that are not elementwise, of each parameter of `flat` that has some of its states here."""
        found: Scalars = {}
        for segment in self._segments[flat.name]:
            state = self.inner.state.get(segment.master)
            own = {k: float(v) for k, v in (state or {}).items() if v is not None and not elementwise(v, segment)}
            for slot in flat.slots[segment.first : segment.last]:
                if max(slot.offset, segment.start) < min(slot.offset + slot.numel, segment.end):
                    found[slot.name] = dict(own) if state else None
        return found

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: Mapping[str, Scalars]) -> None:
        """After flats have moved or were loaded: segments over the new masters, with the given states.

        `flat_states`: flat name → state name → tensor over the flat's present state range; `scalars`: flat name → as
        `scalars_of` gives them.
        """
        self._give_late_up()
        self._states = flat_states
        for flat in self.flats:
            own = scalars.get(flat.name, {})
            names = [slot.name for slot in flat.slots]
            # One that has nothing here goes with its neighbour.
            histories = [own[name] for name in names if name in own]
            known = iter(histories)
            last = histories[0] if histories else None
            each = [(last := next(known)) if name in own else last for name in names]
            differ = {index for index in range(1, len(each)) if each[index] != each[index - 1]}
            self._begins[flat.name] = differ | self._always(flat)
        self.inner.state.clear()
        self._adopted.clear()
        self._renew(self.flats, scalars)

    def _renew(self, flats: list[Flat], scalars: Mapping[str, Scalars]) -> None:
        """Segments of `flats` anew, with views of the states that are there, and these scalars."""
        for flat in flats:
            for segment in self._segments[flat.name]:
                self.inner.state.pop(segment.master, None)
                self._adopted.discard(segment.master)
            self._segments[flat.name] = cut(flat, self._begins[flat.name])
        for group, tensors in zip(self.inner.param_groups, self._by_group(), strict=True):
            group["params"] = tensors
        for flat in flats:
            base, own = flat.state_range[0], scalars.get(flat.name, {})
            for segment in self._segments[flat.name]:
                names = [slot.name for slot in flat.slots[segment.first : segment.last] if slot.name in own]
                history = own[names[0]] if names else None
                if history is None:
                    continue
                state = self.inner.state[segment.master]
                options = self.inner.param_groups[segment.group]
                device = step_device(self.inner, options, segment.master)
                # Made where it is needed: nothing is copied, and nothing waits.
                state.update({key: torch.full((), value, device=device) for key, value in history.items()})
                for key, whole in self._states[flat.name].items():
                    state[key] = whole[segment.start - base : segment.end - base]
                self._adopted.add(segment.master)

    def move(self, before: Residency) -> None:
        """Follow flats that were placed elsewhere; `before` is where they were. Collective when states come
        together."""
        scalars = {flat.name: self.scalars_of(flat) for flat in self.flats}
        kinds = {flat.name: sorted(self._states[flat.name]) for flat in self.flats}
        if self.flats and before.optimizer_states is Holders.PARTITIONED:
            # A rank knows nothing of parameters of which it had no part, or of which only others were ever used.
            for theirs, their_kinds in self.flats[0].gather_group.collect([scalars, kinds]):
                for name, own in scalars.items():
                    own.update({key: value for key, value in theirs[name].items() if own.get(key) is None})
                    kinds[name] = sorted({*kinds[name], *their_kinds[name]})
        moved = {flat.name: {kind: self._moved(flat, kind, before) for kind in kinds[flat.name]} for flat in self.flats}
        self.rebuild(moved, scalars)

    def _moved(self, flat: Flat, kind: str, before: Residency) -> Tensor:
        """An elementwise state where it is now; zeros where no parameter here was ever updated."""
        found = self._states[flat.name].get(kind)
        if found is None:
            if before.optimizer_states is flat.residency.optimizer_states:
                return flat.room(kind, flat.master.dtype)
            numel = flat.end - flat.start if before.optimizer_states is Holders.PARTITIONED else flat.padded
            found = torch.zeros(numel, dtype=flat.master.dtype, device=flat.master.device)
        return flat.moved(kind, found, before)


def _squares(flat: Flat, gradient: Tensor) -> Tensor:
    if has_kernels(flat.master):
        return grad_stats(gradient)[0]
    wide = torch.float32 if gradient.dtype.itemsize < 8 else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()
