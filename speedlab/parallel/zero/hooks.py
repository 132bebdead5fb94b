"""Hooks on modules, for as long as somebody lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from cuda_ops.torch_compat import Nothing, uncompiled


def hook_of(owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook(owner, module, …)` as a hook on `hooked`. It keeps neither alive, and torch.compile goes around it.

    A copy of a module (copy.deepcopy, torch's AveragedModel, a file of torch.save) has `Nothing` in its place: nobody
    partitions what a copy holds.
    """
    return _Hook(owner, hooked, hook)


class _Hook:
    def __init__(self, owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> None:
        self._owner, self._hooked, self._hook = weakref.ref(owner), weakref.ref(hooked), hook

    @uncompiled
    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        owner = self._owner()
        return self._hook(owner, module, *rest) if owner is not None and module is self._hooked() else None

    def __reduce__(self) -> Any:
        return Nothing, ()
