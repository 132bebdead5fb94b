"""Patch modules of a model that knows nothing about parallelism: replace attributes, and restore them later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

_ABSENT: Any = object()


@dataclass(frozen=True)
class ModulePatch:
    """A replacement of one attribute of a module. `new` gets the current value and returns the new one."""

    module: nn.Module
    name: str
    new: Callable[[Any], Any]


class _Instead:
    """A callable that replaces a method. It is bound to one module: in a copy it would compute with the values of the
    original, so it refuses to be copied.
    """

    def __init__(self, module: nn.Module, new: Callable[..., Any]) -> None:
        functools.update_wrapper(self, new)  # Must be first, because it copies the attributes of `new`.
        self._kind, self._new = type(module).__name__, new

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._new(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._refuse("copy.deepcopy")

    def __reduce__(self) -> Any:
        self._refuse("pickle (torch.save)")

    def _refuse(self, who: str) -> NoReturn:
        raise RuntimeError(
            f"{who}: a module of the model, {self._kind}, computes a part of what it does in one process "
            "(parallel.tp, parallel.cp), and a copy would not; copy the model before initialize, and load "
            "engine.state_dict() into that, which all ranks call"
        )


class ModulePatches:
    """A set of patches of one model, applied and undone together."""

    def __init__(self) -> None:
        self._undo: list[tuple[nn.Module, str, Any]] = []

    def make(self, changes: Iterable[ModulePatch]) -> None:
        """Apply patches in order.

        Args:
            changes: The patches. No patches may be applied already.
        """
        assert not self._undo, "made already"
        for change in changes:
            self._undo.append((change.module, change.name, change.module.__dict__.get(change.name, _ABSENT)))
            new = change.new(getattr(change.module, change.name))
            setattr(change.module, change.name, _Instead(change.module, new) if callable(new) else new)

    def undo(self) -> None:
        """Restore all attributes. Does nothing if no patch is applied."""
        while self._undo:
            module, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)
