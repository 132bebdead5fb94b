"""Hooks on modules: calls of submodules without their block, weak references to owners, and tensors in arguments.

1. A model may call `block.mlp(x)`, or `block.forward(x)`. No hook of the block sees such a call. So submodules that
   hold parameters get their own hooks (`PartHooks`). They cost a microsecond per call, and exist only while parameters
   are gathered on demand.
2. `hook_of` wraps a hook so that it keeps neither its owner nor its module alive.
3. `tensors_of` and `map_tensors` find the tensors in nested arguments and outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cuda_ops.torch_compat import Nothing, uncompiled
from speedlab.parallel.zero.units import Unit, takes_hooks


def parts_of(unit: Unit) -> list[nn.Module]:
    """Return the submodules that hold parameters of a unit themselves.

    Args:
        unit: The unit; its own modules are not included.
    """
    held = {id(parameter) for flat in unit.flats for parameter in flat.parameters}
    inside = dict.fromkeys(part for module in unit.modules for part in module.modules())
    return [
        part
        for part in inside
        if part not in unit.modules and takes_hooks(part) and any(id(p) in held for p in part.parameters(recurse=False))
    ]


class PartHooks:
    """The hooks of all submodules that hold parameters. They keep the object of the two methods below alive only
    weakly.
    """

    def __init__(
        self, before: Callable[[int, nn.Module, Any], bool], after: Callable[[int, nn.Module, Any], None]
    ) -> None:
        """Attach nothing yet.

        Args:
            before: Method called with (unit index, submodule, inputs). Returns whether the submodule was called
                without its block.
            after: Method called with (unit index, submodule, output) after such a call, and after all later calls of
                this submodule. The output is None if the call raised.
        """
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._handles: list[RemovableHandle] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """Hook the submodules of these units, and remove all other hooks.

        Args:
            units: All units, root first.
        """
        self.detach()
        # The root stays gathered during the whole pass, so it needs no hooks.
        for number, unit in enumerate(units[1:], start=1):
            for part in parts_of(unit):
                self._attach(number, part)

    def _attach(self, number: int, hooked: nn.Module) -> None:
        called_alone, mine = False, weakref.ref(hooked)

        def before(part: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal called_alone
            # Skip blocks that are compiled as a whole, and copies of the module.
            if torch.compiler.is_compiling() or part is not mine():
                return
            reported = self._before()
            if reported is not None and reported(number, part, (args, kwargs)) and not called_alone:
                called_alone = True
                self._handles.append(part.register_forward_hook(after, always_call=True))

        def after(part: nn.Module, args: Any, output: Any) -> None:
            reported = self._after()
            if reported is not None and part is mine():
                reported(number, part, output)

        self._handles.append(hooked.register_forward_pre_hook(before, with_kwargs=True, prepend=True))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def hook_of(owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return `hook(owner, module, …)` as a hook on a module. torch.compile skips it.

    A copy of the module (copy.deepcopy, torch's AveragedModel, a file of torch.save) gets `Nothing` instead of the
    hook, because a copy's parameters are not partitioned.

    Args:
        owner: First argument of `hook`; only a weak reference is kept.
        hooked: The module; only a weak reference is kept.
        hook: The function to call.
    """
    return _ModuleHook(owner, hooked, hook)


class _ModuleHook:
    def __init__(self, owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> None:
        self._owner, self._hooked, self._hook = weakref.ref(owner), weakref.ref(hooked), hook

    @uncompiled
    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        owner = self._owner()
        return self._hook(owner, module, *rest) if owner is not None and module is self._hooked() else None

    def __reduce__(self) -> Any:
        return Nothing, ()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers.

    Args:
        value: A tensor, or nested tuples, lists, sets, mappings and dataclasses (Hugging Face outputs are mappings).
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to all tensors in it. Containers keep their types; other values are
    unchanged.

    Args:
        value: A tensor, or nested tuples, lists, dicts and dataclasses.
        change: Called once per tensor.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {part.name: map_tensors(getattr(value, part.name), change) for part in fields(value) if part.init}
        return replace(value, **changed)
    return value
