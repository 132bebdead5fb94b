"""Parts of a block that a model calls without the block: `block.mlp(x)`, or all of them by `block.forward(x)`.

No hook of the block sees such a call. So modules that hold parameters inside a block have hooks of their own; these
cost a microsecond a call, and are there only while parameters come and go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
