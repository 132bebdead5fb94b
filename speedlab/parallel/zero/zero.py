"""ZeRO on a plain nn.Module: gathers and reductions driven by hooks (arXiv:1910.02054).

The way of one step, with the numbers used below:

1. Before a unit's forward its parameters are gathered, and the gather of the next unit is started.
2. After it, they are released; the root unit and the last block stay, because backward begins with them.
3. When backward reaches a unit's output its parameters are gathered again, and the unit before it is started.
4. When the last gradient of a unit is there, its own gradients are summed over the ranks and, where gradients are
   partitioned, freed; its parameters are released.
5. At the end of backward the units that are left are reduced, those without gradients as zeros.

Where a step has several passes (accumulation, a pipeline's micro-batches), each rank's own gradients may stay where
they are until the last one. Gradients that copies of a parameter have in other places of the layout (`shared`) are
summed over those places first, so that all copies stay the same.

Every pass gathers every unit once, and every backward reduces every unit once, in one fixed order on all ranks. A rank
that skips a unit takes part in its gather when it comes to the next one, or at the end of the pass, and what it owns
was offered to its peers at the beginning. So ranks may take different branches without a hang. A unit that is needed
again after its release is gathered again, out of order: there all ranks must do alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.autograd.profiler import record_function

from speedlab.comm import Group, Transfer
from speedlab.parallel.zero.flat import Flat, Place, Residency, trainable_in_low_precision
from speedlab.parallel.zero.units import UnitPlan
from speedlab.parallel.zero.walk import tensors_of

_REDUCTIONS_IN_FLIGHT = 1
"""Units whose reduction may be under way while the next unit computes; each holds a whole gradient of a unit."""


class Pass(Enum):
    """What the module is doing; decides in which order units are gathered and whether they are released after a
    forward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Unit:
    """Parameters that are gathered and released together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat]) -> None:
        self.name, self.modules, self.flats = name, modules, flats
        self.trainable_count = sum(len(flat.parameters) for flat in flats if flat.trainable)
        self.gathers: list[Transfer] | None = None
        """The gather under way; None when the unit is released, [] when its parameters are there."""
        self.missing = self.trainable_count
        """Gradients that this backward pass has not produced yet."""
        self.open_calls = 0
        """Calls whose input gradients are still to come; counted where frozen parameters are needed to the end."""
        self.has_frozen = any(not flat.trainable for flat in flats)

    def start_gather(self) -> None:
        if self.gathers is None:
            self.gathers = [flat.gather() for flat in self.flats]

    def finish_gather(self) -> None:
        for pending in self.gathers or ():
            pending.wait()
        self.gathers = []

    def release(self) -> None:
        if self.gathers is not None:
            self.finish_gather()
            for flat in self.flats:
                flat.release()
            self.gathers = None

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(flat.numel for flat in self.flats):,} parameters)"


class Zero:
    """The units of one module, and the hooks that drive them. `detach` takes the hooks off again."""

    def __init__(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        *,
        groups: dict[int, int],
        gather_group: Group,
        reduce_group: Group,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype | None,
        materialize: Callable[[UnitPlan], None] | None = None,
        residency: Residency,
        shared: Mapping[str, Sequence[Group]] | None = None,
    ) -> None:
        """`groups`: id of parameter → index of its optimizer group. `gradient_dtype`: None means the compute dtype.

        `shared`: name of a parameter → groups of ranks that hold it too, and have other terms of its gradient: these
        are summed over each of the groups in turn before they are summed over the ranks here. A group that is on other
        pipeline stages only goes with parameters of the root unit and `end_backward(leave_root=True)`.

        `materialize` gives a unit that stands on `meta` its values; it is called unit by unit, so that one unit at a
        time is whole.
        """
        self.module, self.residency = module, residency
        self.gather_group, self.reduce_group = gather_group, reduce_group
        self.current = Pass.IDLE
        self.around_reduction: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around what reductions take of this rank's time; a pipeline's timeline hangs here."""
        self.units: list[Unit] = []
        for plan in plans:
            group_of = {name: groups.get(id(p), 0) for name, p in plan.parameters.items()}
            if materialize is not None:
                materialize(plan)
            flats = self._make_flats(plan, group_of, compute_dtype, gradient_dtype, shared or {})
            for flat in flats:
                flat.place(residency)
            self.units.append(Unit(plan.name, plan.modules, flats))
        self.order = list(self.units)
        """Units in the order of a forward pass, the root first: the order of gathers; reductions go the other way."""
        self._seen: list[Unit] = []
        self._cursor = 0
        self._reduce_cursor = 0
        self._in_flight: list[tuple[Unit, list[Transfer]]] = []
        self._reduced_before = False
        self._sync = True
        self.unsummed = False
        """Whether gradients of the last backward are still with each rank."""
        self._hooks: list[Any] = []
        self._attach()

    def _make_flats(
        self,
        plan: UnitPlan,
        group_of: dict[str, int],
        compute: torch.dtype,
        gradient: torch.dtype | None,
        shared: Mapping[str, Sequence[Group]],
    ) -> list[Flat]:
        """A flat for each dtype, trainable and frozen apart; parameters of one optimizer group lie side by side."""
        parts: dict[tuple[torch.dtype, bool], dict[str, tuple[nn.Parameter, int]]] = {}
        for name, parameter in sorted(plan.parameters.items(), key=lambda item: group_of[item[0]]):
            dtype = compute if parameter.dtype == torch.float32 else parameter.dtype
            parts.setdefault((dtype, parameter.requires_grad), {})[name] = (parameter, group_of[name])
        flats = []
        for (dtype, trainable), parameters in parts.items():
            suffix = str(dtype).removeprefix("torch.") + ("" if trainable else "-frozen")
            flats.append(
                Flat(
                    f"{plan.name}/{suffix}",
                    parameters,
                    dtype=dtype,
                    gather_group=self.gather_group,
                    reduce_group=self.reduce_group,
                    gradient_dtype=gradient if gradient and trainable_in_low_precision(dtype) else dtype,
                    shared=shared,
                )
            )
        return flats

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def partitioned(self) -> bool:
        return self.residency.parameters is Place.PARTITIONED

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        this = weakref.ref(self)  # The module must not keep a destroyed engine alive.

        # Hooks hold indices, not units: a hook on a parameter lives in C++, where the garbage collector sees no cycle.
        def before(unit_index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if (zero := this()) is not None:
                    zero._before_forward(zero.units[unit_index], (args, kwargs))

            return hook

        def after(unit_index: int, module_is_last: bool) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if (zero := this()) is not None:
                    zero._after_forward(zero.units[unit_index], output, module_is_last)

            return hook

        def arrived(unit_index: int, flat_index: int, index: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                if (zero := this()) is not None:
                    unit = zero.units[unit_index]
                    zero._receive(unit, unit.flats[flat_index], index, parameter)

            return hook

        held_by_root = {id(p) for flat in self.units[0].flats for p in flat.parameters}
        for module in self.module.modules():
            if module is not self.module and any(id(p) in held_by_root for p in module.parameters(recurse=False)):
                # A caller may enter below the root module (generate, an encoder alone).
                self._hooks.append(module.register_forward_pre_hook(before(0), with_kwargs=True))
        for unit_index, unit in enumerate(self.units):
            for module in unit.modules:
                is_last = module is unit.modules[-1]
                self._hooks.append(module.register_forward_pre_hook(before(unit_index), with_kwargs=True, prepend=True))
                self._hooks.append(module.register_forward_hook(after(unit_index, is_last)))
            for flat_index, flat in enumerate(unit.flats):
                for index, parameter in enumerate(flat.parameters if flat.trainable else ()):
                    hook = arrived(unit_index, flat_index, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Take all hooks off the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, inputs: Any) -> None:
        if unit is self.units[0] and self.current is Pass.IDLE:
            self._begin(Pass.FORWARD)
        if self.current is Pass.FORWARD and unit not in self._seen:
            self._seen.append(unit)
        if self.partitioned and unit.has_frozen and unit is not self.units[0] and torch.is_grad_enabled():
            watched = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
            if watched:
                unit.open_calls += 1
                register_multi_grad_hook(watched, partial(self._call_closed, unit), mode="all")
        self._require(unit)  # 1

    def _after_forward(self, unit: Unit, output: Any, module_is_last: bool) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
        if self.current is Pass.BACKWARD:
            return  # Recomputation inside backward: the parameters are needed at once.
        if unit is self.units[0]:
            self._end_forward()
        elif self.partitioned and module_is_last and not self._stays(unit):
            unit.release()  # 2

    def _stays(self, unit: Unit) -> bool:
        return torch.is_grad_enabled() and (unit is self.units[0] or unit is self.order[-1])

    def _end_forward(self) -> None:
        """The root module has returned: take part in the gathers that this rank skipped, and release what backward
        does not need first."""
        self._take_part_in_rest()
        if self.partitioned:
            for unit in self.units:
                if not self._stays(unit):
                    unit.release()
        self.current = Pass.IDLE

    # ---- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, *, sync: bool) -> None:
        """Call before `loss.backward()`. Without `sync` the gradients stay with each rank."""
        self._sync = sync
        self.reduce_group.wait_until_all_read()  # Replicated gradients are about to be written over.
        if self._reduced_before:
            for flat in self.flats:
                if flat.trainable:
                    flat.set_aside()
        self._reduce_cursor = 0
        for unit in self.units:
            unit.missing = unit.trainable_count
        self._begin(Pass.BACKWARD)

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        if self.current is Pass.BACKWARD:
            self._require(unit)  # 3

    def _receive(self, unit: Unit, flat: Flat, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._sync and self._reduce_cursor > self.backward_order.index(unit):
            raise RuntimeError(
                f"{flat.slots[index].name} received a second gradient in one backward pass after {unit.name} was "
                f"reduced; "
                "use torch.utils.checkpoint with use_reentrant=False, or put the module in a unit of its own"
            )
        flat.receive(index, gradient)
        unit.missing -= 1
        if unit.missing == 0 and unit is not self.units[0]:
            if self.partitioned and not unit.has_frozen:
                unit.release()
            if self._sync:
                self._reduce_ready()  # 4

    def _call_closed(self, unit: Unit, gradients: Any) -> None:
        unit.open_calls -= 1
        if unit.open_calls == 0 and unit.missing <= 0:
            unit.release()

    def backward_by_unit(self, compute: Callable[[Unit], None], *, sync: bool, leave_root: bool = False) -> None:
        """A whole backward pass that no hook drives: `compute(unit)` leaves gradients in `.grad` of its parameters."""
        self.begin_backward(sync=sync)
        for unit in self.backward_order:
            self._require(unit)
            compute(unit)
            self._collect(unit)
        self.end_backward(leave_root=leave_root)

    def collect(self) -> None:
        """Inside a backward pass: take the gradients that stand in `.grad`, which no hook has seen."""
        for unit in self.units:
            self._collect(unit)

    def _collect(self, unit: Unit) -> None:
        for flat in unit.flats:
            for index, parameter in enumerate(flat.parameters):
                self._receive(unit, flat, index, parameter)

    def end_backward(self, *, leave_root: bool = False) -> None:
        """Call after `loss.backward()`: gradients of all units are summed over the ranks when this returns.

        `leave_root`: those of the root unit wait for `reduce_root`, for a caller whose ranks may not wait here.
        """
        self._take_part_in_rest()
        if self.partitioned:
            for unit in self.units:
                unit.release()
                unit.open_calls = 0
        if self._sync:
            self._reduce_ready(everything=True, leave_root=leave_root)  # 5
            self._finish_reductions(0)
            self._reduced_before = not leave_root
        self.unsummed = not self._sync or leave_root
        self.gather_group.wait_until_all_read()  # The next thing may be an update of the shards.
        self.current = Pass.IDLE

    def reduce_root(self) -> None:
        """Sum over the ranks what `end_backward(leave_root=True)` has left of a pass that was to be summed."""
        self._reduce_ready(everything=True)
        self._finish_reductions(0)
        self._reduced_before, self.unsummed = True, False

    @property
    def backward_order(self) -> list[Unit]:
        """Blocks as backward meets them; the root last, because it holds what several blocks share."""
        return [*self.order[:0:-1], self.units[0]]

    def _reduce_ready(self, *, everything: bool = False, leave_root: bool = False) -> None:
        order = self.backward_order
        while self._reduce_cursor < len(order) and (everything or order[self._reduce_cursor].missing <= 0):
            unit = order[self._reduce_cursor]
            if unit is self.units[0] and (leave_root or not everything):
                return  # Gradients of shared parameters may still come.
            self._reduce_cursor += 1
            accumulate = self._reduced_before and self.residency.gradients is Place.PARTITIONED
            with record_function(f"speedlab::reduce {unit.name}"), self.around_reduction():
                works = [flat.reduce(accumulate=accumulate) for flat in unit.flats if flat.trainable]
            self._in_flight.append((unit, works))
            self._finish_reductions(_REDUCTIONS_IN_FLIGHT)

    def _finish_reductions(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            unit, works = self._in_flight.pop(0)
            with self.around_reduction():
                for work in works:
                    work.wait()
                for flat in unit.flats:
                    if flat.trainable:
                        flat.reduced()

    # ---- gathers in one order ----------------------------------------------------------------------------------------

    def _begin(self, phase: Pass) -> None:
        self.current = phase
        self._cursor = 0
        if phase is Pass.FORWARD:
            self._seen = []
        if self.partitioned:
            # What stays gathered does so on all ranks, so all offer the same.
            released = [unit for unit in self._gather_order() if unit.gathers is None]
            self.gather_group.offer([flat.shard for unit in released for flat in unit.flats])

    def _gather_order(self) -> list[Unit]:
        """The root comes first in both directions: it is needed at both ends of a pass."""
        return [self.units[0], *self.order[:0:-1]] if self.current is Pass.BACKWARD else self.order

    def _require(self, unit: Unit) -> None:
        """The unit's parameters are there when this returns; the next unit's are on their way."""
        if not self.partitioned:
            return
        order = self._gather_order()
        position = order.index(unit)
        while self._cursor <= position:
            order[self._cursor].start_gather()
            self._cursor += 1
        unit.start_gather()
        unit.finish_gather()
        if self._cursor == position + 1 < len(order):
            order[self._cursor].start_gather()
            self._cursor += 1

    def _take_part_in_rest(self) -> None:
        if not self.partitioned:
            return
        order = self._gather_order()
        while self._cursor < len(order):
            unit = order[self._cursor]
            unit.start_gather()
            self._cursor += 1
            if not (self.current is Pass.FORWARD and self._stays(unit)):
                unit.release()

    # ---- between steps -----------------------------------------------------------------------------------------------

    def agree_on_order(self) -> None:
        """Adopt the order in which rank 0's last forward pass met the units. Collective; call once, after a first
        step."""
        names = [unit.name for unit in self._seen] + [unit.name for unit in self.units if unit not in self._seen]
        by_name = {unit.name: unit for unit in self.units}
        order = [by_name[name] for name in self.gather_group.share(names)]
        self.order = [self.units[0], *(unit for unit in order if unit is not self.units[0])]

    def clear_gradients(self) -> None:
        for flat in self.flats:
            flat.clear_gradient()
        self._reduced_before = self.unsummed = False

    def abandon_pass(self) -> None:
        """After an exception in forward or backward: finish what is under way and return to the state between steps."""
        for unit in self.units:
            if self.partitioned:
                unit.release()
            for flat in unit.flats:
                for parameter in flat.parameters:
                    parameter.grad = None
        if self.current is Pass.BACKWARD:
            self._finish_reductions(0)
            self.clear_gradients()
        self.gather_group.withdraw()
        self.current = Pass.IDLE

    def disconnect(self) -> None:
        """Let go of the connections. Transfers under way keep their memory until `reconnect`."""
        self.gather_group.disconnect()
        self.reduce_group.disconnect()

    def reconnect(self) -> None:
        """Use the present world's connections, after forgetting a pass that was cut off. Collective."""
        self.gather_group.reconnect()
        self.reduce_group.reconnect()
        if self.current is Pass.IDLE and not self._in_flight:
            return
        self._in_flight.clear()
        for unit in self.units:
            unit.open_calls = 0
            if unit.gathers is not None:
                unit.gathers = []  # Nothing arrives any more from a world that was left.
                unit.release()
        self.clear_gradients()
        self.current = Pass.IDLE

    def place(self, residency: Residency) -> None:
        """Move every flat to another row of the residency table. Between two steps only."""
        if self.partitioned:
            for unit in self.units:
                unit.release()
            self.gather_group.wait_until_all_read()
        self.reduce_group.wait_until_all_read()
        for flat in self.flats:
            flat.place(residency)
        self.reduce_group.drop_buffers()
        self.residency = residency
        for unit in self.units:
            unit.gathers = None
