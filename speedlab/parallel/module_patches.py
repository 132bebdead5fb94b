"""How a model that knows nothing of parallelism computes otherwise: attributes of its modules are replaced, and come
back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

_ABSENT: Any = object()


@dataclass(frozen=True)
class ModulePatch:
    """What a module gets in the place of its attribute `name`: made of what was there."""

    module: nn.Module
    name: str
    new: Callable[[Any], Any]


class _Instead:
    """What a module has in place of a method. It knows this module alone, and would compute with its values in a
    copy."""

    def __init__(self, module: nn.Module, new: Callable[..., Any]) -> None:
        functools.update_wrapper(self, new)  # First: it takes over what `new` has of its own.
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
    """Changes of one model, made and undone together."""

    def __init__(self) -> None:
        self._undo: list[tuple[nn.Module, str, Any]] = []

    def make(self, changes: Iterable[ModulePatch]) -> None:
        """In their order."""
        assert not self._undo, "made already"
        for change in changes:
            self._undo.append((change.module, change.name, change.module.__dict__.get(change.name, _ABSENT)))
            new = change.new(getattr(change.module, change.name))
            setattr(change.module, change.name, _Instead(change.module, new) if callable(new) else new)

    def undo(self) -> None:
        """Give the modules what they had; nothing where no change was made."""
        while self._undo:
            module, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)
