"""Parts of a block that a model calls without the block: `block.mlp(x)`, or all of them by `block.forward(x)`.

No hook of the block sees such a call. So modules that hold parameters inside a block have hooks of their own; these
cost a microsecond a call, and are there only while parameters come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from speedlab.parallel.zero.unit import Unit
from speedlab.parallel.zero.units import takes_hooks


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
    """The hooks of all parts. `detach` takes them off."""

    def __init__(self, before: Callable[[int, nn.Module, Any], bool], after: Callable[[int, Any], None]) -> None:
        """`before`: is told the number of the unit, the part and its inputs; whether it was called alone.

        `after`: is told its output, of each part that was called alone once."""
        self._before, self._after = before, after
        self._handles: list[RemovableHandle] = []

    def attach(self, units: Iterable[Unit]) -> None:
        for number, unit in enumerate(units):
            for part in parts_of(unit) if number else ():  # The root's are called without it all the time.
                self._attach(number, part)

    def _attach(self, number: int, part: nn.Module) -> None:
        called_alone = False

        def before(part: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal called_alone
            if torch.compiler.is_compiling():  # Inside a block that is compiled whole.
                return
            if self._before(number, part, (args, kwargs)) and not called_alone:
                called_alone = True
                self._handles.append(part.register_forward_hook(after))

        def after(part: nn.Module, args: Any, output: Any) -> None:
            self._after(number, output)

        self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True, prepend=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
