"""ZeRO on a plain nn.Module: hooks drive the gathers and the reductions (arXiv:1910.02054).

One step, with the numbers that the code uses:

1. Before a unit's forward: gather its parameters, and start the gather of the next unit.
2. After a unit's forward: release its parameters. The root unit and the last block stay, because backward starts with
   them.
3. When backward reaches a unit's output: gather its parameters again, and start the gather of the previous unit.
4. When the last gradient of a unit is ready: release its parameters and reduce its gradients. Partitioned gradients
   are freed after the reduction.
5. At the end of backward: reduce the remaining units. Missing gradients count as zeros.

A step may have several passes (gradient accumulation, micro-batches of a pipeline). Then each rank's gradients can
stay local until the last pass. Gradients of a parameter that other axes replicate are summed over those axes
(`summed_over`) first, so that all replicas stay equal.

Every pass gathers every unit once (`all_gather.py`), and every backward reduces every unit once (`reduce_scatter.py`),
in the same order on all ranks. A unit that is needed after its release is gathered again; all ranks must do so.

The `refuse_…` functions raise errors for uses that would otherwise silently train or read wrong values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from speedlab.comm import Group, PeerLost, note_forward
from speedlab.offload import StoreRegistry
from speedlab.parallel.zero.all_gather import UnshardScheduler
from speedlab.parallel.zero.backward_unshard import SavedTensors
from speedlab.parallel.zero.comm_groups import ZeroCommGroups
from speedlab.parallel.zero.flat_param import FlatParam
from speedlab.parallel.zero.module_hooks import PartHooks, hook_of, parts_of, tensors_of
from speedlab.parallel.zero.param_slot import refuse_shape
from speedlab.parallel.zero.parameter import clear_gradient, gradient_of
from speedlab.parallel.zero.reduce_scatter import ReduceScheduler
from speedlab.parallel.zero.units import Unit, UnitPhase, UnitPlan
from speedlab.placement import Placement, ZeroPolicy

_ONLY_IN_BACKWARD = (
    "where they are partitioned (ZeRO stage 3) or away from the device, only engine.backward brings them together "
    "again. Use a stage below 3 for such a loss, in place by engine.reshape(zero=2)"
)


def refuse_transforms(name: str) -> None:
    """Refuse a forward inside torch.func or forward-mode differentiation. No hook on an output sees such graphs.

    Args:
        name: Name of a unit whose parameters are gathered on demand.

    Raises:
        RuntimeError: A transform of torch.func (grad, vmap, jvp, …) or forward-mode differentiation is active.
    """
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{name}: a forward inside torch.func or forward-mode differentiation keeps graphs for which no rank "
            f"gathers its parameters; {_ONLY_IN_BACKWARD}"
        )


def refuse_gradient_elsewhere(name: str) -> NoReturn:
    """Raise RuntimeError: a backward outside the engine would read released parameters of the unit `name`."""
    raise RuntimeError(
        f"{name}: a gradient was asked for outside engine.backward (by torch.autograd.grad, or by another engine), and "
        f"its parameters are not here; {_ONLY_IN_BACKWARD}. A loss through modules of two engines: one engine over a "
        "module that holds both"
    )


def refuse_loose_gradient(name: str) -> NoReturn:
    """Raise RuntimeError: the parameter `name` got a gradient outside `engine.backward`."""
    raise RuntimeError(
        f"{name} received a gradient outside engine.backward, which scales and sums them over the ranks; call "
        "engine.backward(loss) instead of loss.backward(). Where a loss goes through modules of two engines: to train "
        "both, set up one engine over a module that holds both; to train the other alone, call "
        "module.requires_grad_(False) on this one before its forward and (True) after the backward"
    )


def refuse_taken_gradient(name: str) -> NoReturn:
    """Raise RuntimeError: a hook from before `initialize` cleared the gradient of the parameter `name`."""
    raise RuntimeError(
        f"{name}: a post-accumulate hook of before initialize has taken its gradient, so that the engine would never "
        "train it. Remove the hook; to update in backward, set optimizer.in_backward in the configuration"
    )


def refuse_state_dict() -> NoReturn:
    """Raise RuntimeError: `module.state_dict()` would return released parameters."""
    raise RuntimeError(
        "module.state_dict(): the parameters are partitioned (ZeRO stage 3) or away from the device, so that they are "
        "not here; engine.state_dict() or engine.module_state_dict(), on all ranks, puts them together"
    )


def refuse_thawed(flats: Iterable[FlatParam]) -> None:
    """Check that frozen parameters are still frozen and that shapes are unchanged.

    Args:
        flats: The flats to check.

    Raises:
        RuntimeError: A parameter requires a gradient now but was frozen at initialize, or its shape changed.
    """
    # Released parameters otherwise run Python code on every attribute read.
    with torch._C.DisableTorchFunctionSubclass():
        for flat in flats:
            for slot, parameter in zip(flat.slots, flat.parameters, strict=True):
                if parameter.shape != slot.shape:
                    refuse_shape(slot.name, slot.shape, parameter.shape)
                if parameter.requires_grad and not flat.trainable:
                    raise RuntimeError(
                        f"{slot.name} was frozen at initialize and requires a gradient now, but has no place for one; "
                        "set requires_grad before, and call initialize again"
                    )


def refuse_other_parameters(module: nn.Module, flats: Iterable[FlatParam]) -> None:
    """Check that every trainable parameter of the module is in a flat. Visits all modules.

    Args:
        module: The engine's module.
        flats: All flats of the engine.

    Raises:
        RuntimeError: A trainable parameter was added or replaced after initialize.
    """
    known = {id(parameter) for flat in flats for parameter in flat.parameters}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known and parameter.requires_grad:
            raise RuntimeError(
                f"{name} is another parameter than at initialize, or was added since, and would not be trained; write "
                "new values into the old one (parameter.copy_, or load_state_dict as it is), or call initialize again"
            )


class Zero:
    """The units of one module, and the hooks that drive them. `detach` removes the hooks."""

    def __init__(
        self,
        module: nn.Module,
        plans: list[UnitPlan],
        placement: Placement,
        *,
        ways: ZeroCommGroups,
        stores: StoreRegistry,
        axes: Mapping[str, Group] | None = None,
        reductions_in_flight: int | None = None,
        materialize: Callable[[UnitPlan], None] | None = None,
        alike: Group | None = None,
    ) -> None:
        """Create the flats, place them, and attach the hooks. Collective.

        Args:
            module: The module to train.
            plans: Its units, root first.
            placement: One row per parameter of `plans`. Flats are created and placed accordingly.
            ways: Groups for gathers and reductions.
            stores: The host and disk stores.
            axes: Groups that hold replicas of some parameters but different gradients, by the names in `summed_over`.
                If such a group spans pipeline stages, its parameters must be in the root unit, and the caller must use
                `end_backward(leave_root=True)`.
            reductions_in_flight: Units whose gradients may be reduced at the same time; see `ReduceScheduler`.
            materialize: Initializes a unit that is on the `meta` device. Called unit by unit, so that only one full
                unit is in memory.
            alike: All ranks that start with the same values; None: the gather group.
        """
        self.module, self.placement = module, placement
        self._ways = ways
        units: list[Unit] = []
        for plan in plans:
            if materialize is not None:
                materialize(plan)
            flats = [
                FlatParam(
                    name,
                    rows,
                    plan.parameters,
                    ways=ways,
                    axes=axes or {},
                    stores=stores,
                    alike=alike,
                )
                for name, rows in placement.flats.items()
                if rows[0].unit == plan.name
            ]
            for flat in flats:
                flat.place(placement.zero_policy)
            units.append(Unit(plan.name, plan.modules, flats))
        self.gathers = UnshardScheduler(units, ways)
        self.gathers.place(placement.zero_policy)
        self.reductions = ReduceScheduler(self.gathers, ways.reduce, in_flight=reductions_in_flight)
        self.finish_update: Callable[[], None] = lambda: None
        """Apply the delayed update so that every rank reads current parameters. Collective."""
        self._saved = SavedTensors(self._before_read)
        """Unshards units before autograd reads saved tensors."""
        self._broken = False
        """Whether a peer was lost during a pass, or connections were closed. Pending transfers keep their memory until
        `reconnect` and are never waited for."""
        self._hooks: list[Any] = []
        self._part_hooks = PartHooks(self._before_part, self._after_part)
        self._attach()
        self._watch()

    def _watch(self) -> None:
        """Attach the hooks that only parameters on demand need."""
        come = self.units if self.params_unsharded_on_demand else ()
        self._part_hooks.attach(come)
        self._saved.watch(come)

    @property
    def units(self) -> list[Unit]:
        return self.gathers.units

    @property
    def flats(self) -> list[FlatParam]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def zero_policy(self) -> ZeroPolicy:
        return self.placement.zero_policy

    @property
    def params_unsharded_on_demand(self) -> bool:
        """Whether parameters of a unit are gathered only while the unit is used."""
        return self.gathers.params_unsharded_on_demand

    @property
    def current(self) -> UnitPhase:
        """The current pass."""
        return self.gathers.current

    @property
    def unsummed(self) -> bool:
        """Whether gradients of the last backward are not reduced yet."""
        return self.reductions.unsummed

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        this = weakref.ref(self)  # The module must not keep a destroyed engine alive.

        # Hooks hold indices instead of units: a hook on a parameter is a C++ object, so the garbage collector does not
        # see cycles through it.
        def before(unit_index: int, hooked: nn.Module) -> Callable[..., None]:
            def hook(zero: Zero, module: nn.Module, args: Any, kwargs: Any) -> None:
                zero._before_forward(unit_index, module, (args, kwargs))

            return hook_of(self, hooked, hook)

        def after(unit_index: int, hooked: nn.Module, module_is_last: bool) -> Callable[..., None]:
            def hook(zero: Zero, module: nn.Module, args: Any, output: Any) -> None:
                zero._after_forward(unit_index, output, module_is_last)

            return hook_of(self, hooked, hook)

        def leave(zero: Zero, module: nn.Module, args: Any, output: Any) -> None:
            zero._saved.leave(module)

        def after_all(zero: Zero, module: nn.Module, args: Any, output: Any) -> None:
            zero._saved.leave(module)
            if zero.current is UnitPhase.FORWARD:
                zero.gathers.rest()  # Still FORWARD: the forward raised an exception.

        def arrived(unit_index: int, flat_index: int, index: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                if (zero := this()) is not None:
                    unit = zero.units[unit_index]
                    if gradient_of(parameter) is None:
                        refuse_taken_gradient(unit.flats[flat_index].slots[index].name)
                    zero._receive(unit, unit.flats[flat_index], index, parameter)

            return hook

        def before_state_dict(zero: Zero, module: nn.Module, prefix: str, keep_vars: bool) -> None:
            zero.refuse_late("module.state_dict()")
            if zero.params_unsharded_on_demand:
                refuse_state_dict()

        self._hooks.append(self.module.register_state_dict_pre_hook(hook_of(self, self.module, before_state_dict)))
        # A caller may call a submodule directly (generate, or only an encoder).
        for part in parts_of(self.units[0]):
            self._hooks.append(part.register_forward_pre_hook(before(0, part), with_kwargs=True))
            self._hooks.append(part.register_forward_hook(hook_of(self, part, leave), always_call=True))
        for unit_index, unit in enumerate(self.units):
            for module in unit.modules:
                is_last = module is unit.modules[-1]
                hook = before(unit_index, module)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
                self._hooks.append(module.register_forward_hook(after(unit_index, module, is_last)))
                if module is not self.module:
                    self._hooks.append(module.register_forward_hook(hook_of(self, module, leave), always_call=True))
            for flat_index, flat in enumerate(unit.flats):
                for index, parameter in enumerate(flat.parameters if flat.trainable else ()):
                    hook = arrived(unit_index, flat_index, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        hook = hook_of(self, self.module, after_all)
        self._hooks.append(self.module.register_forward_hook(hook, always_call=True))

    def detach(self) -> None:
        """Remove all hooks from the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._part_hooks.detach()
        self._saved.reset()
        self._saved.watch(())
        self._forget_calls()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, unit_index: int, module: nn.Module, inputs: Any, *, alone: bool = False) -> None:
        gathers, unit = self.gathers, self.units[unit_index]
        if self.params_unsharded_on_demand and torch.is_grad_enabled():
            refuse_transforms(unit.name)
        # A direct call of a submodule leaves its pass open, so the next call of the root ends that pass.
        entered = module is self.module and self.current is UnitPhase.FORWARD
        if entered or (unit is gathers.root and self.current is UnitPhase.IDLE):
            if not torch.is_grad_enabled():
                self.refuse_late("a forward without gradients")
            note_forward()
            gathers.begin(UnitPhase.FORWARD)
            self._saved.reset()
            if module is not self.module:
                gathers.rest()
        gathers.met(unit)
        # Release a unit with frozen parameters only after the gradients of its inputs; see `_watch_call`.
        if self.params_unsharded_on_demand and unit.has_frozen and unit is not gathers.root and torch.is_grad_enabled():
            watched = [tensor for tensor in tensors_of(inputs) if tensor.requires_grad]
            if watched:
                self._watch_call(unit, watched)
        gathers.enter(unit, alone=alone)
        gathers.require(unit)  # 1
        # A submodule called alone gets its own gather, so it does not count as a running forward of the unit.
        unit.calls += not alone
        self._saved.enter(module, recomputing=self.current is UnitPhase.BACKWARD)
        if unit is not gathers.root:
            self._saved.running.append(unit_index)

    def _after_forward(self, unit_index: int, output: Any, module_is_last: bool) -> None:
        unit = self.units[unit_index]
        unit.calls = max(0, unit.calls - 1)
        if unit is not self.gathers.root:
            self._saved.ended(unit_index)
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.grad_fn is not None:
                    # Backward enters the unit through this output. The version detects graphs of older parameters.
                    tensor.register_hook(partial(self._before_backward, unit, self._saved.version))
                    if self.params_unsharded_on_demand:
                        # The hook is on the node, not on the tensor: asking for the tensor's own gradient reads no
                        # parameters and is allowed.
                        tensor.grad_fn.register_prehook(partial(self._refuse_elsewhere, unit))
        if self.current is UnitPhase.BACKWARD:
            return  # Recomputation in backward: backward needs the parameters next.
        if unit is self.gathers.root:
            self.gathers.end_forward()
        elif (
            self.params_unsharded_on_demand
            and module_is_last
            and not unit.calls
            and not self._is_needed_after(unit, output)
        ):
            unit.release()  # 2

    def _is_needed_after(self, unit: Unit, output: Any) -> bool:
        """Return whether the unit must stay gathered after its forward. There are three cases:

        - Backward starts with this unit.
        - Its forward is a generator, which has not run yet.
        - It returned a parameter, as Megatron's `skip_bias_add` does.
        """
        if self.gathers.stays(unit) or isinstance(output, Generator):
            return True
        return any(self._saved.index_of(tensor) is not None for tensor in tensors_of(output))

    def _before_part(self, unit_index: int, part: nn.Module, inputs: Any) -> bool:
        """Prepare a call of a submodule of a block. Return whether it was called without its block, so that its output
        needs hooks.
        """
        unit = self.units[unit_index]
        # The block itself was called, so its own hooks gather the unit.
        if unit.calls:
            return False
        if self.current is UnitPhase.BACKWARD:  # Recomputation runs the block's forward without its hooks.
            self.gathers.require(unit)
            return False
        self._before_forward(unit_index, part, inputs, alone=True)
        return True

    def _after_part(self, unit_index: int, part: nn.Module, output: Any) -> None:
        self._saved.leave(part)
        if not self.units[unit_index].calls:
            self._after_forward(unit_index, output, module_is_last=False)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, *, sync: bool) -> None:
        """Start a backward pass. Call it before `loss.backward()`.

        Args:
            sync: Whether this pass reduces gradients. If not, gradients stay local.

        Raises:
            RuntimeError: A parameter was frozen or did not exist at initialize, and should be trained now.
        """
        if sync:  # Only once per step, because the check visits all modules.
            refuse_other_parameters(self.module, self.flats)
        refuse_thawed(self.flats)
        self.reductions.begin(sync=sync)
        self.gathers.begin(UnitPhase.BACKWARD)
        self.gathers.require(self.gathers.root)  # Submodules of the root have no hooks on their outputs.

    def _before_backward(self, unit: Unit, version: int, gradient: Tensor | None = None) -> None:
        if version != self._saved.version:
            raise RuntimeError(
                "backward: the parameters were changed (by a step, a load or a reshape) after the forward of this "
                "loss; run the forward again"
            )
        if self.current is UnitPhase.BACKWARD:
            self.gathers.require(unit)  # 3

    def _before_read(self, index: int, version: int, *, reads_parameters: bool) -> None:
        """Unshard a unit before autograd reads, or may read, its parameters; see `SavedTensors`."""
        if index >= len(self.units):  # The engine was destroyed.
            raise RuntimeError("backward: the engine of this loss was destroyed; run the forward again")
        unit = self.units[index]
        here = unit.gathers is not None  # Gathered, or its gather is pending.
        if reads_parameters or (self.current is UnitPhase.BACKWARD and (here or self.gathers.is_ahead(unit))):
            self._before_backward(unit, version)
        if reads_parameters and self.current is not UnitPhase.BACKWARD:
            if not here:
                refuse_gradient_elsewhere(unit.name)
            unit.finish_gather()

    @contextmanager
    def checkpointed(self, unit: Unit, module: nn.Module) -> Iterator[None]:
        """Wrap a forward inside torch.utils.checkpoint. Backward runs such a forward again without the module's hooks.

        Args:
            unit: The unit of the module.
            module: The module whose forward runs.
        """
        recomputing = self.current is UnitPhase.BACKWARD
        if recomputing:
            self.gathers.require(unit)
        self._saved.enter(module, recomputing=recomputing)
        try:
            yield
        finally:
            self._saved.leave(module)

    def _refuse_elsewhere(self, unit: Unit, gradients: Any) -> None:
        """Raise RuntimeError if a backward outside the engine would read released parameters of the unit."""
        if self.current is not UnitPhase.BACKWARD and unit.gathers is None:
            refuse_gradient_elsewhere(unit.name)

    def _receive(self, unit: Unit, flat: FlatParam, index: int, parameter: Tensor) -> None:
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        clear_gradient(parameter)
        if self.current is not UnitPhase.BACKWARD:
            refuse_loose_gradient(flat.slots[index].name)
        # A flat holds dense gradients only (nn.Embedding with sparse=True gives sparse ones).
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self.reductions.is_over(unit):
            raise RuntimeError(
                f"{flat.slots[index].name} received a second gradient in one backward pass after {unit.name} was "
                f"reduced; "
                "use torch.utils.checkpoint with use_reentrant=False, or put the module in a unit of its own"
            )
        assert flat.gradient is not None  # Only trainable flats have gradient hooks.
        flat.gradient.receive(index, gradient)
        unit.missing -= 1
        # The root waits for the end of backward, because blocks may still add to its shared parameters.
        if unit.missing == 0 and unit is not self.gathers.root:
            # Reduce before the release: the update in backward needs the gathered parameters.
            if self.zero_policy.update_in_backward:
                self.reductions.advance(self.zero_policy)
            if self.params_unsharded_on_demand and not unit.has_frozen:
                unit.release()
            self.reductions.advance(self.zero_policy)  # 4

    def _watch_call(self, unit: Unit, inputs: list[Tensor]) -> None:
        """Release the unit after the gradients of all inputs of all its calls, and of its parameters, are computed.

        A unit with frozen parameters needs this hook: counting parameter gradients does not tell when backward has
        left the unit.
        """
        handles: list[RemovableHandle] = []

        def closed(gradients: Any) -> None:
            handles[0].remove()
            unit.open_calls.remove(handles[0])
            if not unit.open_calls and unit.missing <= 0:
                unit.release()

        handles.append(register_multi_grad_hook(inputs, closed, mode="all"))
        unit.open_calls.append(handles[0])

    def backward_by_unit(self, compute: Callable[[Unit], None], *, sync: bool, leave_root: bool = False) -> None:
        """Run a full backward pass without hooks.

        Args:
            compute: Called per unit; leaves gradients in `.grad` of the unit's parameters.
            sync: Whether this pass reduces gradients.
            leave_root: Whether gradients of the root unit wait for `reduce_root`.
        """
        self.begin_backward(sync=sync)
        for unit in self.backward_order:
            self.gathers.require(unit)
            compute(unit)
            self._collect(unit)
        self.end_backward(leave_root=leave_root)

    def collect(self) -> None:
        """Take the gradients in `.grad` that no hook has seen. Call it inside a backward pass."""
        for unit in self.units:
            self._collect(unit)

    def _collect(self, unit: Unit) -> None:
        for flat in unit.flats:
            for index, parameter in enumerate(flat.parameters if flat.trainable else ()):
                self._receive(unit, flat, index, parameter)

    def end_backward(self, *, leave_root: bool = False) -> None:
        """Finish the backward pass. Call it after `loss.backward()`. On return, the gradients of all units are
        reduced.

        Args:
            leave_root: Gradients of the root unit wait for `reduce_root`. For callers whose ranks must not wait here.
        """
        if self.zero_policy.update_in_backward:
            self.reductions.end(self.zero_policy, leave_root=leave_root)
        self.gathers.end_backward()
        self._forget_calls()
        self.reductions.end(self.zero_policy, leave_root=leave_root)  # 5
        self.gathers.wait_until_all_read()  # An update of the shards may follow, so all peers must have read them.
        self.gathers.end()

    def reduce_root(self) -> None:
        """Reduce the gradients that `end_backward(leave_root=True)` left."""
        self.reductions.end_root(self.zero_policy)

    @property
    def backward_order(self) -> list[Unit]:
        """Units in the order of backward. The root is last, because several blocks share its parameters."""
        return self.gathers.backward_order

    def around_reductions(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter a context around the time that reductions take on this rank.

        Args:
            context: Returns a new context manager for each entry.
        """
        self.reductions.around = context

    # ---- between steps -----------------------------------------------------------------------------------------------

    def before_change(self) -> None:
        """Prepare for a change of the parameters: release gathered values and invalidate graphs of earlier losses.
        Call it on all ranks.
        """
        self._forget_calls()
        self.gathers.before_change()
        for flat in self.flats:
            flat.take_changes()
            flat.refuse_old_graphs()
        # Graphs of earlier forwards carry the old version, so `_before_backward` refuses them.
        self._saved.version += 1

    def refuse_late(self, what: str) -> None:
        """Refuse an action while a delayed update is under way and no step has used the old parameters yet.

        Args:
            what: The action, for the message.

        Raises:
            RuntimeError: The parameters are older than the last update.
        """
        # Once a gradient exists, the step continues with the old parameters by design, so nothing is refused.
        unused = not any(used for flat in self.flats if flat.gradient is not None for used in flat.gradient.used)
        if unused and any(flat.ahead for flat in self.flats):
            raise RuntimeError(
                f"{what}: the last update is still under way (offload.delayed_update), and the parameters are those "
                "before it; call engine.finish_update() on all ranks before, or what the engine itself has for it "
                "(engine(…), engine.evaluate, engine.state_dict)"
            )

    def _forget_calls(self) -> None:
        for unit in self.units:
            unit.forget_calls()

    def learn_order(self) -> None:
        """Adopt the order in which the step called the units; later passes prefetch in this order. Call it after a
        step. Collective the first time, free afterwards.
        """
        if not self.gathers.order_is_known:
            self.gathers.agree_on_order()

    def clear_gradients(self) -> None:
        """Drop the gradients of the step, and free buffers that the next step does not need at its start."""
        self.reductions.clear()
        self._ways.reduce.trim_buffers()

    def abandon_pass(self) -> None:
        """Clean up after an exception in forward or backward: finish pending transfers.

        After a forward, gradients of earlier micro-batches of the step stay. After a backward, which may have changed
        them, they are dropped.
        """
        was = self.current
        for flat in self.flats:
            for parameter in flat.parameters:
                clear_gradient(parameter)
        self._forget_calls()
        try:
            self.gathers.abandon()
            if was is UnitPhase.BACKWARD:
                self.reductions.abandon(self.zero_policy)
        except PeerLost:
            self._broken = True

    def leave_forwards(self) -> None:
        """Mark all forwards as ended after an exception, so that the caller's hooks on saved tensors are the innermost
        again.
        """
        self._saved.reset()

    def disconnect(self) -> None:
        """Close the connections. Pending transfers keep their memory until `reconnect`."""
        self._broken = True
        for group in self._ways.all:
            group.disconnect()

    def reconnect(self) -> None:
        """Use the connections of the current world, and drop a pass that was cut off. Collective."""
        for group in self._ways.all:
            group.reconnect()
        under_way = any(unit.gathers for unit in self.units) or not self.reductions.idle
        if self._broken or self.current is not UnitPhase.IDLE or under_way:
            self.gathers.forget()
            self.reductions.forget()
        self.gathers.invalidate()  # All ranks must agree, even if only some were cut off.
        self._broken = False

    def leave(self) -> None:
        """Release gathered parameters when the engine ends, without waiting for lost peers."""
        self.gathers.leave(lost=self._broken)

    def place(self, zero_policy: ZeroPolicy) -> None:
        """Move every flat to the memory and partition of a new policy. Call it between two steps only.

        Args:
            zero_policy: The new policy.
        """
        self.before_change()
        self._ways.reduce.wait_until_all_read()
        for flat in self.flats:
            flat.place(zero_policy)
        self._ways.reduce.drop_buffers()
        self.placement = self.placement.moved(zero_policy)
        self.gathers.place(zero_policy)
        for unit in self.units:
            unit.gathers = None
        self._watch()
