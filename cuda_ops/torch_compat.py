"""Functions that torch.compile leaves as they are.

What hooks on modules are in copies of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """As `torch.compiler.disable`, which would import torch's compiler at once: a third of what an engine's start
    computes. With this one it is never imported where nothing is compiled."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def either(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        # Nothing but a compiler that traces this finds the first.
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return either


class Nothing:
    """A hook that does nothing: what a copy of a module (copy.deepcopy, a file of torch.save) has in place of ours."""

    def __call__(self, *ignored: object) -> None: ...
