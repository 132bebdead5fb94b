"""Helpers around torch.compile and module hooks: functions that are not compiled, and an empty hook for copied
modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return `function` as torch.compile must not trace it, like `torch.compiler.disable`.

    `torch.compiler.disable` would import torch's compiler at once, which is a third of the computing at an engine's
    start. This function never imports the compiler if nothing is compiled.

    Args:
        function: The function.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def either(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        # Use the disabled function only while a compiler traces this one.
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return either


class Nothing:
    """A hook that does nothing. It replaces our hooks in a copy of a module (copy.deepcopy, torch.save)."""

    def __call__(self, *ignored: object) -> None: ...
