"""Parts of a block that a model calls without the block: `block.mlp(x)`, or all of them by `block.forward(x)`.

No hook of the block sees such a call. So modules that hold parameters inside a block have hooks of their own; these
cost a microsecond a call, and are there only while parameters come and go.

Hooks on modules, for as long as somebody lives.

Finding the tensors in whatever a module takes or returns.
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
    """Modules inside the unit's that hold its parameters themselves."""
    held = {id(parameter) for flat in unit.flats for parameter in flat.parameters}
    inside = dict.fromkeys(part for module in unit.modules for part in module.modules())
    return [
        part
        for part in inside
        if part not in unit.modules and takes_hooks(part) and any(id(p) in held for p in part.parameters(recurse=False))
    ]


class PartHooks:
    """The hooks of all parts.

    `before` gets the number of the unit, the part and its inputs, and returns whether it was called alone; `after` gets
    the number, the part and the output of a part that was, from then on (None if it raised). The hooks do not keep the
    object of these methods alive.
    """

    def __init__(
        self, before: Callable[[int, nn.Module, Any], bool], after: Callable[[int, nn.Module, Any], None]
    ) -> None:
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._handles: list[RemovableHandle] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """To the parts of these units and no others."""
        self.detach()
        for number, unit in enumerate(units[1:], start=1):  # The root stays for the whole of a pass.
            for part in parts_of(unit):
                self._attach(number, part)

    def _attach(self, number: int, hooked: nn.Module) -> None:
        called_alone, mine = False, weakref.ref(hooked)

        def before(part: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal called_alone
            if torch.compiler.is_compiling() or part is not mine():  # Inside a block that is compiled whole; a copy.
                return
            told = self._before()
            if told is not None and told(number, part, (args, kwargs)) and not called_alone:
                called_alone = True
                self._handles.append(part.register_forward_hook(after, always_call=True))

        def after(part: nn.Module, args: Any, output: Any) -> None:
            told = self._after()
            if told is not None and part is mine():
                told(number, part, output)

        self._handles.append(hooked.register_forward_pre_hook(before, with_kwargs=True, prepend=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def hook_of(owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook(owner, module, …)` as a hook on `hooked`. It keeps neither alive, and torch.compile goes around it.

    A copy of a module (copy.deepcopy, torch's AveragedModel, a file of torch.save) has `Nothing` in its place: nobody
    partitions what a copy holds.
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
    """Every tensor in nested tuples, lists, mappings and dataclasses (Hugging Face outputs are mappings)."""
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
    """`value` with `change` applied to its tensors, in containers of the same types; other things are left as they
    are."""
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
