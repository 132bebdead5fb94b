"""Hooks on modules, for as long as somebody lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from cuda_ops.uncompiled import uncompiled


def hook_of(owner: object, hooked: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook(owner, module, …)` as a hook on `hooked`. It keeps neither alive, and torch.compile goes around it.

    A copy of a module (copy.deepcopy, torch's AveragedModel) has the hooks of what it was made of, and there this one
    does nothing: nobody partitions what a copy holds.
    """
    this, mine = weakref.ref(owner), weakref.ref(hooked)

    @uncompiled
    def called(module: nn.Module, *rest: Any) -> Any:
        found = this()
        return hook(found, module, *rest) if found is not None and module is mine() else None

    return called
