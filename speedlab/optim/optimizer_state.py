"""What the torch optimizer has of the flats that a rank trains: segments of their masters in its groups, and states.

State tensors of a segment's shape are kept end to end in one tensor for each flat, so that they can be cut, gathered
and written like it; the optimizer has views of them. What is not elementwise (a count of steps) it keeps itself.

Segments: the stretches of a flat that one optimizer group updates alike.

Between a backward and the update their masters are of a class that refuses `.grad`, which is None then: clipping them
would do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedlab.optim.fused import step_device
from speedlab.optim.offload_fetch import leave, visit
from speedlab.parallel.zero import FlatParam
from speedlab.parallel.zero.parameter import asked_by_torch, gradient_of, refuse_gradient_read, set_gradient
from speedlab.placement import Replication, ZeroPolicy

_thread = threading.local()
"""`updates`: whether this thread makes an update, next to the backward of another step."""


@contextmanager
def updating_on_this_thread() -> Iterator[None]:
    """Inside, `.grad` of a `HeldMaster` is torch's: an update that is late reads gradients of its own step."""
    _thread.updates = True
    try:
        yield
    finally:
        _thread.updates = False


class HeldMaster(Tensor):
    """A master between a backward and the update. An instance changes its class there and back, because torch's
    optimizers choose their fast form by the exact type of tensors."""

    # As nn.Parameter has it: results of functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # made in C++

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # torch's is an attribute that C++ makes
        if not getattr(_thread, "updates", False) and not asked_by_torch():
            refuse_gradient_read("optimizer.param_groups")
        found: Tensor | None = gradient_of(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not getattr(_thread, "updates", False) and not asked_by_torch():
            refuse_gradient_read("optimizer.param_groups")
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


@dataclass(frozen=True)
class MasterSegment:
    """Elements [start, end) of a flat, of its slots [first, last); `master` is a view of the flat's master."""

    start: int
    end: int
    group: int
    first: int
    last: int
    master: Tensor


def cut(flat: FlatParam, begins: Collection[int] = (), *, apart: bool = False) -> list[MasterSegment]:
    """The flat's state range, cut where its optimizer group changes, and before the slots `begins`. `apart`: before
    each slot; then no segment has the padding behind its parameter, which a mean over elements would count."""
    low, high = flat.state_range
    firsts: list[int] = []
    for index, slot in enumerate(flat.slots):
        if not index or apart or index in begins or slot.group != flat.slots[index - 1].group:
            firsts.append(index)
    segments = []
    for first, last in zip(firsts, [*firsts[1:], len(flat.slots)], strict=True):
        begin = flat.slots[first].offset
        end = flat.slots[last].offset if last < len(flat.slots) else flat.padded
        if apart:
            end = begin + flat.slots[first].numel
        start, stop = max(begin, low), min(end, high)
        if start < stop:
            master = flat.master[start - low : stop - low]
            segments.append(MasterSegment(start, stop, flat.slots[first].group, first, last, master))
    return segments


def owned_ranges(flat: FlatParam, within: tuple[int, int], others: Collection[str]) -> list[tuple[int, int]]:
    """Elements [start, end) of the flat `within` a range without the parameters in `others`; neighbours are one."""
    ranges, (start, stop) = [], within
    for slot in flat.slots:
        if slot.name in others:
            ranges.append((start, slot.offset))
            start = max(start, slot.offset + slot.numel)
    ranges.append((start, stop))
    return [(low, min(high, stop)) for low, high in ranges if low < min(high, stop)]


def elementwise(value: Any, segment: MasterSegment) -> bool:
    """Whether an optimizer's state of this segment has a value for each of its elements."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.shape == segment.master.shape


def has_kernels(master: Tensor) -> bool:
    """Whether cuda_ops updates such masters: those in float32."""
    return master.dtype is torch.float32


Scalars = dict[str, dict[str, float] | None]
"""Of the parameters of a flat of which this rank has states: their states that are not elementwise ('step'), by full
name; None for one that was never updated."""


class OptimizerStates:
    """`inner` is the torch optimizer, over the segments into which `flats` are cut."""

    def __init__(
        self,
        flats: list[FlatParam],
        build: Callable[[list[list[Tensor]]], Optimizer],
        *,
        group_count: int,
        apart: bool,
    ) -> None:
        """`build` makes the inner optimizer of the segments of each of its groups; `apart`: each segment is of one
        parameter."""
        self.flats = flats
        self.group_count = group_count
        """How many groups the optimizer was made with."""
        self._apart = apart
        self._begins: dict[str, set[int]] = {flat.name: set() for flat in flats}
        """Slots before which a flat is cut, because their histories differ, or may."""
        self.segments = {flat.name: self._cut(flat) for flat in flats}
        """By name of a flat."""
        self._build = build
        self.inner = build(self._by_group())
        self._begins_with_states = bool(self.inner.state)
        """Whether the optimizer has states from its making on, as Adagrad, and makes none later."""
        self._states: dict[str, dict[str, Tensor]] = {flat.name: {} for flat in flats}
        """For each flat, its elementwise states (name → tensor over the flat's state range)."""
        self._adopted: dict[Tensor, dict[str, Tensor]] = {}
        """Views of those that the optimizer was given, by name, for masters of segments."""
        if self._begins_with_states:
            self.adopt_anew()
        self._held = False
        """Whether masters refuse `.grad`."""
        self._in_empty_groups = torch.empty(0)
        """The tensor of a group of which this rank has nothing, while masters are held: ranks refuse alike."""

    def _cut(self, flat: FlatParam) -> list[MasterSegment]:
        return cut(flat, self._begins[flat.name], apart=self._apart)

    def _by_group(self) -> list[list[Tensor]]:
        groups: list[list[Tensor]] = [[] for _ in range(self.group_count)]
        for segments in self.segments.values():
            for segment in segments:
                groups[segment.group].append(segment.master)
        return groups

    def forget(self) -> None:
        """Drop every tensor."""
        self.hold(False)
        self.segments.clear()
        self._states.clear()
        self._adopted.clear()
        self.flats.clear()

    def hold(self, held: bool) -> None:
        """Let the masters in the optimizer's groups refuse `.grad`, as long as it would be None and gradients are in
        the engine; with False, no longer."""
        if held is self._held:
            return
        self._held = held
        before, after = (Tensor, HeldMaster) if held else (HeldMaster, Tensor)
        masters = [segment.master for segments in self.segments.values() for segment in segments]
        for master in (*masters, self._in_empty_groups):
            if type(master) is before:  # A tensor of another class (a trace on fake tensors) keeps its own.
                master.__class__ = after  # pyright: ignore[reportAttributeAccessIssue]  # the layouts are equal
        for group in self.inner.param_groups:
            if held and not group["params"]:
                group["params"].append(self._in_empty_groups)
            elif not held and group["params"] and group["params"][0] is self._in_empty_groups:
                group["params"].clear()

    def of(self, flat: FlatParam) -> dict[str, Tensor]:
        """Elementwise states of `flat` over its state range, by name ('exp_avg', …). Empty before the first step."""
        return self._states[flat.name]

    def scalars_of(self, flat: FlatParam) -> Scalars:
        """The states that are not elementwise, of each parameter of `flat` that has some of its states here."""
        found: Scalars = {}
        for segment in self.segments[flat.name]:
            state = self.inner.state.get(segment.master)
            own = {k: float(v) for k, v in (state or {}).items() if v is not None and not elementwise(v, segment)}
            for slot in flat.slots[segment.first : segment.last]:
                if max(slot.offset, segment.start) < min(slot.offset + slot.numel, segment.end):
                    found[slot.name] = dict(own) if state else None
        return found

    # ---- visits ------------------------------------------------------------------------------------------------------

    def visit(
        self, flat: FlatParam | None, ahead: FlatParam | None = None, *, changed: bool = False, update: bool = False
    ) -> AbstractContextManager[None]:
        """Inside, what `flat` has away from the device has its values; that of `ahead` is on its way. What was
        `changed` goes back. `update`: masters and moments change, from the gradient, which is visited too; narrow
        parameters are written anew."""
        return visit(flat, ahead, changed=changed, update=update, point=self._point)

    def end_visits(self, flats: Iterable[FlatParam] | None = None) -> None:
        """Of an update that was broken off, or is not made: nothing of it (or of these `flats`) is under way any
        more."""
        for flat in self.flats if flats is None else flats:
            leave(flat, changed=False, point=self._point)

    def _point(self, flat: FlatParam) -> None:
        """The optimizer's tensors of `flat` are views of what its states are in memory now."""
        base, states = flat.state_range[0], self._states.get(flat.name, {})
        for segment in self.segments.get(flat.name, ()):
            here = slice(segment.start - base, segment.end - base)
            segment.master.data = flat.master[here]
            if segment.master in self._adopted:
                own = self.inner.state[segment.master]
                for key, whole in states.items():
                    if key in own:
                        own[key].data = whole[here]

    # ---- states that the optimizer has made --------------------------------------------------------------------------

    def adopt(self, flat: FlatParam) -> None:
        """Lay states that the optimizer has newly made of `flat`, which is visited, end to end in one tensor; the
        optimizer keeps views."""
        states, base = self._states[flat.name], flat.state_range[0]
        for segment in self.segments[flat.name]:
            own = self.inner.state.get(segment.master, {})
            given = self._adopted.setdefault(segment.master, {}) if own else {}
            # One that is not what it was given is new: it was cleared, or its optimizer makes it anew each time.
            new = [key for key, value in own.items() if value is not given.get(key)]
            for key in [key for key in new if elementwise(own[key], segment)]:
                comes = flat.states.comes(key, own[key].dtype)
                if key not in states and segment.master.shape == flat.master.shape and not comes:
                    states[key] = given[key] = own[key]  # It is the whole already.
                    continue
                if key not in states:
                    states[key] = self.new_state(flat, key, own[key].dtype)
                here = states[key][segment.start - base : segment.end - base]
                own[key] = given[key] = here.copy_(own[key])

    @staticmethod
    def new_state(flat: FlatParam, key: str, dtype: torch.dtype) -> Tensor:
        """A state of a `flat` that is visited, zeros over the state range; visited as well."""
        state = flat.states.room(key, dtype)
        if key in flat.offloaded:
            flat.offloaded[key].fetch(values=False)
            flat.offloaded[key].arrive().zero_()
        return state

    def adopt_anew(self) -> None:
        """The optimizer has other states, of its own: they go where flats have theirs."""
        self._adopted.clear()
        for flat in self.flats:
            with self.visit(flat, changed=True):
                self.adopt(flat)

    # ---- segments anew -----------------------------------------------------------------------------------------------

    def cut_out(self, unused: Mapping[str, Collection[int]]) -> None:
        """From now on these slots of flats, by name, and those between them, have histories of their own."""
        for flat in self.flats:
            left_out, begins = unused.get(flat.name, ()), self._begins[flat.name]
            if not left_out or self._apart:
                continue
            new = {
                index
                for index in range(1, len(flat.slots))
                if (index in left_out) != (index - 1 in left_out) and index not in begins
            }
            if not new:
                continue
            scalars = self.scalars_of(flat)
            begins |= new
            self._renew([flat], {flat.name: scalars})

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: Mapping[str, Scalars]) -> None:
        """After flats have moved or were loaded: segments over the new masters, with the given states.

        `flat_states`: flat name → state name → tensor over the flat's present state range; `scalars`: flat name → as
        `scalars_of` gives them.
        """
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
            self._begins[flat.name] = differ
        self.inner.state.clear()
        self._adopted.clear()
        self._renew(self.flats, scalars)

    def _renew(self, flats: list[FlatParam], scalars: Mapping[str, Scalars]) -> None:
        """Segments of `flats` anew, with views of the states that are there, and these scalars."""
        for flat in flats:
            for segment in self.segments[flat.name]:
                self.inner.state.pop(segment.master, None)
                self._adopted.pop(segment.master, None)
            self.segments[flat.name] = self._cut(flat)
        for group, tensors in zip(self.inner.param_groups, self._by_group(), strict=True):
            group["params"] = tensors
        for flat in flats:
            base, own = flat.state_range[0], scalars.get(flat.name, {})
            for segment in self.segments[flat.name]:
                names = [slot.name for slot in flat.slots[segment.first : segment.last] if slot.name in own]
                history = own[names[0]] if names else None
                if history is None:
                    continue
                state = self.inner.state[segment.master]
                options = self.inner.param_groups[segment.group]
                device = step_device(self.inner, options, segment.master)
                # Made where it is needed: nothing is copied, and nothing waits.
                state.update({key: torch.full((), value, device=device) for key, value in history.items()})
                given = {
                    key: whole[segment.start - base : segment.end - base]
                    for key, whole in self._states[flat.name].items()
                }
                state.update(given)
                self._adopted[segment.master] = given
        if self._begins_with_states:
            self._begin_without_history()

    def _begin_without_history(self) -> None:
        """Give segments without states those with which the optimizer begins."""
        every = [segment.master for segments in self.segments.values() for segment in segments]
        without = [master for master in every if master not in self.inner.state]
        if without:
            begun = self._build(self._by_group()).state
            self.inner.state.update({master: begun[master] for master in without})
            self.adopt_anew()

    def moved(self, before: ZeroPolicy) -> tuple[dict[str, dict[str, Tensor]], dict[str, Scalars]]:
        """What `rebuild` takes, after flats were placed elsewhere; `before` is where they were. Collective when states
        come together."""
        scalars = {flat.name: self.scalars_of(flat) for flat in self.flats}
        kinds = {flat.name: sorted(self._states[flat.name]) for flat in self.flats}
        if self.flats and before.optimizer_states is Replication.PARTITIONED:
            # A rank knows nothing of parameters of which it had no part, or of which only others were ever used.
            for theirs, their_kinds in self.flats[0].gather_group.collect([scalars, kinds]):
                for name, own in scalars.items():
                    own.update({key: value for key, value in theirs[name].items() if own.get(key) is None})
                    kinds[name] = sorted({*kinds[name], *their_kinds[name]})
        moved = {flat.name: {kind: self._moved(flat, kind, before) for kind in kinds[flat.name]} for flat in self.flats}
        return moved, scalars

    def _moved(self, flat: FlatParam, kind: str, before: ZeroPolicy) -> Tensor:
        """An elementwise state where it is now; zeros where no parameter here was ever updated."""
        found = self._states[flat.name].get(kind)
        if found is None:
            if before.optimizer_states is flat.zero_policy.optimizer_states:
                return flat.states.room(kind, flat.master.dtype)
            numel = flat.end - flat.start if before.optimizer_states is Replication.PARTITIONED else flat.padded
            found = torch.zeros(numel, dtype=flat.master.dtype, device=flat.master.device)
        return flat.states.moved(kind, found, before)
