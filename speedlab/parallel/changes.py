"""How a model that knows nothing of parallelism computes otherwise: attributes of its modules are replaced, and come
back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_ABSENT: Any = object()


@dataclass(frozen=True)
class Change:
    """What a module gets in the place of its attribute `name`: made of what was there."""

    module: nn.Module
    name: str
    new: Callable[[Any], Any]


class Changes:
    """Changes of one model, made and undone together."""

    def __init__(self) -> None:
        self._undo: list[tuple[nn.Module, str, Any]] = []

    def make(self, changes: Iterable[Change]) -> None:
        """In their order."""
        assert not self._undo, "made already"
        for change in changes:
            self._undo.append((change.module, change.name, change.module.__dict__.get(change.name, _ABSENT)))
            setattr(change.module, change.name, change.new(getattr(change.module, change.name)))

    def undo(self) -> None:
        """Give the modules what they had; nothing where no change was made."""
        while self._undo:
            module, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)
