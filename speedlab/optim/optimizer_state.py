"""Optimizer state of flat parameters: segments of the masters in the optimizer's groups, and their states.

- A segment is a range of a flat parameter that one parameter group updates. The torch optimizer has segments as params.
- Elementwise states of all segments of a flat parameter are views of one tensor, which can be partitioned, gathered and
  written like the flat parameter. States that are not elementwise (step counts) stay in the optimizer.
- Between a backward and the update, masters are `HeldMaster`: their `.grad` would be None, and clipping them would do
  nothing, so access raises.
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
"""`updates`: whether this thread runs a delayed update, next to the backward of another step."""


@contextmanager
def updating_on_this_thread() -> Iterator[None]:
    """Allow `.grad` of a `HeldMaster` inside, because a delayed update reads gradients of its own step."""
    _thread.updates = True
    try:
        yield
    finally:
        _thread.updates = False


class HeldMaster(Tensor):
    """A master between a backward and the update.

    An instance changes its class there and back, because torch's optimizers choose their fast path by exact tensor
    type.
    """

    # As in nn.Parameter: results of functions are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  # made in C++

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # torch's is an attribute that C++ makes
        """Return torch's `.grad`; raise for callers outside torch, because it would be None."""
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
        """Copy as a plain tensor."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


@dataclass(frozen=True)
class MasterSegment:
    """Elements [start, end) of a flat parameter, in its slots [first, last). `master` is a view of its master."""

    start: int
    end: int
    group: int
    first: int
    last: int
    master: Tensor


def cut(flat: FlatParam, begins: Collection[int] = (), *, separate: bool = False) -> list[MasterSegment]:
    """Split the state range of a flat parameter into segments: where the parameter group changes, and at given slots.

    Args:
        flat: The flat parameter.
        begins: Slots that begin a segment.
        apart: Split before each slot. Then no segment contains the padding after its parameter, because a mean over
            elements would count the padding.

    Returns:
        The segments with elements on this rank, in order.
    """
    low, high = flat.state_range
    firsts: list[int] = []
    for index, slot in enumerate(flat.slots):
        if not index or separate or index in begins or slot.group != flat.slots[index - 1].group:
            firsts.append(index)
    segments = []
    for first, last in zip(firsts, [*firsts[1:], len(flat.slots)], strict=True):
        begin = flat.slots[first].offset
        end = flat.slots[last].offset if last < len(flat.slots) else flat.padded
        if separate:
            end = begin + flat.slots[first].numel
        start, stop = max(begin, low), min(end, high)
        if start < stop:
            master = flat.master[start - low : stop - low]
            segments.append(MasterSegment(start, stop, flat.slots[first].group, first, last, master))
    return segments


def owned_ranges(flat: FlatParam, within: tuple[int, int], others: Collection[str]) -> list[tuple[int, int]]:
    """Return ranges of a flat parameter without some parameters. Adjacent ranges are merged.

    Args:
        flat: The flat parameter.
        within: Elements [start, end) to split.
        others: Names of parameters to leave out.

    Returns:
        Elements [start, end) of each range.
    """
    ranges, (start, stop) = [], within
    for slot in flat.slots:
        if slot.name in others:
            ranges.append((start, slot.offset))
            start = max(start, slot.offset + slot.numel)
    ranges.append((start, stop))
    return [(low, min(high, stop)) for low, high in ranges if low < min(high, stop)]


def elementwise(value: Any, segment: MasterSegment) -> bool:
    """Return whether an optimizer state has one value for each element of the segment.

    Args:
        value: The state.
        segment: The segment that the state belongs to.
    """
    return isinstance(value, Tensor) and value.ndim == 1 and value.shape == segment.master.shape


def has_kernels(master: Tensor) -> bool:
    """Return whether cuda_ops updates these masters, which must be float32.

    Args:
        master: The master tensor.
    """
    return master.dtype is torch.float32


Scalars = dict[str, dict[str, float] | None]
"""States that are not elementwise ('step'), by full parameter name, for parameters with a part on this rank.

None for a parameter that was never updated.
"""


class OptimizerStates:
    """The states of a torch optimizer, `inner`, over the segments of `flats`."""

    def __init__(
        self,
        flats: list[FlatParam],
        build: Callable[[list[list[Tensor]]], Optimizer],
        *,
        group_count: int,
        separate: bool,
    ) -> None:
        """Cut the flat parameters into segments and make the optimizer.

        Args:
            flats: The trained flat parameters of this rank.
            build: Makes the optimizer from the segments of each parameter group.
            group_count: Number of parameter groups.
            apart: Whether each segment holds one parameter only.
        """
        self.flats = flats
        self.group_count = group_count
        """Number of parameter groups that the optimizer was made with."""
        self._separate = separate
        self._begins: dict[str, set[int]] = {flat.name: set() for flat in flats}
        """Slots that begin a segment, because their histories may differ."""
        self.segments = {flat.name: self._cut(flat) for flat in flats}
        """Segments by name of the flat parameter."""
        self._build = build
        self.inner = build(self._by_group())
        self._begins_with_states = bool(self.inner.state)
        """Whether the optimizer creates all states in its constructor, as Adagrad does."""
        self._states: dict[str, dict[str, Tensor]] = {flat.name: {} for flat in flats}
        """Elementwise states of each flat parameter (name → tensor over its state range)."""
        self._adopted: dict[Tensor, dict[str, Tensor]] = {}
        """Views of these states that the optimizer got, by name, by master of a segment."""
        if self._begins_with_states:
            self.adopt_again()
        self._held = False
        """Whether masters refuse `.grad`."""
        self._in_empty_groups = torch.empty(0)
        """Placeholder in groups without a segment on this rank, so that all ranks refuse `.grad` equally."""

    def _cut(self, flat: FlatParam) -> list[MasterSegment]:
        return cut(flat, self._begins[flat.name], separate=self._separate)

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
        """Set whether the masters in the optimizer's groups refuse `.grad`.

        Args:
            held: True while `.grad` would be None because the engine holds the gradients.
        """
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
        """Return the elementwise states of a flat parameter.

        Args:
            flat: The flat parameter.

        Returns:
            By name ('exp_avg', …), 1-D over the state range of `flat`. Empty before the first step.
        """
        return self._states[flat.name]

    def scalars_of(self, flat: FlatParam) -> Scalars:
        """Return the states that are not elementwise.

        Args:
            flat: The flat parameter.

        Returns:
            The states of each parameter of `flat` with a part on this rank.
        """
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
        """Return a context in which offloaded states of a flat parameter are on the device.

        Args:
            flat: The flat parameter.
            ahead: The next flat parameter, whose states are prefetched.
            changed: Whether to write the values back at the end.
            update: Whether this is an update: it reads the gradient and changes masters and moments. Narrow parameters
                are then overwritten.
        """
        return visit(flat, ahead, changed=changed, update=update, point=self._point)

    def end_visits(self, flats: Iterable[FlatParam] | None = None) -> None:
        """End the visits of an interrupted update.

        Args:
            flats: The flat parameters; None takes all.
        """
        for flat in self.flats if flats is None else flats:
            leave(flat, changed=False, point=self._point)

    def _point(self, flat: FlatParam) -> None:
        """Make the optimizer's tensors of `flat` views of the memory that its states have now."""
        base, states = flat.state_range[0], self._states.get(flat.name, {})
        for segment in self.segments.get(flat.name, ()):
            here = slice(segment.start - base, segment.end - base)
            segment.master.data = flat.master[here]
            if segment.master in self._adopted:
                own = self.inner.state[segment.master]
                for key, whole in states.items():
                    if key in own:
                        own[key].data = whole[here]

    # ---- new states --------------------------------------------------------------------------------------------------

    def adopt(self, flat: FlatParam) -> None:
        """Copy new optimizer states of a flat parameter into one tensor; the optimizer keeps views.

        Args:
            flat: The flat parameter, inside a `visit`.
        """
        states, base = self._states[flat.name], flat.state_range[0]
        for segment in self.segments[flat.name]:
            own = self.inner.state.get(segment.master, {})
            given = self._adopted.setdefault(segment.master, {}) if own else {}
            # A state other than the given view is new: the caller cleared it, or its optimizer replaces it in each
            # step.
            new = [key for key, value in own.items() if value is not given.get(key)]
            for key in [key for key in new if elementwise(own[key], segment)]:
                comes = flat.states.comes(key, own[key].dtype)
                if key not in states and segment.master.shape == flat.master.shape and not comes:
                    states[key] = given[key] = own[key]  # The state already covers the whole range.
                    continue
                if key not in states:
                    states[key] = self.new_state(flat, key, own[key].dtype)
                here = states[key][segment.start - base : segment.end - base]
                own[key] = given[key] = here.copy_(own[key])

    @staticmethod
    def new_state(flat: FlatParam, key: str, dtype: torch.dtype) -> Tensor:
        """Return a new state of zeros over the state range; the state is visited too.

        Args:
            flat: The flat parameter, inside a `visit`.
            key: Name of the state.
            dtype: Dtype of the state.
        """
        state = flat.states.room(key, dtype)
        if key in flat.offloaded:
            flat.offloaded[key].fetch(values=False)
            flat.offloaded[key].arrive().zero_()
        return state

    def adopt_again(self) -> None:
        """Copy all states of the optimizer, for example after its load_state_dict, into the engine's memory."""
        self._adopted.clear()
        for flat in self.flats:
            with self.visit(flat, changed=True):
                self.adopt(flat)

    # ---- rebuild segments --------------------------------------------------------------------------------------------

    def cut_out(self, unused: Mapping[str, Collection[int]]) -> None:
        """Give some slots their own history from now on.

        Args:
            unused: The slots, by name of flat parameter. Slots between them get their own history too.
        """
        for flat in self.flats:
            left_out, begins = unused.get(flat.name, ()), self._begins[flat.name]
            if not left_out or self._separate:
                continue
            new = {
                index
                for index in range(1, len(flat.slots))
                if (index in left_out) != (index - 1 in left_out) and index not in begins
            }
            if not new:
                continue
            # Read before the cut, because the old segments hold the states.
            scalars = self.scalars_of(flat)
            begins |= new
            self._renew([flat], {flat.name: scalars})

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: Mapping[str, Scalars]) -> None:
        """Rebuild segments over new masters with the given states, after flat parameters moved or were loaded.

        Args:
            flat_states: Name of flat parameter → name of state → tensor over its present state range.
            scalars: Name of flat parameter → as from `scalars_of`.
        """
        self._states = flat_states
        for flat in self.flats:
            own = scalars.get(flat.name, {})
            names = [slot.name for slot in flat.slots]
            # A parameter without a part here takes the history of its neighbour.
            histories = [own[name] for name in names if name in own]
            known = iter(histories)
            last = histories[0] if histories else None
            each = [(last := next(known)) if name in own else last for name in names]
            # Cut between neighbours with different histories.
            differ = {index for index in range(1, len(each)) if each[index] != each[index - 1]}
            self._begins[flat.name] = differ
        self.inner.state.clear()
        self._adopted.clear()
        self._renew(self.flats, scalars)

    def _renew(self, flats: list[FlatParam], scalars: Mapping[str, Scalars]) -> None:
        """Rebuild the segments of `flats`, with views of the present states and with these scalars."""
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
                # Created on its device: no copy and no sync.
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
        """Give segments without states the initial states of the optimizer."""
        every = [segment.master for segments in self.segments.values() for segment in segments]
        without = [master for master in every if master not in self.inner.state]
        if without:
            begun = self._build(self._by_group()).state
            self.inner.state.update({master: begun[master] for master in without})
            self.adopt_again()

    def moved(self, before: ZeroPolicy) -> tuple[dict[str, dict[str, Tensor]], dict[str, Scalars]]:
        """Return the arguments of `rebuild` after flat parameters moved. Collective if states are gathered.

        Args:
            before: The old placement.

        Returns:
            (flat states, scalars), as `rebuild` takes them.
        """
        scalars = {flat.name: self.scalars_of(flat) for flat in self.flats}
        kinds = {flat.name: sorted(self._states[flat.name]) for flat in self.flats}
        if self.flats and before.optimizer_states is Replication.PARTITIONED:
            # A rank has no states of parameters without a part here, or that only other ranks updated.
            for theirs, their_kinds in self.flats[0].gather_group.collect([scalars, kinds]):
                for name, own in scalars.items():
                    own.update({key: value for key, value in theirs[name].items() if own.get(key) is None})
                    kinds[name] = sorted({*kinds[name], *their_kinds[name]})
        moved = {flat.name: {kind: self._moved(flat, kind, before) for kind in kinds[flat.name]} for flat in self.flats}
        return moved, scalars

    def _moved(self, flat: FlatParam, kind: str, before: ZeroPolicy) -> Tensor:
        """Return an elementwise state at its new placement; zeros if no parameter here was ever updated."""
        found = self._states[flat.name].get(kind)
        if found is None:
            if before.optimizer_states is flat.zero_policy.optimizer_states:
                return flat.states.room(kind, flat.master.dtype)
            numel = flat.end - flat.start if before.optimizer_states is Replication.PARTITIONED else flat.padded
            found = torch.zeros(numel, dtype=flat.master.dtype, device=flat.master.device)
        return flat.states.moved(kind, found, before)
